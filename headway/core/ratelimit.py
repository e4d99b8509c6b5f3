"""Rate limits by GCRA, the generic cell rate algorithm (ITU-T I.371), in its virtual scheduling form.

Each limit stores one number, its theoretical arrival time (TAT). With an emission interval T = 60 / rate and a burst tolerance
τ = T · burst, a request conforms if the new TAT minus τ is not in the future:

    tat' = max(tat, now) + T;   conforms if tat' − τ ≤ now
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from headway.model import Limit

ROUNDING = 1e-9  # Seconds by which rounding may move a time.

LEAST_TATS = 10_000  # Number of limits that are remembered before those without debt are dropped.


def part(limit: Limit, of: int) -> Limit:
    """Return a gateway's share of a limit if `of` gateways count separately and split the traffic evenly."""
    return Limit(limit.id, limit.name, limit.rate / of, max(limit.burst / of, 1.0), limit.model, limit.counting)


def counting_as(limit: Limit, count: int) -> Limit:
    """Return a limit under which one request costs as much as `count`, with the same debt. The burst must be at least `count`."""
    return Limit(limit.id, limit.name, limit.rate / count, limit.burst / count, limit.model, count)


@lru_cache(maxsize=1024)
def all_counting_as(limits: tuple[Limit, ...], count: int) -> tuple[Limit, ...]:
    """Return limits under which one request costs as much as `count` requests; see `counting_as`."""
    return tuple(counting_as(limit, count) for limit in limits)


def interval(limit: Limit) -> float:
    """Return the seconds that a request of cost 1 adds to the debt."""
    return 60.0 / limit.rate


def tolerance(limit: Limit) -> float:
    """Return the largest allowed debt in seconds, which a full burst incurs."""
    return 60.0 / limit.rate * (limit.burst if limit.burst > 1.0 else 1.0)


def wait(limit: Limit, owed: float) -> float:
    """Return the seconds until a request conforms, given a debt of `owed` seconds."""
    step = 60.0 / limit.rate
    burst = limit.burst
    late = owed + step - (step * burst if burst > 1.0 else step)
    return late if late > ROUNDING else 0.0


LOOKS = 2  # Number of debts checked each time, in turn. With only one, debts would pile up without end.


class Over(msgspec.Struct, frozen=True, gc=False):
    """The limit that a request exceeds, and the seconds until it would conform."""

    limit: Limit
    retry_after: float


def charge(limits: Sequence[Limit], tats: Mapping[str, float], now: float) -> Over | list[float]:
    """Judge one request by several limits: either all are charged, or none. `tats` maps limit ids to their known theoretical arrival
    times. Returns the times to store, in the order of `limits`, or the exceeded limit with the longest wait."""
    charged: list[float] = []
    worst, longest = None, 0.0
    for limit in limits:
        tat, step = tats.get(limit.id, now), 60.0 / limit.rate
        if tat <= now:
            tat = now
        elif tat + step > now + step * limit.burst and (late := wait(limit, tat - now)) > longest:
            worst, longest = limit, late
        charged.append(tat + step)
    return charged if worst is None else Over(worst, longest)


class Debts(OrderedDict[str, float]):
    """Theoretical arrival times by limit id. When one is added or read, the next few are checked, and those that are paid are
    forgotten. So at most about twice as many are kept as are unpaid. No unpaid debt is dropped."""

    def forget_paid(self, now: float) -> None:
        for _ in range(min(LOOKS, len(self))):
            id, tat = self.popitem(last=False)
            if tat > now:
                self[id] = tat


class RateDebts:
    """Rate limit debts by id. Paid debts are forgotten once there are many."""

    def __init__(self) -> None:
        self.tats: dict[str, float] = {}  # Theoretical arrival times, which `charge` reads and updates.
        self._most = LEAST_TATS

    def tidy(self, now: float) -> None:
        if len(self.tats) > self._most:
            self.tats = {id: tat for id, tat in self.tats.items() if tat > now}
            self._most = max(LEAST_TATS, 2 * len(self.tats))


class CallPace:
    """Evenly spaced turns for the calls to a remote API, shared by its slots. `rate` is per second; 0 means no limit."""

    def __init__(self, rate: float) -> None:
        self._gap = 1.0 / rate if rate else 0.0
        self._next = -math.inf

    def take(self, now: float) -> float:
        """Take the next turn, and return the seconds until then."""
        if not self._gap:
            return 0.0
        turn = max(now, self._next)
        self._next = turn + self._gap
        return turn - now
