"""The controller publishes each model's capacity, and how many workers it should have. Only the leader does so.

follow ──lead is free──▶ lead ──not renewed in time──▶ follow
         (asked once a second, and less often while the leader renews it)

The leader also advances rollouts, as decided by `core/rollout` from the gateways' counts. It writes these counts to the broker now
and then, so that the next leader can continue from them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.controller.autoscaler import Autoscaler
from headway.core.capacity import capacity
from headway.core.departure import Load
from headway.core.health import OFFLINE_AFTER, REST_EVERY
from headway.core.rollout import counted, watched
from headway.errors import BrokerUnavailable
from headway.fleet.pace import Pace
from headway.model import (
    BulkDepth,
    Capacity,
    ProcessInfo,
    QueueName,
    Rollout,
    RolloutState,
    TierDepth,
    VersionCounts,
    WorkerInfo,
    WorkerStatus,
)
from headway.model.board import SlotChange
from headway.ports import Broker, Fleet
from headway.runtime.counters import ControllerCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

PUBLISH_EVERY = 0.5  # Seconds between publications while there are requests. Limits lag behind by up to this long.
GONE_AFTER = OFFLINE_AFTER  # Seconds until the capacity of a model is withdrawn if it has no workers and no settings.
LEADS_FOR = 2.5  # Seconds for which the lead lasts. Each look renews it.
ENDS_SOON = 1.25  # A lead that expires within this many seconds is overdue for renewal. Ask for it twice a second then.


class _Seen(msgspec.Struct, frozen=True):
    """State of the fleet at one moment. Fields with a default are only read if the autoscaler or a rollout needs them."""

    workers: Sequence[WorkerInfo]
    loads: Mapping[QueueName, Load]
    rollouts: Sequence[Rollout]
    members: Sequence[ProcessInfo] = ()
    depths: Sequence[TierDepth] = ()
    bulk: Sequence[BulkDepth] = ()


class Controller:
    """Controller of the process with this `id`. It leads if no other controller does.

    `target_utilisation` is the share of the measured capacity above which the lowest tier is held back. The process's `pace` never
    rests while its controller leads. If `alone`, there can be no other, so leading isn't logged. `leads` is True if it led when it
    last asked. `models` returns the models that the fleet serves even without workers; None means all that the broker knows."""

    def __init__(
        self, id: str, broker: Broker, fleet: Fleet, target_utilisation: float, clock: Callable[[], float], pace: Pace, *,
        alone: bool = False, counters: ControllerCounts | None = None, models: Callable[[], Collection[str]] | None = None,
        autoscaler: Autoscaler | None = None,
    ) -> None:  # fmt: skip
        self.leads = False
        self.models, self.autoscaler = models, autoscaler
        self._clock, self._pace = clock, pace
        self._led_until = -math.inf
        self._ends_in = math.inf  # Seconds from the last look until another's lead expires; infinite if unknown.
        self._say = log.debug if alone else log.info
        self._id, self._broker, self._fleet, self._target_utilisation = id, broker, fleet, target_utilisation
        self._rollouts = RolloutLeader(fleet, counters or ControllerCounts(), clock)
        self._published: dict[str, float] = {}
        self._last: dict[str, Capacity] = {}  # Capacity last published for each model while leading. See `_steady`.
        self._unchanged: list[Capacity] = []  # Unchanged at the last look. The next look publishes them.
        self._calm = False  # True if the fleet had nothing to do at the last look.
        self._logged_estimate: dict[str, bool] = {}  # True if the capacity logged last was an estimate, by model.
        self._periodic = Periodic("controller", self._control, clock, every=self.every)

    @property
    def leads_now(self) -> bool:
        """True while the lead hasn't expired, so that no other controller can lead."""
        return self.leads and self._clock() < self._led_until

    def every(self) -> float:
        """Return the seconds until the next look: few while this process leads a busy fleet, or is about to lead."""
        if self.leads:
            return REST_EVERY if self._calm else PUBLISH_EVERY
        return PUBLISH_EVERY if self._ends_in < ENDS_SOON else self._pace.every()

    def start(self, supervisor: Supervisor) -> None:
        self._periodic.start(supervisor)

    def soon(self) -> None:
        self._periodic.soon()

    async def stop(self) -> None:
        """Stop asking for the lead. The lead itself ends when the process leaves the fleet."""
        await self._periodic.stop()

    async def _control(self) -> None:
        try:
            until = self._clock() + LEADS_FOR
            acquiring, led = self._fleet.acquire_leadership(self._id, LEADS_FOR), self.leads
            if led:  # This controller probably still leads, so look and publish in the same round trip.
                self._ends_in, seen, _ = await asyncio.gather(acquiring, self._look(), self._publish_again())
            else:
                self._ends_in = await acquiring
            leads = self._ends_in == 0.0
            self._become(leads)
            self._led_until = until
            if leads and not led:
                self._rollouts.begin()
                published, seen = await asyncio.gather(self._fleet.capacities(), self._look())
                self._begin(published)
            if leads:
                self._pace.stir()
                rollouts = await self._rollouts.look(seen.rollouts, seen.members) if self.leads_now else {}
                await self._publish(seen, rollouts)
        except BrokerUnavailable:
            self._become(leader=False, known=False)  # Another controller may lead before the broker is back.
            self._ends_in = math.inf
            self._pace.stir()
            raise

    def _begin(self, published: Sequence[Capacity]) -> None:
        self._published = dict.fromkeys((capacity.model for capacity in published), self._clock())
        self._last.clear()
        self._unchanged.clear()
        if self.autoscaler is not None:
            self.autoscaler.begin(published)

    async def _look(self) -> _Seen:
        broker, fleet = self._broker, self._fleet
        calls: dict[str, Awaitable[Any]] = {
            "workers": broker.workers(), "loads": broker.loads(), "rollouts": fleet.rollouts(),
        }  # fmt: skip
        if self.autoscaler is not None or self._rollouts.asks:
            calls["members"] = fleet.members()
        if self.autoscaler is not None:
            calls |= {"depths": broker.depths(), "bulk": broker.bulk_queues()}
        answers = await asyncio.gather(*calls.values())
        return _Seen(**dict(zip(calls, answers, strict=True)))

    async def _publish(self, seen: _Seen, rollouts: Mapping[str, Rollout]) -> None:
        workers, loads = seen.workers, seen.loads
        self._calm = _calm(seen)
        loads_by_model: dict[str, Load] = {}
        rates: dict[str, float] = {}
        for queue, load in loads.items():
            # A model's versions mostly cost the same. The best estimate is that of the version with the most batches.
            rates[queue.model] = rates.get(queue.model, 0.0) + load.rate
            if queue.model not in loads_by_model or load.departures > loads_by_model[queue.model].departures:
                loads_by_model[queue.model] = load
        served = loads_by_model if self.models is None else loads_by_model.keys() & set(self.models())
        models = sorted({*served, *(worker.model for worker in workers)})
        for model in [*self._logged_estimate]:
            if model not in models:
                del self._logged_estimate[model]
        capacities: list[Capacity] = []
        for model in models:
            load_of_model = loads_by_model.get(model)
            target, memory_pressure = self._target_utilisation, self._broker.memory_pressure
            measured = capacity(model, workers, load_of_model, target, memory_pressure)
            if self.autoscaler is not None:
                all_versions = load_of_model and replace(load_of_model, rate=rates[model])
                waiting = sum(depth.depth for depth in seen.depths if depth.model == model)
                bulk = sum(depth.waiting for depth in seen.bulk if depth.model == model)
                measured = self.autoscaler.look(measured, all_versions, waiting, workers, seen.members, bulk)
            capacities.append(replace(measured, rollout=rollouts.get(model)))
        for measured in capacities:
            if not self.leads_now:  # The process was stalled, and another controller may lead by now.
                return
            if self._calm and _steady(measured) == self._last.get(measured.model):
                self._unchanged.append(measured)
                continue
            self._last[measured.model] = _steady(measured)
            await self._fleet.publish(measured)
            self._published[measured.model] = self._clock()
            self._log_capacity(measured)
        await self._withdraw_except(models)

    async def _publish_again(self) -> None:
        """Publish the capacities that hadn't changed at the last look, unless another controller may lead by now."""
        unchanged, self._unchanged = self._unchanged, []
        if self.leads_now:
            self._published.update(dict.fromkeys((capacity.model for capacity in unchanged), self._clock()))
            await asyncio.gather(*map(self._fleet.publish, unchanged))

    async def _withdraw_except(self, models: Collection[str]) -> None:
        for model, at in [*self._published.items()]:
            if model not in models and self._clock() - at >= GONE_AFTER and self.leads_now:
                await self._fleet.withdraw_capacity(model)
                del self._published[model]
                self._logged_estimate.pop(model, None)
                self._last.pop(model, None)
                if self.autoscaler is not None:
                    self.autoscaler.drop(model)

    def _log_capacity(self, capacity: Capacity) -> None:
        if capacity.items_per_second and self._logged_estimate.get(capacity.model) is not capacity.estimated:
            self._logged_estimate[capacity.model] = capacity.estimated
            event = "capacity is estimated" if capacity.estimated else "capacity is measured"
            rate = round(capacity.items_per_second, 1)
            log.info(event, model=capacity.model, items_per_second=rate, workers=capacity.healthy)

    def _become(self, leader: bool, known: bool = True) -> None:
        """Record whether this controller leads. `known` is False if it is unknown which controller does."""
        if not leader and self.autoscaler is not None:
            (self.autoscaler.forget if known else self.autoscaler.interrupt)()
        if leader is not self.leads:
            self.leads = leader
            self._say("leads the fleet" if leader else "no longer leads the fleet", controller=self._id)


def _calm(seen: _Seen) -> bool:
    """Return True if nothing is waiting and all healthy workers rest. A fleet without healthy workers isn't calm, because it
    expects some."""
    healthy = [worker for worker in seen.workers if worker.status is WorkerStatus.HEALTHY]
    rests = bool(healthy) and all(worker.every >= REST_EVERY for worker in healthy)
    return rests and not any(load.depth for load in seen.loads.values())


def _steady(capacity: Capacity) -> Capacity:
    """Return a capacity without the numbers that decay over time."""
    if capacity.scaling is None:
        return capacity
    return replace(capacity, scaling=replace(capacity.scaling, utilisation=None, rate=0.0))


KEEP_EVERY = 2.0  # Maximum seconds of counts that are lost if a leader dies.
LONGEST_LOOK = 5.0  # Maximum seconds that count as observed per look: nobody observes while the broker is unreachable.
STEP = "step"  # Metric label for a new step. For other changes the label is the state.

_Tallies = dict[tuple[str, str, str], VersionCounts]  # Counts by gateway, model and version.


class RolloutLeader:
    """Advances the rollouts of the fleet while its controller leads."""

    def __init__(self, fleet: Fleet, counters: ControllerCounts, clock: Callable[[], float]) -> None:
        self._fleet, self._counters, self._clock = fleet, counters, clock
        self._held: dict[str, Rollout] = {}
        self._kept_at: dict[str, float] = {}
        self._seen: _Tallies | None = None  # The gateways' counts at the last look, or None before the first look.
        self._looked_at = 0.0

    @property
    def asks(self) -> bool:
        """True if the next look needs the fleet's processes, because a rollout is running or because it is the first look."""
        return self._seen is None or any(rollout.running for rollout in self._held.values())

    def begin(self) -> None:
        self._held.clear()
        self._seen = None

    async def look(self, kept: Sequence[Rollout], members: Sequence[ProcessInfo]) -> Mapping[str, Rollout]:
        """Advance the rollouts that the broker stores. Returns them by model, to be published."""
        now = self._clock()
        seconds, self._looked_at = min(now - self._looked_at, LONGEST_LOOK), now
        first, news = self._seen is None, self._news(members)
        lost = self._held.keys() - {rollout.model for rollout in kept}
        for rollout in kept:
            held = self._held.get(rollout.model)
            if held is None or held.revision != rollout.revision:
                self._held[rollout.model] = rollout
                self._kept_at[rollout.model] = now
                if not first:
                    self._report(held, rollout)
        for model, rollout in [*self._held.items()]:
            after = rollout
            if rollout.running and not first:
                new = news.get((model, rollout.version), VersionCounts())
                old = news.get((model, rollout.beside), VersionCounts())
                after = watched(rollout, seconds, new, old)
            await self._keep(rollout, after, now, lost=model in lost)
        if not self.asks:
            self._seen = {}
        return self._held

    async def _keep(self, before: Rollout, after: Rollout, now: float, *, lost: bool) -> None:
        """Write a rollout back if it has changed. If an operator changed it in the meantime, the next look starts from that change."""
        moved = (before.state, before.step) != (after.state, after.step)
        if moved or lost or (after.running and now - self._kept_at[after.model] >= KEEP_EVERY):
            after = replace(after, revision=after.revision + 1)
            if not await self._fleet.keep_rollout(after):
                return
            self._kept_at[after.model] = now
            if moved:
                self._report(before, after)
        self._held[after.model] = after

    def _news(self, members: Sequence[ProcessInfo]) -> Mapping[tuple[str, str], VersionCounts]:
        """Return what all gateways counted since the last look, by model and version. A restarted gateway counts from zero."""
        before, news = self._seen or {}, dict[tuple[str, str], VersionCounts]()
        self._seen = dict(before)  # A gateway that doesn't report for a while may come back.
        for member in members:
            for model, versions in member.versions.items():
                for version, counts in versions.items():
                    key = member.id, model, version
                    self._seen[key] = counts
                    last = before.get(key, VersionCounts())
                    more = _since(counts, last if last.count <= counts.count else VersionCounts())
                    news[model, version] = counted(news.get((model, version), VersionCounts()), more)
        return news

    def _report(self, before: Rollout | None, after: Rollout) -> None:
        if before is not None and _place(before) == _place(after):
            return
        model, version, state = after.model, after.version, after.state
        self._counters.rollout_changes[model, STEP if after.running else state.value] += 1
        status = f"at {after.percent:g} %" if after.running else state.value
        change = SlotChange(f"rollout of {model}@{version}", model, status, 0, cause=after.reason)
        self._counters.departures.changed(change)
        write = log.error if state is RolloutState.ROLLED_BACK else log.info
        write(f"a rollout is {status}", model=model, version=version, beside=after.beside, reason=after.reason)


def _place(rollout: Rollout) -> tuple[object, ...]:
    """Return the identity and the progress of a rollout, for comparison."""
    return rollout.version, rollout.beside, rollout.steps, rollout.state, rollout.step


def _since(counts: VersionCounts, last: VersionCounts) -> VersionCounts:
    grown = {bucket: count - last.latencies.get(bucket, 0) for bucket, count in counts.latencies.items()}
    latencies = {bucket: count for bucket, count in grown.items() if count > 0}
    return VersionCounts(counts.answered - last.answered, counts.failed - last.failed, latencies)
