"""Runs a public door on a loopback port, in front of a gateway that only echoes, with a client that checks every byte.

    served(main)  runs the coroutine function `main(stand)` against an open door; fails on leaks and unhandled errors
    @on_stand()   turns such a function into a test

The loop is uvloop, as in production. The clock of the door and broker doesn't advance: test deadlines with `Stand.later`.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

import msgspec
import pytest
import uvloop

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core import policies
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.core.values import shown
from headway.doors.entrance import Entrance
from headway.doors.readiness import Readiness
from headway.gateway.client_quotas import HeldBytes, Quotas
from headway.gateway.gateway import Gateway, TenantCounts
from headway.gateway.limiter import Limiter
from headway.gateway.pending import Lane, ReplySink, SeveralInputs
from headway.gateway.request_traces import RefusalTraces, RequestTraces
from headway.gateway.served_models import ServedModels
from headway.http import public
from headway.http.inference import fast_path, request_in_hand
from headway.http.server import connection
from headway.http.server import listener as door
from headway.http.server.listener import Listener
from headway.identity.principals import AnonymousIdentity, make_principal
from headway.model import (
    BatchRun,
    DedupKind,
    Failure,
    InferenceRequest,
    ItemResult,
    Limit,
    NoWork,
    Principal,
    Reply,
    RequestOptions,
    Slot,
    TokenCount,
    Value,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker
from headway.runtime.certificates import Certificates
from headway.runtime.counters import Counters, GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.supervisor import Supervisor
from tests.scenes import Scene, scene
from tests.services.tracing import Recorded

PATIENCE = 120.0
"""A test that hangs is stopped after this many seconds."""
INSTANT = 1000.0
KEPT_LIMITS = KeptLimits.of(400_000, 100_000)
"""Byte budgets for kept outcomes."""

Keys = Mapping[str, Mapping[str, Any]]
"""Arguments of `make_principal` by API key. The user, tenant and tier are optional."""
ADA, BOB = "Authorization: Bearer ada", "Authorization: Bearer bob"
TENANTS: Keys = {"ada": {"rate": 0.0}, "bob": {"tenant": "other", "rate": 0.0}}
"""Two tenants without rate limits: `acme` and `other`."""
LENGTH = "Inference-Header-Content-Length"
MEBIBYTE = 1 << 20


class Bearers:
    def __init__(self, keys: Keys, settings: Settings) -> None:
        usual = {"user": "ada", "tenant": "acme", "tier": "paid"}
        self._callers = {key.encode(): make_principal(settings, **{**usual, **data}) for key, data in keys.items()}

    def identify(self, authorization: bytes) -> Principal | None:
        scheme, _, key = authorization.partition(b" ")
        return self._callers.get(key) if scheme.lower() == b"bearer" else None


class Asked(InferenceRequest, frozen=True, kw_only=True):
    sink: ReplySink

    @property
    def tier(self) -> int:
        return max(self.principal.tier, self.options.tier)


def worker(takes: str = "text", gives: str = "", **known: Any) -> WorkerInfo:
    """Return a healthy worker of the default model. Unless `gives` is set, it returns the kind of value that it takes."""
    usual: dict[str, Any] = {"worker_id": "gpu-0", "model": "default", "status": WorkerStatus.HEALTHY}
    return WorkerInfo(**{**usual, "takes": takes, "gives": gives or takes, **known})


def echo(value: Value) -> Value:
    return value.upper() if isinstance(value, str) else value


class EchoGateway:
    """Returns each input in upper case, on the next turn of the loop or, with `hold` set, when `release` is called.
    `failure` or `output` replaces the answer. `abandoned` lists requests whose client left, `detached` those whose client stopped
    waiting. `versions` maps inputs to the version that ran them; answers to other inputs have no run."""

    def __init__(self, broker: MemoryBroker, settings: Settings, counters: GatewayCounts) -> None:
        self.broker: Broker = broker
        self.facts: object = self
        self.quotas, self.settings, self.counters = Quotas(settings), settings, counters
        self.limiter = Limiter(3, lambda: INSTANT)
        self.turns = FairTurns(lambda: INSTANT)
        self.served = ServedModels(["default"], Settings())
        self.served.learn([worker()])
        self.tenant_counts = TenantCounts(Settings().tier_names, self.served, lambda counts: None)
        self.hold = False
        self.shared: DedupKind | None = None
        self.kept = False
        self.detached: list[tuple[str, str]] = []
        self.failure: Failure | None = None
        self.output: Value | None = None
        self.tokens: TokenCount | None = None
        self.asked: list[Asked] = []
        self.abandoned: list[tuple[str, str]] = []
        self.waiting: list[Asked] = []
        self.versions: dict[Value, str] = {}
        self._news = asyncio.Event()

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        return limits

    def absence(self, principal: Principal, model: str) -> Failure | None:
        return None

    def lane(self, principal: Principal, options: RequestOptions, asked: str | None) -> Lane:
        lane = Lane(self.facts, principal, options, asked)
        lane.principal, lane.model = principal, asked or self.served.default
        lane.open = not (options.key or options.task)
        return lane

    def enter(self, sink: ReplySink, lane: Lane, id: str, input: Value, parameters: bytes) -> None:
        self.submit(sink, InferenceRequest(lane.asker, id, lane.options, lane.model, input, parameters))

    def take_in(
        self, sink: ReplySink, lane: Lane, options: RequestOptions, id: str, input: Value, parameters: bytes
    ) -> None:
        self.submit(sink, InferenceRequest(lane.asker, id, options, lane.model, input, parameters))

    def lets_in(self, lane: Lane, count: int) -> bool:
        return False

    def submit(self, sink: ReplySink, request: InferenceRequest, several: SeveralInputs | None = None) -> bool:
        asked = Asked(**msgspec.structs.asdict(request), sink=sink)
        self.asked.append(asked)
        self.waiting.append(asked)
        self._news.set()
        if not self.hold:
            asyncio.get_running_loop().call_soon(self.release)
        return True

    def abandon(self, sink: ReplySink, tenant: str, id: str) -> None:
        self.abandoned.append((tenant, id))
        self.waiting = [asked for asked in self.waiting if (asked.principal.tenant, asked.id) != (tenant, id)]
        self._news.set()

    def note_refusal(self, request: InferenceRequest, failure: Failure) -> Reply:
        return Reply(request.id, request.principal.tenant, None, failure)

    def detach(self, tenant: str, id: str) -> None:
        self.detached.append((tenant, id))

    def admit(self) -> None:
        """Report all waiting tasks as queued."""
        for asked in self.waiting:
            if asked.options.task:
                asked.sink.admitted()

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for asked in waiting:
            output = None if self.failure else (echo(asked.input) if self.output is None else self.output)
            version = self.versions.get(asked.input) if self.versions else None
            ran = None if version is None else BatchRun("gpu-0", 1, 0.1, INSTANT, version)
            how = {"shared": self.shared, "kept": self.kept, "tokens": self.tokens}
            reply = Reply(asked.id, asked.principal.tenant, output, self.failure, ran, **how)  # type: ignore[arg-type]
            asked.sink.answer(reply)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()` is true. It is checked whenever a request arrives or leaves."""
        while not reached():
            self._news.clear()
            await self._news.wait()


@dataclass
class Answer:
    status: int
    header: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def parts(self) -> tuple[Any, bytes]:
        """The JSON object and the binary data of an Open Inference Protocol answer."""
        assert self.status == 200, self.body
        length = self.header.get(LENGTH.lower())
        kind = "application/json" if length is None else "application/octet-stream"
        assert self.header["content-type"] == kind
        end = len(self.body) if length is None else int(length)
        return json.loads(self.body[:end]), self.body[end:]

    @property
    def error(self) -> str:
        """The error code. Checks that the problem document is complete and consistent."""
        document = self.json
        assert self.header["content-type"] == "application/problem+json"
        assert document["status"] == self.status
        assert document["detail"] == document["message"]
        assert document["request_id"] == self.header["x-request-id"]
        assert document["type"].startswith("/docs#")
        assert document["title"]
        if self.status in (429, 503):
            assert int(self.header["retry-after"]) >= 1
            assert int(self.header["retry-after-ms"]) == document["retry_after_ms"]
        code = document["error"]
        assert isinstance(code, str)
        return code


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Send each piece as a separate packet."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def ask(self, *pieces: bytes) -> Answer:
        await self.send(*pieces)
        return await self.answer()

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Return the next response. `bodiless` means that it answers HEAD."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first, *lines = head[:-4].split("\r\n")
        version, status, phrase = first.split(" ", 2)
        assert version == "HTTP/1.1"
        assert phrase
        header: dict[str, str] = {}
        for line in lines:
            name, value = line.split(": ", 1)
            assert name == name.lower() and name not in header, f"{name} twice in {head}"
            header[name] = value
        if status == "100":
            return Answer(100, header, b"")
        assert header["x-request-id"].startswith("req_")
        assert header["date"].endswith("GMT")
        assert not bodiless or int(header["content-length"]) > 0
        length = 0 if bodiless or status == "204" else int(header["content-length"])
        return Answer(int(status), header, await self.reader.readexactly(length))

    async def ended(self) -> bool:
        """Return True if the server closes the connection without sending anything more."""
        return await self.reader.read(1) == b""

    def listen(self, now: bool = True) -> None:
        """Resume or pause reading from the socket."""
        transport: Any = self.writer.transport
        (transport.resume_reading if now else transport.pause_reading)()

    def leave(self) -> None:
        self.writer.close()


@dataclass
class Stand:
    """A test's tools. With `whole`, `runs` lists the inputs that reached the worker, and its batches wait for `go`."""

    door: Listener
    gateway: EchoGateway
    counters: Counters
    settings: Settings
    real: Gateway
    broker: MemoryBroker
    runs: list[str]
    go: asyncio.Event
    recorded: Recorded
    leaving: bool = False
    clients: list[Client] = field(default_factory=list)

    async def connect(self, **options: Any) -> Client:
        if "sock" not in options:
            options |= {"host": "127.0.0.1", "port": self.door.port}
        reader, writer = await asyncio.open_connection(limit=1 << 24, **options)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def connect_deaf(self) -> Client:
        """Connect a client with a small receive buffer that reads nothing until `listen` is called."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.door.port))
        client = await self.connect(sock=sock)
        client.listen(False)
        return client

    async def ask(self, *pieces: bytes) -> Answer:
        """Send a request on a new connection, and return the response."""
        client = await self.connect()
        return await client.ask(*pieces)

    async def hold(self, *pieces: bytes) -> Client:
        """Return a client whose request waits in the gateway for `gateway.release`."""
        self.gateway.hold = True
        client, asked = await self.connect(), len(self.gateway.asked)
        await client.send(*pieces)
        await self.gateway.until(lambda: len(self.gateway.asked) > asked)
        return client

    @property
    def context(self) -> Any:
        return self.door._context

    @property
    def bodies(self) -> HeldBytes:
        """The byte budget for bodies and answers."""
        held: HeldBytes = self.context.quotas.bytes
        return held

    @property
    def nothing_held(self) -> bool:
        return self.bodies.free == self.settings.bodies_bytes

    @property
    def connection(self) -> Any:
        (connection,) = self.door._connections()
        return connection

    def learn(self, takes: str, gives: str = "", **known: Any) -> None:
        """Make the default model take and return values of these kinds."""
        for gateway in (self.gateway, self.real):
            gateway.served.learn([worker(takes, gives, **known)])

    def later(self, seconds: float) -> None:
        """Make the door check its connections as if `seconds` had passed."""
        self.door.sweep(INSTANT + seconds)


async def _work(stand: Stand) -> None:
    """Answer waiting inputs in upper case, and reject those that start with `bad`."""
    slot, policy = Slot("gpu-0", stand.settings.model, 32), policies.build("window", 0.0)
    while True:
        claimed = await stand.broker.claim(slot, policy)
        if isinstance(claimed, NoWork):
            await stand.broker.wait_for_work(slot, claimed.until)
            continue
        inputs = [entry.input for entry in claimed.entries]
        texts = [value if isinstance(value, str) else shown(value) for value in inputs]
        stand.runs += texts
        await stand.go.wait()
        items = [
            ItemResult(None, "bad input")
            if text.startswith("bad")
            else ItemResult(echo(value), tokens=stand.gateway.tokens)
            for value, text in zip(inputs, texts, strict=True)
        ]
        await stand.broker.complete(claimed, items)


async def settled(reached: Callable[[], bool]) -> None:
    """Run the event loop, which the door shares, until `reached()` is true."""
    while not reached():  # noqa: ASYNC110 - the door has no event to wait for
        await asyncio.sleep(0)


def post(
    body: bytes | str, path: str = "/v1/inference", *fields: str, version: str = "1.1", length: int | None = None
) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    count = len(content) if length is None else length
    lines = [f"POST {path} HTTP/{version}", "Host: test", f"Content-Length: {count}", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


def chunked(*pieces: bytes, path: str = "/v1/inference", fields: Sequence[str] = (), end: bytes = b"") -> bytes:
    """Build a request with a chunked body. `end` follows the chunks."""
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", *fields, "", ""])
    return head.encode("latin-1") + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


LAST = b"0\r\n\r\n"
"""The chunk that ends a body."""


def get(path: str, *fields: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *fields, "", ""]).encode("latin-1")


def served(
    main: Callable[[Stand], Coroutine[Any, Any, None]],
    keys: Keys | None = None,
    whole: bool = False,
    certificates: Certificates | None = None,
    **settings: Any,
) -> None:
    """Run `main` against an open door. If `whole`, the real gateway and one worker replace the echo gateway."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for module in (connection, door, fast_path, request_in_hand):
            assert module.monotonic is monotonic, "a test before has left another clock"
            patch.setattr(module, "monotonic", lambda: INSTANT)
        runner.run(_serve(main, keys, whole, certificates, settings))


def on_stand(*given: Any, **settings: Any) -> Callable[[Scene], Callable[..., None]]:
    """Turn a coroutine function that takes a stand into a test. The arguments are those of `served`."""
    return scene(lambda main: served(main, *given, **settings))


def recording(settings: Settings, counters: Counters) -> tuple[Recorded, RequestTraces | None]:
    """Return a span recorder and, if the settings enable traces, the request observer that uses it."""
    recorded = Recorded(monotonic)
    traces = RequestTraces(recorded.recorder, settings.tier_names, counters.gateway) if settings.trace else None
    return recorded, traces


async def _serve(
    main: Callable[[Stand], Coroutine[Any, Any, None]],
    keys: Keys | None,
    whole: bool,
    certificates: Certificates | None,
    changes: dict[str, Any],
) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    ample = {"request_timeout_ms": 30_000.0} if whole else {}
    settings = Settings(**{"port": 0, "keys": "keys.toml" if keys else "", **ample, **changes})
    counters = Counters()
    limits = QueueLimits(tiers=3, max_batch=32, reserved_share=0.1, max_queue=100)
    recorded, traces = recording(settings, counters)
    clock = monotonic if traces else lambda: INSTANT
    broker = MemoryBroker({settings.model: limits}, DeadLetterBox(), counters.broker, clock, lambda: 0.5, KEPT_LIMITS)
    real = Gateway(settings, [settings.model], broker, counters.gateway, clock, traces=traces)
    await broker.heartbeat(WorkerInfo(worker_id="gpu-0", model=settings.model, status=WorkerStatus.HEALTHY))
    gateway = EchoGateway(broker, settings, counters.gateway)
    identity = Bearers(keys, settings) if keys else AnonymousIdentity(settings.default_tier_index)
    numbers = itertools.count()
    refused = RefusalTraces(recorded.recorder, counters.spans_dropped) if traces else None
    of_real, of_door = (
        Entrance(one, identity, lambda: f"00000000-0000-7000-8000-{next(numbers):012x}", refused)
        for one in (real, real if whole else cast(Any, gateway))
    )
    ready = Readiness(broker, lambda: stand.leaving, slots={"gpu-0"})
    door = Listener.public(of_door, public.build(of_real, ready), certificates)
    stand = Stand(door, gateway, counters, settings, real, broker, [], asyncio.Event(), recorded)
    stand.go.set()
    supervisor = Supervisor()
    if whole:
        real.start(supervisor)
        supervisor.start("worker", lambda: _work(stand))
    await door.open()
    try:
        async with asyncio.timeout(PATIENCE):
            await main(stand)
    finally:
        for client in stand.clients:
            client.writer.transport.abort()
        await door.close()
        await supervisor.stop()
    assert unseen == []
