"""Rollouts as the leading controller moves them on, and as gateways go by them and count for them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.controller import LEADS_FOR, Controller
from headway.controller.rollouts import KEEP_EVERY, RolloutLeader
from headway.core.queue_limits import QueueLimits
from headway.core.rollout import begun, decided
from headway.errors import WorkerCrashed
from headway.fleet.pace import Pace
from headway.gateway.fleet_watchers import READ_CAPACITY_EVERY, CapacityWatcher
from headway.model import Capacity, ProcessInfo, Role, Rollout, RolloutState, VersionCounts
from headway.runtime.counters import ControllerCounts, Counters
from headway.runtime.supervisor import Supervisor
from tests.core.test_rollout import PLAN
from tests.core.test_versions import worker
from tests.services.test_versions import Rollout as Versions
from tests.virtual_time import Clock


class Scene:
    """Controllers over a fleet whose gateway tells of so many requests a second for each version."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.counters = clock, Counters()
        limits = QueueLimits(3, 8, 0.1, 100)
        self.broker = MemoryBroker({"m": limits}, DeadLetterBox(), self.counters.broker, clock, lambda: 0.5)
        self.fleet, self.failing, self.told = MemoryFleet(clock), 0, VersionCounts()
        self._supervisor = Supervisor()

    async def __aenter__(self) -> Scene:
        self._supervisor.start("workers", self._live)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.stop()

    async def _live(self) -> None:
        old = VersionCounts()
        while True:
            for version in ("3", "4"):
                await self.broker.heartbeat(worker(version))
            failed = self.told.failed + self.failing
            self.told, old = VersionCounts(self.told.answered + 1, failed), VersionCounts(old.answered + 100)
            counts = {"m": {"3": old, "4": self.told}}
            await self.fleet.heartbeat(
                ProcessInfo(id="gateway", role=Role.GATEWAY, host="h", pid=1, model="m", versions=counts)
            )
            await asyncio.sleep(0.5)

    def controller(self, name: str) -> Controller:
        """A controller that runs."""
        made = Controller(
            name, self.broker, self.fleet, 0.7, self.clock, Pace(self.clock), counters=self.counters.controller
        )
        made.start(self._supervisor)
        return made

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
        first = it.controller("first")
        await asyncio.sleep(1.0)
        await it.fleet.keep_rollout(replace(PLAN, every=60.0))
        await asyncio.sleep(30.0)
        await first.stop()
        at = await it.rollout()
        assert 30.0 - KEEP_EVERY - 1.0 <= at.waited <= 30.0
        assert at.evidence.new.answered > 50
        it.controller("second")
        await asyncio.sleep(LEADS_FOR + 32.0)
        after = await it.rollout()
        assert (after.step, after.state) == (1, RolloutState.RUNNING)
        assert it.events() == [("at 1 %", ""), ("at 10 %", "")], "the second one tells nothing twice"
        assert it.counters.controller.rollout_changes == {("m", "step"): 2}


async def test_a_version_that_fails_gets_nothing_more_and_that_is_told_once(clock: Clock) -> None:
    async with Scene(clock) as it:
        it.controller("c")
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
        it.controller("c")
        await it.fleet.keep_rollout(PLAN)
        await asyncio.sleep(9.7)
        after = decided(await it.rollout(), RolloutState.ABORTED, "m", await it.broker.workers())
        assert await it.fleet.keep_rollout(after)
        await asyncio.sleep(2 * KEEP_EVERY)
        assert await it.rollout() == await it.published() == after
        assert it.events()[-1] == ("aborted", "by an operator")


async def test_a_rollout_that_the_broker_has_lost_is_kept_again(clock: Clock) -> None:
    async with Scene(clock) as it:
        it.controller("c")
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
        await asyncio.gather(*(it.ask(str(number), version="4") for number in range(3)))
        assert gateway.rollout_counts.counts["m"]["4"].failed == 0, "bad inputs sent to it on purpose tell nothing"
        replies = await asyncio.gather(*(it.ask(f"drawn {number}") for number in range(50)))
        failed = sum(reply.failure is not None for reply in replies)
        assert gateway.rollout_counts.counts["m"]["4"].failed == failed > 0
        await publish(replace(PLAN, state=RolloutState.ROLLED_BACK))
        assert set(await it.versions(50)) == {"3"}
        assert not gateway.rollout_counts.counts


@pytest.mark.parametrize("first", [RolloutState.ROLLED_BACK, RolloutState.ABORTED])
async def test_a_promoted_version_has_all_requests_and_earlier_losers_none_whatever_the_file_says_and_whoever_leads(
    clock: Clock, first: RolloutState
) -> None:
    fleet = MemoryFleet(clock)
    async with Versions(clock, "1", "2", "3", version_weights="1=100") as it:
        CapacityWatcher(it.gateway, fleet, clock, Pace(clock)).start(it.supervisor)

        async def answered(rollout: Rollout) -> Counter[str]:
            assert await fleet.keep_rollout(rollout)
            leader = RolloutLeader(fleet, ControllerCounts(), clock)
            found = await leader.look(await fleet.rollouts(), [])
            await fleet.publish(
                Capacity(
                    model="m", healthy=3, degraded=0, items_per_second=0.0, usable_per_second=0.0, rollout=found["m"]
                )
            )
            await asyncio.sleep(2 * READ_CAPACITY_EVERY)
            return await it.versions(64)

        workers = await it.broker.workers()

        def started(version: str, beside: str) -> Rollout:
            return begun(replace(PLAN, version=version, beside=beside, steps=(50.0, 100.0)), workers, last)

        def ended(state: RolloutState) -> Rollout:
            return decided(last, state, "m", workers)

        last: Rollout | None = None
        last = started("2", "1")
        assert (await answered(last)).keys() == {"1", "2"}
        last = ended(first)
        assert await answered(last) == {"1": 64}
        last = started("3", "1")
        assert (await answered(last)).keys() == {"1", "3"}
        last = ended(RolloutState.PROMOTED)
        assert await answered(last) == {"3": 64}
        last = started("2", "3")
        assert (await answered(last)).keys() == {"2", "3"}
        last = ended(RolloutState.ABORTED)
        assert await answered(last) == {"3": 64}
        last = ended(RolloutState.PROMOTED)
        assert await answered(last) == {"2": 64}
        await it.pools["2"].wind_down()
        await it.look()
        assert (await it.versions(64)).keys() == {"1", "3"}, "where only losers are left they serve"
