"""Shared bucket: a token bucket that tenants share evenly.

    level of a tenant   what it took and hasn't worked off yet; tenants work theirs off at speeds in proportion to their weights
    level               of all together; it falls at the rate, whoever asks, so that no token is lost

A tenant may take while its own level is at most what is left of two bursts. So a tenant alone gets a burst and then the rate. Of n
tenants that want all they can get, each ends up with a share of 1/(n + 1), and the next tenant finds room (see
`core/memory_room.py` for the rule). A tenant without a level may take more, up to MOST, so that a tenant that asks for less than
its part of the rate is let in, whatever others ask for.

A weight is 1 unless set. Levels are counted in bursts, so a change of the rate leaves the filled part of the bucket as it is.
Working off is generalised processor sharing in virtual time (Parekh and Gallager, IEEE/ACM Transactions on Networking, 1993): each
tenant has the virtual instant at which it will be done, and the clock runs the slower the more weight there is."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from types import MappingProxyType

NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})  # All tenants have weight 1.
ROUNDING = 1e-9  # Part of a burst by which rounding alone may move a level.
FULL = 2.0  # Level of all tenants, in bursts, up to which a tenant with a level may take more.
MOST = 4.0  # Level of all tenants, in bursts, up to which a tenant without a level may take.
LEAST_RATE = 0.1  # Smallest rate, in tokens per second, for computing waits.
STALE = 64  # Outdated places in the order of tenants before they are swept.


class SharedBucket:
    """Bucket of tokens that tenants share; infinite until a rate is set. It only knows tenants with a level."""

    __slots__ = ("_at", "_done", "_order", "_sum", "_virtual", "_weight", "_weights", "burst", "rate")

    def __init__(self) -> None:
        self.rate = self.burst = math.inf  # Tokens per second, and most that one tenant takes at once.
        self._at = 0.0
        self._virtual = 0.0
        self._done: dict[str, float] = {}  # Virtual instants at which tenants will have worked off their levels.
        self._weights: Mapping[str, float] = NO_WEIGHTS
        self._sum = self._weight = 0.0  # Sum of these instants times their tenants' weights, and sum of the weights.
        # Heap with an instant for each of these tenants, which may be earlier than the true one, and some outdated instants.
        self._order: list[tuple[float, str]] = []

    @property
    def tenants(self) -> int:
        return len(self._done)

    @property
    def level(self) -> float:
        """Level of all tenants together, as a multiple of the burst."""
        return self._sum - self._weight * self._virtual

    def take(self, tenant: str, count: int, now: float) -> float:
        """Take `count` tokens and return 0, or none and return the seconds until they are there if nobody else asks."""
        if self.rate == math.inf:
            return 0.0
        self._work_off(now)
        if not self.burst:
            return count / LEAST_RATE
        part = count / self.burst
        weight = self._weights.get(tenant, 1.0)
        own = (self._done.get(tenant, self._virtual) - self._virtual) * weight
        level = self.level
        over = own + level + 2.0 * part - FULL
        beyond = level + 2.0 * part - MOST if part <= 1.0 + ROUNDING else math.inf
        if over <= ROUNDING or (own <= ROUNDING and beyond <= ROUNDING):
            self._set(tenant, own + part)
            return 0.0
        active = self._weight / weight if tenant in self._done else 1.0 + self._weight / weight
        seconds = min(max(over / (1.0 + 1.0 / active), over - own), max(own * active, beyond))
        return seconds * self.burst / max(self.rate, LEAST_RATE)

    def give_back(self, tenant: str, count: int) -> None:
        """Return up to `count` tokens that a tenant took, limited by its level."""
        if tenant in self._done and self.burst:
            own = (self._done[tenant] - self._virtual) * self._weights.get(tenant, 1.0)
            self._set(tenant, own - count / self.burst)

    def set_rate(self, rate: float, burst: float, now: float, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """Set the tokens per second and per burst, and tenants' weights, at most 1. An infinite rate forgets all levels."""
        self._work_off(now)
        self.rate, self.burst = rate, burst
        if rate == math.inf:
            self._done.clear()
            self._begin_afresh()
        elif weights != self._weights:
            before = self._weights
            levels = {name: (done - self._virtual) * before.get(name, 1.0) for name, done in self._done.items()}
            self._done.clear()
            self._begin_afresh()
            self._weights = weights
            for tenant, level in levels.items():
                self._set(tenant, level)

    def _set(self, tenant: str, level: float) -> None:
        before, weight = self._done.pop(tenant, None), self._weights.get(tenant, 1.0)
        if before is not None:
            self._sum -= before * weight
            self._weight -= weight
        if level > ROUNDING:
            self._done[tenant] = done = self._virtual + level / weight
            self._sum += done * weight
            self._weight += weight
            if before is None or done < before:
                heapq.heappush(self._order, (done, tenant))
                if len(self._order) > 2 * len(self._done) + STALE:
                    self._order = [(instant, name) for name, instant in self._done.items()]
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
            elif (needed := (own - self._virtual) * self._weight) > left:
                self._virtual += left / self._weight
                return
            else:
                heapq.heappop(order)
                left -= needed
                self._virtual = own
                weight = self._weights.get(tenant, 1.0)
                self._sum -= done.pop(tenant) * weight
                self._weight -= weight
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Restart the virtual time once nobody has a level."""
        self._virtual = self._sum = self._weight = 0.0
        self._order.clear()
