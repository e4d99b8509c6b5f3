from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Self

from headway.app.brokers import queue_limits
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.config.target import ModelSettings
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.departure import Policy
from headway.core.queue_limits import QueueLimits
from headway.fleet.pace import reap_on
from headway.gateway.gateway import Gateway
from headway.model import Principal, Reply, Slot
from headway.ports import Backend, WorkSource
from headway.runtime.counters import BrokerCounts, Counters, WorkerCounts
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.pool import Workers
from headway.worker.starting import Limits
from tests.services.fake_backend import ANYBODY
from tests.services.requests import request
from tests.virtual_time import Clock


def memory_broker(clock: Clock, *models: str, counts: BrokerCounts | None = None) -> MemoryBroker:
    """Return a broker for these models, or for `m` if there are none."""
    limits = dict.fromkeys(models or ("m",), QueueLimits(tiers=3, max_batch=8))
    return MemoryBroker(limits, DeadLetterBox(), counts or BrokerCounts(), clock, lambda: 0.5)


def make_batcher(
    slot: Slot,
    make_backend: Callable[[], Backend],
    broker: WorkSource,
    counters: WorkerCounts,
    clock: Clock,
    policy: Policy | None = None,
    breaker: Breaker | None = None,
    gpu_timeout: float = 3.0,
    **others: Any,
) -> Batcher:
    """Make a batcher. Without `policy`, it sends whatever is waiting immediately. `others` are passed to `Batcher`."""
    chosen = policy or policies.build("window", 0.0)
    limits = Limits(gpu_timeout)
    others = {"rng": lambda: 0.5, **others}
    return Batcher(slot, make_backend, broker, chosen, breaker or Breaker(5, 0.5), limits, counters, clock, **others)


class Site:
    """A gateway on virtual time, and the `pools` of a subclass. It uses the broker of the site `beside`, if given."""

    pools: Collection[Workers]
    patience = 4.0
    """Seconds that requests may take."""

    def __init__(
        self,
        clock: Clock,
        *models: ModelSettings,
        beside: Site | None = None,
        rng: Callable[[], float] = lambda: 0.5,
        **settings: Any,
    ) -> None:
        self.settings = Settings(models=models, max_batch_size=8, policy="window", max_wait_ms=0, **settings)
        self.clock, self.counters, self.supervisor = clock, Counters(), Supervisor()
        limits = {name: queue_limits(own) for name, own in self.settings.served.items()}
        self.broker = MemoryBroker(limits, DeadLetterBox(), self.counters.broker, clock, rng)
        if beside is not None:
            self.broker = beside.broker
            self.broker.know(limits)
        self.gateway = Gateway(self.settings, [*limits], self.broker, self.counters.gateway, clock, rng=rng)

    def batcher(
        self, slot: Slot, backend: Callable[[], Backend], source: WorkSource | None = None, **others: Any
    ) -> Batcher:
        return make_batcher(slot, backend, source or self.broker, self.counters.worker, self.clock, **others)

    async def __aenter__(self) -> Self:
        for pool in self.pools:
            await pool.start()
            pool.run(self.supervisor)
        self.gateway.start(self.supervisor)
        self.supervisor.start("reaper", lambda: reap_on(self.broker))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()
        for pool in self.pools:
            await pool.stop()

    async def ask(self, model: str = "m", text: str = "x", caller: Principal = ANYBODY, **options: Any) -> Reply:
        return await self.gateway.ask(request(text, caller, model=model, **{"timeout": self.patience, **options}))

    def asking(self, model: str = "m", text: str = "x", **options: Any) -> asyncio.Task[Reply]:
        return asyncio.get_running_loop().create_task(self.ask(model, text, **options))

    async def latency(self, model: str) -> float:
        begun = self.clock()
        assert (await self.ask(model)).failure is None
        return self.clock() - begun
