"""Clients that leave while nothing is read from them, because they have sent far ahead of their answers."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
import uvloop

from headway.http.inference.fast_path import FastPathConnection
from headway.http.server.hangups import Hangups
from headway.http.server.reader import MOST_BUFFERED
from tests.http.stand import Client, Stand, on_stand, post, settled

BODY = '{"input": "a"}'
AHEAD = post(" " * 100_000 + BODY)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is read ahead of an answer than there has to be."""
    monkeypatch.setattr(FastPathConnection, "far", MOST_BUFFERED)


async def pending(stand: Stand) -> Client:
    """A client whose request is pending."""
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post(BODY))
    await stand.gateway.until(lambda: bool(stand.gateway.waiting))
    return client


async def far_ahead(stand: Stand) -> Client:
    """Client that has sent so much more that nothing is read from it."""
    client = await pending(stand)
    await client.send(AHEAD)
    (connection,) = stand.door._connections()
    await settled(lambda: connection.gate.paused)
    return client


@pytest.mark.parametrize("size", [70_000, 300_000, 1_000_000, 3_500_000])
@pytest.mark.parametrize("small", [False, True])
@on_stand()
async def test_the_departure_of_a_client_is_seen_behind_all_that_it_has_sent(
    stand: Stand, size: int, small: bool
) -> None:
    client = await pending(stand)
    piece = post(BODY) * 10 if small else AHEAD
    for _ in range(size // len(piece) + 1):
        client.writer.write(piece)
    client.leave()
    await stand.gateway.until(lambda: not stand.gateway.waiting)
    assert stand.gateway.abandoned == [("default", stand.gateway.asked[0].id)]
    await settled(lambda: not stand.door._connections())
    lane: Any = stand.door._context
    assert lane.quotas.bytes.free == stand.settings.bodies_bytes


@pytest.mark.parametrize("how", ["close", "reset", "half", "close behind more"])
@pytest.mark.usefixtures("near")
@on_stand()
async def test_the_departure_of_a_client_is_seen_while_nothing_is_read_from_it(stand: Stand, how: str) -> None:
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


@pytest.mark.parametrize("number", [1, 30, 90])
@on_stand()
async def test_who_stays_gets_every_answer_in_order(stand: Stand, number: int) -> None:
    """Clients whose input is held, is far ahead, or is not read yet."""
    client = await pending(stand)
    texts = [f"{index}".ljust(60_000, ".") for index in range(number)]
    sending = asyncio.ensure_future(client.send(*(post(f'{{"input": "{text}"}}') for text in texts)))
    (connection,) = stand.door._connections()
    await settled(lambda: connection.gate.paused or connection.reader.waiting > number * 60_000)
    assert connection.gate.paused == (number == 90)
    stand.gateway.hold = False
    stand.gateway.release()
    assert (await client.answer()).json["output"] == "A"
    for text in texts:
        assert (await client.answer()).json["output"] == text
    await sending
    client.writer.write_eof()
    assert await client.ended()
    assert stand.gateway.abandoned == []
    lane: Any = stand.door._context
    await settled(lambda: not stand.door._connections())
    assert lane.quotas.bytes.free == stand.settings.bodies_bytes


@on_stand()
async def test_many_small_requests_far_ahead_are_answered(stand: Stand) -> None:
    client = await pending(stand)
    for _ in range(8):
        await client.send(post(BODY) * 150)
    stand.gateway.hold = False
    stand.gateway.release()
    for _ in range(1201):
        assert (await client.answer()).json["output"] == "A"


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
