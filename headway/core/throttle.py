"""The throttle: holds the lowest tier to what the others leave of the fleet's capacity.

    room  = max(usable − arrivals of higher tiers, reserved share · usable)
    share = what one gateway may let in of it

Higher tiers are counted and never held up: they have the rest of the GPUs, and admission bounds them by their deadlines.
The room is filled from arrivals, not from what was let in, and from measured batch times, which do not depend on it: so
nothing feeds back, and it settles as fast as its figures do. A gateway's share goes by its part of the lowest tier's
arrivals. A tenth is dealt evenly, for a gateway to which traffic has just moved; together all shares are the room.

It is a token bucket rather than GCRA, which is the same rule (ITU-T I.371, annex A) but counts in time: tokens keep their
worth when the rate changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headway.model import Capacity

BURST_SECONDS = 1.0
"""Seconds' worth of the rate that may come at once."""
LEAST_BURST = 10.0
"""Requests that may come at once however low the rate. The rate is an average over a second, and rough when it is low.
"""
DEALT = 0.1
"""Part of the room that is dealt to all gateways evenly."""
LEAST_RATE = 0.1
"""Rate per second with which a wait is computed when less, or nothing, is let in."""
AVERAGED = 1.0
"""Time constant in seconds of the averages of arrivals."""


class ArrivalRates(msgspec.Struct, frozen=True, gc=False):
    """Arrivals per second at one gateway: of the lowest tier, and of all others."""

    higher: float = 0.0
    lowest: float = 0.0


def room(capacity: Capacity, reserved_share: float, gateways: Sequence[ArrivalRates]) -> float:
    """Entries per second of the lowest tier that the fleet has room for; infinite while nothing is known.

    Arguments:
        capacity: capacity that the controller published.
        reserved_share: share of the usable capacity that is kept for the lowest tier, 0 to 1.
        gateways: arrivals at all gateways.
    """
    if capacity.scarce:
        return 0.0
    if capacity.usable_per_second <= 0.0:
        # Either no batch was measured yet, or there is nobody at all; or workers are there and none of them counts.
        return 0.0 if capacity.healthy == 0 and capacity.degraded > 0 else math.inf
    left = capacity.usable_per_second - math.fsum(one.higher for one in gateways)
    return max(left, capacity.usable_per_second * reserved_share)


def share(own: ArrivalRates, others: Sequence[ArrivalRates]) -> float:
    """Part of the room that one gateway gets, 0 to 1.

    Arguments:
        own: arrivals at this gateway.
        others: arrivals at each other one.
    """
    gateways = 1 + len(others)
    total = own.lowest + math.fsum(one.lowest for one in others)
    part = own.lowest / total if total > 0.0 else 1.0 / gateways
    return (1.0 - DEALT) * part + DEALT / gateways


class Throttle:
    """One gateway's throttle of the lowest tier; open until a rate is set.

    Attributes:
        higher, lowest: arrivals since the last `count`, of the other tiers and of the lowest. The gateway adds to
            `higher`, and takes away what needed no run.
        rate: entries per second of the lowest tier that it lets in; infinite while it lets in all.
        burst: most entries of the lowest tier that it lets in at once.
        rates: averages of recent arrivals.
        least_seconds: see Capacity. What cannot wait that long is no demand, as no number of workers could answer it.
    """

    __slots__ = ("_counted_at", "_filled_at", "_tokens", "burst", "higher", "least_seconds", "lowest", "rate", "rates")

    def __init__(self) -> None:
        self.higher = 0
        self.lowest = 0
        self.rate = math.inf
        self.least_seconds = 0.0
        self.rates = ArrivalRates()
        self.burst = self._tokens = math.inf
        self._filled_at = 0.0
        self._counted_at: float | None = None

    def admit(self, now: float, count: int = 1, demand: int | None = None) -> float:
        """Let in `count` entries of the lowest tier: 0; or refuse them all: the seconds until they would be let in.

        More than `burst` are never let in. `demand`: how many of them count as arrivals; None: all.
        """
        self.lowest += count if demand is None else demand
        if self.rate == math.inf:
            return 0.0
        self._fill(now)
        if self._tokens >= count:
            self._tokens -= count
            return 0.0
        return (count - self._tokens) / max(self.rate, LEAST_RATE)

    def give_back(self, demand: int = 1) -> None:
        """Give back an entry of the lowest tier that was let in and needed no run. `demand`: as what it was counted."""
        self.lowest -= demand
        self.refund()

    def refund(self, count: int = 1) -> None:
        """Give back the places of entries of the lowest tier that were let in here and refused by the broker, or not offered.

        Only some moments have room in time for another entry. If each refusal cost a place, too few entries would come
        at those moments, and GPUs would run batches that are not full.
        """
        self._tokens = min(self._tokens + count, self.burst)

    def set_rate(self, rate: float, now: float) -> None:
        """Set the entries per second to let in from now on; infinite: all. What was saved up stays, as far as it fits."""
        self._fill(now)
        self.rate = rate
        self.burst = max(rate * BURST_SECONDS, LEAST_BURST) if rate > 0.0 else 0.0
        self._tokens = min(self._tokens, self.burst) if rate < math.inf else math.inf

    def count(self, now: float) -> ArrivalRates:
        """Average the arrivals since the last call, and return the averages."""
        if self._counted_at is None or now <= self._counted_at:
            self._counted_at = now if self._counted_at is None else self._counted_at
            return self.rates
        elapsed = now - self._counted_at
        weight = 1.0 - math.exp(-elapsed / AVERAGED)
        higher, lowest = max(self.higher, 0) / elapsed, max(self.lowest, 0) / elapsed
        before = self.rates
        self.rates = ArrivalRates(
            before.higher + weight * (higher - before.higher), before.lowest + weight * (lowest - before.lowest)
        )
        self.higher = self.lowest = 0
        self._counted_at = now
        return self.rates

    def _fill(self, now: float) -> None:
        if self.rate < math.inf and now > self._filled_at:
            self._tokens = min(self._tokens + (now - self._filled_at) * self.rate, self.burst)
        self._filled_at = now
