"""A server that handles each request with a script, on the event loop of the generator under test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from headway.load.generator import Generator
from headway.load.report import Record
from headway.load.spec import LoadSpec, Target


class Call:
    """A request as received. `head` is in lower case, and `connection` is the one that it came on."""

    def __init__(self, connection: Exchange, number: int, head: str, body: dict[str, Any]) -> None:
        self.connection, self.number, self.head, self.body = connection, number, head, body
        self.server = connection.server

    @property
    def input(self) -> str:
        return str(self.body["input"])

    def send(self, data: bytes) -> None:
        self.connection.transport.write(data)

    def close(self) -> None:
        self.connection.transport.close()

    def answer(self, output: str | None = None, status: int = 200, headers: str = "", **members: object) -> None:
        """Send an answer, by default the right one for `--expect upper`."""
        body = members or {"output": self.input.upper() if output is None else output}
        self.send(response(msgspec.json.encode(body), status, headers))


def response(body: bytes, status: int = 200, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


Script = Callable[[Call], None]


class Exchange(asyncio.Protocol):
    """The server's side of a connection. Passes each complete request to the script."""

    def __init__(self, server: Scripted) -> None:
        self.server, self._data = server, b""
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.exchanges.append(self)
        if self.server.hangs_up:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) if end else 0
        if end and len(rest) == length:
            self._data = b""
            call = Call(self, len(self.server.calls), head.decode().lower(), msgspec.json.decode(rest))
            self.server.calls.append(call)
            self.server.script(call)


class Scripted:
    def __init__(self, script: Script, hangs_up: bool) -> None:
        self.script, self.hangs_up = script, hangs_up
        self.calls: list[Call] = []
        self.exchanges: list[Exchange] = []
        self.listening: asyncio.Server | None = None

    def stop_listening(self) -> None:
        assert self.listening is not None
        self.listening.close()

    async def end(self) -> None:
        """Stop listening and close all connections.
        First wait for pending accepts: asyncio leaks a socket if its server closes before the transport exists."""
        while accepting := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*accepting, return_exceptions=True)
        self.stop_listening()
        for exchange in self.exchanges:
            exchange.transport.abort()
        await asyncio.gather(*(exchange.lost for exchange in self.exchanges))


Start = Callable[[Scripted, Generator], None]


def load(
    script: Script, *, start: Start | None = None, hang_up: bool = False, **settings: Any
) -> tuple[Record, Scripted]:
    """Run a load test (50 requests in 50 ms). `start` is called first; with `hang_up`, the server closes every connection."""

    async def drive() -> tuple[Record, Scripted]:
        loop = asyncio.get_running_loop()
        server = Scripted(script, hang_up)
        server.listening = await loop.create_server(lambda: Exchange(server), "127.0.0.1", 0, backlog=1024)
        port = server.listening.sockets[0].getsockname()[1]
        target = Target("127.0.0.1", port, f"127.0.0.1:{port}", "/v1/inference")
        chosen: dict[str, Any] = {
            "rate": 1000.0,
            "duration": 0.05,
            "arrivals": "uniform",
            "expect": "upper",
            **settings,
        }
        generator = Generator(LoadSpec(target=target, **chosen), "test")
        if start is not None:
            start(server, generator)
        try:
            record = await generator.run()
        finally:
            await server.end()
        return record, server

    return asyncio.run(drive())


def outcomes(record: Record) -> dict[str, int]:
    found: dict[str, int] = {}
    for stream in record.streams:
        for label, count in [("ok", len(stream.answered)), *stream.failed.items()]:
            if count:
                found[label] = found.get(label, 0) + count
    return found
