"""The autoscaler of a controller on virtual time: what it asks of its driver, what it tells, and who may decide."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headway.controller.autoscaler import (
    AGAIN_AFTER,
    CHECK_EVERY,
    REFUSED_AGAIN_AFTER,
    SETTLES_AFTER,
    Autoscaler,
)
from headway.core.scaling.rules import read
from headway.errors import ScalingRefused, ScalingUnavailable
from headway.fleet.scaling_follower import ScalingFollower
from headway.model import ProcessInfo, Role
from headway.scaling.local import LocalScaling
from headway.scaling.none import NoScaling
from tests.services.fake_backend import FakeBackend
from tests.services.fake_scaling import FakeScaling
from tests.services.scaling_scene import QUICK, Scene
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock


async def test_a_decision_is_carried_out_told_counted_and_published(clock: Clock) -> None:
    driver = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        scene.controller(driver)
        await asyncio.sleep(2)
        assert (await scene.scaling()).desired == 2
        assert driver.asked == []
        scene.rate = 300.0
        for _ in range(200):
            await asyncio.sleep(0.1)
            if scene.counters.scaling_decisions["m", "up"]:
                break
        await asyncio.sleep(1.1)
        assert driver.asked == [("m", 4)], "at once"
        await asyncio.sleep(20)
        shown = await scene.scaling()
        assert (shown.current, shown.coming, shown.driver, shown.policy) == (2, shown.desired - 2, "fake", "rules")
        assert "utilisation above 0.85 for 5 s" in shown.reason
        assert scene.counters.scaling_decisions["m", "up"] == len(driver.asked)
        [first, *_] = scene.counters.departures.take_scalings()
        assert (first.model, first.before, first.desired, first.direction) == ("m", 2, 4, "up")
        assert 0 < first.ago < 30
        assert scene.counters.departures.take_scalings() == ()


async def test_before_workers_are_removed_the_platform_hears_what_each_process_is_worth(clock: Clock) -> None:
    driver = FakeScaling({"m": 3})
    async with Scene(clock, 3) as scene:
        scene.controller(driver)
        await asyncio.sleep(20)
        assert driver.asked[0] == ("m", 2)
        assert driver.costs == {"host-0": 1, "host-1": 11, "host-2": 1}


@pytest.mark.parametrize(
    ("trouble", "again_after"),
    [
        (ScalingRefused("an HPA owns the replicas. Remove it."), REFUSED_AGAIN_AFTER),
        (ScalingUnavailable("no answer within 5 s"), AGAIN_AFTER),
    ],
)
async def test_trouble_is_published_and_a_call_is_tried_again(
    trouble: ScalingRefused, again_after: float, clock: Clock
) -> None:
    driver = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        scene.controller(driver)
        await asyncio.sleep(2)
        driver.trouble = trouble
        scene.rate = 180.0
        await asyncio.sleep(60)
        shown = await scene.scaling()
        assert (shown.desired, shown.trouble) == (4, str(trouble))
        assert scene.counters.scaling_failures["m"] >= 1
        driver.trouble = None
        await asyncio.sleep(again_after + 2)
        assert driver.asked[0] == ("m", 4)
        assert (await scene.scaling()).trouble == ""


async def test_a_platform_that_is_away_at_first_keeps_nobody_from_knowing_the_number(clock: Clock) -> None:
    driver = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        driver.trouble = ScalingUnavailable("no answer within 5 s")
        scene.controller(driver)
        scene.rate = 100.0
        await asyncio.sleep(3)
        shown = await scene.scaling()
        assert (shown.desired, shown.trouble) == (2, "no answer within 5 s")


async def test_what_an_operator_sets_is_taken_over(clock: Clock) -> None:
    driver = FakeScaling({"m": 2}, slots=2)
    async with Scene(clock) as scene:
        scene.rate = 120.0
        scene.controller(driver)
        await asyncio.sleep(2)
        driver.workers["m"] = 6
        await asyncio.sleep(CHECK_EVERY + 1)
        shown = await scene.scaling()
        assert (shown.desired, shown.reason) == (6, "6 were set by another")
        assert driver.asked == []


async def test_whole_processes_that_are_more_than_was_asked_for_are_no_operators_doing(clock: Clock) -> None:
    driver = FakeScaling({"m": 4}, slots=4)
    async with Scene(clock, 4) as scene:
        scene.controller(driver)
        for _ in range(8):
            scene.workers = driver.workers["m"]
            await asyncio.sleep(10)
        assert [workers for _, workers in driver.asked] == [3, 2, 1]
        assert driver.workers == {"m": 4}
        assert (await scene.scaling()).desired == 1


async def test_without_a_platform_the_number_is_published_all_the_same(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.controller(NoScaling())
        await asyncio.sleep(SETTLES_AFTER + 1)
        assert (await scene.scaling()).desired == 2
        scene.rate = 180.0
        await asyncio.sleep(25)
        assert (await scene.scaling()).desired == 4
        scene.workers = 4
        await asyncio.sleep(5)
        assert (await scene.scaling()).coming == 0


async def test_workers_that_turn_up_after_the_first_leader_are_no_surplus(clock: Clock) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 250.0
        scene.controller(NoScaling(), limits=replace(QUICK, rules=read("")))
        await asyncio.sleep(SETTLES_AFTER + 1)
        assert (await scene.scaling()).desired == 1
        scene.workers = 4
        await asyncio.sleep(2)
        shown = await scene.scaling()
        assert (shown.desired, shown.current, shown.coming) == (4, 4, 0)
        assert not scene.counters.scaling_decisions


async def test_workers_that_share_gpus_with_other_models_are_not_scaled(clock: Clock) -> None:
    driver = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        scene.gpu, scene.rate = "gpu-0", 1000.0
        scene.controller(driver)
        await asyncio.sleep(30)
        shown = await scene.scaling()
        assert (shown.desired, driver.asked) == (2, [])
        assert "share GPUs" in shown.reason


@dataclass
class FakePool:
    """Pool that takes any size."""

    size: int
    most: int = 8
    serving: bool = True

    async def resize(self, size: int) -> None:
        self.size = size


async def test_hosts_share_what_is_wanted_and_move_no_worker(clock: Clock) -> None:
    async with Scene(clock) as scene:
        pools = {"a": FakePool(1, 4), "b": FakePool(1, 2)}

        async def live() -> None:
            while True:
                scene.workers = sum(pool.size for pool in pools.values())
                for id, pool in pools.items():
                    told = ProcessInfo(id=id, role=Role.WORKER, host=id, pid=1, scalable={"m": (pool.size, pool.most)})
                    await scene.fleet.heartbeat(told)
                await asyncio.sleep(0.5)

        scene.supervisor.start("hosts", live)
        scene.controller(NoScaling())
        for id, pool in pools.items():
            ScalingFollower(id, ["m"], LocalScaling({"m": pool}), scene.fleet, clock).start(scene.supervisor)
        await asyncio.sleep(2)
        scene.rate = 290.0
        await asyncio.sleep(30)
        assert (pools["a"].size, pools["b"].size) == (3, 1)
        scene.rate = 3000.0
        await asyncio.sleep(60)
        assert (pools["a"].size, pools["b"].size) == (4, 2)
        shown = await scene.scaling()
        assert (shown.desired, shown.most) == (6, 6), "as many as there are devices"
        scene.rate = 10.0
        await asyncio.sleep(200)
        assert (pools["a"].size, pools["b"].size) == (1, 1)
        assert (await scene.scaling()).desired == 2, "each host keeps one"


async def test_a_host_warns_once_of_a_controller_that_was_not_told_of_it(clock: Clock) -> None:
    async with Scene(clock) as scene:
        pool = FakePool(1, 4)
        told = ProcessInfo(id="a", role=Role.WORKER, host="a", pid=1, scalable={"m": (1, 4)})

        async def live() -> None:
            while True:
                await scene.fleet.heartbeat(told)
                await asyncio.sleep(0.5)

        scene.supervisor.start("host", live)
        scene.controller(NoScaling())
        with capture_logs() as logs:
            ScalingFollower("a", ["m"], LocalScaling({"m": pool}), scene.fleet, clock).start(scene.supervisor)
            await asyncio.sleep(20)
        warned = [one for one in logs if "its controller was told otherwise" in one["event"]]
        assert [(one["model"], one["controller"]) for one in warned] == [("m", "fake")]


async def test_under_real_batchers_the_pool_grows_and_shrinks_and_no_request_fails(clock: Clock) -> None:
    backends = [FakeBackend(0.5) for _ in range(4)]
    for backend in backends:
        backend.start_seconds = 3.0
    backends[2].refuse_start = 2
    async with Stand(clock, *backends, slots=1, max_batch=4, policy="window") as stand:
        stand.controller.autoscaler = scaler = Autoscaler(
            LocalScaling({"m": stand.pool}), lambda model: QUICK, stand.counters, clock, "local"
        )
        scaler.start(stand.service._supervisor)
        asked = []
        for rate, seconds in ((4, 10), (18, 40), (2, 90)):
            for _ in range(rate * seconds):
                asked.append(stand.asking("x", timeout=20.0))
                await asyncio.sleep(1 / rate)
            if rate == 18:
                assert stand.pool.size == 3
                assert stand.counters.scaling_decisions["m", "up"] == 1
        answers = codes(await asyncio.gather(*asked))
        assert set(answers[:40] + answers[-180:]) == {"ok"}, "while it shrinks"
        assert set(answers) <= {"ok", "SHED", "SERVICE_OVERLOADED"}, "while what was asked for starts"
        assert stand.pool.size == 1
        assert stand.counters.scaling_decisions["m", "down"] == 2
