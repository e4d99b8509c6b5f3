"""How a client is told to leave: frame by frame, with a client that writes them itself, and one of gRPC's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench.load import http2
from headway.grpc import burden
from headway.grpc.connection import LAST, LEAVING, SILENCE, CallConnection
from tests.grpc.stand import PREDICT, Port, on_port, predict, predicted, served
from tests.grpc.wire import ACK, GOAWAY, PING, Wire, greeted


def test_a_connection_stays_until_its_client_has_read_that_it_is_to_leave() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        client, connections = await greeted(port)
        draining = asyncio.ensure_future(port.listener.drain())
        assert await client.next(GOAWAY) == LAST.to_bytes(4, "big") + bytes(4)
        assert await client.next(PING) == LEAVING
        for number in (1, 2, 3):
            now[0] += 0.4 * SILENCE
            connections.sweep(now[0], True)
            client.ask(number)
            await client.ended(number)
        client.send(http2.frame(http2.PING, ACK, 0, LEAVING))
        assert await client.next(GOAWAY) == http2.stream_of(3).to_bytes(4, "big") + bytes(4)
        assert len(await client.left()) == 2, "nothing follows its last word"
        await draining
        client.writer.close()

    served(main, now=lambda: now[0])


def test_a_client_that_does_not_say_that_it_leaves_is_let_go_after_a_while() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        client, connections = await greeted(port)
        port.listener.retire()
        await client.next(PING)
        for _ in range(2):
            connections.sweep(now[0], False)
            now[0] += SILENCE - 1.0
        client.ask(1)
        await client.ended(1)
        connections.sweep(now[0], False)
        connections.sweep(now[0] + SILENCE + 1.0, False)
        assert await client.next(GOAWAY) == http2.stream_of(1).to_bytes(4, "big") + bytes(4)
        assert len(await client.left()) == 2, "nothing follows its last word"
        client.writer.close()

    served(main, now=lambda: now[0])


def test_a_closed_connection_whose_client_takes_nothing_is_cut() -> None:
    class Stuck(asyncio.Transport):
        """What was written never leaves."""

        aborted = False

        def close(self) -> None: ...

        def is_closing(self) -> bool:
            return True

        def abort(self) -> None:
            self.aborted = True

    now, transport = [1000.0], Stuck()
    port: Any = SimpleNamespace(clock=lambda: now[0], turns=None, unread_timeout=10.0, grace=20.0)
    connection = CallConnection(port)
    connection._transport = transport
    connection.greeted = connection.answered = True
    connection.leaving = now[0]
    for _ in range(30):
        now[0] += 0.5
        connection.inspect(now[0], False)
    assert transport.aborted


async def pinged(client: Wire, times: int) -> bytes:
    """Ping so many times, each time when the last ping is answered. The server's word for leaving; empty while it has none."""
    for number in range(times):
        client.send(http2.frame(http2.PING, 0, 0, number.to_bytes(8, "big")))
        kind = flags = -1
        while (kind, flags) != (PING, ACK):
            kind, flags, payload = await client.frame()
            if kind == GOAWAY:
                return payload[8:]
    return b""


@pytest.mark.parametrize("calls", [0, 1])
@on_port()
async def test_a_client_may_ping_at_intervals_with_a_call_in_hand_and_without_one(
    port: Port, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert burden.LEAST_PING < 10.0
    monkeypatch.setattr(burden, "LEAST_PING", 0.0)
    client, _ = await greeted(port)
    port.gateway.hold = True
    if calls:
        client.ask(1)
        await port.gateway.until(lambda: bool(port.gateway.waiting))
    assert await pinged(client, 20) == b""
    port.gateway.release()
    if calls:
        await client.ended(1)
    client.writer.close()


@on_port()
async def test_a_client_that_pings_without_end_is_cut(port: Port) -> None:
    client, _ = await greeted(port)
    assert await pinged(client, 20) == b"too_many_pings"
    client.writer.close()


@on_port()
async def test_a_call_that_its_client_has_kept_back_goes_by_another_connection(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.grpc.connection.STREAMS", 1)
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
