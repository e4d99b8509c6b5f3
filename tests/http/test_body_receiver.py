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
from msgspec.structs import replace

from headway.doors.entrance import CHARGED
from headway.gateway.deadlines import DEADLINE_GRAIN
from headway.gateway.limiter import Limiter
from headway.http.inference import request_in_hand
from headway.http.inference.fast_path import FastPathConnection
from headway.http.inference.incoming_bodies import STEP, BodyReceiver
from headway.http.server import connection
from headway.http.server.connection_context import LARGE
from headway.model import WorkerStatus
from headway.oip.tensors import pack
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from tests.http.stand import INSTANT, Answer, Client, Stand, get, on_stand, post, served, settled, texts
from tests.http.test_oip import LENGTH, PATH, infer

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


@pytest.mark.parametrize("way", ["leaves", "stops sending", "resets"])
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


async def test_a_listener_that_closes_cuts_a_body_that_comes(stand: Stand, receivers: Receivers) -> None:
    client = await begun(stand)
    await stand.door.close()
    assert await client.ended()
    assert receivers.begun == 1


async def test_a_small_body_comes_as_ever(stand: Stand, receivers: Receivers) -> None:
    client, request = await stand.connect(), asked("a" * (LARGE - 1))
    await client.send(request[:1000], request[1000:])
    assert (await client.answer()).json["output"] == "A" * (LARGE - 1)
    assert receivers.begun == 0


KEY = "Authorization: Bearer k"
KEYS = {"k": {"rate": 60.0, "burst": 5.0}}


def _binary() -> bytes:
    octets = pack([b"abc", b"defg"])
    given = {"name": "IN", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(octets)}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    return post(head + octets, PATH, f"{LENGTH}: {len(head)}", KEY)


def _packed() -> bytes:
    _, _, body = infer(["abc"]).partition(b"\r\n\r\n")
    return post(gzip.compress(body), PATH, "Content-Encoding: gzip", KEY)


def _chunked() -> bytes:
    head, _, body = infer(["abc"], KEY).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    fields = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"])
    return fields + b"\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % octet for octet in body) + b"0\r\n\r\n"


def _of_oip(answer: Answer) -> str:
    [(name, told)] = answer.json.items()
    assert name == "error"
    return str(told)


def _of_openai(answer: Answer) -> str:
    return str(answer.json["error"]["message"])


DOORS: dict[str, tuple[bytes, Callable[[Answer], str]]] = {
    "JSON": (infer(["abc"], KEY), _of_oip),
    "binary": (_binary(), _of_oip),
    "gzip": (_packed(), _of_oip),
    "chunked": (_chunked(), _of_oip),
    "completions": (post('{"prompt": "abc"}', "/v1/completions", KEY), _of_openai),
    "embeddings": (post('{"input": "abc"}', "/v1/embeddings", KEY), _of_openai),
}


@pytest.mark.parametrize("stops", [False, True], ids=["trickles", "stops"])
@pytest.mark.parametrize("door", DOORS)
def test_a_body_that_is_late_is_given_up(door: str, stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, told = DOORS[door]
    begin = whole.index(b"\r\n\r\n") + 5
    heard = [0]
    receive = FastPathConnection.data_received

    def counted(connected: FastPathConnection, data: bytes) -> None:
        receive(connected, data)
        heard[0] += len(data)

    monkeypatch.setattr(FastPathConnection, "data_received", counted)

    async def main(stand: Stand) -> None:
        with pytest.MonkeyPatch.context() as patch:
            await ask(stand, patch)

    async def ask(stand: Stand, patch: pytest.MonkeyPatch) -> None:
        now, limit = [INSTANT], stand.settings.read_timeout_ms / 1000
        patch.setattr(connection, "monotonic", lambda: now[0])
        client = await stand.connect()
        await client.send(whole[:begin])
        await settled(lambda: heard[0] == begin)
        for octet in whole[begin : begin + 1 if stops else -1]:
            now[0] = min(now[0] + 0.5, INSTANT + limit - 1.0)
            before = heard[0]
            await client.send(bytes([octet]))
            await settled(lambda: heard[0] > before)  # noqa: B023 - awaited at once
            stand.door.sweep(now[0])
        (connected,) = stand.door._connections()
        assert not connected.transport.is_closing()
        stand.later(limit + 1.0)
        answer = await client.answer()
        assert answer.status == 408
        assert "read_timeout_ms" in told(answer)
        assert await client.ended()
        assert stand.gateway.asked == []
        assert connected.reserved == 0

    served(main, KEYS)


ADA, BOB = "Authorization: Bearer ada", "Authorization: Bearer bob"
TENANTS: dict[str, dict[str, Any]] = {"ada": {"rate": 0.0, "tenant": "acme"}, "bob": {"rate": 0.0, "tenant": "globex"}}
LONG = "l" * LARGE


class Loop:
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
@on_stand(keys=TENANTS)
async def test_every_large_body_is_answered(stand: Stand, chunked: bool) -> None:
    body = json.dumps({"input": LONG}).encode()
    request = post(body.decode(), "/v1/inference", ADA)
    if chunked:
        head = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%b\r\n\r\n" % ADA.encode()
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for client in await crowd(stand, 4, request + request + post('{"input": "a"}', "/v1/inference", ADA)):
        assert [(await client.answer()).json["output"] for _ in range(3)] == [LONG.upper(), LONG.upper(), "A"]


@on_stand(keys=TENANTS)
async def test_a_wrong_large_body_is_refused_and_the_connection_goes_on(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post("[" * LARGE, "/v1/inference", ADA) + post('{"input": "a"}', "/v1/inference", ADA))
    assert (await client.answer()).status == 400
    assert (await client.answer()).json["output"] == "A"


@on_stand(keys=TENANTS)
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
@on_stand(keys=TENANTS)
async def test_a_short_compressed_body_is_charged_by_what_comes_out_of_it(stand: Stand, leaves: bool) -> None:
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


@on_stand(keys=TENANTS)
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
    context: Any = stand.door._context
    assert context.quotas.bytes.free == stand.settings.bodies_bytes


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
