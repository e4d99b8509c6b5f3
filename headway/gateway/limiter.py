"""A gateway's rate limits. Principals have limits, and the lowest tier has one that follows the fleet's capacity.

The broker counts the requests of all gateways, and charges the limits when it enqueues an entry (`MemoryBroker._admit`,
`lua/11_limits.lua`). A gateway only compares limits with the debts known so far, to keep a flood away from the broker.
During an outage, each gateway applies its share of a limit. Invalid requests, for example for an unknown model, never reach
the broker. They count towards the same limits, but each gateway counts only its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from headway import errors
from headway.core import failures, ratelimit
from headway.core.ratelimit import Debts, Over
from headway.core.throttle import Throttle
from headway.model import Entry, Failure, Limit
from headway.ports import QueueCondition

REMEMBERED = 10_000  # Maximum number of sets of limits whose shares are cached.
POLLS = 30  # Minimum number of polls for each allowed request. Longer tasks get one poll per second.
POLLS_AT_ONCE = 60  # Additional burst of polls.
CHARGED = frozenset((
    errors.BAD_REQUEST, errors.NOT_FOUND, errors.FORBIDDEN, errors.IDEMPOTENCY_CONFLICT, errors.REJECTED_BY_POLICY,
))  # fmt: skip
"""Error codes of invalid requests that a gateway answers itself, and charges for."""
OF_LOAD = frozenset(
    (errors.SHED, errors.SERVICE_OVERLOADED, errors.SCARCE)
)  # Refusals due to a lack of workers or memory.


class Limiter:
    """A gateway's limiter for `tiers` tiers. If there are several, the last one is throttled."""

    def __init__(self, tiers: int, clock: Callable[[], float], task_seconds: float = POLLS) -> None:
        self.throttles = defaultdict[str, Throttle](Throttle)  # The lowest tier's, by model. Open until a rate is set.
        self.gateways = 1  # Known number of gateways, including this one.
        self._lowest = tiers - 1
        self._clock = clock
        self._parts: dict[tuple[Limit, ...], tuple[Limit, ...]] = {}
        self._parts_of = 1
        self.debts = Debts()  # Theoretical arrival times by limit id, for requests answered here.
        self._polls = Debts()
        self._polls_each = max(POLLS, math.ceil(task_seconds))

    def parts(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Return this gateway's shares of these limits. They apply while no broker counts for all gateways."""
        if self._parts_of != self.gateways or len(self._parts) >= REMEMBERED:
            self._parts, self._parts_of = {}, self.gateways
        parts = self._parts.get(limits)
        if parts is None:
            parts = self._parts[limits] = tuple(ratelimit.part(limit, self.gateways) for limit in limits)
        return parts

    def owed_by(self, broker: QueueCondition) -> Callable[[Limit], float]:
        """Return a function that returns the seconds owed to a limit, at the broker and here in total."""
        return lambda limit: broker.rate_limit_debt(limit) + self._debt(limit)

    def excess(self, limits: tuple[Limit, ...], broker: QueueCondition) -> Failure | None:
        """Return the failure for a request that exceeds any of these limits, or None. Nothing is charged."""
        owed_to = self.owed_by(broker) if self.debts else broker.rate_limit_debt
        for limit in limits:
            owed = owed_to(limit)
            if owed > 0.0 and (wait := ratelimit.wait(limit, owed)) > 0.0:
                return failures.over(Over(limit, wait))
        return None

    def never(self, limits: tuple[Limit, ...], counted: int) -> Failure | None:
        """Return the failure for a request that never fits, as it counts for more than a limit's burst; None if it can fit."""
        least = min(limits, key=lambda limit: limit.burst)
        several = least.counting > 1  # It belongs to a list that has already been checked.
        return None if several or counted <= max(least.burst, 1.0) else failures.never_within(least, counted)

    def charge(self, limits: tuple[Limit, ...], counting: int = 1) -> None:
        """Charge an invalid request as only one request, even if these limits count it as `counting` requests."""
        now, debts = self._clock(), self.debts
        for limit in limits:
            debts.forget_paid(now)
            debts[limit.id] = max(debts.get(limit.id, now), now) + ratelimit.interval(limit) / counting

    def charge_pages(self, limits: tuple[Limit, ...], pages: int) -> None:
        """Charge each page of a long JSON text as a request, up to the burst of each limit."""
        now, debts = self._clock(), self.debts
        for limit in limits:
            debts.forget_paid(now)
            counted = min(pages, max(limit.burst, 1.0))
            debts[limit.id] = max(debts.get(limit.id, now), now) + counted * ratelimit.interval(limit)

    def refund(self, limits: tuple[Limit, ...]) -> None:
        """Undo a charge, because the broker is going to charge the request."""
        debts = self.debts
        for limit in limits:
            if limit.id in debts:
                debts[limit.id] -= ratelimit.interval(limit)
                self._debt(limit)

    def poll(self, limits: tuple[Limit, ...]) -> Failure | None:
        """Charge a task poll. Returns a failure if that exceeds the limits. Each gateway counts its own polls. A tier's limit doesn't
        apply, because one principal could use it up for all others."""
        now, polls, own = self._clock(), self._polls, self._of_polls(limits)
        charged = ratelimit.charge(own, polls, now)
        if isinstance(charged, Over):
            return failures.over_polls(charged)
        for limit, tat in zip(own, charged, strict=True):
            polls.forget_paid(now)
            polls[limit.id] = tat
        return None

    def charge_polls(self, limits: tuple[Limit, ...], count: int) -> None:
        """Charge a large outcome as `count` more polls, up to the burst of each limit."""
        now, polls = self._clock(), self._polls
        for limit in self._of_polls(limits):
            polls[limit.id] = max(polls.get(limit.id, now), now) + min(count, limit.burst) * ratelimit.interval(limit)

    def _of_polls(self, limits: tuple[Limit, ...]) -> list[Limit]:
        return [
            Limit(limit.id, limit.name, limit.rate * self._polls_each, limit.burst * self._polls_each + POLLS_AT_ONCE)
            for limit in limits
            if limit.name != "tier"
        ]

    def holds_up(self, tier: int) -> bool:
        """Return True for the lowest of several tiers, which is throttled according to the fleet's capacity."""
        return 0 < self._lowest <= tier

    def check(self, entry: Entry, alone: bool, count: int = 1) -> Failure | None:
        """Count a new entry that is within its rate limits. Returns a failure if the fleet lacks the capacity for it,
        otherwise None. `alone`: True if the entry goes to the gateway's own broker, where the fleet's capacity doesn't
        matter. `count`: number of entries to admit together, including this one; 0 if the entry was already admitted along
        with another."""
        throttle = self.throttles[entry.model]
        demand = count if entry.timeout >= throttle.least_seconds else 0
        if (
            entry.tier < self._lowest or not self._lowest
        ):  # If there is only one tier, it is counted but never throttled.
            throttle.higher += demand
        elif count and not alone and (wait := throttle.admit(entry.tenant, self._clock(), count, demand)) > 0.0:
            burst = throttle.burst
            return failures.over_burst(count, burst, wait) if 1 <= burst < count else failures.over_capacity(wait)
        return None

    def _debt(self, limit: Limit) -> float:
        now = self._clock()
        self.debts.forget_paid(now)
        return max(self.debts.get(limit.id, now) - now, 0.0)

    def refused(self, entry: Entry, failure: Failure) -> None:
        """Record that the broker refused an entry, which thus uses no capacity. It counts as demand only if refused due to load."""
        throttle = self.throttles[entry.model]
        demand = 0 if failure.code in OF_LOAD or entry.timeout < throttle.least_seconds else entry.count
        if self.holds_up(entry.tier):
            throttle.give_back(entry.tenant, demand)
        else:
            throttle.higher -= demand

    def forgo(self, model: str, tenant: str, tier: int, count: int) -> None:
        """Release the capacity reserved for `count` entries that were let in but won't be offered."""
        if tier == self._lowest:
            self.throttles[model].refund(tenant, count)

    def left(self, entry: Entry, seconds: float) -> None:
        """Record that an entry's client left after `seconds`. The entry isn't counted as demand if no worker could have answered
        by then. An entry with a dedup key is always counted, because it keeps running."""
        if seconds < self.throttles[entry.model].least_seconds <= entry.timeout and not entry.dedup_keys:
            self.not_run(entry)

    def not_run(self, entry: Entry) -> None:
        """Record that an entry used no capacity, for example because it shared another entry's answer."""
        throttle = self.throttles[entry.model]
        counted = int(entry.timeout >= throttle.least_seconds)
        if entry.tier < self._lowest or not self._lowest:
            throttle.higher -= counted
        else:
            throttle.give_back(entry.tenant, counted)
