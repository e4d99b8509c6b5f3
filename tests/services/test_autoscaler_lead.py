"""The number of workers while the lead changes, the broker loses it, or its model goes."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.autoscaler import (
    AGAIN_AFTER,
    LEFT_FOR,
    SETTLES_AFTER,
)
from headway.controller.controller import LEADS_FOR
from headway.core.scaling.rules import read
from headway.errors import ScalingUnavailable
from headway.model import Scaling, WorkerStatus
from headway.scaling.none import NoScaling
from tests.services.fake_scaling import FakeScaling
from tests.services.scaling_scene import QUICK, Scene
from tests.services.test_roles import Away
from tests.virtual_time import Clock


async def test_another_leader_goes_on_from_the_published_number_and_removes_nothing_at_once(clock: Clock) -> None:
    first, second = FakeScaling({"m": 2}), FakeScaling({"m": 4})
    async with Scene(clock) as scene:
        leader = scene.controller(first)
        await asyncio.sleep(2)
        scene.rate = 240.0
        await asyncio.sleep(25)
        assert first.asked == [("m", 4)]
        scene.controller(second, "d")
        await asyncio.sleep(5)
        assert second.asked == [], "it does not lead"
        await leader.stop()
        await asyncio.sleep(LEADS_FOR + 3)
        shown = await scene.scaling()
        assert (shown.desired, shown.current, shown.coming) == (4, 2, 2)
        assert second.asked == [], "nothing is asked for twice"
        await asyncio.sleep(30)
        assert first.asked == [("m", 4)]


async def test_a_new_leader_whose_platform_is_slow_never_unpublishes_the_number(clock: Clock) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 350.0
        told = Scaling(desired=4, current=1, coming=3, reason="queue above 3 for 1 s", driver="fake", most=8)
        await scene.publish(told)
        driver = FakeScaling({"m": 1})
        driver.answers.clear()
        scene.controller(driver)
        for number in range(100):
            await asyncio.sleep(0.1)
            shown = await scene.scaling()
            assert (shown.desired, shown.reason) == (4, told.reason)
            if number == 50:
                driver.answers.set()
        assert driver.asked == [("m", 4)]


async def test_a_new_leader_decides_though_its_platform_does_not_answer_and_has_it_set_later(clock: Clock) -> None:
    async with Scene(clock) as scene:
        await scene.publish(Scaling(desired=4, current=2, coming=2, driver="fake"))
        driver = FakeScaling({"m": 2})
        driver.trouble = ScalingUnavailable("no answer within 5 s")
        scene.controller(driver)
        await asyncio.sleep(3)
        assert (await scene.scaling()).desired == 4
        driver.trouble = None
        await asyncio.sleep(AGAIN_AFTER)
        assert driver.asked == [("m", 4)]


async def test_a_number_that_was_guessed_while_the_platform_was_away_gives_way_to_that_of_the_platform(
    clock: Clock,
) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 150.0
        driver = FakeScaling({"m": 3})
        driver.trouble = ScalingUnavailable("no answer within 5 s")
        scene.controller(driver, limits=replace(QUICK, rules=read("")))
        await asyncio.sleep(2)
        assert (await scene.scaling()).desired == 1
        driver.trouble = None
        await asyncio.sleep(AGAIN_AFTER + 1)
        assert ((await scene.scaling()).desired, driver.asked) == (3, [])


async def test_a_leader_goes_on_from_its_own_number_when_the_broker_was_away_and_has_lost_it(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        controller = scene.controller(NoScaling())
        await asyncio.sleep(25)
        assert (await scene.scaling()).desired == 4
        controller._fleet = away = Away(MemoryFleet(clock))
        away.away = True
        await asyncio.sleep(2)
        assert not controller.leads
        away.away, scene.workers = False, 1
        seen = set()
        for _ in range(80):
            await asyncio.sleep(0.1)
            seen |= {one.scaling and one.scaling.desired for one in await away.capacities()}
        assert seen == {4}


async def test_a_controller_that_another_one_followed_knows_nothing_of_its_own_any_more(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        controller = scene.controller(NoScaling())
        await asyncio.sleep(25)
        controller._fleet = other = MemoryFleet(clock)
        await other.acquire_leadership("d", 2.0)
        scene.rate = 100.0
        await asyncio.sleep(2 + SETTLES_AFTER + 2)
        assert [one.scaling and one.scaling.desired for one in await other.capacities()] == [2]


async def test_a_leader_that_knows_no_number_waits_until_the_workers_that_are_there_have_told_of_themselves(
    clock: Clock,
) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 120.0
        scene.controller(NoScaling())
        await asyncio.sleep(SETTLES_AFTER - 0.5)
        assert [one.scaling for one in await scene.fleet.capacities()] == [None]
        scene.workers = 3
        await asyncio.sleep(2)
        assert (await scene.scaling()).desired == 3


async def test_a_controller_whose_lead_has_run_out_asks_its_platform_for_nothing(clock: Clock) -> None:
    async with Scene(clock) as scene:
        driver = FakeScaling({"m": 2})
        controller = scene.controller(driver)
        await asyncio.sleep(2)
        driver.trouble = ScalingUnavailable("no answer within 5 s")
        scene.rate = 300.0
        await asyncio.sleep(12)
        assert (await scene.scaling()).desired > 2
        await controller._periodic.stop()
        await asyncio.sleep(LEADS_FOR)
        driver.trouble = None
        await asyncio.sleep(AGAIN_AFTER + 1)
        assert driver.asked == []


@pytest.mark.parametrize("named", [False, True])
async def test_a_model_whose_workers_have_all_left_has_no_number_unless_a_setting_names_it(
    named: bool, clock: Clock
) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        scene.controller(NoScaling(), named=("m",) if named else ())
        await asyncio.sleep(25)
        scene.status = WorkerStatus.OFFLINE
        await asyncio.sleep(LEFT_FOR - 1)
        assert (await scene.scaling()).desired == 4, "a host that is restarted finds it"
        await asyncio.sleep(2)
        [found] = await scene.fleet.capacities()
        assert (found.scaling is not None) is named
        scene.status = WorkerStatus.HEALTHY
        await asyncio.sleep(SETTLES_AFTER + 1.5)
        assert (await scene.scaling()).desired == (4 if named else 2)


async def test_a_model_whose_workers_were_all_lost_keeps_its_number(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        scene.controller(NoScaling())
        await asyncio.sleep(25)
        scene.workers = 0
        await asyncio.sleep(LEFT_FOR + 5)
        shown = await scene.scaling()
        assert (shown.desired, shown.current, shown.utilisation) == (4, 0, None)
