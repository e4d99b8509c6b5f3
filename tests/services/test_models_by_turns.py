"""Models of one process that have its GPUs by turns: what one gives back another gets, and whoever is asked for gets one."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from headway import errors
from headway.app.devices import Devices
from headway.app.model_plans import ModelPlan
from headway.app.scaling import scalable
from headway.brokers.memory.fleet import MemoryFleet
from headway.bulk.seat_runner import SeatRunner
from headway.config import Settings
from headway.config.target import parse_target
from headway.controller.autoscaler import Autoscaler
from headway.controller.controller import Controller
from headway.core.scaling.rules import read
from headway.core.scaling.scaler import ScaleLimits
from headway.fleet.local_scaling import LocalScaling
from headway.fleet.membership import Membership
from headway.fleet.pace import Pace
from headway.gateway.fleet_watchers import CapacityWatcher, WorkersWatcher
from headway.gateway.served_models import ServedModels
from headway.model import ProcessInfo, Reply, Role, Slot
from headway.model.bulk import BulkLine
from headway.runtime.request_id import new_id
from headway.worker.batcher import Batcher
from headway.worker.pool import Places, WorkerPool, WorkerPools
from tests.services.batchers import make_batcher
from tests.services.fake_backend import FakeBackend
from tests.services.stand import codes
from tests.services.test_models import TwoModels
from tests.virtual_time import Clock

GROWS = read('[{"queue_above": 4, "for_s": 1, "add": 1}]')
IDLE = ScaleLimits(rules=GROWS, idle_after=15.0, most=4)
START = 1.0


class ByTurns(TwoModels):
    """Models `a` and `b` over so many GPUs, scaled in their process; `a` begins with `first` of them, `b` with what is left."""

    def __init__(self, clock: Clock, gpus: int, first: int = 1) -> None:
        super().__init__(clock)
        self.taken: list[int] = []
        """GPUs on which a worker is, or starts."""
        self.wrong = 0
        places, slots, names = Places(gpus), set[str](), [*self.settings.served]
        pools = {
            name: WorkerPool(self._slots_of(name), size, gpus, slots, places)
            for name, size in zip(names, (first, 1), strict=True)
        }
        self.pools = WorkerPools(pools, slots)
        devices = Devices(tuple(map(str, range(gpus))), gpus, shared=True)
        plans = {name: ModelPlan(self.settings.served[name], parse_target("m:f"), devices) for name in names}
        self.fleet = MemoryFleet(clock)
        rates = self.gateway.limiter.throttles

        def describe() -> ProcessInfo:
            arrivals = {name: (one.rates.higher, one.rates.lowest) for name, one in rates.items()}
            told = ProcessInfo(id=self.gateway.name, role=Role.SERVE, host="h", pid=1, model="a")
            return replace(told, arrivals=arrivals, scalable=scalable(plans, pools))

        self.membership = Membership(self.fleet, describe, clock, self.broker)
        pace = Pace(clock, may_rest=False)
        self.controller = Controller("c", self.broker, self.fleet, 1.0, clock, pace, counters=self.counters.controller)
        self.controller.autoscaler = Autoscaler(
            LocalScaling(pools), lambda model: IDLE, self.counters.controller, clock, "local", names
        )
        self.watchers = (
            CapacityWatcher(self.gateway, self.fleet, clock, pace),
            WorkersWatcher([self.gateway.served, self.gateway], self.broker, clock),
        )

    def _slots_of(self, name: str) -> Slots:
        return Slots(self, name)

    async def __aenter__(self) -> ByTurns:
        await super().__aenter__()
        for one in (self.membership, self.controller, *self.watchers):
            one.start(self._supervisor)
        return self

    def sizes(self) -> tuple[int, ...]:
        return tuple(pool.size for pool in self.pools.of_models.values() if isinstance(pool, WorkerPool))


class Slots:
    """Builder of the batchers of one model, each of which has a GPU to itself."""

    def __init__(self, turns: ByTurns, name: str) -> None:
        self._turns, self._name = turns, name

    def __call__(self, number: int) -> Batcher:
        turns, name = self._turns, self._name
        slot = Slot(f"{name}/gpu-{number}", name, turns.settings.served[name].max_batch_size, 0)
        return make_batcher(
            slot, lambda: Exclusive(turns.taken, number), turns.broker, turns.counters.worker, turns.clock
        )


class Exclusive(FakeBackend):
    """Backend on a GPU that no other may be on at the same time."""

    def __init__(self, taken: list[int], number: int) -> None:
        super().__init__(0.1)
        self.start_seconds = START
        self._taken, self._number = taken, number

    async def start(self) -> float:
        assert self._number not in self._taken, "two workers on one GPU"
        self._taken.append(self._number)
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._number in self._taken:
            self._taken.remove(self._number)


async def test_a_model_gets_the_gpu_that_another_gave_back_and_gives_it_up_for_it_again(clock: Clock) -> None:
    async with ByTurns(clock, 2) as turns:
        await asyncio.sleep(5)
        assert turns.sizes() == (1, 1)

        async def busy() -> None:
            while True:
                await turns.ask("b")

        callers = [asyncio.ensure_future(busy()) for _ in range(16)]
        await asyncio.sleep(30)
        assert turns.sizes() == (0, 2), "b has the GPU of a"
        assert codes([await turns.ask("a")])[0] in ("ok", errors.NO_WORKERS)
        await asyncio.sleep(8)
        assert turns.sizes() == (1, 1), "and gave it up"
        assert codes([await turns.ask("a")]) == ["ok"]
        for one in callers:
            one.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


async def test_two_models_have_one_gpu_by_turns(clock: Clock) -> None:
    async with ByTurns(clock, 1) as turns:
        await asyncio.sleep(5)
        assert turns.sizes() == (1, 0), "b begins without one"
        for _ in range(3):
            for name, sizes in (("b", (0, 1)), ("a", (1, 0))):
                for _ in range(10):
                    reply = await turns.ask(name)
                    if reply.failure is None:
                        break
                    assert reply.failure.code == errors.NO_WORKERS
                    await asyncio.sleep(reply.failure.retry_after or 1.0)
                assert codes([reply]) == ["ok"]
                assert turns.sizes() == sizes
                await asyncio.sleep(3)


class Job:
    """Bulk job whose lines go to the queue as fast as that has room for them.

    Attributes:
        done: lines that have their answers.
    """

    def __init__(self, turns: ByTurns, model: str) -> None:
        settings = Settings(max_batch_size=8)
        served = ServedModels(["a", "b"], settings)
        self._runner = SeatRunner(
            turns.broker,
            served,
            "feeder",
            len(settings.tier_names),
            None,
            turns.clock,
            lambda: 0.5,
            new_id,
        )
        self.done, self._model = 0, model
        self._runner.start(turns._supervisor)
        turns._supervisor.start("job", self._feed)

    async def _feed(self) -> None:
        while True:
            room = await self._runner.room(self._model)
            self._runner.offer(
                [BulkLine("job", "acme", number, self._model, "", "x") for number in range(room)], self._heard
            )
            await asyncio.sleep(0.01)

    def _heard(self, line: BulkLine, reply: Reply) -> None:
        self.done += reply.failure is None


async def test_a_bulk_job_wakes_its_model_on_a_gpu_that_is_free_and_gives_it_up_for_whoever_is_asked_for(
    clock: Clock,
) -> None:
    async with ByTurns(clock, 1) as turns:
        job = Job(turns, "b")
        for _ in range(5):
            await asyncio.sleep(4)
            assert codes([await turns.ask("a")]) == ["ok"]
            assert (turns.sizes(), job.done) == ((1, 0), 0), "a is asked for now and then"
        await asyncio.sleep(14)
        assert (turns.sizes(), job.done) == ((1, 0), 0)
        await asyncio.sleep(60)
        assert turns.sizes() == (0, 1), "once nobody has asked for a, and beyond that time"
        begun, before = clock(), job.done
        assert before > 2000
        for _ in range(10):
            if (reply := await turns.ask("a")).failure is None:
                break
            await asyncio.sleep(reply.failure.retry_after or 1.0)
        assert (codes([reply]), clock() - begun < 8.0) == (["ok"], True)
        await asyncio.sleep(10)
        between = job.done
        await asyncio.sleep(60)
        assert turns.sizes() == (0, 1)
        assert job.done > between
        assert turns.counters.controller.scaling_decisions["b", "up"] == 2


async def test_a_bulk_job_gives_its_gpu_up_for_a_model_that_is_asked_for_more_than_its_workers_carry(
    clock: Clock,
) -> None:
    async with ByTurns(clock, 2) as turns:
        job = Job(turns, "b")
        await asyncio.sleep(30)
        await turns.ask("a")
        assert (turns.sizes(), job.done > 0) == ((1, 1), True)

        async def busy() -> None:
            while True:
                await turns.ask("a")

        callers = [asyncio.ensure_future(busy()) for _ in range(16)]
        await asyncio.sleep(30)
        assert turns.sizes() == (2, 0)
        for one in callers:
            one.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
