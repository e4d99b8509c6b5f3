"""Large bodies that the system writes where they stay: none is cut, mixed up or outlives its connection."""

from __future__ import annotations

import random

import pytest

from headway.http.inference.fast_path import FastPathConnection
from headway.http.inference.incoming_bodies import BodyReceiver
from headway.http.server.connection_context import LARGE
from tests.http.stand import Client, Stand, get, on_stand, post, settled

BODY = bytes(random.Random(1).randbytes(6 * LARGE)).hex()
"""Text in which no piece is like another."""


class Receivers:
    """Receivers that took over, and the bytes that each read brought in."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.reads: list[int] = []
        begin, updated = BodyReceiver.begin, BodyReceiver.buffer_updated

        def count(receiver: BodyReceiver) -> None:
            self.begun += 1
            begin(receiver)

        def note(receiver: BodyReceiver, nbytes: int) -> None:
            self.reads.append(nbytes)
            updated(receiver, nbytes)

        patch.setattr(BodyReceiver, "begin", count)
        patch.setattr(BodyReceiver, "buffer_updated", note)


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> Receivers:
    return Receivers(monkeypatch)


def asked(text: str) -> bytes:
    return post(text, "/v1/predict?model_id=default", "Content-Type: application/octet-stream")


def connection_of(stand: Stand) -> FastPathConnection:
    """The only connection."""
    [connection] = stand.door._connections()
    assert isinstance(connection, FastPathConnection)
    return connection


async def begun(stand: Stand, size: int = len(BODY) // 2) -> Client:
    """Client that has sent the header and a part of its large body, which have arrived."""
    client = await stand.connect()
    request = asked(BODY)
    head = request.index(b"\r\n\r\n") + 4
    await client.send(request[:head], request[head : head + size])
    connection = connection_of(stand)
    await settled(lambda: connection.reader.missing == len(BODY) - size)
    return client


@pytest.mark.parametrize("first", [0, 1, 1000, LARGE])
@on_stand()
async def test_a_body_comes_whole_however_it_is_cut(stand: Stand, receivers: Receivers, first: int) -> None:
    client, request = await stand.connect(), asked(BODY)
    head = request.index(b"\r\n\r\n") + 4
    cuts = [head + first, *sorted(random.Random(first).sample(range(head + first + 1, len(request)), 9))]
    for _ in range(2):  # On one connection.
        await client.send(request[: cuts[0]])
        await client.send(*(request[a:b] for a, b in zip(cuts, [*cuts[1:], len(request)], strict=True)))
        assert (await client.answer()).json["output"] == BODY.upper()
        assert connection_of(stand).transport.get_protocol() is connection_of(stand)
    assert receivers.begun == 2
    assert sum(receivers.reads) >= 2 * (len(BODY) - first - LARGE)


@on_stand()
async def test_what_follows_a_body_is_the_next_request(stand: Stand, receivers: Receivers) -> None:
    client, request = await stand.connect(), asked(BODY)
    await client.send(request[:5000], request[5000:] + asked("next") + asked(BODY[::-1]) + get("/healthz"))
    outputs = [(await client.answer()).json["output"] for _ in range(3)]
    assert outputs == [BODY.upper(), "NEXT", BODY[::-1].upper()]
    assert (await client.answer()).status == 200
    assert receivers.begun >= 1


@on_stand()
async def test_a_body_that_does_not_come_to_its_end_in_time_is_refused(stand: Stand, receivers: Receivers) -> None:
    client = await begun(stand)
    stand.later(stand.settings.read_timeout_ms / 1000 + 1)
    answer = await client.answer()
    assert (answer.status, answer.error) == (408, "REQUEST_TIMEOUT")
    before = len(receivers.reads)
    await client.send(b"x" * 1000, asked("not to be read"))  # More than its room, if it had any yet.
    await settled(lambda: len(receivers.reads) > before)
    assert await client.ended()
    assert stand.gateway.asked == []


@pytest.mark.parametrize("way", ["leaves", "stops sending", "resets"])
@on_stand()
async def test_nothing_stays_of_a_body_whose_client_goes(stand: Stand, receivers: Receivers, way: str) -> None:
    client = await begun(stand)
    if way == "leaves":
        client.leave()
    elif way == "stops sending":
        client.writer.write_eof()
    else:
        client.writer.transport.abort()
    await settled(lambda: stand.door.open_connections == 0)
    assert stand.gateway.asked == []
    assert receivers.begun == 1


@on_stand()
async def test_a_listener_that_closes_cuts_a_body_that_comes(stand: Stand, receivers: Receivers) -> None:
    client = await begun(stand)
    await stand.door.close()
    assert await client.ended()
    assert receivers.begun == 1


@on_stand()
async def test_a_small_body_comes_as_ever(stand: Stand, receivers: Receivers) -> None:
    client, request = await stand.connect(), asked("a" * (LARGE - 1))
    await client.send(request[:1000], request[1000:])
    assert (await client.answer()).json["output"] == "A" * (LARGE - 1)
    assert receivers.begun == 0
