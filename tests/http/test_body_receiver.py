"""Large bodies take turns, and are never truncated, mixed up or kept after their connection closes."""

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from unittest import mock

import pytest

from headway.doors.entrance import CHARGED
from headway.gateway.deadlines import DEADLINE_GRAIN
from headway.gateway.limiter import Limiter
from headway.http.inference import request_in_hand
from headway.http.inference.fast_path import FastPathConnection
from headway.http.inference.incoming_bodies import STEP, BodyReceiver
from headway.http.server import connection
from headway.http.server.connection_context import LARGE
from headway.runtime.fair_turns import MILLISECOND
from tests.http.stand import ADA, INSTANT, LAST, TENANTS, Client, Stand, chunked, on_stand, post, settled
from tests.http.test_oip import PATH, infer

BODY = bytes(random.Random(1).randbytes(6 * LARGE)).hex()
"""Text without repetitions."""


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Record the calls to the receivers that took over a connection."""
    seen = mock.Mock()
    for name in ("begin", "buffer_updated"):
        method = getattr(BodyReceiver, name)
        setattr(seen, name, mock.create_autospec(method, side_effect=method))
        monkeypatch.setattr(BodyReceiver, name, getattr(seen, name))
    return seen


def asked(text: str) -> bytes:
    return post(text, "/v1/predict?model_id=default", "Content-Type: application/octet-stream")


async def begun(stand: Stand, size: int = len(BODY) // 2) -> Client:
    """Return a client whose header and first part of a large body have arrived."""
    client = await stand.connect()
    request = asked(BODY)
    head = request.index(b"\r\n\r\n") + 4
    await client.send(request[:head], request[head : head + size])
    connection = stand.connection
    await settled(lambda: connection.reader.missing == len(BODY) - size)
    return client


@pytest.mark.parametrize("first", [0, 1, 1000, LARGE])
async def test_a_body_comes_whole_however_it_is_cut(stand: Stand, receivers: mock.Mock, first: int) -> None:
    client, request = await stand.connect(), asked(BODY)
    head = request.index(b"\r\n\r\n") + 4
    cuts = [head + first, *sorted(random.Random(first).sample(range(head + first + 1, len(request)), 9))]
    for _ in range(2):  # Twice on the same connection.
        await client.send(request[: cuts[0]])
        await client.send(*(request[a:b] for a, b in zip(cuts, [*cuts[1:], len(request)], strict=True)))
        assert (await client.answer()).json["output"] == BODY.upper()
        assert stand.connection.transport.get_protocol() is stand.connection
    assert receivers.begin.call_count == 2
    read = sum(call.args[1] for call in receivers.buffer_updated.call_args_list)
    assert read >= 2 * (len(BODY) - first - LARGE)


async def test_a_body_that_does_not_come_to_its_end_in_time_is_refused(stand: Stand, receivers: mock.Mock) -> None:
    client = await begun(stand)
    stand.later(stand.settings.read_timeout_ms / 1000 + 1)
    answer = await client.answer()
    assert (answer.status, answer.error) == (408, "REQUEST_TIMEOUT")
    before = receivers.buffer_updated.call_count
    await client.send(b"x" * 1000, asked("not to be read"))  # More than it would have room for.
    await settled(lambda: receivers.buffer_updated.call_count > before)
    assert await client.ended()
    assert stand.gateway.asked == []


@pytest.mark.parametrize("way", ["leaves", "stops sending", "resets", "is cut by the listener"])
async def test_nothing_stays_of_a_body_whose_client_goes(stand: Stand, receivers: mock.Mock, way: str) -> None:
    client = await begun(stand)
    if way == "leaves":
        client.leave()
    elif way == "stops sending":
        client.writer.write_eof()
    elif way == "resets":
        client.writer.transport.abort()
    else:
        await stand.door.close()
        assert await client.ended()
    await settled(lambda: stand.door.open_connections == 0)
    assert (stand.gateway.asked, receivers.begin.call_count) == ([], 1)


KEY = "Authorization: Bearer k"
KEYS = {"k": {"rate": 60.0, "burst": 5.0}}


_, _, PLAIN = infer(["abc"]).partition(b"\r\n\r\n")


@pytest.mark.parametrize(
    "whole",
    [
        infer(["abc"], KEY),
        chunked(*(b"%c" % octet for octet in PLAIN), path=PATH, fields=[KEY], end=LAST),
        post('{"prompt": "abc"}', "/v1/completions", KEY),
    ],
    ids=["counted", "chunked", "OpenAI"],
)
@on_stand(KEYS)
async def test_a_body_that_trickles_is_given_up_in_the_form_of_its_route(
    stand: Stand, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, heard, receive = whole.index(b"\r\n\r\n") + 5, [0], FastPathConnection.data_received

    def counted(connected: FastPathConnection, data: bytes) -> None:
        receive(connected, data)
        heard[0] += len(data)

    monkeypatch.setattr(FastPathConnection, "data_received", counted)
    now, limit = [INSTANT], stand.settings.read_timeout_ms / 1000
    with monkeypatch.context() as patch:
        patch.setattr(connection, "monotonic", lambda: now[0])
        client = await stand.connect()
        for end in range(begin, len(whole)):
            await client.send(whole[heard[0] : end])
            await settled(lambda: heard[0] == end)  # noqa: B023 - awaited immediately
            now[0] = min(now[0] + 0.5, INSTANT + limit - 1.0)
            stand.door.sweep(now[0])
        connected = stand.connection
        assert not connected.transport.is_closing()
        stand.later(limit + 1.0)
        answer = await client.answer()
    assert answer.status == 408
    assert (answer.header["content-type"], list(answer.json)) == ("application/json", ["error"])
    assert "read_timeout_ms" in str(answer.json)
    assert await client.ended()
    assert (stand.gateway.asked, connected.reserved) == ([], 0)


LONG = "l" * LARGE


def hold_turns(stand: Stand) -> list[Callable[[], None]]:
    """Collect the turns of large bodies. A turn begins when the test calls it."""
    waiting: list[Callable[[], None]] = []
    stand.context.large_bodies.wait = lambda tenant, begin: waiting.append(begin)
    return waiting


@pytest.mark.parametrize("in_chunks", [False, True])
@on_stand(keys=TENANTS)
async def test_every_large_body_is_answered(stand: Stand, in_chunks: bool) -> None:
    body = json.dumps({"input": LONG}).encode()
    request = chunked(body, fields=[ADA], end=LAST) if in_chunks else post(body, "/v1/inference", ADA)
    clients = [await stand.connect() for _ in range(3)]
    for client in clients:
        client.writer.write(request + request + post('{"input": "a"}', "/v1/inference", ADA))
    for client in clients:
        assert [(await client.answer()).json["output"] for _ in range(3)] == [LONG.upper(), LONG.upper(), "A"]


@pytest.mark.parametrize("leaves", [False, True])
@on_stand(keys=TENANTS)
async def test_a_short_compressed_body_is_charged_by_what_comes_out_of_it(stand: Stand, leaves: bool) -> None:
    waiting, held = hold_turns(stand), stand.bodies
    free = held.free
    body = gzip.compress(PLAIN + b" " * 5 * STEP)
    assert len(body) < 10_000
    client = await stand.connect()
    await client.send(post(body, PATH, ADA, "Content-Encoding: gzip"))
    for turn in range(1, 6):
        await settled(lambda: bool(waiting))
        waiting.pop()()
        assert free - held.free == turn * STEP
    if leaves:
        client.leave()
        await settled(lambda: not stand.door._connections())
    while waiting:
        waiting.pop()()
    assert held.free == free
    if not leaves:
        assert (await client.answer()).json["outputs"][0]["data"] == ["ABC"]
    assert len(stand.gateway.asked) == (0 if leaves else 1)


@on_stand(keys=TENANTS)
async def test_compressed_bodies_have_no_more_room_than_others(stand: Stand) -> None:
    stand.bodies.take("another", stand.bodies.free - STEP)
    body = gzip.compress(b" " * 5 * STEP)
    client = await stand.connect()
    await client.send(post(body, "/v2/models/default/infer", ADA, "Content-Encoding: gzip"))
    assert (await client.answer()).header["x-headway-dropped-reason"] == "bodies"
    assert (await client.ask(post('{"input": "a"}', "/v1/inference", ADA))).status == 200


@contextlib.contextmanager
def page_by_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each reading step use up a whole turn."""
    ticks = count(INSTANT, 0.6 * MILLISECOND)
    with monkeypatch.context() as patch:
        patch.setattr(request_in_hand, "monotonic", lambda: next(ticks))
        yield


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/inference", b'{"input":[%b]}' % b",".join([b"0"] * 4 * CHARGED)),
        ("/v1/chat/completions", b'{"x":[%b],"messages":[]}' % b",".join([b"0"] * 4 * CHARGED)),
        ("/v2/models/default/infer", b'{"x":[%b],"inputs":[]}' % b",".join([b"0"] * 4 * CHARGED)),
    ],
)
@on_stand(keys={"ada": {"rate": 1.0, "burst": 10.0}})
async def test_a_client_that_leaves_while_its_body_is_read_pays_for_the_pages_that_were(
    stand: Stand, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    stand.learn("json")
    waiting = hold_turns(stand)
    client = await stand.connect()
    await client.send(post(body, path, ADA))
    await settled(lambda: bool(waiting))
    with page_by_page(monkeypatch):
        for _ in range(9):
            waiting.pop()()
        assert not charged
        client.leave()
        await settled(lambda: not stand.door._connections())
        waiting.pop()()
    assert charged
    assert (waiting, stand.gateway.asked) == ([], [])


@pytest.mark.parametrize("begun", [False, True])
@on_stand(keys=TENANTS)
async def test_a_request_whose_time_passes_before_its_body_is_read_is_answered_then(
    stand: Stand, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = hold_turns(stand)
    loop = stand.context.loop = mock.Mock(wraps=stand.context.loop, call_later=mock.Mock())
    client = await stand.connect()
    body = b'{"x":[%b],"input":"a"}' % b",".join([b"0"] * 4 * CHARGED)
    request = post(body, "/v1/inference", ADA, "X-Request-Timeout-Ms: 250")
    client.writer.write(request)
    await settled(lambda: bool(waiting))
    if begun:
        with page_by_page(monkeypatch):
            waiting.pop()()
    seconds, ring = loop.call_later.call_args.args
    assert seconds == 0.25
    ring()
    answer = await client.answer()
    assert (answer.status, answer.error) == (504, "DEADLINE_EXCEEDED")
    assert answer.json["message"] == "the total deadline of 250 ms passed while the body waited for its turn to be read"
    assert answer.header["x-headway-dropped-reason"] == "total"
    client.writer.write(request)
    await settled(lambda: len(waiting) == 2)
    waiting.pop(0)()
    assert len(waiting) == 1, "nothing is read of the one that is answered"
    waiting.pop()()
    assert (await client.answer()).json["output"] == "A", "the connection goes on"
    assert loop.call_later.return_value.cancel.call_count == loop.call_later.call_count == 2
    assert stand.nothing_held


@pytest.mark.parametrize("seconds", [0.01, 1.5])
@on_stand(keys=TENANTS)
async def test_waiting_counts_as_a_requests_time(stand: Stand, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = hold_turns(stand)
    client = await stand.connect()
    client.writer.write(post(json.dumps({"input": LONG}), "/v1/inference", ADA))
    await settled(lambda: bool(waiting))
    with monkeypatch.context() as patch:
        patch.setattr(request_in_hand, "monotonic", lambda: INSTANT + seconds)
        waiting.pop()()
        answer = await client.answer()
    assert answer.json["metadata"]["latency_ms"] == pytest.approx(seconds * 1000, abs=0.01)
    assert stand.gateway.asked[0].options.timeout == (4.0 if seconds < DEADLINE_GRAIN else 4.0 - seconds)
