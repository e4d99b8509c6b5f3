"""Refusals by rate of one gateway: principals by their limits, the lowest tier by the capacity.

The broker counts the limits for all gateways and charges them with the enqueue. Here they are only compared with the
known debts, so that a flood over a limit is not handed on. While each gateway goes on alone it counts its part of them.

A request that a gateway answers by itself because it is wrong (no JSON, an unknown model) never gets to the broker. It
counts towards the same limits, but is counted here, by each gateway for itself.
"""

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

REMEMBERED = 10_000
"""Most sets of limits whose parts are kept ready."""

POLLS = 30
"""Least polls of tasks for each request that a principal may send: one a second, for as long as a task may take."""
POLLS_AT_ONCE = 60
"""Polls at once beyond those."""

CHARGED = frozenset((
    errors.BAD_REQUEST, errors.NOT_FOUND, errors.FORBIDDEN, errors.IDEMPOTENCY_CONFLICT, errors.REJECTED_BY_POLICY,
))  # fmt: skip
"""Error codes of wrong requests that a gateway answers by itself, and that count as requests."""

OF_LOAD = frozenset((errors.SHED, errors.SERVICE_OVERLOADED, errors.SCARCE))
"""Error codes of what a broker refuses for its load, and would have answered with more workers or room."""


class Limiter:
    """Limiter of one gateway.

    Arguments:
        tiers: number of tiers; the throttle is for the last of several.
        clock: monotonic seconds.
        task_seconds: seconds that a task may take.

    Attributes:
        throttles: throttle of the lowest tier of each model, by its name; open until its rate is set.
        gateways: number of gateways, this one included, as far as is known.
        debts: theoretical arrival time by id of the limit, for what was answered here.
    """

    def __init__(self, tiers: int, clock: Callable[[], float], task_seconds: float = POLLS) -> None:
        self.throttles = defaultdict[str, Throttle](Throttle)
        self.gateways = 1
        self._lowest = tiers - 1
        self._clock = clock
        self._parts: dict[tuple[Limit, ...], tuple[Limit, ...]] = {}
        self._parts_of = 1
        self.debts = Debts()
        self._polls = Debts()
        self._polls_each = max(POLLS, math.ceil(task_seconds))

    def parts(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Parts of limits that this gateway counts, for as long as no broker counts for all."""
        if self._parts_of != self.gateways or len(self._parts) >= REMEMBERED:
            self._parts, self._parts_of = {}, self.gateways
        parts = self._parts.get(limits)
        if parts is None:
            parts = self._parts[limits] = tuple(ratelimit.part(limit, self.gateways) for limit in limits)
        return parts

    def owed_by(self, broker: QueueCondition) -> Callable[[Limit], float]:
        """Make a function that returns the seconds owed to a limit: to the broker, and for what was answered here."""
        return lambda limit: broker.rate_limit_debt(limit) + self._debt(limit)

    def excess(self, limits: tuple[Limit, ...], broker: QueueCondition) -> Failure | None:
        """Return the refusal of a request that is over one of these limits, or None if it may go on. Nothing is charged."""
        owed_to = self.owed_by(broker) if self.debts else broker.rate_limit_debt
        for limit in limits:
            owed = owed_to(limit)
            if owed > 0.0 and (wait := ratelimit.wait(limit, owed)) > 0.0:
                return failures.over(Over(limit, wait))
        return None

    def never(self, limits: tuple[Limit, ...], counted: int) -> Failure | None:
        """Refusal of one request that counts as so many, more than these limits ever let in at once."""
        least = min(limits, key=lambda limit: limit.burst)
        several = least.counting > 1  # Then it is one of a list, which was compared as a whole.
        return None if several or counted <= max(least.burst, 1.0) else failures.never_within(least, counted)

    def charge(self, limits: tuple[Limit, ...], counting: int = 1) -> None:
        """Charge a request that is answered here, because it is wrong.

        Arguments:
            limits: limits of its principal.
            counting: requests as which these limits count it; it is charged as one.
        """
        now, debts = self._clock(), self.debts
        for limit in limits:
            debts.forget_paid(now)
            debts[limit.id] = max(debts.get(limit.id, now), now) + ratelimit.interval(limit) / counting

    def charge_pages(self, limits: tuple[Limit, ...], pages: int) -> None:
        """Charge the pages of a long JSON text, each as a request, up to what each limit bears at once."""
        now, debts = self._clock(), self.debts
        for limit in limits:
            debts.forget_paid(now)
            counted = min(pages, max(limit.burst, 1.0))
            debts[limit.id] = max(debts.get(limit.id, now), now) + counted * ratelimit.interval(limit)

    def refund(self, limits: tuple[Limit, ...]) -> None:
        """Take a charge back: the request goes to the broker after all, which charges it."""
        debts = self.debts
        for limit in limits:
            if limit.id in debts:
                debts[limit.id] -= ratelimit.interval(limit)
                self._debt(limit)

    def poll(self, limits: tuple[Limit, ...]) -> Failure | None:
        """Refusal of a poll by rate; None when it is allowed, and counted. Each gateway counts by itself.

        The limit of a tier does not bound polls: a principal that polls much would keep the others of its tier from
        polling.
        """
        now, polls, own = self._clock(), self._polls, self._of_polls(limits)
        charged = ratelimit.charge(own, polls, now)
        if isinstance(charged, Over):
            return failures.over_polls(charged)
        for limit, tat in zip(own, charged, strict=True):
            polls.forget_paid(now)
            polls[limit.id] = tat
        return None

    def charge_polls(self, limits: tuple[Limit, ...], count: int) -> None:
        """Charge a large outcome that a poll has told, as so many polls more, up to what each limit bears at once."""
        now, polls = self._clock(), self._polls
        for limit in self._of_polls(limits):
            polls[limit.id] = max(polls.get(limit.id, now), now) + min(count, limit.burst) * ratelimit.interval(limit)

    def _of_polls(self, limits: tuple[Limit, ...]) -> list[Limit]:
        """Limits of polls that come with these of requests."""
        return [
            Limit(limit.id, limit.name, limit.rate * self._polls_each, limit.burst * self._polls_each + POLLS_AT_ONCE)
            for limit in limits
            if limit.name != "tier"
        ]

    def holds_up(self, tier: int) -> bool:
        """Whether the fleet's capacity may hold up entries of a tier: the lowest of several."""
        return 0 < self._lowest <= tier

    def check(self, entry: Entry, alone: bool, count: int = 1) -> Failure | None:
        """Refusal of an entry for the fleet's capacity; None when it may go on, and counted.

        Arguments:
            entry: entry that the broker does not know, within its limits.
            alone: whether it goes to a broker of this gateway's own, which the fleet's capacity does not bound.
            count: entries that are let in with it, itself among them; 0 where it was let in with another.
        """
        throttle = self.throttles[entry.model]
        demand = count if entry.timeout >= throttle.least_seconds else 0
        if entry.tier < self._lowest or not self._lowest:  # One tier alone is counted, and never held up.
            throttle.higher += demand
        elif count and not alone and (wait := throttle.admit(entry.tenant, self._clock(), count, demand)) > 0.0:
            burst = throttle.burst
            return failures.over_burst(count, burst, wait) if 1 <= burst < count else failures.over_capacity(wait)
        return None

    def _debt(self, limit: Limit) -> float:
        """Seconds owed to a limit for what was answered here. Requests cost more while there are debts."""
        now = self._clock()
        self.debts.forget_paid(now)
        return max(self.debts.get(limit.id, now) - now, 0.0)

    def refused(self, entry: Entry, failure: Failure) -> None:
        """Note that the broker refuses an entry, which so takes nothing of the capacity.

        What is refused for something else than the load, such as too many inputs for its deadline, was no demand either.
        """
        throttle = self.throttles[entry.model]
        demand = 0 if failure.code in OF_LOAD or entry.timeout < throttle.least_seconds else entry.count
        if self.holds_up(entry.tier):
            throttle.give_back(entry.tenant, demand)
        else:
            throttle.higher -= demand

    def forgo(self, model: str, tenant: str, tier: int, count: int) -> None:
        """Note that `count` entries of a tenant's for a model, in a tier, that were let in are not offered after all."""
        if tier == self._lowest:
            self.throttles[model].refund(tenant, count)

    def left(self, entry: Entry, seconds: float) -> None:
        """Note that the client of an entry that was let in left after so many seconds.

        One that left before any worker could have answered was no demand. Under a dedup key it runs on.
        """
        if seconds < self.throttles[entry.model].least_seconds <= entry.timeout and not entry.dedup_keys:
            self.not_run(entry)

    def not_run(self, entry: Entry) -> None:
        """Note that an entry took nothing of the capacity, such as one that got another's answer."""
        throttle = self.throttles[entry.model]
        counted = int(entry.timeout >= throttle.least_seconds)
        if entry.tier < self._lowest or not self._lowest:
            throttle.higher -= counted
        else:
            throttle.give_back(entry.tenant, counted)
