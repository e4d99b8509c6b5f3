"""Writer of one connection's answers: headers, framing, and `Connection: close`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from http import HTTPStatus

from headway.errors import STATUS
from headway.http.problem import Encoded
from headway.http.routing import RouteAnswer
from headway.http.server.connection_context import LARGE, ConnectionContext

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # Characters that must not appear in a header value.


class Writer:
    """Writes one connection's answers. If `last`, the next answer is the last one."""

    __slots__ = ("_context", "_transport", "last")

    def __init__(self, context: ConnectionContext, transport: asyncio.Transport) -> None:
        self._context, self._transport = context, transport
        self.last = False

    @property
    def ends(self) -> bool:
        return self.last or self._context.closing

    def write_error(self, code: str, shown: str, encoded: Encoded, fields: bytes) -> None:
        named, body = encoded
        head = self.frame(STATUS[code], {**named, "content-length": str(len(body))}, shown, fields)
        self._transport.write(head + body)

    def write_answer(self, response: RouteAnswer, shown: str, marks: bytes, method: str) -> None:
        """Write the answer of an ordinary route. `method` is the method of the request. For `marks` see `frame`."""
        empty = response.status in (204, 304)
        fields = response.headers if empty else {"content-length": str(len(response.body)), **response.headers}
        head = self.frame(response.status, fields, shown, marks)
        body = b"" if empty or method == "HEAD" else response.body
        for part in (head + body,) if len(body) < LARGE else (head, body):  # Don't copy a large body.
            self._transport.write(part)

    def frame(self, status: int, fields: Mapping[str, str], shown: str, marks: bytes) -> bytes:
        """Return the head of an answer. `marks` has additional header lines, with line endings."""
        date = self._context.date.decode()
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {date}\r\nx-request-id: {shown}"]
        for name, value in fields.items():
            if _UNSAFE.search(value):
                raise ValueError(f"the header field {name} contains a control character")
            lines.append(f"{name}: {value}")
        if self.ends:
            lines.append("connection: close")
        return "\r\n".join((*lines, "")).encode("latin-1") + marks + b"\r\n"
