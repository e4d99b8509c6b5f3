import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from headway.admin import routes
from headway.admin.process import ProcessView
from headway.admin.snapshot import SnapshotSource
from headway.app.lifecycle import Service
from headway.app.roles import ROLES
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryBoard, MemoryFleet
from headway.config import Settings
from headway.controller.controller import Controller
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.queue_limits import QueueLimits
from headway.doors.readiness import Readiness
from headway.fleet.board_reporter import BoardReporter
from headway.fleet.membership import Membership
from headway.fleet.pace import Pace
from headway.gateway.gateway import Gateway
from headway.gateway.input_gate import InputGate, InputPolicy
from headway.gateway.ledger_writer import LedgerWriter
from headway.gateway.request_traces import RequestTraces
from headway.http.routing import Handler
from headway.model import Principal, ProcessInfo, Reply, Role, Slot, Value
from headway.ports import Broker, Gpu, Ledger
from headway.runtime.counters import Counters
from headway.runtime.spans import SpanRecorder
from headway.runtime.supervisor import Supervisor
from headway.telemetry.figures import ProcessFigures
from headway.worker.batch_traces import BatchTraces
from headway.worker.batcher import Batcher
from headway.worker.pool import WorkerPool, carry_out
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.requests import request
from tests.services.roles import FakeDoor
from tests.services.site import make_batcher
from tests.storage.fake_ledger import FakeLedger
from tests.virtual_time import Clock

EPOCH = 1_790_000_000.0


class Stand:
    """The services of one process on virtual time: real broker, gateway and batchers, with a slot for each fake backend.
    `slots` is the initial number of slots (all by default). They share `breaker`, and watch `gpus`, if there are any.
    `input_policy` creates the input policy."""

    def __init__(
        self,
        clock: Clock,
        *backends: FakeBackend,
        max_batch: int = 8,
        breaker: Breaker | None = None,
        slots: int | None = None,
        input_policy: Callable[[Counters], InputPolicy] | None = None,
        recorder: SpanRecorder | None = None,
        gpus: Sequence[Gpu] = (),
        **settings: object,
    ):
        self.settings = Settings(max_batch_size=max_batch, workers=len(backends), **settings)  # type: ignore[arg-type]
        self._clock = clock
        self.backends, self.gpus = backends, gpus
        self.counters = Counters()
        self.dead = DeadLetterBox()
        limits = QueueLimits(tiers=3, max_batch=max_batch, max_weight=self.settings.max_batch_weight)
        self.broker = MemoryBroker({"m": limits}, self.dead, self.counters.broker, clock, lambda: 0.5)
        self.gate = None if input_policy is None else InputGate(input_policy(self.counters), self.counters.input_policy)
        self._recorder = recorder
        traces = None if recorder is None else RequestTraces(recorder, self.settings.tier_names, self.counters.gateway)
        self.gateway = Gateway(
            self.settings,
            ["m"],
            self.broker,
            self.counters.gateway,
            clock,
            gate=self.gate,
            traces=traces,
            woken=self._woken,
            rng=lambda: 0.5,
        )
        wait = None if self.settings.max_wait_ms is None else self.settings.max_wait_ms / 1000
        self.policy = policies.build(self.settings.policy, wait)
        self._breaker = breaker
        self.pool = WorkerPool(self._batcher, len(backends) if slots is None else slots, len(backends))
        self.fleet = MemoryFleet(clock)
        self.board = MemoryBoard(clock)
        drained = partial(carry_out, process=self.gateway.name, pool=self.pool)
        self.membership = Membership(
            self.fleet, self._member, clock, self.broker, drained=drained, killed=self.counters.departures.take_killed
        )
        self.controller = Controller(
            self.gateway.name, self.broker, self.fleet, 0.7, clock, Pace(clock, may_rest=False)
        )
        self.service = Service(
            self.settings,
            self.broker,
            self.gateway,
            self.pool,
            [FakeDoor("door", [])],
            controller=self.controller,
            membership=self.membership,
            resources=[BoardReporter(self.gateway.name, self.board, self.broker, self.fleet, self.counters, clock, 3)],
        )

    def _batcher(self, index: int) -> Batcher:
        return make_batcher(
            Slot(f"gpu-{index}", "m", self.settings.max_batch_size, self.settings.max_batch_weight),
            lambda: self.backends[index],
            self.broker,
            self.counters.worker,
            self._clock,
            self.policy,
            self._breaker,
            self.settings.gpu_timeout_ms / 1000,
            gpu=self.gpus[index] if self.gpus else None,
            traces=None if self._recorder is None else BatchTraces(self._recorder),
        )

    def admin_app(
        self,
        role: Role = Role.SERVE,
        broker: Any = None,
        direct: Broker | None = None,
        ledger: Ledger | None = None,
        troubles: Callable[[], Mapping[str, str]] = dict,
    ) -> Handler:
        """Return the admin app. Only `serve` and `gateway` have a gateway. `direct` replaces a broker that is away."""
        has = ROLES[role]
        ready = Readiness(
            broker or self.broker,
            lambda: self.membership.leaving,
            self.pool.slots,
            direct,
            needs_workers=has.needs_workers,
            needs_own=has.needs_own_workers,
            clock=self._clock,
        )
        process = ProcessView(
            settings=self.settings,
            role=role,
            id=self.gateway.name,
            counters=self.counters,
            broker=broker or self.broker,
            letters=broker or self.dead,
            fleet=broker or self.fleet,
            board=self.board,
            clock=self._clock,
            now=self._now,
            troubles=troubles,
            gateway=self.gateway if has.gateway else None,
            ledger=ledger,
            figures=self._figures,
        )
        return routes.build(process, ready, SnapshotSource(process, ready.learn))

    def _figures(self) -> ProcessFigures:
        gateway = self.gateway
        return ProcessFigures(self.settings.tier_names, gateway.served.models, pending=gateway.pending)

    def _woken(self) -> None:
        """Called when a request for a model without workers arrives."""

    def _member(self) -> ProcessInfo:
        return ProcessInfo(
            id=self.gateway.name,
            role=Role.SERVE,
            host="here",
            pid=1,
            admin="http://127.0.0.1:9000",
            version="1",
            pending=self.gateway.pending,
            requests_per_second=self.gateway.requests_per_second,
            leads=self.controller.leads,
        )

    async def _now(self) -> float:
        return self._clock()

    async def __aenter__(self) -> Self:
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop()

    async def ask(self, text: Value, caller: Principal = ANYBODY, **how: Any) -> Reply:
        return await self.gateway.ask(request(text, caller, **how))

    def asking(self, text: Value, caller: Principal = ANYBODY, **how: Any) -> asyncio.Task[Reply]:
        return asyncio.get_running_loop().create_task(self.ask(text, caller, **how))

    @property
    def ran(self) -> list[str]:
        """The inputs that the first backend has run."""
        return [text for batch in self.backends[0].batches for text in batch]


@asynccontextmanager
async def served(clock: Clock, **settings: object) -> AsyncIterator[Stand]:
    """A running service with one backend. It is drained at the end, when no requests may be left."""
    stand = Stand(clock, FakeBackend(0.1), **settings)  # type: ignore[arg-type]
    await stand.service.start()
    try:
        yield stand
        assert stand.gateway.pending == 0
        await stand.service.drain()
    finally:
        await stand.service.stop()


@asynccontextmanager
async def recorded(clock: Clock, stand: Stand) -> AsyncIterator[FakeLedger]:
    """The ledger of a running service. The times in its rows are EPOCH plus the virtual time."""
    ledger, supervisor = FakeLedger(), Supervisor()
    writer = LedgerWriter(
        ledger,
        stand.settings,
        stand.counters.store,
        clock,
        lambda: EPOCH + clock(),
        rng=lambda: 0.5,
        held=stand.gateway.held,
    )
    stand.gateway._observers = (*stand.gateway._observers, writer)
    await writer.open()
    writer.start(supervisor)
    try:
        async with stand:
            yield ledger
    finally:
        await supervisor.stop()
        await writer.close()


def codes(replies: Sequence[Reply]) -> list[str]:
    return [reply.failure.code if reply.failure else "ok" for reply in replies]
