"""Clients that leave while nothing is read from them, because they have sent far ahead of their answers."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
import uvloop

from headway.http.connection import HELD
from headway.http.hangups import Hangups
from tests.http.stand import Client, Stand, post, served, settled

BODY = '{"input": "a"}'
AHEAD = post(" " * 100_000 + BODY)


async def far_ahead(stand: Stand, first: bytes = post(BODY)) -> Client:
    """A client of a request that is pending, which has sent so much more that nothing is read from it."""
    client = await stand.connect()
    await client.send(first)
    await stand.gateway.until(lambda: bool(stand.gateway.waiting))
    await client.send(AHEAD)
    (connection,) = stand.door._connections()
    await settled(lambda: connection.paused)
    assert len(connection.held) > HELD
    return client


@pytest.mark.parametrize("how", ["close", "reset", "half", "close behind more"])
def test_the_departure_of_a_client_that_sent_far_ahead_is_seen(how: str) -> None:
    async def main(stand: Stand) -> None:
        stand.gateway.hold = True
        client = await far_ahead(stand)
        if how == "reset":
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "close behind more":
            client.writer.write(b" " * 10_000)  # It is not read, and the end comes behind it.
        if how == "half":
            client.writer.write_eof()
        else:
            client.leave()
        await stand.gateway.until(lambda: not stand.gateway.waiting)
        assert stand.gateway.abandoned == [("default", stand.gateway.asked[0].id)]
        await settled(lambda: not stand.door._connections())

    served(main)


def test_who_stays_gets_every_answer() -> None:
    async def main(stand: Stand) -> None:
        stand.gateway.hold = True
        client = await far_ahead(stand)
        await client.send(AHEAD, AHEAD)
        stand.gateway.hold = False
        stand.gateway.release()
        for _ in range(4):
            assert (await client.answer()).status == 200
        client.writer.write_eof()
        assert await client.ended()
        assert stand.gateway.abandoned == []

    served(main)


def test_a_watch_tells_once_and_forgets() -> None:
    async def main() -> None:
        told: list[str] = []
        heard = asyncio.Event()

        def hear(name: str) -> None:
            told.append(name)
            heard.set()

        hangups = Hangups(asyncio.get_running_loop())
        pairs = {name: socket.socketpair() for name in ("left", "forgotten", "closed", "last")}
        for name, (here, _) in pairs.items():
            hangups.watch(here.fileno(), lambda name=name: hear(name))  # type: ignore[misc]
        hangups.forget(pairs["forgotten"][0].fileno())
        hangups.forget(pairs["forgotten"][0].fileno())
        number = pairs["closed"][0].fileno()
        pairs["closed"][0].close()
        hangups.forget(number)
        for name in ("left", "forgotten", "last"):
            pairs[name][1].close()
            await asyncio.wait_for(heard.wait(), 30) if name == "left" else await asyncio.sleep(0)
        heard.clear()
        while len(told) < 2:
            await asyncio.wait_for(heard.wait(), 30)
            heard.clear()
        hangups.close()
        hangups.close()
        assert told == ["left", "last"]
        for pair in pairs.values():
            for end in pair:
                end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
