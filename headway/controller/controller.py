"""The controller publishes each model's capacity, and how many workers it should have. Only the leader does so.

follow ──lead is free──▶ lead ──not renewed in time──▶ follow
         (asked once a second, and less often while the leader renews it)
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
from headway.runtime.counters import ControllerCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

PUBLISH_EVERY = 0.5
"""Seconds between two publications while there are requests. Limits lag behind by as much, as they follow publications."""
GONE_AFTER = OFFLINE_AFTER
"""Seconds without a worker or a setting that names a model, after which its capacity is withdrawn."""
LEADS_FOR = 2.5
"""Seconds for which the lead lasts. Each look renews it."""
ENDS_SOON = 1.25
"""Once another controller's lead ends within so many seconds, ask for it twice a second. It should have been renewed by then."""


class _Seen(msgspec.Struct, frozen=True):
    """The fleet at one look. Attributes with a default are only read when the autoscaler or a rollout needs them."""

    workers: Sequence[WorkerInfo]
    loads: Mapping[QueueName, Load]
    rollouts: Sequence[Rollout]
    members: Sequence[ProcessInfo] = ()
    depths: Sequence[TierDepth] = ()
    bulk: Sequence[BulkDepth] = ()


class Controller:
    """Controller of one process, which leads if no other does.

    `id` is the process's. Above `target_utilisation`, a share of the measured capacity, the lowest tier is held back. The `pace` of
    the process is kept up while it leads. `alone` is True if there can be no other controller, so that leading isn't worth a log
    line. `leads` is True if it led when it last asked. `models` returns the models that the fleet serves, besides those with
    workers; None for all models that the broker knows.
    """

    def __init__(
        self, id: str, broker: Broker, fleet: Fleet, target_utilisation: float, clock: Callable[[], float], pace: Pace, *,
        alone: bool = False, counters: ControllerCounts | None = None, models: Callable[[], Collection[str]] | None = None,
        autoscaler: Autoscaler | None = None,
    ) -> None:  # fmt: skip
        self.leads = False
        self.models, self.autoscaler = models, autoscaler
        self._clock, self._pace = clock, pace
        self._led_until = -math.inf
        self._ends_in = math.inf
        """Seconds that another controller's lead had left at the last look; infinite if unknown."""
        self._say = log.debug if alone else log.info
        self._id, self._broker, self._fleet, self._target_utilisation = id, broker, fleet, target_utilisation
        self._rollouts = RolloutLeader(fleet, counters or ControllerCounts(), clock)
        self._published: dict[str, float] = {}
        self._last: dict[str, Capacity] = {}
        """Capacity last published for each model while leading; see `_steady`."""
        self._unchanged: list[Capacity] = []
        """Capacities that had not changed at the last look, to be published with the next."""
        self._calm = False
        """True if the fleet had nothing to do at the last look."""
        self._logged_estimate: dict[str, bool] = {}
        """True if the capacity that was logged last was an estimate, by model."""
        self._periodic = Periodic("controller", self._control, clock, every=self.every)

    @property
    def leads_now(self) -> bool:
        """True while the lead hasn't run out, so that no other controller can lead."""
        return self.leads and self._clock() < self._led_until

    def every(self) -> float:
        """Return the seconds until the next look. They are fewer while it leads a busy fleet, or is about to lead."""
        if self.leads:
            return REST_EVERY if self._calm else PUBLISH_EVERY
        return PUBLISH_EVERY if self._ends_in < ENDS_SOON else self._pace.every()

    def start(self, supervisor: Supervisor) -> None:
        self._periodic.start(supervisor)

    def soon(self) -> None:
        self._periodic.soon()

    async def stop(self) -> None:
        """Stop asking for the lead. Leaving the fleet gives it up."""
        await self._periodic.stop()

    async def _control(self) -> None:
        try:
            until = self._clock() + LEADS_FOR
            asked, led = self._fleet.acquire_leadership(self._id, LEADS_FOR), self.leads
            if led:  # It probably still leads, so look and publish in the same round trip.
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
            self._become(leader=False, known=False)  # Another may lead before the broker is back.
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
        asked: dict[str, Awaitable[Any]] = {
            "workers": broker.workers(), "loads": broker.loads(), "rollouts": fleet.rollouts(),
        }  # fmt: skip
        if self.autoscaler is not None or self._rollouts.asks:
            asked["members"] = fleet.members()
        if self.autoscaler is not None:
            asked |= {"depths": broker.depths(), "bulk": broker.bulk_queues()}
        found = await asyncio.gather(*asked.values())
        return _Seen(**dict(zip(asked, found, strict=True)))

    async def _publish(self, seen: _Seen, rollouts: Mapping[str, Rollout]) -> None:
        workers, loads = seen.workers, seen.loads
        self._calm = _calm(seen)
        loads_by_model: dict[str, Load] = {}
        rates: dict[str, float] = {}
        for queue, load in loads.items():
            # Versions of a model mostly cost the same. The one that has run most is known best.
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
            if not self.leads_now:  # The process stood still, and another controller may lead by now.
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
        """Publish the capacities that had not changed at the last look, unless another controller may lead by now."""
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
        """Note whether this controller leads. `known` is False if the leader is unknown."""
        if not leader and self.autoscaler is not None:
            (self.autoscaler.forget if known else self.autoscaler.interrupt)()
        if leader is not self.leads:
            self.leads = leader
            self._say("leads the fleet" if leader else "no longer leads the fleet", controller=self._id)


def _calm(seen: _Seen) -> bool:
    """Return True if nothing waits and all workers rest. A fleet without workers isn't calm, as it expects its first ones."""
    healthy = [worker for worker in seen.workers if worker.status is WorkerStatus.HEALTHY]
    rests = bool(healthy) and all(worker.every >= REST_EVERY for worker in healthy)
    return rests and not any(load.depth for load in seen.loads.values())


def _steady(capacity: Capacity) -> Capacity:
    """Return a capacity without the figures that fade over time."""
    if capacity.scaling is None:
        return capacity
    return replace(capacity, scaling=replace(capacity.scaling, utilisation=None, rate=0.0))
