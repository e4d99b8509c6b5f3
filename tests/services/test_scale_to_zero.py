"""Requests for a model without workers: what happens to them, when a worker is started, and what is reported."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from headway import errors
from headway.app.devices import Devices
from headway.app.model_plans import ModelPlan
from headway.app.scaling import scalable
from headway.config.target import parse_target
from headway.controller.autoscaler import SETTLES_AFTER, Autoscaler, LocalScaling
from headway.core.scaling.scaler import ScaleLimits
from headway.doors.readiness import Readiness
from headway.fleet.pace import Pace
from headway.gateway.fleet_watchers import CapacityWatcher, WorkersWatcher
from headway.model import Capacity, Drain, ProcessInfo, RequestOptions, Scaling
from headway.runtime.counters import ControllerCounts
from tests.core.entries import entry
from tests.services.calls import failure_of
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.roles import Cut
from tests.services.scaling_scene import FakeScaling, Scene
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock

IDLE = ScaleLimits(idle_after=20.0, most=2)


class Zero(Stand):
    """A process whose pool is scaled to zero, with all services that handle a request then."""

    def __init__(self, clock: Clock, start: float, **settings: Any) -> None:
        self.backend = FakeBackend(0.05)
        self.backend.start_seconds = start
        super().__init__(clock, self.backend, FakeBackend(0.05), slots=1, **settings)
        self.controller.autoscaler = Autoscaler(
            LocalScaling({"m": self.pool}), lambda model: IDLE, self.counters.controller, clock, "local", ["m"]
        )
        self.watcher = CapacityWatcher(self.gateway, self.fleet, clock, Pace(clock, may_rest=False))
        self.workers = WorkersWatcher([self.gateway.served, self.gateway], self.broker, clock)
        self.ready = Readiness(
            self.broker,
            lambda: False,
            self.pool.slots,
            at_zero=lambda: self.gateway.served.wakes,
            awaited=lambda: self.gateway.served.awaited,
            clock=clock,
        )

    def _member(self) -> ProcessInfo:
        rates = {model: (one.rates.higher, one.rates.lowest) for model, one in self.gateway.limiter.throttles.items()}
        plan = ModelPlan(self.settings, parse_target("m:f"), Devices(("0", "1"), 2))
        return replace(super()._member(), arrivals=rates, scalable=scalable({"m": plan}, {"m": self.pool}))

    def _woken(self) -> None:
        self.membership.soon()
        self.controller.soon()

    async def scaling(self) -> Scaling:
        [found] = await self.fleet.capacities()
        assert found.scaling is not None
        return found.scaling


@asynccontextmanager
async def at_zero(clock: Clock, start: float = 1.0, **settings: Any) -> AsyncIterator[Zero]:
    """A process whose model has had no worker for a while. Starting one takes `start` seconds."""
    zero = Zero(clock, start, **settings)
    async with zero:
        zero.watcher.start(zero.service._supervisor)
        zero.workers.start(zero.service._supervisor)
        assert codes([await zero.ask("before")]) == ["ok"]
        await asyncio.sleep(30)
        assert (zero.pool.size, zero.gateway.served.at_zero) == (0, {"m": start})
        yield zero
        await zero.watcher.close()
        await zero.workers.close()


async def test_the_first_requests_bring_one_worker_and_wait_beyond_their_deadline(clock: Clock) -> None:
    async with at_zero(clock, 3.0, queue_timeout_ms=500) as zero:
        began = clock()
        assert set(codes(await asyncio.gather(*(zero.asking(str(number)) for number in range(20))))) == {"ok"}
        assert 3.0 < clock() - began < 3.4
        assert zero.counters.controller.scaling_decisions["m", "up"] == 1
        await asyncio.sleep(1)
        assert zero.gateway.served.at_zero == {}
        assert (await zero.scaling()).start_seconds > 3.0


async def test_a_request_that_the_start_would_make_late_is_told_when_it_is_over(clock: Clock) -> None:
    async with at_zero(clock, 10.0) as zero:
        began = clock()
        refused = failure_of(await zero.ask("a"))
        assert clock() - began < 0.1, "at once"
        assert (refused.code, refused.retry_after) == (errors.NO_WORKERS, 10.0)
        assert "one is being started" in refused.message
        await asyncio.sleep(4)
        left = failure_of(await zero.ask("b")).retry_after or 0.0
        assert 5.0 <= left <= 7.0, "what is left of the start that the first has begun"
        await asyncio.sleep(left)
        assert codes([await zero.ask("b")]) == ["ok"]
        assert zero.counters.controller.scaling_decisions["m", "up"] == 1


async def test_a_worker_that_is_wanted_and_never_comes_is_missed_by_all_who_are_asked(clock: Clock) -> None:
    async with at_zero(clock, 3.0) as zero:
        assert zero.controller.autoscaler is not None
        zero.controller.autoscaler._pools = FakeScaling({"m": 0})  # Nothing can start one.
        held = zero.asking("a", timeout=4.0)
        await asyncio.sleep(2)
        word, checks = await zero.ready.look()
        assert (word, checks["workers"].startswith("none; 1 wanted, on its way for")) == ("ok", True)
        waits = []
        assert failure_of(await held).code == errors.NO_WORKERS
        for id in "bcd":
            await asyncio.sleep(10)
            refused = failure_of(await zero.ask(id, timeout=4.0))
            assert "s ago is overdue" in refused.message
            waits.append(refused.retry_after or 0.0)
        assert 5 < waits[0] < waits[1] - 9 < waits[2] - 18
        found = await zero.scaling()
        assert (found.desired, found.current, found.coming, found.late) == (1, 0, 0, 1)
        word, checks = await zero.ready.look()
        assert word == "degraded"
        assert re.fullmatch(r"none; 1 wanted, on its way for 3\d s", checks["workers"])


async def test_a_target_that_does_not_load_holds_nobody_in_vain_and_goes_back_to_zero(clock: Clock) -> None:
    async with at_zero(clock, 1.0) as zero:
        for backend in zero.backends:
            backend.refuse_start = 1_000
        for id in "abc":
            held = failure_of(await zero.ask(id, timeout=4.0))
        [worker] = [one for one in await zero.broker.workers() if one.start_failed]
        began = clock()
        refused = failure_of(await zero.ask("d", timeout=4.0))
        assert clock() - began < 0.1
        assert "failed to load" in refused.message
        assert min(held.retry_after or 0.0, refused.retry_after or 0.0) >= worker.retry_in > 3.0
        scaling = await zero.scaling()
        assert (scaling.desired, scaling.trouble) == (1, "gpu-0 does not start: does not load")
        assert (zero.pool.size, (await zero.ready.look())[0]) == (1, "unavailable")
        await asyncio.sleep(25)
        assert ((await zero.scaling()).desired, zero.pool.size) == (0, 0)
        assert codes([await zero.ask("e", timeout=4.0)]) == ["NO_WORKERS"]
        for backend in zero.backends:
            backend.refuse_start = 0
        await asyncio.sleep(19)
        scaling = await zero.scaling()
        assert (scaling.current, scaling.trouble, scaling.starts_in) == (1, "", 1.0)
        assert codes([await zero.ask("f")]) == ["ok"]
        assert (await zero.ready.look())[0] == "ok"


async def test_a_gateway_at_zero_is_ready_so_that_somebody_can_ask_it(clock: Clock) -> None:
    async with at_zero(clock) as zero:
        assert await zero.ready.look() == ("ok", {"workers": "none, as nobody asks for one", "draining": False})
        assert zero.gateway.served.has_worker("m")
        zero.gateway.served.note_starts({})
        assert (await zero.ready.look())[0] == "unavailable"


@pytest.mark.parametrize("slots", [0, 1])
async def test_a_worker_replaces_a_drained_one_but_not_in_a_drained_process(clock: Clock, slots: int) -> None:
    async with at_zero(clock) as zero:
        me = zero.gateway.name
        if slots:
            assert codes([await zero.ask("a")]) == ["ok"]
        starts = zero.backend.starts
        await zero.fleet.drain([Drain(name="gpu-0", process=me, host="here")])
        await asyncio.sleep(5)
        assert codes([await zero.ask("b")]) == ["ok"]
        await asyncio.sleep(2)
        assert zero.backend.starts == starts, "nothing is loaded on a drained GPU"
        shown = await zero.scaling()
        assert (shown.desired, shown.current, shown.coming) == (2, 1, 0)
        assert (await zero.ready.look())[0] == "ok"
        await zero.fleet.drain([Drain(name=me, process=me, host="here")])
        await asyncio.sleep(5)
        shown = await zero.scaling()
        assert (shown.desired, shown.current, shown.coming, shown.starts_in) == (2, 0, 0, None)
        assert (await zero.ready.look())[0] == "unavailable"
        assert codes([await zero.ask("c")]) == [errors.NO_WORKERS]
        await zero.fleet.undrain([me])
        await asyncio.sleep(5)
        assert codes([await zero.ask("d")]) == ["ok"]


async def test_a_lane_is_closed_only_while_its_own_model_is_at_zero(clock: Clock) -> None:
    async with at_zero(clock) as zero:
        options = RequestOptions(4.0, 1)
        assert not zero.gateway.lane(ANYBODY, options, "m").open
        await zero.ask("a")
        await asyncio.sleep(1)
        assert zero.gateway.lane(ANYBODY, options, "m").open
        served = zero.gateway.served
        served.serve({**{model: one.settings for model, one in served.items()}, "other": zero.settings})
        assert served.note_starts({"other": Scaling(desired=0, current=0, starts_in=1.0)})
        zero.gateway.learn()
        assert zero.gateway.lane(ANYBODY, options, "m").open


async def test_the_platform_is_asked_for_none_and_a_new_leader_keeps_what_was_learnt(clock: Clock) -> None:
    pools = FakeScaling({"m": 1})
    async with Scene(clock, 1) as scene:
        leader = scene.controller(pools, limits=IDLE, named=["m"])
        await asyncio.sleep(25)
        assert pools.asked == [("m", 0)]
        scene.workers = 0
        await asyncio.sleep(15)
        scene.rate = 1.0
        await asyncio.sleep(7)
        assert pools.asked == [("m", 0), ("m", 1)]
        scene.workers = 1
        await asyncio.sleep(2)
        scene.rate = 0.0
        await asyncio.sleep(25)
        scene.workers = 0
        await asyncio.sleep(15)
        shown = await scene.scaling()
        assert (shown.desired, shown.least, shown.starts_in) == (0, 0, shown.start_seconds)
        assert 6.0 <= shown.start_seconds <= 8.0
        await leader.stop()
        scene.controller(pools, "d", limits=IDLE, named=["m"])
        await asyncio.sleep(10)
        assert await scene.scaling() == shown
        assert pools.asked == [("m", 0), ("m", 1), ("m", 0)]


async def test_lines_of_bulk_jobs_bring_no_worker_while_those_of_another_model_are_on_their_way(clock: Clock) -> None:
    autoscaler = Autoscaler(
        FakeScaling({"b": 0, "c": 0}), lambda model: IDLE, ControllerCounts(), clock, "fake", ["b", "c"]
    )
    none = Capacity(model="b", healthy=0, degraded=0, items_per_second=0.0, usable_per_second=0.0)

    def wanted(queue: int, ready: int) -> tuple[int, int]:
        """Return how many workers `c` (with `queue` entries waiting) and `b` (with lines waiting) should have."""
        c = autoscaler.look(replace(none, model="c", healthy=ready), None, queue, [], [])
        b = autoscaler.look(none, None, 0, [], [], bulk=9)
        return (c.scaling.desired if c.scaling else 0), (b.scaling.desired if b.scaling else 0)

    wanted(0, 0)
    await asyncio.sleep(SETTLES_AFTER)
    wanted(0, 0)
    await asyncio.sleep(70)
    assert (wanted(1, 0), wanted(1, 1)) == ((1, 0), (1, 1))


@pytest.mark.parametrize("killed", [False, True])
async def test_no_number_becomes_zero_while_somebody_waits_as_what_is_known_is_old(killed: bool, clock: Clock) -> None:
    """The controllers can't reach the fleet for longer than a model may be idle. The leader survives, or is killed."""
    async with Scene(clock) as scene:
        leader, heir = scene.controller(limits=IDLE, named=["m"]), scene.controller(name="d", limits=IDLE, named=["m"])
        leader._fleet = heir._fleet = fleet = Cut(scene.fleet)
        await asyncio.sleep(SETTLES_AFTER + 1)
        fleet.away = True
        workers, scene.workers = scene.workers, 0
        if killed:
            await leader.stop()
        await scene.broker.enqueue([entry(timeout=600.0, queue_timeout=600.0)])
        await asyncio.sleep(IDLE.idle_after + 5)
        fleet.away = False
        seen = set()
        for tick in range(300):
            await asyncio.sleep(0.1)
            seen.add((await scene.scaling()).desired)
            if tick == 20:
                scene.workers = workers
        assert heir.leads_now or not killed
        assert seen == {2}
