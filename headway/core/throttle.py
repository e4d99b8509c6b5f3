"""The throttle: limits the lowest tier to the capacity of the fleet that the other tiers leave.

    room  = max(usable − arrivals of higher tiers, reserved share · usable)
    share = the part of it, in entries per second, that one gateway lets in

Higher tiers are counted but never held up: admission limits them by their deadlines. The room is computed from arrivals, not from
what was let in, and from measured batch times, which don't depend on the room. So there is no feedback, and the room settles as fast
as these figures do. A gateway's share is in proportion to its part of the lowest tier's arrivals; only a tenth of the room is divided
evenly, for gateways to which traffic has just moved. All shares together make up the room. A tenant counts once, however many
gateways it uses: its weight at each is the share of its arrivals there.

The throttle is a token bucket rather than GCRA. Both are the same rule (ITU-T I.371, annex A), but tokens keep their worth when the
rate changes. `SharedBucket` is a token bucket that tenants share evenly.

    level of a tenant   what it took and hasn't worked off yet; tenants work theirs off at speeds in proportion to their weights
    level               sum over all tenants; it falls at the rate, whoever asks, so that no token is lost

A tenant may take while its own level is at most what is left of two bursts. So a tenant alone gets a burst and then the rate. Of n
tenants that want all they can get, each ends up with a share of 1/(n + 1), and the next tenant finds room (see
`core/queue_limits.py`). A tenant without a level may take more, up to MOST. So if it asks for less than its part of the rate,
it is always let in.

A weight is 1 unless set. Levels are counted in bursts, so a change of the rate leaves the filled part of the bucket as it is.
Levels are worked off by generalised processor sharing in virtual time (Parekh and Gallager, IEEE/ACM Transactions on
Networking, 1993): each tenant has a virtual instant at which it will be done. The more weight there is, the slower the virtual
clock runs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.model import Capacity

NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})  # All tenants have weight 1.
ROUNDING = 1e-9  # Part of a burst by which mere rounding may change a level.
FULL = 2.0  # Level of all tenants, in bursts, up to which a tenant with a level may take more.
MOST = 4.0  # Level of all tenants, in bursts, up to which a tenant without a level may take.
LEAST_REFILL = 0.1  # Smallest rate, in tokens per second, for computing waits.
STALE = 64  # The order of tenants may contain this many outdated places before it is swept.


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
        self._order: list[tuple[float, str]] = []  # Heap of these instants. Some are outdated or too early.

    @property
    def level(self) -> float:
        """Level of all tenants together, as a multiple of the burst."""
        return self._sum - self._weight * self._virtual

    def take(self, tenant: str, count: int, now: float) -> float:
        """Take `count` tokens and return 0. If there are too few, take none and return the seconds until there are enough."""
        if self.rate == math.inf:
            return 0.0
        self._work_off(now)
        if not self.burst:
            return count / LEAST_REFILL
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
        return seconds * self.burst / max(self.rate, LEAST_REFILL)

    def give_back(self, tenant: str, count: int) -> None:
        """Return up to `count` tokens that a tenant took, limited by its level."""
        if tenant in self._done and self.burst:
            own = (self._done[tenant] - self._virtual) * self._weights.get(tenant, 1.0)
            self._set(tenant, own - count / self.burst)

    def set_rate(self, rate: float, burst: float, now: float, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """Set the rate in tokens per second, the tokens of a burst, and tenants' weights, at most 1. An infinite rate forgets
        all levels."""
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
        self._virtual = self._sum = self._weight = 0.0
        self._order.clear()


MOST_TENANTS = 1000  # Limit on tenants that are counted separately. All others count as one.
MOST_TOLD = 16  # Limit on tenants whose averages are reported.
LEAST_RATE = 0.01  # Arrivals per second below which a tenant is forgotten.
OTHER_TENANTS = ""  # Name for all further tenants. No tenant has it.
BURST_SECONDS = 1.0  # As much as the rate gives in this many seconds may come at once.
LEAST_BURST = 10.0  # At least this many requests may come at once, however low the rate, which is a rough average.
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
    """Return this gateway's share of the arrivals of each tenant that also uses other gateways, from LEAST_WEIGHT to 1."""
    elsewhere = _together(others)
    return {
        tenant: max(rate / (rate + elsewhere[tenant]), LEAST_WEIGHT)
        for tenant, rate in own.tenants.items()
        if rate > 0.0 and elsewhere.get(tenant, 0.0) > 0.0
    }


def _together(gateways: Sequence[ArrivalRates]) -> dict[str, float]:
    whole: dict[str, float] = {}
    for gateway in gateways:
        for tenant, rate in gateway.tenants.items():
            if rate > 0.0:
                whole[tenant] = whole.get(tenant, 0.0) + rate
    return whole


def _unknown(rates: ArrivalRates) -> Iterator[tuple[float, float]]:
    """Yield rates of a gateway's unknown tenants in the lowest tier, with the number of tenants at each. An unknown tenant is assumed to
    send as much as the known tenant that sends least. If no tenant is known, one tenant is assumed to send all."""
    rest = rates.lowest - math.fsum(rates.tenants.values())
    least = min(rates.tenants.values(), default=rates.lowest)
    if rest > 0.0 and least > 0.0:
        yield least, rest / least


def _fair(rest: float, groups: list[tuple[float, float]]) -> float:
    """Return the one rate to which all tenants are limited so that together they get `rest`. A tenant that asks for less gets what it asks
    for. `groups` has pairs of a rate and the number of tenants that ask for it. The result is infinite if `rest` is enough for all."""
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
        self.higher = 0  # Arrivals of higher tiers that needed a run, since the last `count`. Set by the gateway.
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
        """Let in `count` entries of a tenant and return 0, or refuse them all and return the seconds until they would be let
        in. More than `burst` entries are never let in. `demand` entries count as arrivals; None for all."""
        counted = count if demand is None else demand
        self.lowest += counted
        self._tenants.add(tenant, counted)
        return self._bucket.take(tenant, count, now)

    def give_back(self, tenant: str, demand: int = 1) -> None:
        """Take back an entry that was let in and counted as `demand` arrivals, but needed no run."""
        self.lowest -= demand
        self._tenants.add(tenant, -demand)
        self.refund(tenant)

    def refund(self, tenant: str, count: int = 1) -> None:
        """Return the tokens of entries that were let in here, but refused by the broker or not offered. Otherwise, too few
        would be let in even if there is time for more, and batches would not be full."""
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
