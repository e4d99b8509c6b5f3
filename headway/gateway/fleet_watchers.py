"""Fleet watchers. One watches the workers; the other watches capacity and gateways, and sets this gateway's throttle. If
the fleet is unreachable, or no controller publishes the capacity, the throttle opens after a few seconds. From then on only
the broker refuses requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from headway.core.capacity import Freshness
from headway.core.health import heard
from headway.core.throttle import NO_WEIGHTS, ArrivalRates, room, share, weights
from headway.errors import BrokerUnavailable
from headway.fleet.pace import Pace
from headway.model import Capacity, ProcessInfo, Scaling, WorkerInfo
from headway.ports import Fleet, Registry
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic, PeriodicResource

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway

log = get_logger(__name__)

READ_WORKERS_EVERY = 0.5  # Seconds between checks of the workers.
READ_CAPACITY_EVERY = 0.5  # Seconds between checks of the capacity while requests arrive.
CALM = 0.05  # If the arrival rate (averaged over about a second) is below this, nothing arrived for a few seconds.


class Learner(Protocol):
    """Anything that uses the reports of workers."""

    def learn(self, workers: Sequence[WorkerInfo]) -> None: ...


class WorkersWatcher(PeriodicResource):
    """Watches the workers. The learners get the reports in order, because the first may change the served models."""

    def __init__(
        self,
        learners: Sequence[Learner],
        registry: Registry,
        clock: Callable[[], float],
        every: Callable[[], float] = lambda: READ_WORKERS_EVERY,
    ) -> None:
        self._learners, self._registry = learners, registry
        super().__init__(Periodic("kinds of models", self.look, clock, every=every))

    async def look(self) -> None:
        self.learn(await self._registry.workers())

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        for learner in self._learners:
            learner.learn(workers)


class CapacityWatcher(PeriodicResource):
    """Watches the capacity and sets the gateway's throttle. It checks more often while requests arrive."""

    def __init__(self, gateway: Gateway, fleet: Fleet, clock: Callable[[], float], pace: Pace) -> None:
        self._gateway, self._fleet = gateway, fleet
        self._clock, self._pace = clock, pace
        super().__init__(Periodic("capacity watcher", self._look, clock, every=self.every))
        self._freshness = Freshness(clock())
        self._calm = False

    def every(self) -> float:
        """Return the seconds until the next check; longer while the gateway is idle."""
        if self._calm and not self._gateway.pending:
            return self._pace.every()
        self._pace.stir()
        return READ_CAPACITY_EVERY

    async def _look(self) -> None:
        began = self._clock()
        try:
            capacities, members = await asyncio.gather(self._fleet.capacities(), self._fleet.members())
            self._follow(capacities, members)
        except BrokerUnavailable as exc:
            self._gateway.note_silence(began, exc)
            raise
        finally:
            for model, throttle in self._gateway.limiter.throttles.items():
                if throttle.rate != math.inf and self._freshness.is_stale(model, self._clock()):
                    log.info(
                        "no recent report on a model's capacity; its lowest tier is no longer throttled", model=model
                    )
                    self._set(model, math.inf)

    def _follow(self, capacities: Sequence[Capacity], members: Sequence[ProcessInfo]) -> None:
        gateway, now = self._gateway, self._clock()
        others = [member for member in heard(members) if member.model and member.id != gateway.name]  # live gateways
        gateway.limiter.gateways = 1 + len(others)
        of_models = {capacity.model: capacity for capacity in capacities}
        self._freshness.keep(gateway.limiter.throttles.keys())
        self._calm = True
        self._roll(of_models)
        scalings: dict[str, Scaling] = {}
        for model in gateway.served.models:
            own = gateway.limiter.throttles[model].count(now)
            self._calm = self._calm and own.higher + own.lowest < CALM
            capacity = of_models.get(model)
            if capacity is not None and self._freshness.hear(capacity, now):
                rates = [
                    ArrivalRates(*other.arrivals[model], other.tenant_rates.get(model, {}))
                    for other in others
                    if model in other.arrivals
                ]
                whole = room(capacity, gateway.served[model].settings.reserved_share, [own, *rates])
                self._set(model, share(whole, own, rates), weights(own, rates))
                gateway.limiter.throttles[model].least_seconds = capacity.least_seconds
                if capacity.scaling is not None and capacity.scaling.starts_in is not None:
                    scalings[model] = capacity.scaling
        if gateway.served.note_starts(scalings):
            gateway.learn()

    def _roll(self, capacities: Mapping[str, Capacity]) -> None:
        """Follow the published rollouts. If nothing was published for a model, it keeps its rollout."""
        gateway, rollouts, changed = self._gateway, [], False
        for model, served in gateway.served.items():
            capacity = capacities.get(model)
            changed |= capacity is not None and served.versions.roll(capacity.rollout)
            if served.versions.rollout is not None:
                rollouts.append(served.versions.rollout)
        gateway.rollout_counts.follow(rollouts)
        if changed:
            gateway.learn()

    def _set(self, model: str, rate: float, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        gateway = self._gateway
        gateway.limiter.throttles[model].set_rate(rate, self._clock(), weights)
        if rate < math.inf:
            gateway.counters.throttle[model] = rate
        else:
            gateway.counters.throttle.pop(model, None)
