"""Turns of large bodies."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headway.doors.entrance import CHARGED
from headway.gateway.deadlines import DEADLINE_GRAIN
from headway.gateway.limiter import Limiter
from headway.http.inference import request_in_hand
from headway.http.inference.incoming_bodies import STEP
from headway.http.server.connection_context import LARGE
from headway.model import WorkerStatus
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from tests.http.stand import INSTANT, Client, Stand, on_stand, post, settled, texts

ADA, BOB = "Authorization: Bearer ada", "Authorization: Bearer bob"
KEYS: dict[str, dict[str, Any]] = {"ada": {"rate": 0.0, "tenant": "acme"}, "bob": {"rate": 0.0, "tenant": "globex"}}
LONG = "l" * LARGE


class Loop:
    """Event loop of which each callback is called by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append((self.now, callback))

    def call_later(self, pause: float, callback: Callable[[], None]) -> None:
        self.due.append((self.now + pause, callback))

    def next(self) -> float:
        """Call the only callback there is; the instant at which it was due."""
        [(self.now, callback)] = self.due
        self.due.clear()
        begun = self.now
        callback()
        return begun


def test_one_is_read_at_a_time_and_the_loop_is_free_for_as_long_as_that_took() -> None:
    loop, read = Loop(), list[str]()
    line = FairTurns(lambda: loop.now, loop)  # type: ignore[arg-type]

    def body(name: str, seconds: float) -> Callable[[], None]:
        def begin() -> None:
            read.append(name)
            loop.now += seconds

        return begin

    for number in range(3):
        line.wait("flood", body(f"flood {number}", 0.25))
    line.wait("other", body("other", 0.5))
    assert [loop.next() for _ in range(4)] == [0.0, 0.5, 1.5, 2.0]
    assert read == ["flood 0", "other", "flood 1", "flood 2"]
    assert loop.due == []
    line.wait("other", body("last", 0.0))
    assert loop.next() == 2.5, "one that comes later leaves the pause to others, too"


def test_work_that_asks_for_another_turn_leaves_the_loop_as_long_before_it() -> None:
    loop, done = Loop(), list[float]()
    line = FairTurns(lambda: loop.now, loop)  # type: ignore[arg-type]

    def piece() -> None:
        done.append(loop.now)
        loop.now += 0.25
        if len(done) < 3:
            line.wait("one", piece)

    line.wait("one", piece)
    assert [loop.next() for _ in range(3)] == [0.0, 0.5, 1.0]
    assert (done, loop.due) == ([0.0, 0.5, 1.0], [])


async def crowd(stand: Stand, count: int, request: bytes) -> list[Client]:
    """Clients that have sent a request each, all of whose bodies have arrived."""
    clients = [await stand.connect() for _ in range(count)]
    for client in clients:
        client.writer.write(request)
    return clients


@pytest.mark.parametrize("chunked", [False, True])
@on_stand(keys=KEYS)
async def test_every_large_body_is_answered(stand: Stand, chunked: bool) -> None:
    body = json.dumps({"input": LONG}).encode()
    request = post(body.decode(), "/v1/inference", ADA)
    if chunked:
        head = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%b\r\n\r\n" % ADA.encode()
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for client in await crowd(stand, 4, request + request + post('{"input": "a"}', "/v1/inference", ADA)):
        assert [(await client.answer()).json["output"] for _ in range(3)] == [LONG.upper(), LONG.upper(), "A"]


@on_stand(keys=KEYS)
async def test_a_wrong_large_body_is_refused_and_the_connection_goes_on(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post("[" * LARGE, "/v1/inference", ADA) + post('{"input": "a"}', "/v1/inference", ADA))
    assert (await client.answer()).status == 400
    assert (await client.answer()).json["output"] == "A"


@on_stand(keys=KEYS)
async def test_a_client_that_leaves_while_its_body_waits_is_asked_nothing(stand: Stand) -> None:
    context: Any = stand.door._context
    waiting: list[Callable[[], None]] = []
    context.large_bodies.wait = lambda tenant, begin: waiting.append(begin)
    client = await stand.connect()
    await client.send(post(json.dumps({"input": LONG}), "/v1/inference", BOB))
    await settled(lambda: bool(waiting))
    client.leave()
    await settled(lambda: not stand.door._connections())
    waiting.pop()()
    assert stand.gateway.asked == []


@pytest.mark.parametrize("leaves", [False, True])
@on_stand(keys=KEYS)
async def test_a_short_compressed_body_is_unpacked_in_turns_and_counted_by_what_comes_out_of_it(
    stand: Stand, leaves: bool
) -> None:
    context: Any = stand.door._context
    waiting: list[Callable[[], None]] = []
    context.large_bodies.wait = lambda tenant, begin: waiting.append(begin)
    free = context.quotas.bytes.free
    tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    body = gzip.compress(json.dumps({"inputs": [tensor]}).encode() + b" " * 5 * STEP)
    assert len(body) < 10_000
    client = await stand.connect()
    await client.send(post(body, "/v2/models/default/infer", ADA, "Content-Encoding: gzip"))
    for turn in range(1, 6):
        await settled(lambda: bool(waiting))
        waiting.pop()()
        assert free - context.quotas.bytes.free == turn * STEP
    if leaves:
        client.leave()
        await settled(lambda: not stand.door._connections())
    while waiting:
        waiting.pop()()
    assert context.quotas.bytes.free == free
    if not leaves:
        assert (await client.answer()).json["outputs"][0]["data"] == ["A"]
    assert len(stand.gateway.asked) == (0 if leaves else 1)


@on_stand(keys=KEYS)
async def test_compressed_bodies_have_no_more_room_than_others(stand: Stand) -> None:
    context: Any = stand.door._context
    context.quotas.bytes.take("another", context.quotas.bytes.free - STEP)
    body = gzip.compress(b" " * 5 * STEP)
    client = await stand.connect()
    await client.send(post(body, "/v2/models/default/infer", ADA, "Content-Encoding: gzip"))
    assert (await client.answer()).header["x-headway-dropped-reason"] == "bodies"
    await client.send(post('{"input": "a"}', "/v1/inference", ADA))
    assert (await client.answer()).status == 200


def hold_turns(stand: Stand) -> list[Callable[[], None]]:
    """Turns of large bodies, which come when the test calls them."""
    context: Any = stand.door._context
    waiting: list[Callable[[], None]] = []
    context.large_bodies.wait = lambda tenant, begin: waiting.append(begin)
    return waiting


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
        ("/v1/inference", b'{"inputs":[[%b],1]}' % b",".join([b"0"] * 4 * CHARGED)),
        ("/v1/chat/completions", b'{"x":[%b],"messages":[]}' % b",".join([b"0"] * 4 * CHARGED)),
        ("/v1/responses", b'{"x":[%b],"input":""}' % b",".join([b"0"] * 4 * CHARGED)),
        ("/v2/models/default/infer", b'{"x":[%b],"inputs":[]}' % b",".join([b"0"] * 4 * CHARGED)),
    ],
)
@on_stand(keys={"ada": {"rate": 1.0, "burst": 10.0}})
async def test_a_client_that_leaves_while_its_body_is_read_pays_for_the_pages_that_were(
    stand: Stand, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    stand.gateway.served.learn([replace(texts(WorkerStatus.HEALTHY), takes="json", gives="json")])
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
@on_stand(keys=KEYS)
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
    context: Any = stand.door._context
    assert context.quotas.bytes.free == stand.settings.bodies_bytes


@pytest.mark.parametrize("seconds", [0.01, 1.5])
@on_stand(keys=KEYS)
async def test_the_wait_for_its_turn_is_a_part_of_a_requests_time(
    stand: Stand, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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
