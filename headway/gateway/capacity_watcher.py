"""Watcher of the fleet's capacity and gateways, which sets this gateway's throttle twice a second.

The fleet may be out of reach, or no controller may publish any more. After some seconds without news the throttle
opens, and only the broker itself refuses.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from headway.core.throttle import ArrivalRates, room, share
from headway.gateway.gateway import Gateway
from headway.model import Capacity, ProcessInfo
from headway.ports import Fleet
from headway.runtime.periodic import PERIOD, Periodic
from headway.runtime.supervisor import Supervisor

log = structlog.get_logger(__name__)

LOOK_EVERY = 0.5
"""Seconds between two looks."""
STALE_AFTER = 10.0
"""Seconds without a newly published capacity after which the last one is no longer believed."""
SILENT_AFTER = 3 * PERIOD
"""Seconds since its last heartbeat after which another gateway counts no more."""


class CapacityWatcher:
    """Watcher of the fleet for one gateway.

    Arguments:
        gateway: gateway whose throttle is set, and which learns the number of gateways.
        fleet: fleet that is watched.
        clock: monotonic seconds.
    """

    def __init__(self, gateway: Gateway, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._clock = clock
        self._periodic = Periodic("capacity watcher", self._look, clock, every=LOOK_EVERY)
        self._published = -math.inf
        """Broker instant at which the capacity was last published."""
        self._heard_at = clock()

    async def open(self) -> None:
        """See Resource. Nothing is needed."""

    def start(self, supervisor: Supervisor) -> None:
        """Start watching."""
        self._periodic.start(supervisor)

    async def close(self) -> None:
        """See Resource. Nothing is held."""

    async def _look(self) -> None:
        try:
            self._follow(*await asyncio.gather(self._fleet.capacities(), self._fleet.members()))
        finally:
            if self._clock() - self._heard_at > STALE_AFTER and self._gateway.limiter.throttle.rate != math.inf:
                log.info("nothing is heard of the fleet's capacity any more; the lowest tier is not throttled")
                self._set(math.inf)

    def _follow(self, capacities: Sequence[Capacity], members: Sequence[ProcessInfo]) -> None:
        gateway, now = self._gateway, self._clock()
        others = self._others(members)
        gateway.limiter.gateways = 1 + len(others)
        own = gateway.limiter.throttle.count(now)
        capacity = next((one for one in capacities if one.model == gateway.settings.model), None)
        if capacity is None:
            return
        if capacity.measured_at != self._published:
            self._published, self._heard_at = capacity.measured_at, now
        elif now - self._heard_at > STALE_AFTER:
            return
        alike = [one for one in others if one.model == capacity.model]
        rates = [ArrivalRates(one.higher_per_second, one.lowest_per_second) for one in alike]
        rate = room(capacity, gateway.settings.reserved_share, [own, *rates]) * share(own, rates)
        self._set(rate)

    def _set(self, rate: float) -> None:
        gateway = self._gateway
        gateway.limiter.throttle.set_rate(rate, self._clock())
        if rate < math.inf:
            gateway.counters.throttle[gateway.settings.model] = rate
        else:
            gateway.counters.throttle.pop(gateway.settings.model, None)

    def _others(self, members: Sequence[ProcessInfo]) -> list[ProcessInfo]:
        """Other live gateways. Instants are the broker's, so the newest one is the measure."""
        newest = max((member.last_seen for member in members), default=0.0)
        return [
            member
            for member in members
            if member.model and member.id != self._gateway.name and newest - member.last_seen < SILENT_AFTER
        ]
