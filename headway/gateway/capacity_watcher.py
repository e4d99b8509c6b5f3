"""Watcher of the fleet's capacity and gateways, which sets this gateway's throttle twice a second, or more seldom while nothing comes.

The fleet may be out of reach, or no controller may publish any more. After some seconds without news the throttle
opens, and only the broker itself refuses.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from headway.core.capacity import Freshness
from headway.core.health import heard
from headway.core.shared_bucket import NO_WEIGHTS
from headway.core.throttle import ArrivalRates, room, share, weights
from headway.errors import BrokerUnavailable
from headway.fleet.pace import Pace
from headway.gateway.gateway import Gateway
from headway.model import Capacity, ProcessInfo, Scaling
from headway.ports import Fleet
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic, PeriodicResource

log = get_logger(__name__)

READ_CAPACITY_EVERY = 0.5
"""Seconds between two looks while requests come."""
CALM = 0.05
"""Arrivals per second, averaged over about one, below which none has come for some seconds."""


class CapacityWatcher(PeriodicResource):
    """Watcher of the fleet for one gateway.

    Arguments:
        gateway: gateway whose throttle is set, and which learns the number of gateways, and that the fleet does not answer.
        fleet: fleet that is watched.
        clock: monotonic seconds.
        pace: pace of the process, which is told while requests come.
    """

    def __init__(self, gateway: Gateway, fleet: Fleet, clock: Callable[[], float], pace: Pace) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._clock, self._pace = clock, pace
        super().__init__(Periodic("capacity watcher", self._look, clock, every=self.every))
        self._freshness = Freshness(clock())
        self._calm = False

    def every(self) -> float:
        """Seconds until the next look: more while no request comes to the gateway, or waits there."""
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
                    message = "nothing is heard of a model's capacity any more; its lowest tier is not throttled"
                    log.info(message, model=model)
                    self._set(model, math.inf)

    def _follow(self, capacities: Sequence[Capacity], members: Sequence[ProcessInfo]) -> None:
        gateway, now = self._gateway, self._clock()
        others = self._others(members)
        gateway.limiter.gateways = 1 + len(others)
        of_models = {one.model: one for one in capacities}
        self._freshness.keep(gateway.limiter.throttles.keys())
        self._calm = True
        self._roll(of_models)
        scalings: dict[str, Scaling] = {}
        for model in gateway.served.models:
            own = gateway.limiter.throttles[model].count(now)
            self._calm = self._calm and own.higher + own.lowest < CALM
            capacity = of_models.get(model)
            if capacity is not None and self._freshness.hear(capacity, now):
                rates = [found for one in others if (found := _arrivals(one, model)) is not None]
                whole = room(capacity, gateway.served[model].settings.reserved_share, [own, *rates])
                self._set(model, share(whole, own, rates), weights(own, rates))
                gateway.limiter.throttles[model].least_seconds = capacity.least_seconds
                if capacity.scaling is not None and capacity.scaling.starts_in is not None:
                    scalings[model] = capacity.scaling
        if gateway.served.note_starts(scalings):
            gateway.learn()

    def _roll(self, capacities: Mapping[str, Capacity]) -> None:
        """Go by the rollouts that are published. Those of a model of which nothing is published stay as they were."""
        gateway, rollouts, changed = self._gateway, [], False
        for model, one in gateway.served.items():
            found = capacities.get(model)
            changed |= found is not None and one.versions.roll(found.rollout)
            if one.versions.rollout is not None:
                rollouts.append(one.versions.rollout)
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

    def _others(self, members: Sequence[ProcessInfo]) -> list[ProcessInfo]:
        """Other live gateways."""
        return [member for member in heard(members) if member.model and member.id != self._gateway.name]


def _arrivals(member: ProcessInfo, model: str) -> ArrivalRates | None:
    """Arrivals for a model at another gateway; None where it does not serve that."""
    found = member.arrivals.get(model)
    if found is None:
        return None
    higher, lowest = found
    return ArrivalRates(higher, lowest, member.tenant_rates.get(model, {}))
