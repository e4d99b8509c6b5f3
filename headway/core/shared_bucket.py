"""Shared bucket: a token bucket whose tokens go to those who ask, in even parts.

    level of a tenant   what it has taken and not worked off; each tenant that has one works off as fast as every other
    level               of all together; it falls at the rate, whoever asks, so that no token is lost

A tenant may take while its own level is at most what is left of two bursts. So a tenant alone gets a whole burst and then
the rate; n that want all they can get end with one part of n + 1 each, and whoever comes next finds room (see
`core/memory_room.py`, whose rule it is). A tenant that has worked off all it took may take besides, up to `MOST`: so
whoever asks for less than its part of the rate is let in, whatever the others ask for.

Levels are counted in bursts, so that a change of the rate leaves the filled part of the bucket as it is. Working off is
generalised processor sharing in virtual time (Parekh and Gallager, IEEE/ACM Transactions on Networking, 1993): a tenant has
the virtual instant at which it is done, and the clock goes as fast as the number of tenants lets it.
"""

from __future__ import annotations

import heapq
import math

ROUNDING = 1e-9
"""Part of a burst by which rounding alone may move a level."""
FULL = 2.0
"""Bursts of all tenants together up to which a tenant may take more while it has a level."""
MOST = 4.0
"""Bursts of all tenants together, and as many as one takes, up to which a tenant without a level may take."""
LEAST_RATE = 0.1
"""Tokens per second by which a wait is computed when fewer, or none, come."""
STALE = 64
"""Places in the order of tenants that may be out of date before they are swept."""


class SharedBucket:
    """Bucket of tokens that tenants share; infinite until a rate is set. It knows the tenants that have a level.

    Attributes:
        rate: tokens per second; infinite for as many as are asked for.
        burst: most tokens that one tenant may take at once.
    """

    __slots__ = ("_at", "_done", "_order", "_sum", "_virtual", "burst", "rate")

    def __init__(self) -> None:
        self.rate = self.burst = math.inf
        self._at = 0.0
        self._virtual = 0.0
        self._done: dict[str, float] = {}
        """Virtual instants at which the tenants with a level have worked it off."""
        self._sum = 0.0
        """Sum of these."""
        self._order: list[tuple[float, str]] = []
        """Heap with an instant of each of these tenants that is not later than its own; and some that are out of date."""

    @property
    def tenants(self) -> int:
        """Number of tenants that have a level."""
        return len(self._done)

    @property
    def level(self) -> float:
        """Level of all tenants together, in bursts."""
        return self._sum - len(self._done) * self._virtual

    def take(self, tenant: str, count: int, now: float) -> float:
        """Take `count` tokens for a tenant: 0; or none: the seconds until they would be there if nobody else asked."""
        if self.rate == math.inf:
            return 0.0
        self._work_off(now)
        if not self.burst:
            return count / LEAST_RATE
        part = count / self.burst
        own = self._done.get(tenant, self._virtual) - self._virtual
        level = self.level
        over = own + level + 2.0 * part - FULL
        beyond = level + 2.0 * part - MOST if part <= 1.0 + ROUNDING else math.inf
        if over <= ROUNDING or (own <= ROUNDING and beyond <= ROUNDING):
            self._set(tenant, own + part)
            return 0.0
        active = max(len(self._done), 1)
        seconds = min(max(over / (1.0 + 1.0 / active), over - own), max(own * active, beyond))
        return seconds * self.burst / max(self.rate, LEAST_RATE)

    def give_back(self, tenant: str, count: int) -> None:
        """Give `count` tokens back that a tenant took; no more than it has a level for."""
        if tenant in self._done and self.burst:
            self._set(tenant, self._done[tenant] - self._virtual - count / self.burst)

    def set_rate(self, rate: float, burst: float, now: float) -> None:
        """Set the tokens per second, and those of a burst, from now on. An infinite rate forgets all levels."""
        self._work_off(now)
        self.rate, self.burst = rate, burst
        if rate == math.inf:
            self._done.clear()
            self._begin_afresh()

    def _set(self, tenant: str, level: float) -> None:
        """Set the level of a tenant."""
        before = self._done.pop(tenant, None)
        if before is not None:
            self._sum -= before
        if level > ROUNDING:
            self._done[tenant] = done = self._virtual + level
            self._sum += done
            if before is None or done < before:
                heapq.heappush(self._order, (done, tenant))
                if len(self._order) > 2 * len(self._done) + STALE:
                    self._order = [(instant, one) for one, instant in self._done.items()]
                    heapq.heapify(self._order)
        elif not self._done:
            self._begin_afresh()

    def _work_off(self, now: float) -> None:
        """Let the tenants work off what they can since the last call."""
        elapsed, self._at = now - self._at, max(now, self._at)
        if not self._done or elapsed <= 0.0 or not self.burst or self.rate == math.inf:
            return
        left, order, done = elapsed * self.rate / self.burst, self._order, self._done
        while done:
            instant, tenant = order[0]
            own = done.get(tenant)
            if own is None:
                heapq.heappop(order)
            elif own > instant:
                heapq.heapreplace(order, (own, tenant))
            elif (needed := (own - self._virtual) * len(done)) > left:
                self._virtual += left / len(done)
                return
            else:
                heapq.heappop(order)
                left -= needed
                self._virtual = own
                self._sum -= done.pop(tenant)
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Begin the virtual time anew, once nobody has a level."""
        self._virtual = self._sum = 0.0
        self._order.clear()
