"""Several models of one process: each with its queue, workers and rules, and those that have its GPUs by turns."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from headway import errors
from headway.app.brokers import queue_limits
from headway.app.devices import Devices
from headway.app.model_plans import ModelPlan
from headway.app.scaling import scalable
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.bulk.seat_runner import SeatRunner
from headway.config import Settings
from headway.config.target import ModelSettings, parse_target
from headway.controller.autoscaler import Autoscaler, LocalScaling
from headway.controller.controller import Controller
from headway.core.scaling.rules import read
from headway.core.scaling.scaler import ScaleLimits
from headway.fleet.membership import Membership
from headway.fleet.pace import Pace, reap_on
from headway.gateway.fleet_watchers import CapacityWatcher, WorkersWatcher
from headway.gateway.gateway import Gateway
from headway.gateway.served_models import ServedModels
from headway.model import (
    InferenceRequest,
    ModelReport,
    Principal,
    ProcessInfo,
    Reply,
    RequestOptions,
    Role,
    Slot,
)
from headway.model.bulk import BulkLine
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.pool import Places, WorkerPool, WorkerPools
from tests.services.batchers import make_batcher
from tests.services.calls import failure_of
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.stand import codes
from tests.virtual_time import Clock

BATCH = 0.1


def model(name: str, **values: object) -> ModelSettings:
    return ModelSettings(name, values=tuple(values.items()))


class TwoModels:
    """A gateway and a slot for each of two models."""

    def __init__(self, clock: Clock, *models: ModelSettings, **settings: object) -> None:
        chosen = models or (model("a"), model("b"))
        self.settings = Settings(models=chosen, max_batch_size=8, policy="window", max_wait_ms=0, **settings)  # type: ignore[arg-type]
        self.counters, self.clock = Counters(), clock
        limits = {name: queue_limits(one) for name, one in self.settings.served.items()}
        self.broker = MemoryBroker(limits, DeadLetterBox(), self.counters.broker, clock, lambda: 0.5)
        self.gateway = Gateway(self.settings, [*limits], self.broker, self.counters.gateway, clock, rng=lambda: 0.5)
        self.backends = {name: FakeBackend(BATCH) for name in limits}
        slots = set[str]()
        pools = {name: WorkerPool(lambda index, name=name: self._batcher(name), 1, 1, slots) for name in limits}  # type: ignore[misc]
        self.pools = WorkerPools(pools, slots)
        self._supervisor = Supervisor()

    def _batcher(self, name: str) -> Batcher:
        own = self.settings.served[name]
        slot = Slot(f"{name}/gpu-0", name, own.max_batch_size, 0, ModelReport(own.model_version))
        return make_batcher(slot, lambda: self.backends[name], self.broker, self.counters.worker, self.clock)

    async def __aenter__(self) -> TwoModels:
        await self.pools.start()
        self.pools.run(self._supervisor)
        self.gateway.start(self._supervisor)
        self._supervisor.start("reaper", lambda: reap_on(self.broker))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.stop()
        await self.pools.stop()

    async def ask(self, model: str, text: str = "x", caller: Principal = ANYBODY, **options: object) -> Reply:
        asked = RequestOptions(4.0, **options)  # type: ignore[arg-type]
        return await self.gateway.ask(InferenceRequest(caller, new_id(), asked, model, text, b""))

    async def latency(self, model: str) -> float:
        begun = self.clock()
        assert (await self.ask(model)).failure is None
        return self.clock() - begun


async def test_each_model_answers_with_its_own_workers_version_and_cache(clock: Clock) -> None:
    async with TwoModels(clock, model("a", model_version="7", cache=True), model("b", model_version="8")) as two:
        assert two.pools.slots == {"a/gpu-0", "b/gpu-0"}
        for name, version, runs in (("a", "7", [["a"]]), ("b", "8", [["b"], ["b"]])):
            for _ in range(2):
                reply = await two.ask(name, name)
            assert reply.ran is not None
            assert (reply.output, reply.ran.worker, reply.ran.version) == (name.upper(), f"{name}/gpu-0", version)
            assert two.backends[name].batches == runs


async def test_largest_batch_and_deadlines_are_those_of_the_model(clock: Clock) -> None:
    quick = model("b", max_batch_size=2, request_timeout_ms=150.0, queue_timeout_ms=150.0)
    async with TwoModels(clock, model("a"), quick) as two:
        await asyncio.gather(*(two.ask("a", str(number)) for number in range(9)))
        assert max(map(len, two.backends["a"].batches)) == 8
        begun = clock()
        replies = await asyncio.gather(*(two.ask("b", str(number)) for number in range(9)))
        assert clock() - begun <= 0.2, "nobody waits longer than this model allows"
        assert max(map(len, two.backends["b"].batches)) <= 2
        assert {failure_of(reply).code for reply in replies if reply.failure} <= {
            errors.DEADLINE_EXCEEDED, errors.SERVICE_OVERLOADED, errors.SHED,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("only", "asked", "code", "named"),
    [
        (frozenset[str](), "", errors.BAD_REQUEST, "name one of: a, b"),
        (frozenset("b"), "", errors.BAD_REQUEST, "name one of: b"),
        (frozenset[str](), "c", errors.NOT_FOUND, "there is: a, b"),
        (frozenset("b"), "c", errors.FORBIDDEN, "only for: b"),
        (frozenset("b"), "a", errors.FORBIDDEN, "only for: b"),
        (
            frozenset("c"),
            "",
            errors.FORBIDDEN,
            "no model that this credential is for is served here; it is only for: c",
        ),
        (frozenset("c"), "c", errors.NOT_FOUND, "there is: none for you"),
    ],
)
async def test_a_request_for_no_model_or_a_foreign_one_names_those_it_may_ask(
    only: frozenset[str], asked: str, code: str, named: str, clock: Clock
) -> None:
    async with TwoModels(clock) as two:
        told = failure_of(await two.ask(asked, caller=Principal("u", "t", 0, models=only)))
        assert told.code == code
        assert told.message.endswith(named)
        assert "a" not in told.message.rpartition(":")[2] or not only


async def test_each_model_has_a_throttle_of_its_own(clock: Clock) -> None:
    async with TwoModels(clock) as two:
        lowest = len(two.settings.tier_names) - 1
        two.gateway.limiter.throttles["a"].set_rate(0.0, clock())
        refused, taken = await asyncio.gather(*(two.ask(name, tier=lowest) for name in "ab"))
        assert (failure_of(refused).code, taken.output) == (errors.SHED, "X")


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


class Job:
    """Bulk job whose lines go to the queue as fast as that has room for them."""

    def __init__(self, turns: ByTurns, model: str) -> None:
        settings = Settings(max_batch_size=8)
        served = ServedModels(["a", "b"], settings)
        self._runner = SeatRunner(
            turns.broker, served, "feeder", len(settings.tier_names), None, turns.clock, lambda: 0.5, new_id
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


async def test_a_bulk_job_wakes_its_model_on_a_free_gpu_and_gives_way_to_demand(clock: Clock) -> None:
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
