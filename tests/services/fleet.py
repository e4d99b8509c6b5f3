"""Gateways and batchers on virtual time, each with its own connection to a faulty broker."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core import policies
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.gateway.direct_mode import Fallback
from headway.gateway.gateway import Gateway
from headway.gateway.pending import Ending, PendingRequest
from headway.model import Entry, Reply, Slot
from headway.ports import Broker
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.pool import WorkerPool
from tests.services.fake_backend import FakeBackend
from tests.services.requests import request
from tests.services.site import make_batcher
from tests.services.troubled import Connection, Server
from tests.virtual_time import Clock


class Asked:
    """A waiter that records every answer it gets, and when."""

    def __init__(self, text: str, clock: Clock) -> None:
        self.text = text
        self.at = clock()
        self.replies: list[Reply] = []
        self.told = asyncio.Event()
        self.answered_at = 0.0
        self.id = ""
        self.was_admitted = asyncio.Event()
        """Set when it is a task."""
        self._clock = clock

    def admitted(self) -> None:
        self.was_admitted.set()

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)
        self.answered_at = self._clock()
        self.told.set()

    @property
    def reply(self) -> Reply:
        """The answer. Fails if there isn't exactly one."""
        [reply] = self.replies
        return reply

    @property
    def outcome(self) -> str:
        """`ok`, or the code of the failure. Checks that the output belongs to this input."""
        if self.reply.failure is not None:
            return self.reply.failure.code
        assert self.reply.output == self.text.upper()
        return "ok"


class Notes:
    def __init__(self) -> None:
        self.notes: list[tuple[Entry, float, Reply]] = []

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        self.notes += [(request.entry, now - request.since, request.reply) for request in requests]

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(str(entry.input), reply.failure.code if reply.failure else "ok") for entry, _, reply in self.notes]


class Fleet:
    """Gateways, and a batcher for each of `backends`. Each backend runs one of `models`, in rotation.
    With `fallback`, each gateway has a direct mode, which serves only the first model."""

    def __init__(
        self,
        clock: Clock,
        *backends: FakeBackend,
        gateways: int = 1,
        fallback: FakeBackend | None = None,
        max_batch: int = 8,
        seed: int = 0,
        models: Sequence[str] = ("m",),
        **settings: object,
    ):
        self.clock = clock
        self.settings = Settings(max_batch_size=max_batch, **settings)  # type: ignore[arg-type]
        self.backends = backends
        self.fallback = fallback or FakeBackend()
        self.counters = Counters()
        rng = random.Random(seed)
        limits = QueueLimits(tiers=3, max_batch=max_batch)
        self.server = Server(clock, limits, self.counters.broker, models)
        self._rng = rng.random
        self._supervisor = Supervisor()
        self.journals = [Notes() for _ in range(gateways)]
        self._tasks: list[asyncio.Task[None]] = []
        self.batchers = [
            self._batcher(f"gpu-{number}", backend, Connection(self.server), models[number % len(models)])
            for number, backend in enumerate(backends)
        ]
        self.direct: Fallback | None = None
        if fallback is not None:
            own = MemoryBroker({"m": limits}, DeadLetterBox(), self.counters.broker, clock, self._rng)
            pool = WorkerPool(lambda index: self._batcher("fallback-0", fallback, own), 1, 1)
            self.direct = Fallback(own, pool, ("m",))
        self.gateways = [
            Gateway(
                self.settings,
                models,
                Connection(self.server),
                self.counters.gateway,
                clock,
                direct=self.direct,
                observers=[journal],
                rng=self._rng,
            )
            for journal in self.journals
        ]

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    async def __aenter__(self) -> Fleet:
        for batcher in self.batchers:
            await batcher.start()
        for gateway in self.gateways:
            gateway.start(self._supervisor)
        if self.direct is not None:
            self.direct.start(self._supervisor)
        self.serving = [batcher.run(self._supervisor) for batcher in self.batchers]
        self._supervisor.start("reaper", self._reap_on)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.stop()
        for batcher in self.batchers:
            await batcher.stop()
        if self.direct is not None:
            await self.direct.stop()

    def ask(self, text: str, *, gateway: int = 0, **how: Any) -> Asked:
        """Send a request to a gateway. `how` is passed to `request`."""
        asked, sent = Asked(text, self.clock), request(text, **how)
        asked.id = sent.id
        self.gateways[gateway].submit(asked, sent)
        return asked

    async def go_direct(self) -> None:
        """Make the broker fail, and wait until the gateway uses its fallback."""
        await self.server.fail()
        self.ask("notices")
        await asyncio.sleep(2.0)
        assert self.direct is not None and self.gateway.broker is self.direct.broker

    async def answered(self, *asked: Asked) -> list[str]:
        for one in asked:
            await one.told.wait()
        return [one.outcome for one in asked]

    def runs(self, text: str, backends: Sequence[FakeBackend] | None = None) -> int:
        chosen = self.backends if backends is None else backends
        return sum(batch.count(text) for backend in chosen for batch in backend.batches)

    def _batcher(self, name: str, backend: FakeBackend, broker: Broker, model: str = "m") -> Batcher:
        slot, timeout = Slot(name, model, self.settings.max_batch_size), self.settings.gpu_timeout_ms / 1000
        policy = policies.build(self.settings.policy, None)
        return make_batcher(
            slot, lambda: backend, broker, self.counters.worker, self.clock, policy, gpu_timeout=timeout, rng=self._rng
        )

    async def _reap_on(self) -> None:
        connection = Connection(self.server)
        while True:
            pause = 0.05
            with contextlib.suppress(BrokerUnavailable):
                pause = await connection.reap()
            await asyncio.sleep(max(pause, 0.01))
