"""The rate limit: GCRA, the generic cell rate algorithm (ITU-T I.371), in its virtual scheduling form.

One number a key, the theoretical arrival time (TAT). With an emission interval T = 60 / rate and a burst
tolerance τ = T · burst, a request of cost c conforms when its TAT after it, less τ, is not in the future:

    tat' = max(tat, now) + c·T;   conforms when tat' − τ ≤ now
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from headway.model import Limit

ROUNDING = 1e-9
"""Seconds by which an instant may be off through arithmetic alone."""


def part(limit: Limit, of: int) -> Limit:
    """What one of so many gateways goes by while each counts alone: together they let in what the limit allows, as long as
    each sees an even part of the traffic."""
    return Limit(limit.id, limit.name, limit.rate / of, max(limit.burst / of, 1.0))


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """`tat` is to be stored when `allowed`. `retry_after` is the seconds until the same request fits, infinite when
    it costs more than the burst."""

    allowed: bool
    tat: float
    retry_after: float


def interval(limit: Limit) -> float:
    """Seconds that a request of cost 1 adds to what is owed."""
    return 60.0 / limit.rate


def tolerance(limit: Limit) -> float:
    """Most seconds that may be owed: the burst's worth."""
    return 60.0 / limit.rate * (limit.burst if limit.burst > 1.0 else 1.0)


def check(limit: Limit, tat: float, cost: float, now: float) -> Verdict:
    """Judge a request.

    Arguments:
        limit: what it counts towards.
        tat: the stored theoretical arrival time; anything in the past for a new one.
        cost: in requests; 1 for each input.
        now: an instant on the clock that `tat` was made with.
    """
    base = tat if tat > now else now
    most = tolerance(limit)
    after = base + cost * interval(limit)
    if after - most <= now + ROUNDING:
        return Verdict(True, after, 0.0)
    fits_ever = cost * interval(limit) <= most + ROUNDING
    return Verdict(False, base, after - most - now if fits_ever else math.inf)


class Over(msgspec.Struct, frozen=True, gc=False):
    """A request that does not conform: to which limit, and the seconds until it would."""

    limit: Limit
    retry_after: float


def charge(limits: Sequence[Limit], tats: Mapping[str, float], now: float) -> Over | list[float]:
    """Judge one request by several limits: all are charged or none.

    Arguments:
        limits: what it counts towards.
        tats: theoretical arrival times by id of the limit, as far as there are.
        now: an instant on the clock that they were made with.

    Returns:
        The times to store, in the order of `limits`; or, of those it does not conform to, the one that takes longest.
    """
    verdicts = [check(limit, tats.get(limit.id, 0.0), 1.0, now) for limit in limits]
    worst = max(range(len(limits)), key=lambda at: verdicts[at].retry_after, default=-1)
    if worst >= 0 and not verdicts[worst].allowed:
        return Over(limits[worst], verdicts[worst].retry_after)
    return [verdict.tat for verdict in verdicts]


def remaining(limit: Limit, owed: float) -> int:
    """Whole requests that fit now, when `owed` seconds are owed."""
    return max(0, int((tolerance(limit) - owed) / interval(limit) + ROUNDING))
