"""The autoscaler: which sizes it requests, what it bases them on, what it reports, and which controller decides."""

import asyncio
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.autoscaler import LEFT_FOR, SETTLES_AFTER, LocalScaling, ScalingFollower
from headway.controller.controller import LEADS_FOR
from headway.core.scaling.rules import read
from headway.model import ProcessInfo, Role, WorkerInfo, WorkerStatus
from tests.services.roles import Cut
from tests.services.scaling_scene import QUICK, FakeScaling, Scene
from tests.virtual_time import Clock


async def test_a_decision_is_carried_out_told_counted_and_published(clock: Clock) -> None:
    pools = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        scene.controller(pools)
        await asyncio.sleep(2)
        assert (await scene.scaling()).desired == 2
        assert pools.asked == []
        scene.rate = 300.0
        for _ in range(200):
            await asyncio.sleep(0.1)
            if scene.counters.controller.scaling_decisions["m", "up"]:
                break
        await asyncio.sleep(1.1)
        assert pools.asked == [("m", 4)], "at once"
        await asyncio.sleep(20)
        shown = await scene.scaling()
        assert (shown.current, shown.coming, shown.driver, shown.policy) == (2, shown.desired - 2, "fake", "rules")
        assert "utilisation above 0.85 for 5 s" in shown.reason
        assert scene.counters.controller.scaling_decisions["m", "up"] == len(pools.asked)
        [first, *_] = scene.counters.departures.take_scalings()
        assert (first.model, first.before, first.desired, first.direction) == ("m", 2, 4, "up")
        assert 0 < first.ago < 30
        assert scene.counters.departures.take_scalings() == ()


async def test_workers_that_turn_up_after_the_first_leader_are_no_surplus(clock: Clock) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 250.0
        scene.controller(limits=replace(QUICK, rules=read("")))
        await asyncio.sleep(SETTLES_AFTER + 1)
        assert (await scene.scaling()).desired == 1
        scene.workers = 4
        await asyncio.sleep(2)
        shown = await scene.scaling()
        assert (shown.desired, shown.current, shown.coming) == (4, 4, 0)
        assert not scene.counters.controller.scaling_decisions


async def test_workers_that_share_gpus_with_other_models_are_not_scaled(clock: Clock) -> None:
    pools = FakeScaling({"m": 2})
    async with Scene(clock) as scene:
        scene.gpu, scene.rate = "gpu-0", 1000.0
        scene.controller(pools)
        await asyncio.sleep(30)
        shown = await scene.scaling()
        assert (shown.desired, pools.asked) == (2, [])
        assert "share GPUs" in shown.reason


@dataclass
class FakePool:
    """A pool that accepts any size."""

    size: int
    most: int = 8
    serving: bool = True

    async def resize(self, size: int) -> None:
        self.size = size


async def test_hosts_share_what_is_wanted_and_move_no_worker(clock: Clock) -> None:
    async with Scene(clock) as scene:
        pools = {"a": FakePool(1, 4), "b": FakePool(1, 2)}

        def host(id: str) -> ProcessInfo:
            scene.workers = sum(pool.size for pool in pools.values())
            scalable = {"m": (pools[id].size, pools[id].most)}
            return ProcessInfo(id=id, role=Role.WORKER, host=id, pid=1, scalable=scalable)

        scene.attend(lambda: host("a"), lambda: host("b"))
        scene.controller()
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
        host = ProcessInfo(id="a", role=Role.WORKER, host="a", pid=1, scalable={"m": (1, 4)})
        scene.attend(lambda: host)
        scene.controller()
        with capture_logs() as logs:
            ScalingFollower("a", ["m"], LocalScaling({"m": pool}), scene.fleet, clock).start(scene.supervisor)
            await asyncio.sleep(20)
        warned = [one for one in logs if "its controller is set to another driver" in one["event"]]
        assert [(one["model"], one["controller"]) for one in warned] == [("m", "fake")]


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


async def test_a_leader_goes_on_from_its_own_number_when_the_broker_was_away_and_has_lost_it(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        controller = scene.controller()
        await asyncio.sleep(25)
        assert (await scene.scaling()).desired == 4
        controller._fleet = away = Cut(MemoryFleet(clock))
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
        controller = scene.controller()
        await asyncio.sleep(25)
        controller._fleet = other = MemoryFleet(clock)
        await other.acquire_leadership("d", 2.0)
        scene.rate = 100.0
        await asyncio.sleep(2 + SETTLES_AFTER + 2)
        assert [one.scaling and one.scaling.desired for one in await other.capacities()] == [2]


async def test_a_leader_without_a_number_waits_until_workers_have_told_of_themselves(clock: Clock) -> None:
    async with Scene(clock, 1) as scene:
        scene.rate = 120.0
        scene.controller()
        await asyncio.sleep(SETTLES_AFTER - 0.5)
        assert [one.scaling for one in await scene.fleet.capacities()] == [None]
        scene.workers = 3
        await asyncio.sleep(2)
        assert (await scene.scaling()).desired == 3


@pytest.mark.parametrize("named", [False, True])
async def test_a_model_whose_workers_all_left_has_only_a_set_number(named: bool, clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.rate = 240.0
        scene.controller(named=("m",) if named else ())
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
        scene.controller()
        await asyncio.sleep(25)
        scene.workers = 0
        await asyncio.sleep(LEFT_FOR + 5)
        shown = await scene.scaling()
        assert (shown.desired, shown.current, shown.utilisation) == (4, 0, None)


@pytest.mark.parametrize("shared", [False, True])
async def test_no_number_falls_as_hosts_come_back_after_an_outage(shared: bool, clock: Clock) -> None:
    async with Scene(clock, workers=0) as scene:
        heard = ["a", "b"]

        async def live() -> None:
            while True:
                for id in heard:
                    room = {} if shared else {"m": (3, 3)}
                    await scene.fleet.heartbeat(ProcessInfo(id=id, role=Role.WORKER, host=id, pid=1, scalable=room))
                    for number in range(3):
                        gpu = f"{id}-{number}" if shared else ""
                        own = WorkerInfo(worker_id=f"{id}/{number}", model="m", status=WorkerStatus.HEALTHY, gpu=gpu)
                        await scene.broker.heartbeat(own)
                await asyncio.sleep(0.5)

        scene.supervisor.start("hosts", live)
        leader, heir = scene.controller(), scene.controller(name="d")
        heir._fleet = away = Cut(scene.fleet)
        await asyncio.sleep(SETTLES_AFTER + 2)
        assert (await scene.scaling()).desired == 6
        await leader.stop()
        away.away = True
        heard.clear()
        await asyncio.sleep(20)
        away.away = False
        seen = set()
        for id in "ab":
            heard.append(id)
            for _ in range(25):
                await asyncio.sleep(0.1)
                seen.add((await scene.scaling()).desired)
        assert heir.leads_now
        assert seen == {6}
