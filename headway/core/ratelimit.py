"""The rate limit: GCRA, the generic cell rate algorithm (ITU-T I.371), in its virtual scheduling form.

One number a key, the theoretical arrival time (TAT). With an emission interval T = 60 / rate and a burst
tolerance τ = T · burst, a request conforms when the TAT after it, less τ, is not in the future:

    tat' = max(tat, now) + T;   conforms when tat' − τ ≤ now
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from headway.model import Limit

ROUNDING = 1e-9
"""Seconds by which rounding alone may move an instant."""

LEAST_TATS = 10_000
"""Limits that are remembered before those without debt are dropped."""


def part(limit: Limit, of: int) -> Limit:
    """Return the share of a limit for one of `of` gateways that count alone.

    Together they let in what the limit allows, as long as each sees an even part of the traffic.
    """
    return Limit(limit.id, limit.name, limit.rate / of, max(limit.burst / of, 1.0), limit.model, limit.counting)


def counting_as(limit: Limit, count: int) -> Limit:
    """Limit under which one request is charged as `count` requests to the same debt; the burst must have room for them."""
    return Limit(limit.id, limit.name, limit.rate / count, limit.burst / count, limit.model, count)


@lru_cache(maxsize=1024)
def all_counting_as(limits: tuple[Limit, ...], count: int) -> tuple[Limit, ...]:
    """Return the limits under which one request is charged as `count` requests; see `counting_as`."""
    return tuple(counting_as(limit, count) for limit in limits)


def interval(limit: Limit) -> float:
    """Return the seconds that a request of cost 1 adds to the debt."""
    return 60.0 / limit.rate


def tolerance(limit: Limit) -> float:
    """Return the most seconds of debt: the burst's worth."""
    return 60.0 / limit.rate * (limit.burst if limit.burst > 1.0 else 1.0)


def wait(limit: Limit, owed: float) -> float:
    """Return the seconds until a request conforms, with a debt of `owed` seconds; 0 when it does now."""
    step = 60.0 / limit.rate
    burst = limit.burst
    late = owed + step - (step * burst if burst > 1.0 else step)
    return late if late > ROUNDING else 0.0


LOOKS = 2
"""Debts that are looked at each time, of those that are forgotten in turn: more than one, or their number only grows."""


class Over(msgspec.Struct, frozen=True, gc=False):
    """Verdict on a request that does not conform: the limit, and the seconds until the request would conform."""

    limit: Limit
    retry_after: float


def charge(limits: Sequence[Limit], tats: Mapping[str, float], now: float) -> Over | list[float]:
    """Judge one request by several limits: all are charged or none.

    Arguments:
        limits: rate limits that the request counts towards.
        tats: theoretical arrival times by id of the limit, as far as there are.
        now: an instant on the clock that they were made with.

    Returns:
        The times to store, in the order of `limits`; or, of those it does not conform to, the one that takes longest.
    """
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
    """Theoretical arrival times by id of the limit, of which paid ones are forgotten a few at a time.

    Each time that a debt is added or read a few are looked at, in turn: so the work is the same however many there are,
    about as many are kept as are owed to twice over, and none that is owed is ever dropped.
    """

    def forget_paid(self, now: float) -> None:
        """Look at the next debts, and forget those that are paid by instant `now`."""
        for _ in range(min(LOOKS, len(self))):
            id, tat = self.popitem(last=False)
            if tat > now:
                self[id] = tat


class RateDebts:
    """Debts of rate limits, by id. Paid debts are forgotten as soon as there are many.

    Attributes:
        tats: theoretical arrival times by id of the limit, which `charge` reads and updates.
    """

    def __init__(self) -> None:
        self.tats: dict[str, float] = {}
        self._most = LEAST_TATS

    def tidy(self, now: float) -> None:
        """Forget the debts that are paid by instant `now`, if there are many."""
        if len(self.tats) > self._most:
            self.tats = {id: tat for id, tat in self.tats.items() if tat > now}
            self._most = max(LEAST_TATS, 2 * len(self.tats))


class CallPace:
    """Turns of calls, evenly apart. Slots of one API share it.

    Arguments:
        rate: calls per second; 0: no bound.
    """

    def __init__(self, rate: float) -> None:
        self._gap = 1.0 / rate if rate else 0.0
        self._next = -math.inf

    def take(self, now: float) -> float:
        """Take the next turn; returns the seconds until then."""
        if not self._gap:
            return 0.0
        turn = max(now, self._next)
        self._next = turn + self._gap
        return turn - now
