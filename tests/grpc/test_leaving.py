"""How a client is told to leave: frame by frame, with a client that writes them itself, and one of gRPC's own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from bench.load import http2
from headway.grpc import connection
from headway.grpc.connection import LAST, LEAVING, SILENCE
from headway.grpc.connections import PortConnections
from tests.grpc.stand import PREDICT, Port, predict, predicted, served

_GOAWAY, _PING, _ACK = 7, 6, 1
FRAME_HEADER = 9


@dataclass
class Raw:
    """A client that reads and writes frames only when the test says so."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def ask(self, number: int) -> None:
        """Send a call."""
        self.writer.write(http2.headers(number, PREDICT) + http2.message(number, predict("a")))

    async def answered(self, number: int) -> None:
        """Read until a call has ended."""
        kind = flags = stream = 0
        while (kind, flags & http2.END_STREAM, stream) != (http2.HEADERS, 1, http2.stream_of(number)):
            kind, flags, stream, _ = await self.frame()

    async def frame(self) -> tuple[int, int, int, bytes]:
        """The next frame: type, flags, stream and payload."""
        head = await self.reader.readexactly(FRAME_HEADER)
        return (
            head[3],
            head[4],
            int.from_bytes(head[5:], "big"),
            await self.reader.readexactly(int.from_bytes(head[:3], "big")),
        )

    async def next(self, wanted: int) -> bytes:
        """Payload of the next frame of a type that no answer to this client has."""
        while True:
            kind, flags, _, payload = await self.frame()
            if kind == wanted and not flags:
                return payload


async def raw(port: Port) -> tuple[Raw, PortConnections]:
    """A client, of which one call is answered, and the connections."""
    client = Raw(*await asyncio.open_connection("127.0.0.1", port.listener.port))
    client.writer.write(http2.hello())
    client.ask(0)
    await client.answered(0)
    assert port.listener._connections is not None
    return client, port.listener._connections


def test_a_connection_stays_until_its_client_has_read_that_it_is_to_leave() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        client, connections = await raw(port)
        draining = asyncio.ensure_future(port.listener.drain())
        assert await client.next(_GOAWAY) == LAST.to_bytes(4, "big") + bytes(4)
        assert await client.next(_PING) == LEAVING
        for number in (1, 2, 3):
            now[0] += 0.4 * SILENCE
            connections.sweep(now[0], True)
            client.ask(number)
            await client.answered(number)
        client.writer.write(http2.frame(http2.PING, _ACK, 0, LEAVING))
        assert await client.next(_GOAWAY) == http2.stream_of(3).to_bytes(4, "big") + bytes(4)
        assert await client.reader.read() == b""
        await draining
        client.writer.close()

    served(main, now=lambda: now[0])


def test_a_client_that_does_not_say_that_it_leaves_is_let_go_after_a_while() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        client, connections = await raw(port)
        port.listener.retire()
        await client.next(_PING)
        for _ in range(2):
            connections.sweep(now[0], False)
            now[0] += SILENCE - 1.0
        client.ask(1)
        await client.answered(1)
        connections.sweep(now[0], False)
        connections.sweep(now[0] + SILENCE + 1.0, False)
        assert await client.next(_GOAWAY) == http2.stream_of(1).to_bytes(4, "big") + bytes(4)
        assert await client.reader.read() == b""
        client.writer.close()

    served(main, now=lambda: now[0])


async def pinged(client: Raw, times: int) -> bytes:
    """Ping so many times, each time when the last ping is answered. The server's word for leaving; empty while it has none."""
    for number in range(times):
        client.writer.write(http2.frame(http2.PING, 0, 0, number.to_bytes(8, "big")))
        kind = flags = -1
        while (kind, flags) != (_PING, _ACK):
            kind, flags, _, payload = await client.frame()
            if kind == _GOAWAY:
                return payload[8:]
    return b""


@pytest.mark.parametrize("calls", [0, 1])
def test_a_client_may_ping_at_intervals_with_a_call_in_hand_and_without_one(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connection.LEAST_PING < 10.0
    monkeypatch.setattr(connection, "LEAST_PING", 0.0)

    async def main(port: Port) -> None:
        client, _ = await raw(port)
        port.gateway.hold = True
        if calls:
            client.ask(1)
            await port.gateway.until(lambda: bool(port.gateway.waiting))
        assert await pinged(client, 20) == b""
        port.gateway.release()
        if calls:
            await client.answered(1)
        client.writer.close()

    served(main)


def test_a_client_that_pings_without_end_is_cut() -> None:
    async def main(port: Port) -> None:
        client, _ = await raw(port)
        assert await pinged(client, 20) == b"too_many_pings"
        client.writer.close()

    served(main)


def test_a_call_that_its_client_has_kept_back_goes_by_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.grpc.connection.STREAMS", 1)

    async def main(port: Port) -> None:
        client = port.client(**{"grpc.enable_retries": 1})
        await client.ask(PREDICT, predict("first"))
        port.gateway.hold = True
        calls = [client.call(PREDICT, predict("held"))]
        await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
        calls.append(client.call(PREDICT, predict("kept")))
        port.listener.retire()
        await port.gateway.until(lambda: len(port.gateway.waiting) == 2)
        port.gateway.release()
        assert [predicted(await call).output for call in calls] == [b"HELD", b"KEPT"]

    served(main)
