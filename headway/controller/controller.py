"""The controller: publishes the capacity of each model's workers, and how many there should be. Of many, one leads.

follow ──lead is free──▶ lead ──not renewed in time──▶ follow
         (asked once a second, and more seldom while the leader renews it)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.controller.autoscaler import Autoscaler
from headway.controller.rollouts import RolloutLeader
from headway.core.capacity import capacity
from headway.core.departure import Load
from headway.core.health import OFFLINE_AFTER, REST_EVERY
from headway.errors import BrokerUnavailable
from headway.fleet.pace import Pace
from headway.model import BulkDepth, Capacity, ProcessInfo, QueueName, Rollout, TierDepth, WorkerInfo, WorkerStatus
from headway.ports import Broker, Fleet
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

PUBLISH_EVERY = 0.5
"""Seconds between two publications while anything is asked. The limits made from them are older by that, beside the heartbeats."""
GONE_AFTER = OFFLINE_AFTER
"""Seconds for which neither a worker nor a setting has named a model before its capacity is withdrawn."""
LEADS_FOR = 2.5
"""Seconds for which a leader leads unless it renews that, which it does with each look."""
ENDS_SOON = 1.25
"""Seconds that are left of the lead of another from which on it is asked for twice a second: that one was to renew it by then."""


class _Seen(msgspec.Struct, frozen=True):
    """The fleet as it was seen at one look; depths and bulk lines for the autoscaler, processes for that and for rollouts."""

    workers: Sequence[WorkerInfo]
    loads: Mapping[QueueName, Load]
    rollouts: Sequence[Rollout]
    members: Sequence[ProcessInfo] = ()
    depths: Sequence[TierDepth] = ()
    bulk: Sequence[BulkDepth] = ()


class Controller:
    """Controller of one process. It leads if no other does, and publishes capacities while it leads.

    Arguments:
        id: id of its process in the fleet.
        broker: broker that knows workers and loads.
        fleet: fleet that knows the leader, and gets the capacities.
        target_utilisation: share of the measured capacity above which the lowest tier is held back, 0 to 1.
        clock: monotonic seconds.
        pace: pace of the process, which is told while it leads.
        alone: whether there can be no other controller, so that the lead is nothing to tell of.
        counters: counters of the process.

    Attributes:
        leads: whether it led when it last asked.
        autoscaler: decides how many workers there should be while the controller leads; None: nobody does.
        models: names of the models that the fleet serves besides those of its workers; None: all that the broker knows.
    """

    def __init__(
        self,
        id: str,
        broker: Broker,
        fleet: Fleet,
        target_utilisation: float,
        clock: Callable[[], float],
        pace: Pace,
        *,
        alone: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.leads = False
        self.autoscaler: Autoscaler | None = None
        self.models: Callable[[], Collection[str]] | None = None
        self._clock, self._pace = clock, pace
        self._led_until = -math.inf
        self._ends_in = math.inf
        """Seconds that were left of the lead of another at the last look; infinite as long as that is not known."""
        self._say = log.debug if alone else log.info
        self._id = id
        self._broker = broker
        self._fleet = fleet
        self._target_utilisation = target_utilisation
        self._rollouts = RolloutLeader(fleet, counters or Counters(), clock)
        self._published: dict[str, float] = {}
        """Instants of the last publications, by model."""
        self._last: dict[str, Capacity] = {}
        """Capacity of each model as it was published last while it led; see `_bare`."""
        self._unchanged: list[Capacity] = []
        """Capacities that the last look has found as they were, which are published with the next one."""
        self._calm = False
        """Whether nothing was asked of the fleet lately, as of the last look."""
        self._told: dict[str, bool] = {}
        """Whether what was logged last of a model's capacity was an estimate."""
        self._periodic = Periodic("controller", self._control, clock, every=self.every)

    @property
    def leads_now(self) -> bool:
        """Whether no other controller can lead now: the lead that it got has not run out since."""
        return self.leads and self._clock() < self._led_until

    def every(self) -> float:
        """Seconds until the next look: fewer while this controller leads a fleet that works, or is about to lead."""
        if self.leads:
            return REST_EVERY if self._calm else PUBLISH_EVERY
        return PUBLISH_EVERY if self._ends_in < ENDS_SOON else self._pace.every()

    def start(self, supervisor: Supervisor) -> None:
        """Start to ask for the lead."""
        self._periodic.start(supervisor)

    def soon(self) -> None:
        """Look at the fleet now."""
        self._periodic.soon()

    async def stop(self) -> None:
        """Stop asking. The lead itself is given up when its process leaves the fleet."""
        await self._periodic.stop()

    async def _control(self) -> None:
        try:
            until = self._clock() + LEADS_FOR
            asked, led = self._fleet.acquire_leadership(self._id, LEADS_FOR), self.leads
            if led:  # Most likely still, so that one call of the broker does for all.
                self._ends_in, seen, _ = await asyncio.gather(asked, self._look(), self._publish_again())
            else:
                self._ends_in = await asked
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
            self._become(leader=False, known=False)  # Another may lead before we hear of it.
            self._ends_in = math.inf
            self._pace.stir()
            raise

    def _begin(self, published: Sequence[Capacity]) -> None:
        """Begin to lead, from what was published last."""
        self._published = dict.fromkeys((one.model for one in published), self._clock())
        self._last.clear()
        self._unchanged.clear()
        if self.autoscaler is not None:
            self.autoscaler.begin(published)

    async def _look(self) -> _Seen:
        """Look at the fleet, as far as it is needed."""
        broker, fleet = self._broker, self._fleet
        asked: list[Awaitable[Any]] = [broker.workers(), broker.loads(), fleet.rollouts()]
        if self.autoscaler is not None or self._rollouts.asks:
            asked += [fleet.members(), *(() if self.autoscaler is None else (broker.depths(), broker.bulk_queues()))]
        return _Seen(*await asyncio.gather(*asked))

    async def _publish(self, seen: _Seen, rollouts: Mapping[str, Rollout]) -> None:
        workers, loads = seen.workers, seen.loads
        self._calm = _calm(seen)
        target, scarce = self._target_utilisation, self._broker.memory_pressure
        of_models: dict[str, Load] = {}
        rates: dict[str, float] = {}
        for queue, load in loads.items():
            # Versions of a model mostly cost alike; that which has run most is known best.
            rates[queue.model] = rates.get(queue.model, 0.0) + load.rate
            if queue.model not in of_models or load.departures > of_models[queue.model].departures:
                of_models[queue.model] = load
        served = of_models if self.models is None else of_models.keys() & set(self.models())
        found = [
            capacity(model, workers, of_models.get(model), target, scarce)
            for model in sorted({*served, *(worker.model for worker in workers)})
        ]
        if self.autoscaler is not None:
            asked = {model: replace(load, rate=rates[model]) for model, load in of_models.items()}
            found = [
                self.autoscaler.look(
                    one,
                    asked.get(one.model),
                    sum(depth.depth for depth in seen.depths if depth.model == one.model),
                    workers,
                    seen.members,
                    sum(one_queue.waiting for one_queue in seen.bulk if one_queue.model == one.model),
                )
                for one in found
            ]
        found = [replace(one, rollout=rollouts.get(one.model)) for one in found]
        self._told = {model: told for model, told in self._told.items() if model in {one.model for one in found}}
        for one in found:
            if not self.leads_now:  # It stood still, and another may lead meanwhile.
                return
            if self._calm and _bare(one) == self._last.get(one.model):
                self._unchanged.append(one)
                continue
            self._last[one.model] = _bare(one)
            await self._fleet.publish(one)
            self._published[one.model] = self._clock()
            self._tell(one)
        await self._withdraw({one.model for one in found})

    async def _publish_again(self) -> None:
        """Publish what the last look has found as it was, unless another may lead by now."""
        unchanged, self._unchanged = self._unchanged, []
        if self.leads_now:
            self._published.update(dict.fromkeys((one.model for one in unchanged), self._clock()))
            await asyncio.gather(*(self._fleet.publish(one) for one in unchanged))

    async def _withdraw(self, there: Collection[str]) -> None:
        """Withdraw the capacities of models that are gone."""
        for model, at in [*self._published.items()]:
            if model not in there and self._clock() - at >= GONE_AFTER and self.leads_now:
                await self._fleet.withdraw_capacity(model)
                del self._published[model]
                self._told.pop(model, None)
                self._last.pop(model, None)
                if self.autoscaler is not None:
                    self.autoscaler.drop(model)

    def _tell(self, found: Capacity) -> None:
        """Log a capacity when it becomes known, and when it becomes an estimate or sure."""
        if found.items_per_second and self._told.get(found.model) is not found.estimated:
            self._told[found.model] = found.estimated
            log.info(
                "capacity is estimated" if found.estimated else "capacity is measured",
                model=found.model,
                items_per_second=round(found.items_per_second, 1),
                workers=found.healthy,
            )

    def _become(self, leader: bool, known: bool = True) -> None:
        """Note whether this controller leads. `known`: whether another leads if it does not."""
        if not leader and self.autoscaler is not None:
            (self.autoscaler.forget if known else self.autoscaler.interrupt)()
        if leader is not self.leads:
            self.leads = leader
            self._say("leads the fleet" if leader else "no longer leads the fleet", controller=self._id)


def _calm(seen: _Seen) -> bool:
    """Whether nothing was asked of the fleet lately: nothing waits, and all workers rest. Without any, the first are waited for."""
    there = [one for one in seen.workers if one.status is WorkerStatus.HEALTHY]
    rests = bool(there) and all(one.every >= REST_EVERY for one in there)
    return rests and not any(load.depth for load in seen.loads.values())


def _bare(found: Capacity) -> Capacity:
    """Capacity without the figures that change while nothing else does: they fade."""
    if found.scaling is None:
        return found
    return msgspec.structs.replace(found, scaling=msgspec.structs.replace(found.scaling, utilisation=None, rate=0.0))
