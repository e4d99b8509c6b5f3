"""A listener without a port, for tests of targets. Requests and answers are the same bytes as on a socket."""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import Mapping
from typing import Any

from headway.http.inference.context import InferenceContext
from headway.http.inference.fast_path import FastPathConnection
from headway.http.server.head import END
from headway.http.server.listener import Listener


class MemoryListener(Listener):
    """A listener that doesn't bind an address. Requests are sent with `ask`."""

    takes_address = False

    async def bind(self) -> None:
        """Do nothing: there is no address to bind."""

    async def open(self) -> None:
        self._context = self._make_context()
        self.look_after()

    def ask(self, method: str, path: str, header: Mapping[str, str], body: bytes) -> asyncio.Future[MemoryExchange]:
        """Send a request over a new connection, and return its answer as a future."""
        context = self._context
        if not isinstance(context, InferenceContext):
            raise RuntimeError("the listener is not open, or does not accept clients")
        transport = _MemoryTransport(context.loop)
        connection = FastPathConnection(context)
        transport.connect(connection)
        fields = {"Host": "memory", "Connection": "close", "Content-Length": str(len(body)), **header}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        connection.data_received("\r\n".join(lines).encode("latin-1") + body)
        return transport.answer


class MemoryExchange:
    """The answer to a request. The names in `header` are lower case."""

    def __init__(self, received: bytes) -> None:
        head, _, self.body = received.partition(END)
        line, _, fields = head.partition(b"\r\n")
        self.status = int(line.split(b" ", 2)[1])
        parsed = http.client.parse_headers(io.BytesIO(fields + END))
        self.header = {name.lower(): value for name, value in parsed.items()}


class _MemoryTransport(asyncio.Transport):
    """A transport that collects the written bytes. When the connection closes, they become the `answer`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"peername": ("127.0.0.1", 0)})
        self.answer: asyncio.Future[MemoryExchange] = loop.create_future()
        self._loop = loop
        self._received = bytearray()
        self._closing = False

    def connect(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._received += data

    def write_eof(self) -> None:
        self.close()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._end)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, because every byte is accepted immediately."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do nothing, because the whole request has been read."""

    def resume_reading(self) -> None:
        """Do nothing, because the whole request has been read."""

    def _end(self) -> None:
        self._protocol.connection_lost(None)
        if self.answer.done():
            return
        if self._received:
            self.answer.set_result(MemoryExchange(bytes(self._received)))
        else:
            self.answer.set_exception(ConnectionResetError("the connection was cut"))
