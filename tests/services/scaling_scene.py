"""Scene for the tests of the autoscaler: controllers over one fleet, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.autoscaler import Autoscaler, LocalScaling
from headway.controller.controller import Controller
from headway.core.queue_limits import QueueLimits
from headway.core.scaling.rules import read
from headway.core.scaling.scaler import ScaleLimits
from headway.fleet.pace import Pace
from headway.model import Capacity, ProcessInfo, Role, Scaling, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor
from tests.virtual_time import Clock

QUICK = ScaleLimits(
    rules=read(
        '[{"utilisation_above": 0.85, "for_s": 5, "add": 2}, {"utilisation_below": 0.4, "for_s": 10, "remove": 1}]'
    ),
    start_within=60.0,
    most=8,
)
PACE = 100.0


class Scene:
    """Controllers over one fleet whose workers and load are as they are told."""

    def __init__(self, clock: Clock, workers: int = 2) -> None:
        self.clock = clock
        self.workers = workers
        self.rate = 0.0
        self.gpu = ""
        self.status = WorkerStatus.HEALTHY
        self.counters = Counters()
        limits = QueueLimits(3, 8, 0.1, 100)
        self.broker = MemoryBroker({"m": limits}, DeadLetterBox(), self.counters.broker, clock, lambda: 0.5)
        self.fleet = MemoryFleet(clock)
        self.supervisor = Supervisor()
        self.supervisor.start("workers", self._live)

    async def __aenter__(self) -> Scene:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()

    async def _live(self) -> None:
        while True:
            for number in range(self.workers):
                await self.broker.heartbeat(
                    WorkerInfo(
                        worker_id=f"host-{number}/gpu-0",
                        model="m",
                        status=self.status,
                        items_per_second=PACE,
                        in_flight=number % 2,
                        gpu=self.gpu,
                    )
                )
            told = ProcessInfo(id="g", role=Role.GATEWAY, host="h", pid=1, arrivals={"m": (self.rate, 0.0)})
            await self.fleet.heartbeat(told)
            await asyncio.sleep(0.5)

    def attend(self, *members: Callable[[], ProcessInfo]) -> None:
        """Have processes tell of themselves as they are by then."""

        async def live() -> None:
            while True:
                for member in members:
                    await self.fleet.heartbeat(member())
                await asyncio.sleep(0.5)

        self.supervisor.start("members", live)

    def controller(
        self,
        pools: LocalScaling | None = None,
        name: str = "c",
        limits: ScaleLimits | None = QUICK,
        named: Collection[str] = (),
    ) -> Controller:
        made = Controller(name, self.broker, self.fleet, 1.0, self.clock, Pace(self.clock))
        made.autoscaler = Autoscaler(pools, lambda model: limits, self.counters.controller, self.clock, "fake", named)
        made.start(self.supervisor)
        return made

    async def publish(self, scaling: Scaling) -> None:
        """Publish as a leader before did."""
        capacity = Capacity(model="m", healthy=1, degraded=0, items_per_second=0.0, usable_per_second=0.0)
        await self.fleet.publish(msgspec.structs.replace(capacity, scaling=scaling))

    async def scaling(self) -> Scaling:
        [found] = await self.fleet.capacities()
        assert found.scaling is not None
        return found.scaling
