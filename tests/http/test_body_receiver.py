"""Large bodies: their turns, and that none is cut, mixed up or outlives its connection."""

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

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
from tests.http.stand import INSTANT, Client, Stand, get, on_stand, post, settled
from tests.http.test_oip import PATH, infer

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
    assert isinstance(stand.connection, FastPathConnection)
    return stand.connection


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


async def test_what_follows_a_body_is_the_next_request(stand: Stand, receivers: Receivers) -> None:
    client, request = await stand.connect(), asked(BODY)
    await client.send(request[:5000], request[5000:] + asked("next") + asked(BODY[::-1]) + get("/healthz"))
    outputs = [(await client.answer()).json["output"] for _ in range(3)]
    assert outputs == [BODY.upper(), "NEXT", BODY[::-1].upper()]
    assert (await client.answer()).status == 200
    assert receivers.begun >= 1


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


@pytest.mark.parametrize("way", ["leaves", "stops sending", "resets", "is cut by the listener"])
async def test_nothing_stays_of_a_body_whose_client_goes(stand: Stand, receivers: Receivers, way: str) -> None:
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
    assert (stand.gateway.asked, receivers.begun) == ([], 1)


async def test_a_small_body_comes_as_ever(stand: Stand, receivers: Receivers) -> None:
    client, request = await stand.connect(), asked("a" * (LARGE - 1))
    assert (await client.ask(request[:1000], request[1000:])).json["output"] == "A" * (LARGE - 1)
    assert receivers.begun == 0


KEY = "Authorization: Bearer k"
KEYS = {"k": {"rate": 60.0, "burst": 5.0}}


def chunked() -> bytes:
    head, _, body = infer(["abc"], KEY).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    fields = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"])
    return fields + b"\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % octet for octet in body) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "whole",
    [infer(["abc"], KEY), chunked(), post('{"prompt": "abc"}', "/v1/completions", KEY)],
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
            await settled(lambda: heard[0] == end)  # noqa: B023 - awaited at once
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


ADA = "Authorization: Bearer ada"
TENANTS: dict[str, dict[str, Any]] = {"ada": {"rate": 0.0}}
LONG = "l" * LARGE


def hold_turns(stand: Stand) -> list[Callable[[], None]]:
    """Turns of large bodies, which come when the test calls them."""
    context: Any = stand.door._context
    waiting: list[Callable[[], None]] = []
    context.large_bodies.wait = lambda tenant, begin: waiting.append(begin)
    return waiting


@pytest.mark.parametrize("in_chunks", [False, True])
@on_stand(keys=TENANTS)
async def test_every_large_body_is_answered(stand: Stand, in_chunks: bool) -> None:
    body = json.dumps({"input": LONG}).encode()
    request = post(body, "/v1/inference", ADA)
    if in_chunks:
        head = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%b\r\n\r\n" % ADA.encode()
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    clients = [await stand.connect() for _ in range(3)]
    for client in clients:
        client.writer.write(request + request + post('{"input": "a"}', "/v1/inference", ADA))
    for client in clients:
        assert [(await client.answer()).json["output"] for _ in range(3)] == [LONG.upper(), LONG.upper(), "A"]


@on_stand(keys=TENANTS)
async def test_a_wrong_large_body_is_refused_and_the_connection_goes_on(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post("[" * LARGE, "/v1/inference", ADA) + post('{"input": "a"}', "/v1/inference", ADA))
    assert (await client.answer()).status == 400
    assert (await client.answer()).json["output"] == "A"


@on_stand(keys=TENANTS)
async def test_a_client_that_leaves_while_its_body_waits_is_asked_nothing(stand: Stand) -> None:
    client, waiting = await stand.connect(), hold_turns(stand)
    await client.send(post(json.dumps({"input": LONG}), "/v1/inference", ADA))
    await settled(lambda: bool(waiting))
    client.leave()
    await settled(lambda: not stand.door._connections())
    waiting.pop()()
    assert stand.gateway.asked == []


@pytest.mark.parametrize("leaves", [False, True])
@on_stand(keys=TENANTS)
async def test_a_short_compressed_body_is_charged_by_what_comes_out_of_it(stand: Stand, leaves: bool) -> None:
    waiting, held = hold_turns(stand), stand.context.quotas.bytes
    free = held.free
    _, _, plain = infer(["a"]).partition(b"\r\n\r\n")
    body = gzip.compress(plain + b" " * 5 * STEP)
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
        assert (await client.answer()).json["outputs"][0]["data"] == ["A"]
    assert len(stand.gateway.asked) == (0 if leaves else 1)


@on_stand(keys=TENANTS)
async def test_compressed_bodies_have_no_more_room_than_others(stand: Stand) -> None:
    stand.context.quotas.bytes.take("another", stand.context.quotas.bytes.free - STEP)
    body = gzip.compress(b" " * 5 * STEP)
    client = await stand.connect()
    await client.send(post(body, "/v2/models/default/infer", ADA, "Content-Encoding: gzip"))
    assert (await client.answer()).header["x-headway-dropped-reason"] == "bodies"
    assert (await client.ask(post('{"input": "a"}', "/v1/inference", ADA))).status == 200


@contextlib.contextmanager
def page_by_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time of which each step of reading takes up a turn."""
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


class Alarms:
    """Event loop of connections, whose timers pass when the test says so."""

    def __init__(self, stand: Stand) -> None:
        context: Any = stand.door._context
        self._loop, context.loop = context.loop, self
        self.set: list[tuple[float, Callable[[], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        alarm = seconds, callback
        self.set.append(alarm)
        return SimpleNamespace(cancel=lambda: self.set.remove(alarm))

    def ring(self) -> float:
        """Let the only one pass. Returns its seconds."""
        [(seconds, callback)] = self.set
        callback()
        return seconds


@pytest.mark.parametrize("begun", [False, True])
@on_stand(keys=TENANTS)
async def test_a_request_whose_time_passes_before_its_body_is_read_is_answered_then(
    stand: Stand, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, alarms = hold_turns(stand), Alarms(stand)
    client = await stand.connect()
    body = b'{"x":[%b],"input":"a"}' % b",".join([b"0"] * 4 * CHARGED)
    request = post(body, "/v1/inference", ADA, "X-Request-Timeout-Ms: 250")
    client.writer.write(request)
    await settled(lambda: bool(waiting))
    if begun:
        with page_by_page(monkeypatch):
            waiting.pop()()
    assert alarms.ring() == 0.25
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
    assert alarms.set == []
    assert stand.context.quotas.bytes.free == stand.settings.bodies_bytes


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
