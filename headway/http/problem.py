"""Problem documents of RFC 9457: the errors of all routes whose API has no form of its own."""

from __future__ import annotations

import math
import re

import msgspec

from headway.errors import HOPELESS, SHOWN, STATUS, TITLE, UNAUTHENTICATED

LABEL = re.compile(r"[a-z0-9_-]{1,40}")
"""Labels of metrics that clients read, too, as the reason of a refusal."""


class Problem(msgspec.Struct, gc=False):
    """An error document: the members of RFC 9457, and the short ones with the same content."""

    type: str
    title: str
    status: int
    detail: str
    error: str
    message: str
    request_id: str
    retry_after_ms: int | msgspec.UnsetType = msgspec.UNSET


_encode = msgspec.json.Encoder().encode


def retry_seconds(code: str, retry_after: float | None) -> float | None:
    """Seconds after which a retry makes sense: as given, or 1 where the status must name one."""
    if retry_after is None and STATUS[code] in (429, 503):
        return 1.0
    return retry_after


def anchor(code: str) -> str:
    """Anchor on the page /docs that describes an error."""
    return code.lower().replace("_", "-")


def problem(code: str, message: str, shown: str, retry_after: float | None = None) -> Problem:
    """Problem document of one error.

    Arguments:
        code: a code of `headway.errors`.
        message: what happened, for the client to read.
        shown: the request's id as clients see it, `req_…`.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
    """
    document = Problem(
        type=f"/docs#{anchor(code)}",
        title=TITLE[code],
        status=STATUS[code],
        detail=message,
        error=SHOWN.get(code, code),
        message=message,
        request_id=shown,
    )
    seconds = retry_seconds(code, retry_after)
    if seconds is not None:
        document.retry_after_ms = math.ceil(max(seconds, 0.0) * 1000)
    return document


def escaped(text: str) -> str:
    """`text` with lone surrogates escaped, as a model may return them."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_body(document: Problem) -> bytes:
    """Problem document as JSON. Lone surrogates, as a model may return them, are escaped."""
    try:
        return _encode(document)
    except UnicodeEncodeError:
        document.detail = document.message = escaped(document.message)
        return _encode(document)


def problem_header(code: str, retry_after: float | None = None, reason: str = "") -> dict[str, str]:
    """Header fields of an error.

    Arguments:
        code: a code of `headway.errors`.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
    """
    fields = {"content-type": "application/problem+json"}
    seconds = retry_seconds(code, retry_after)
    if seconds is not None and STATUS[code] in (429, 503):
        fields["retry-after"] = str(max(1, math.ceil(seconds)))
        fields["retry-after-ms"] = str(math.ceil(max(seconds, 0.0) * 1000))
    if code in HOPELESS:
        fields["x-should-retry"] = "false"
    if code == UNAUTHENTICATED:
        fields["www-authenticate"] = "Bearer"
    if LABEL.fullmatch(reason):
        fields["x-headway-dropped-reason"] = reason
    return fields


def encode_problem(
    code: str, message: str, shown: str, retry_after: float | None = None, reason: str = ""
) -> tuple[dict[str, str], bytes]:
    """Encode an error as `problem_header` and `problem_body` do; see `headway.http.server.framing.EncodeError`."""
    return problem_header(code, retry_after, reason), problem_body(problem(code, message, shown, retry_after))
