"""Framing of errors: the HTTP/1.1 response around the header fields and body that a route's codec has encoded."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from headway.errors import STATUS
from headway.http.problem import AnyError

Encoded = tuple[dict[str, str], bytes]
"""Header fields and body of an answer. The fields are ASCII and name the content type, but nothing that framing adds."""

EncodeError = Callable[[AnyError, str], Encoded]
"""Function that encodes an error as an API has it. It takes every error there is, and never raises.

Its arguments: the error, whose message may hold lone surrogates; the request's id as clients see it, `req_…`.
"""


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
