"""The throttle: limits the lowest tier to what the others leave of the fleet's capacity.

    room  = max(usable − arrivals of higher tiers, reserved share · usable)
    share = the part of it, in entries per second, that one gateway lets in

Higher tiers are counted but never held up. They use the other GPUs, and admission limits them by their deadlines. The room follows
from arrivals, not from what was let in, and from measured batch times, which don't depend on it. So there is no feedback, and it
settles as fast as its figures do. A gateway's share is in proportion to its part of the lowest tier's arrivals. A tenth of the room
is divided evenly, for gateways to which traffic has just moved. All shares together make up the room. A tenant counts once, however
many gateways it asks. Its part is divided like its arrivals, and its weight at each gateway is the share of its arrivals there.

It is a token bucket rather than GCRA, which is the same rule (ITU-T I.371, annex A) but counts in time, as tokens keep their worth
when the rate changes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from headway.core.shared_bucket import NO_WEIGHTS, SharedBucket
from headway.model import Capacity

MOST_TENANTS = 1000  # Limit on tenants that are counted separately. All others count as one.
MOST_TOLD = 16  # Limit on tenants whose averages are reported.
LEAST_RATE = 0.01  # Arrivals per second below which a tenant is forgotten.
OTHER_TENANTS = ""  # Name for all further tenants. No tenant has it.
BURST_SECONDS = 1.0  # Seconds' worth of the rate that may come at once.
LEAST_BURST = 10.0  # Requests that may come at once however low the rate, which is a rough average over a second.
DEALT = 0.1  # Part of the room that is divided evenly among all gateways.
LEAST_WEIGHT = 0.01  # Minimum weight of a tenant at a gateway, so that what it took there is worked off in time.
AVERAGED = 1.0  # Time constant in seconds of the averages of arrivals.


class TenantRates:
    """Averages of the arrivals of each tenant."""

    __slots__ = ("_averages", "_came")

    def __init__(self) -> None:
        self._came: dict[str, int] = {}  # Arrivals since the last average.
        self._averages: dict[str, float] = {}

    def add(self, tenant: str, count: int) -> None:
        """Count arrivals of a tenant. A negative number takes some back."""
        came = self._came
        if tenant not in came and len(came) >= MOST_TENANTS:
            tenant = OTHER_TENANTS
        came[tenant] = came.get(tenant, 0) + count

    def average(self, elapsed: float, weight: float) -> dict[str, float]:
        """Average the arrivals of the last `elapsed` seconds, with a weight from 0 to 1. Returns the averages of the tenants that
        send most, highest first."""
        came, before, self._came = self._came, self._averages, {}
        averages = {
            tenant: average
            for tenant in before.keys() | came.keys()
            if (average := (1.0 - weight) * before.get(tenant, 0.0) + weight * max(came.get(tenant, 0), 0) / elapsed)
            > LEAST_RATE
        }
        if len(averages) > MOST_TENANTS:
            averages = dict(heapq.nlargest(MOST_TENANTS, averages.items(), key=lambda item: item[1]))
        self._averages = averages
        known = ((tenant, average) for tenant, average in averages.items() if tenant != OTHER_TENANTS)
        return dict(heapq.nlargest(MOST_TOLD, known, key=lambda item: item[1]))


class ArrivalRates(msgspec.Struct, frozen=True, gc=False):
    """Arrivals per second at one gateway."""

    higher: float = 0.0  # Of all tiers above the lowest.
    lowest: float = 0.0  # Of the lowest tier.
    tenants: dict[str, float] = {}  # Of the lowest tier's tenants that send most. Empty: one tenant sends all of it.


def room(capacity: Capacity, reserved_share: float, gateways: Sequence[ArrivalRates]) -> float:
    """Return the entries per second of the lowest tier that the fleet has room for, given the arrivals at all gateways; infinite if
    unknown. A share of the usable capacity, 0 to 1, is reserved for the tier."""
    if capacity.scarce:
        return 0.0
    if capacity.usable_per_second <= 0.0:
        # If workers are there but none counts, nothing is let in. Otherwise no batch was measured yet, or there are no workers.
        return 0.0 if capacity.healthy == 0 and capacity.degraded > 0 else math.inf
    left = capacity.usable_per_second - math.fsum(gateway.higher for gateway in gateways)
    return max(left, capacity.usable_per_second * reserved_share)


def share(room: float, own: ArrivalRates, others: Sequence[ArrivalRates]) -> float:
    """Return the part of the room, in entries per second, that one gateway lets in. The parts of all gateways make up the room."""
    if room == math.inf:
        return room
    gateways = 1 + len(others)
    even, rest = DEALT * room / gateways, (1.0 - DEALT) * room
    total = own.lowest + math.fsum(other.lowest for other in others)
    if total <= 0.0:
        return room / gateways
    if total <= rest:
        return even + rest * own.lowest / total
    whole = _together([own, *others])
    unknown = [group for gateway in (own, *others) for group in _unknown(gateway)]
    level = _fair(rest, [*((rate, 1.0) for rate in whole.values()), *unknown])
    known = math.fsum(rate * min(1.0, level / whole[tenant]) for tenant, rate in own.tenants.items() if rate > 0.0)
    return even + known + math.fsum(count * min(rate, level) for rate, count in _unknown(own))


def weights(own: ArrivalRates, others: Sequence[ArrivalRates]) -> dict[str, float]:
    """Return the shares, from LEAST_WEIGHT to 1, of tenants' arrivals that come to one gateway, if they ask at others, too."""
    elsewhere = _together(others)
    return {
        tenant: max(rate / (rate + elsewhere[tenant]), LEAST_WEIGHT)
        for tenant, rate in own.tenants.items()
        if rate > 0.0 and elsewhere.get(tenant, 0.0) > 0.0
    }


def _together(gateways: Sequence[ArrivalRates]) -> dict[str, float]:
    """Return the arrivals per second of known tenants at all gateways together."""
    whole: dict[str, float] = {}
    for gateway in gateways:
        for tenant, rate in gateway.tenants.items():
            if rate > 0.0:
                whole[tenant] = whole.get(tenant, 0.0) + rate
    return whole


def _unknown(rates: ArrivalRates) -> Iterator[tuple[float, float]]:
    """Yield rates of a gateway's unknown tenants in the lowest tier, with the number of tenants at each. An unknown tenant is
    assumed to send as much as the known one that sends least. If none is known, one tenant sends all."""
    rest = rates.lowest - math.fsum(rates.tenants.values())
    least = min(rates.tenants.values(), default=rates.lowest)
    if rest > 0.0 and least > 0.0:
        yield least, rest / least


def _fair(rest: float, groups: list[tuple[float, float]]) -> float:
    """Return the rate for each tenant that asks for more, if all that ask for less get what they ask for."""
    left = math.fsum(count for _, count in groups)
    for rate, count in sorted(groups):
        if rate * left >= rest:
            return rest / left
        rest -= rate * count
        left -= count
    return math.inf


class Throttle:
    """One gateway's throttle of the lowest tier; open until a rate is set."""

    __slots__ = ("_bucket", "_counted_at", "_tenants", "higher", "least_seconds", "lowest", "rates")

    def __init__(self) -> None:
        self.higher = 0  # Arrivals of higher tiers since the last `count` that needed a run; kept by the gateway.
        self.lowest = 0  # Arrivals of the lowest tier since then.
        self.least_seconds = 0.0  # See Capacity. An entry with less time isn't demand, as no fleet could answer it.
        self.rates = ArrivalRates()  # Averages of recent arrivals.
        self._bucket = SharedBucket()
        self._tenants = TenantRates()
        self._counted_at: float | None = None

    @property
    def rate(self) -> float:
        """Entries per second of the lowest tier to let in; infinite for all."""
        return self._bucket.rate

    @property
    def burst(self) -> float:
        """Limit on entries of the lowest tier that one tenant may send at once."""
        return self._bucket.burst

    def admit(self, tenant: str, now: float, count: int = 1, demand: int | None = None) -> float:
        """Let in `count` entries of a tenant and return 0, or refuse all and return the seconds until they would be let in. More
        than `burst` are never let in. Of the entries, `demand` count as arrivals; None for all."""
        counted = count if demand is None else demand
        self.lowest += counted
        self._tenants.add(tenant, counted)
        return self._bucket.take(tenant, count, now)

    def give_back(self, tenant: str, demand: int = 1) -> None:
        """Take back an entry that was let in but needed no run, and had counted as `demand` arrivals."""
        self.lowest -= demand
        self._tenants.add(tenant, -demand)
        self.refund(tenant)

    def refund(self, tenant: str, count: int = 1) -> None:
        """Return the tokens of entries that were let in here, but refused by the broker or not offered.

        Only at some moments is there time for another entry. If each refusal cost a token, too few entries would arrive at those
        moments, and batches would not be full."""
        self._bucket.give_back(tenant, count)

    def set_rate(self, rate: float, now: float, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """Set the entries per second to let in; infinite for all. Saved tokens stay the same part of a burst. See `weights`."""
        self._bucket.set_rate(rate, max(rate * BURST_SECONDS, LEAST_BURST) if rate > 0.0 else 0.0, now, weights)

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
            before.higher + weight * (higher - before.higher),
            before.lowest + weight * (lowest - before.lowest),
            self._tenants.average(elapsed, weight),
        )
        self.higher = self.lowest = 0
        self._counted_at = now
        return self.rates
