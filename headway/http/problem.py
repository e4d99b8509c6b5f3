"""Errors as HTTP answers. Routes whose API has no error format of its own answer with problem documents (RFC 9457)."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headway.errors import HOPELESS, LABEL, SHOWN, STATUS, TITLE, UNAUTHENTICATED, AnyError


class Problem(msgspec.Struct, gc=False):
    """A problem document: the members of RFC 9457, and short ones with the same content."""

    type: str
    title: str
    status: int
    detail: str
    error: str
    message: str
    request_id: str
    retry_after_ms: int | msgspec.UnsetType = msgspec.UNSET


_encode = msgspec.json.Encoder().encode

Encoded = tuple[dict[str, str], bytes]
"""Header fields and body of an answer. The fields are ASCII and include the content type, but not the fields of the framing."""

EncodeError = Callable[[AnyError, str], Encoded]
"""Encode any error in the form of one API. Never raises. The arguments are the error, whose message may contain lone surrogates,
and the request id as clients see it, `req_…`."""


def retry_seconds(error: AnyError) -> float | None:
    """Return the seconds after which to retry: as the error says, or 1 if only its status asks for a retry."""
    if error.retry_after is None and STATUS[error.code] in (429, 503):
        return 1.0
    return error.retry_after


def anchor(code: str) -> str:
    """Return the anchor of an error code on the page /docs."""
    return code.lower().replace("_", "-")


def problem(error: AnyError, shown: str) -> Problem:
    """Return the problem document of an error. `shown` is the request id as clients see it, `req_…`."""
    code, message = error.code, error.message
    document = Problem(
        type=f"/docs#{anchor(code)}",
        title=TITLE[code],
        status=STATUS[code],
        detail=message,
        error=SHOWN.get(code, code),
        message=message,
        request_id=shown,
    )
    seconds = retry_seconds(error)
    if seconds is not None:
        document.retry_after_ms = math.ceil(max(seconds, 0.0) * 1000)
    return document


def escaped(text: str) -> str:
    """Escape the lone surrogates that a model's text may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_body(document: Problem) -> bytes:
    """Encode a problem document as JSON, with lone surrogates escaped."""
    try:
        return _encode(document)
    except UnicodeEncodeError:
        document.detail = document.message = escaped(document.message)
        return _encode(document)


def problem_header(error: AnyError) -> dict[str, str]:
    """Return the header fields of an error."""
    code = error.code
    fields = {"content-type": "application/problem+json"}
    seconds = retry_seconds(error)
    if seconds is not None and STATUS[code] in (429, 503):
        fields["retry-after"] = str(max(1, math.ceil(seconds)))
        fields["retry-after-ms"] = str(math.ceil(max(seconds, 0.0) * 1000))
    if code in HOPELESS:
        fields["x-should-retry"] = "false"
    if code == UNAUTHENTICATED:
        fields["www-authenticate"] = "Bearer"
    if LABEL.fullmatch(error.reason):
        fields["x-headway-dropped-reason"] = error.reason
    return fields


def encode_problem(error: AnyError, shown: str) -> Encoded:
    """Encode an error as a problem document; see EncodeError."""
    return problem_header(error), problem_body(problem(error, shown))
