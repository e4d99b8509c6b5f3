"""Gateways, workers and controllers as separate services that share a broker, on virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from headway.app.lifecycle import BrokerConnection, Service
from headway.app.process_figures import describe_process
from headway.brokers.memory.fleet import MemoryFleet
from headway.config import Settings
from headway.controller.controller import Controller
from headway.core import policies
from headway.errors import BrokerUnavailable
from headway.fleet.membership import Membership
from headway.fleet.pace import Pace
from headway.gateway.fleet_watchers import CapacityWatcher
from headway.gateway.gateway import Gateway
from headway.model import ProcessInfo, Reply, Role, Slot, WorkerInfo, WorkerStatus
from headway.ports import Fleet, Gpu
from headway.runtime.counters import Counters
from headway.worker.pool import WorkerPool, carry_out
from tests.services.fake_backend import FakeBackend
from tests.services.requests import request
from tests.services.site import make_batcher, memory_broker
from tests.virtual_time import Clock

MAX_BATCH = 8


NOBODY = WorkerPool([].__getitem__, 0, 0)


class Cut:
    """A process's connection to a broker or fleet. While `away`, every use raises BrokerUnavailable."""

    def __init__(self, inner: Any) -> None:
        self.away = False
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise BrokerUnavailable("out of reach")
        return getattr(self._inner, name)


class FakeDoor:
    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    async def bind(self) -> None:
        self._told.append(f"{self._name} binds")

    async def open(self) -> None:
        self._told.append(f"{self._name} opens")

    def retire(self) -> None:
        self._told.append(f"{self._name} retires")

    async def drain(self) -> None:
        self._told.append(f"{self._name} drains")

    async def close(self) -> None:
        self._told.append(f"{self._name} closes")


class Fleets:
    """Creates services that share a broker. `told` lists what their doors, links and backends did, in order."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.told: list[str] = []
        self.settings = Settings(model="m", max_batch_size=MAX_BATCH)
        self.counters = Counters()
        self.broker = memory_broker(clock, counts=self.counters.broker)
        self.fleet: Fleet = MemoryFleet(clock)
        self._made: list[Service] = []

    def gateway(self, connection: BrokerConnection | None = None) -> tuple[Service, Gateway]:
        gateway = Gateway(self.settings, ["m"], self.broker, self.counters.gateway, self.clock, rng=lambda: 0.5)
        listeners = [FakeDoor("public", self.told), FakeDoor("admin", self.told)]
        pace = Pace(self.clock)
        membership = self._membership(gateway.name, Role.GATEWAY, gateway=gateway, pace=pace)
        lookout = CapacityWatcher(gateway, self.fleet, self.clock, pace)
        return self._service(gateway, NOBODY, listeners, membership, connection, resources=[lookout]), gateway

    def worker(
        self,
        name: str,
        *backends: FakeBackend,
        pid: int = 1,
        id: str = "",
        connection: BrokerConnection | None = None,
        memory: Callable[[], float] = lambda: 0.0,
        gpu: Gpu | None = None,
    ) -> Service:
        batchers = [
            make_batcher(
                Slot(f"{name}/gpu-{index}", "m", MAX_BATCH),
                lambda backend=backend: backend,  # type: ignore[misc]
                self.broker,
                self.counters.worker,
                self.clock,
                policies.build("paced", None),
                memory=memory,
                gpu=gpu,
            )
            for index, backend in enumerate(backends)
        ]
        listeners = [FakeDoor("admin", self.told)]
        pool = WorkerPool(batchers.__getitem__, len(batchers), len(batchers))
        membership = self._membership(id or name, Role.WORKER, pid, pool=pool)
        return self._service(None, pool, listeners, membership, connection)

    def controller(self, name: str) -> tuple[Service, Controller]:
        pace = Pace(self.clock)
        controller = Controller(name, self.broker, self.fleet, 0.7, self.clock, pace)
        membership = self._membership(name, Role.CONTROLLER, controller=controller, pace=pace)
        listeners = [FakeDoor("admin", self.told)]
        return self._service(None, NOBODY, listeners, membership, None, controller=controller), controller

    async def close(self) -> None:
        for service in self._made:
            await service.stop()

    def _service(
        self,
        gateway: Gateway | None,
        pool: WorkerPool,
        listeners: Sequence[FakeDoor],
        membership: Membership,
        connection: BrokerConnection | None,
        **others: Any,
    ) -> Service:
        parts = {"membership": membership, "connection": connection, **others}
        service = Service(self.settings, self.broker, gateway, pool, listeners, **parts)
        self._made.append(service)
        return service

    def _membership(
        self,
        id: str,
        role: Role,
        pid: int = 1,
        controller: Controller | None = None,
        gateway: Gateway | None = None,
        pace: Pace | None = None,
        pool: WorkerPool = NOBODY,
    ) -> Membership:
        pace = Pace(self.clock, may_rest=False) if pace is None else pace

        def describe() -> ProcessInfo:
            told = describe_process(self.settings, role, id, gateway, controller, 0, {}, pace.every())
            return replace(told, host="here", pid=pid)

        drained = None if pool is NOBODY else partial(carry_out, process=id, pool=pool)
        return Membership(self.fleet, describe, self.clock, self.broker, pool.slots, pace.every, drained)

    async def members(self) -> list[str]:
        return sorted(member.id for member in await self.fleet.members())

    async def worker_statuses(self) -> dict[str, WorkerStatus]:
        workers: list[WorkerInfo] = list(await self.broker.workers())
        return {worker.worker_id: worker.status for worker in workers}


def asking(gateway: Gateway, text: str, timeout: float = 4.0) -> asyncio.Task[Reply]:
    return asyncio.get_running_loop().create_task(gateway.ask(request(text, timeout=timeout)))
