"""Errors as answers: what encodes one, the response around it, and the problem documents of RFC 9457.

The latter are those of all routes whose API has no form of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from headway.errors import HOPELESS, LABEL, SHOWN, STATUS, TITLE, UNAUTHENTICATED, AnyError


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


Encoded = tuple[dict[str, str], bytes]
"""Header fields and body of an answer. The fields are ASCII and name the content type, but nothing that framing adds."""

EncodeError = Callable[[AnyError, str], Encoded]
"""Function that encodes an error as an API has it. It takes every error there is, and never raises.

Its arguments: the error, whose message may hold lone surrogates; the request's id as clients see it, `req_…`.
"""


def retry_seconds(error: AnyError) -> float | None:
    """Seconds after which a retry makes sense: as given, or 1 where the status must name one."""
    if error.retry_after is None and STATUS[error.code] in (429, 503):
        return 1.0
    return error.retry_after


def anchor(code: str) -> str:
    """Anchor on the page /docs that describes an error."""
    return code.lower().replace("_", "-")


def problem(error: AnyError, shown: str) -> Problem:
    """Problem document of one error. `shown`: the request's id as clients see it, `req_…`."""
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
    """`text` with lone surrogates escaped, as a model may return them."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_body(document: Problem) -> bytes:
    """Problem document as JSON. Lone surrogates, as a model may return them, are escaped."""
    try:
        return _encode(document)
    except UnicodeEncodeError:
        document.detail = document.message = escaped(document.message)
        return _encode(document)


def problem_header(error: AnyError) -> dict[str, str]:
    """Header fields of an error."""
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
    """Encode an error as `problem_header` and `problem_body` do; see EncodeError."""
    return problem_header(error), problem_body(problem(error, shown))


def frame_error(
    code: str, shown: str, encoded: Encoded, *, date: bytes, close: bool = False, fields: bytes = b""
) -> bytes:
    """Whole HTTP/1.1 response with one error.

    Arguments:
        code: a code of `headway.errors`, which decides the status.
        shown: the request's id as clients see it, `req_…`.
        encoded: header fields and body of the error.
        date: value of its Date header.
        close: whether the response says that the connection ends.
        fields: further lines of its header, each with its end.
    """
    named, body = encoded
    status = STATUS[code]
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {date.decode()}\r\nx-request-id: {shown}"]
    lines.extend(f"{name}: {value}" for name, value in named.items())
    if close:
        lines.append("connection: close")
    lines.append(f"content-length: {len(body)}\r\n")
    return b"%b%b\r\n%b" % ("\r\n".join(lines).encode("ascii"), fields, body)
