from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Self

import msgspec

from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.autoscaler import Autoscaler, LocalScaling
from headway.controller.controller import Controller
from headway.core.scaling.rules import read
from headway.core.scaling.scaler import ScaleLimits
from headway.fleet.pace import Pace
from headway.model import ProcessInfo, Role, Scaling, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor
from tests.services.site import memory_broker
from tests.virtual_time import Clock

QUICK = ScaleLimits(
    rules=read(
        '[{"utilisation_above": 0.85, "for_s": 5, "add": 2}, {"utilisation_below": 0.4, "for_s": 10, "remove": 1}]'
    ),
    start_within=60.0,
    most=8,
)
PACE = 100.0


class FakeScaling(LocalScaling):
    """Records the requested numbers of workers."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        super().__init__({})
        self._workers = dict(workers)
        self.asked: list[tuple[str, int]] = []

    def current(self, model: str) -> int:
        return self._workers[model]

    def scale(self, model: str, workers: int) -> None:
        if workers != self._workers[model]:
            self._workers[model] = workers
            self.asked.append((model, workers))


class Scene:
    """Controllers of a fleet on virtual time. A test sets its workers and load."""

    def __init__(self, clock: Clock, workers: int = 2) -> None:
        self.clock = clock
        self.workers = workers
        self.rate = 0.0
        self.gpu = ""
        self.status = WorkerStatus.HEALTHY
        self.counters = Counters()
        self.broker = memory_broker(clock, counts=self.counters.broker)
        self.fleet = MemoryFleet(clock)
        self.supervisor = Supervisor()
        self._repeat("workers", self.live)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()

    def _repeat(self, name: str, act: Callable[[], Awaitable[object]]) -> None:
        async def loop() -> None:
            while True:
                await act()
                await asyncio.sleep(0.5)

        self.supervisor.start(name, loop)

    async def live(self) -> None:
        """Send the heartbeats of the workers and of a gateway."""
        usual = WorkerInfo(worker_id="", model="m", status=self.status, items_per_second=PACE, gpu=self.gpu)
        for number in range(self.workers):
            await self.broker.heartbeat(
                msgspec.structs.replace(usual, worker_id=f"host-{number}/gpu-0", in_flight=number % 2)
            )
        told = ProcessInfo(id="g", role=Role.GATEWAY, host="h", pid=1, arrivals={"m": (self.rate, 0.0)})
        await self.fleet.heartbeat(told)

    def attend(self, *members: Callable[[], ProcessInfo]) -> None:
        """Keep sending the heartbeats of these processes. Each call returns the process's current state."""
        for member in members:
            self._repeat("members", lambda member=member: self.fleet.heartbeat(member()))  # type: ignore[misc]

    def controller(
        self,
        pools: LocalScaling | None = None,
        name: str = "c",
        limits: ScaleLimits | None = QUICK,
        named: Collection[str] = (),
    ) -> Controller:
        counts = self.counters.controller
        made = Controller(name, self.broker, self.fleet, 1.0, self.clock, Pace(self.clock), counters=counts)
        made.autoscaler = Autoscaler(pools, lambda model: limits, counts, self.clock, "fake", named)
        made.start(self.supervisor)
        return made

    async def scaling(self) -> Scaling:
        [found] = await self.fleet.capacities()
        assert found.scaling is not None
        return found.scaling
