"""What the leading controller publishes: capacity, and rollouts that gateways follow and report counts for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.controller import GONE_AFTER, KEEP_EVERY, LEADS_FOR, PUBLISH_EVERY, Controller, RolloutLeader
from headway.core.departure import Load
from headway.core.rollout import decided
from headway.errors import WorkerCrashed
from headway.fleet.pace import Pace
from headway.gateway.fleet_watchers import READ_CAPACITY_EVERY, CapacityWatcher
from headway.model import Capacity, ProcessInfo, QueueName, Role, Rollout, RolloutState, VersionCounts
from headway.runtime.counters import ControllerCounts
from headway.runtime.supervisor import Supervisor
from tests.core.test_rollout import PLAN
from tests.core.test_versions import worker
from tests.services import scaling_scene
from tests.services.site import memory_broker
from tests.services.test_versions import Rollout as Versions
from tests.virtual_time import Clock


class Scene(scaling_scene.Scene):
    """Controllers of a fleet whose gateway reports request counts for each version."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.failing, self.told, self.old = 0, VersionCounts(), VersionCounts()

    async def live(self) -> None:
        for version in ("3", "4"):
            await self.broker.heartbeat(worker(version))
        failed = self.told.failed + self.failing
        self.told, self.old = VersionCounts(self.told.answered + 1, failed), VersionCounts(self.old.answered + 100)
        counts = {"m": {"3": self.old, "4": self.told}}
        await self.fleet.heartbeat(
            ProcessInfo(id="gateway", role=Role.GATEWAY, host="h", pid=1, model="m", versions=counts)
        )

    async def rollout(self) -> Rollout:
        [found] = await self.fleet.rollouts()
        return found

    async def published(self) -> Rollout | None:
        [capacity] = await self.fleet.capacities()
        return capacity.rollout

    def events(self) -> list[tuple[str, str]]:
        _, changes, _ = self.counters.departures.take()
        return [(one.status, one.cause) for one in changes if one.worker == "rollout of m@4"]


async def test_another_leader_goes_on_with_the_step_and_its_evidence(clock: Clock) -> None:
    async with Scene(clock) as it:
        first = it.controller(name="first")
        await asyncio.sleep(1.0)
        await it.fleet.keep_rollout(replace(PLAN, every=60.0))
        await asyncio.sleep(30.0)
        await first.stop()
        at = await it.rollout()
        assert 30.0 - KEEP_EVERY - 1.0 <= at.waited <= 30.0
        assert at.evidence.new.answered > 50
        it.controller(name="second")
        await asyncio.sleep(LEADS_FOR + 32.0)
        after = await it.rollout()
        assert (after.step, after.state) == (1, RolloutState.RUNNING)
        assert it.events() == [("at 1 %", ""), ("at 10 %", "")], "the second one tells nothing twice"
        assert it.counters.controller.rollout_changes == {("m", "step"): 2}


async def test_a_version_that_fails_gets_nothing_more_and_that_is_told_once(clock: Clock) -> None:
    async with Scene(clock) as it:
        it.controller(name="c")
        await it.fleet.keep_rollout(PLAN)
        await asyncio.sleep(10.0)
        assert (await it.rollout()).running
        it.events()
        it.failing = 1
        await asyncio.sleep(20.0)
        end = await it.rollout()
        assert end.state is RolloutState.ROLLED_BACK
        assert await it.published() == end
        assert it.events() == [("rolled back", end.reason)]
        assert it.counters.controller.rollout_changes["m", "rolled back"] == 1
        await asyncio.sleep(60.0)
        assert await it.rollout() == end


async def test_what_an_operator_decides_holds_against_the_leader(clock: Clock) -> None:
    async with Scene(clock) as it:
        it.controller(name="c")
        await it.fleet.keep_rollout(PLAN)
        await asyncio.sleep(9.7)
        after = decided(await it.rollout(), RolloutState.ABORTED, "m", await it.broker.workers())
        assert await it.fleet.keep_rollout(after)
        await asyncio.sleep(2 * KEEP_EVERY)
        assert await it.rollout() == await it.published() == after
        assert it.events()[-1] == ("aborted", "by an operator")


async def test_a_rollout_that_the_broker_has_lost_is_kept_again(clock: Clock) -> None:
    async with Scene(clock) as it:
        it.controller(name="c")
        await it.fleet.keep_rollout(replace(PLAN, every=600.0))
        await asyncio.sleep(5.0)
        before = await it.rollout()
        it.fleet._rollouts.clear()
        await asyncio.sleep(1.0)
        after = await it.rollout()
        assert after.waited >= before.waited
        assert after.running


async def test_what_a_gateway_counted_before_a_leader_came_or_while_it_was_away_counts_once(clock: Clock) -> None:
    fleet, other = MemoryFleet(clock), ProcessInfo(id="other", role=Role.WORKER, host="h", pid=2)
    leader = RolloutLeader(fleet, ControllerCounts(), clock)
    seen = []
    await fleet.keep_rollout(PLAN)
    for answered in (100, 110, None, 125, 5):
        counts = {} if answered is None else {"m": {"4": VersionCounts(answered), "3": VersionCounts(answered)}}
        gateway = ProcessInfo(id="gateway", role=Role.GATEWAY, host="h", pid=1, versions=counts)
        found = await leader.look(await fleet.rollouts(), [other, gateway])
        seen.append(found["m"].evidence.new.answered)
    assert seen == [0, 10, 10, 25, 30], "the last are those of a gateway that began anew"


async def test_a_gateway_goes_by_the_published_rollout_and_counts_while_one_is_under_way(clock: Clock) -> None:
    async with Versions(clock, "3", "4") as it:
        fleet, gateway = MemoryFleet(clock), it.gateway
        CapacityWatcher(gateway, fleet, clock, Pace(clock)).start(it.supervisor)

        async def publish(rollout: Rollout) -> None:
            await fleet.publish(
                Capacity(model="m", healthy=2, degraded=0, items_per_second=0.0, usable_per_second=0.0, rollout=rollout)
            )
            await asyncio.sleep(2 * READ_CAPACITY_EVERY)

        assert set(await it.versions(20)) == {"3", "4"}
        assert not gateway.rollout_counts.counts
        await publish(replace(PLAN, steps=(20.0,)))
        drawn: Counter[str] = await it.versions(200)
        assert 20 <= drawn["4"] <= 60
        counts = gateway.rollout_counts.counts["m"]
        assert {version: one.answered for version, one in counts.items()} == drawn
        assert sum(counts["4"].latencies.values()) == drawn["4"]
        it.backends["4"].script = lambda entries: WorkerCrashed("no good")
        await asyncio.gather(*(it.ask("m", str(number), version="4") for number in range(3)))
        assert gateway.rollout_counts.counts["m"]["4"].failed == 0, "bad inputs sent to it on purpose tell nothing"
        replies = await asyncio.gather(*(it.ask("m", f"drawn {number}") for number in range(50)))
        failed = sum(reply.failure is not None for reply in replies)
        assert gateway.rollout_counts.counts["m"]["4"].failed == failed > 0
        await publish(replace(PLAN, state=RolloutState.ROLLED_BACK))
        assert set(await it.versions(50)) == {"3"}
        assert not gateway.rollout_counts.counts


async def test_a_model_that_is_served_no_longer_loses_its_capacity(clock: Clock) -> None:
    fleet, supervisor, served = MemoryFleet(clock), Supervisor(), {"m", "retired"}
    controller = Controller("c", memory_broker(clock, *served), fleet, 0.7, clock, Pace(clock))
    controller.models = lambda: served
    controller.start(supervisor)
    await asyncio.sleep(1.0)
    assert {one.model for one in await fleet.capacities()} == {"m", "retired"}
    served.remove("retired")
    await asyncio.sleep(GONE_AFTER - 1.0)
    assert {one.model for one in await fleet.capacities()} == {"m", "retired"}, "it may only be away"
    await asyncio.sleep(2.0)
    assert {one.model for one in await fleet.capacities()} == {"m"}
    await supervisor.stop()


async def test_another_leader_withdraws_what_its_predecessor_told_of_a_gone_model(clock: Clock) -> None:
    async with scaling_scene.Scene(clock) as it:
        gone = Capacity(model="gone", healthy=1, degraded=0, items_per_second=9.0, usable_per_second=9.0)
        await it.fleet.publish(gone)
        it.controller()
        await asyncio.sleep(GONE_AFTER + 1.0)
        assert {one.model for one in await it.fleet.capacities()} == {"m"}


async def test_a_controller_that_stood_still_beyond_its_lead_publishes_nothing_of_before(clock: Clock) -> None:
    broker, fleet, supervisor = memory_broker(clock, "m"), MemoryFleet(clock), Supervisor()
    stood, loads = 0.0, broker.loads

    async def stand_still() -> Mapping[QueueName, Load]:
        nonlocal stood
        found = await loads()
        stood = LEADS_FOR
        return found

    broker.loads = stand_still  # type: ignore[method-assign]
    controller = Controller("c", broker, fleet, 0.7, lambda: clock() + stood, Pace(clock))
    controller.start(supervisor)
    await asyncio.sleep(0.01)
    led, published = controller.leads, await fleet.capacities()
    await supervisor.stop()
    assert led
    assert not published


async def test_a_controller_that_could_not_renew_its_lead_does_not_take_itself_for_the_leader(clock: Clock) -> None:
    async with scaling_scene.Scene(clock) as it:
        controller = it.controller()
        led = [controller.leads_now]
        await asyncio.sleep(1.0)
        await controller.stop()
        for pause in (0.0, LEADS_FOR - PUBLISH_EVERY - 0.1, PUBLISH_EVERY + 0.2):
            await asyncio.sleep(pause)
            led.append(controller.leads_now)
        assert led == [False, True, True, False]
        assert controller.leads, "nobody has told it otherwise"
