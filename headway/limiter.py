"""What one gateway refuses by rate before it asks the broker: callers by their limits, the lowest tier by the capacity.

The broker counts the limits for all gateways and charges them with the enqueue; here they are only compared with what is
known of it, so that a flood over a limit is not handed on. While each gateway goes on alone it counts its part of them.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core import ratelimit, verdicts
from headway.core.ratelimit import Over
from headway.core.throttle import Throttle
from headway.model import Entry, Failure, Limit
from headway.ports import Broker

REMEMBERED = 10_000
"""Sets of limits whose parts are kept ready."""


class Limiter:
    """One gateway's.

    Arguments:
        tiers: how many there are; the throttle is for the last of several.
        clock: monotonic seconds.

    Attributes:
        throttle: of the lowest tier; open until somebody sets its rate.
        gateways: how many there are, this one included, as far as it was told.
    """

    def __init__(self, tiers: int, clock: Callable[[], float]) -> None:
        self.throttle = Throttle()
        self.gateways = 1
        self._lowest = tiers - 1
        self._clock = clock
        self._parts: dict[tuple[Limit, ...], tuple[Limit, ...]] = {}
        self._parts_of = 1

    def parts(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """This gateway's parts of limits, for as long as nobody counts for all."""
        if self._parts_of != self.gateways or len(self._parts) >= REMEMBERED:
            self._parts, self._parts_of = {}, self.gateways
        parts = self._parts.get(limits)
        if parts is None:
            parts = self._parts[limits] = tuple(ratelimit.part(limit, self.gateways) for limit in limits)
        return parts

    def objection(self, entry: Entry, broker: Broker, alone: bool) -> Failure | None:
        """Why an entry is not handed on; None when it is, and counted.

        Arguments:
            entry: not known to the broker.
            broker: where it would go.
            alone: that is a broker of this gateway's own: the fleet's capacity does not bound it.
        """
        for limit in entry.limits:
            wait = ratelimit.wait(limit, broker.owed(limit))
            if wait > 0.0:
                return verdicts.over(Over(limit, wait))
        if entry.tier < self._lowest:
            self.throttle.higher += 1
        elif self._lowest and not alone and (wait := self.throttle.admit(self._clock())) > 0.0:
            return verdicts.over_capacity(wait)
        return None

    def not_run(self, entry: Entry) -> None:
        """Another's answer was good for an entry: it took nothing of the capacity."""
        if entry.tier < self._lowest:
            self.throttle.higher -= 1
        else:
            self.throttle.give_back()
