"""Retries: a failed batch runs again, is searched for its culprit, or is given up.

    raised, refused ───────────────────────▶ halves … ──▶ one alone ──fails──▶ dead
    crashed, hung ──▶ whole again ──fails──▶ ┘
    remote ──▶ whole again ──fails──▶ whole again ──fails──▶ dead

An exception is an input's fault and would be raised again, so such a batch is searched immediately; see `core.suspects`. A
crash or hang may have another cause, so such a batch runs whole once more before it is searched. A failure of a remote API
itself says nothing about the inputs, so such a batch stays whole; many small calls would only harm a struggling API. In the
last two cases, each further run is charged to the retry budgets of the entries' tenants, so that an outage isn't amplified.

A backend that doesn't start, or dies before it has received a batch, is restarted after increasingly long pauses. Only a
finished batch, or a few seconds of staying alive, shows that it is healthy. A backend that dies in a batch is restarted
immediately, as the rules above limit how often that happens, and others may be waiting for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.core.ratelimit import ROUNDING
from headway.model import Cause

Rng = Callable[[], float]  # Random numbers, uniform in [0, 1).
MAX_ATTEMPTS = 3  # Runs of an entry before it is given up, unless it raised an exception.
RAISES = 2  # Runs after which an entry that raised an exception alone is given up.
DEATHS_ALONE = 2  # Failed runs alone after which any other entry is given up. Next to others, it may be innocent.
BACKOFF_BASE = 0.010  # Seconds before the first retry. Doubles with each retry.
BACKOFF_CAP = 0.5
BUDGET_RATIO = 0.2  # Retries that each first run earns.
BUDGET_RESERVE = 64.0  # Limit on saved retries, which is also the initial number.
BUDGET_TRICKLE = 1.0  # Retries earned per second, whatever the traffic.
BUDGET_RUNS, BUDGET_TRICKLE_RUNS = 10.0, 0.1  # Smallest reserve and trickle, in multiples of the largest batch.
SEARCHED = frozenset(
    (Cause.RAISED, Cause.REFUSED)
)  # An input's fault: the batch is searched, and retries cost nothing.
NEVER_SPLIT = frozenset((Cause.REMOTE,))  # Unrelated to inputs: the batch runs again, or is given up, as a whole.
MOST_BUDGETS = 10_000  # Limit on tenants whose budgets are kept.
BLAMED = frozenset((Cause.RAISED, Cause.REFUSED, Cause.CRASHED, Cause.TIMEOUT))  # Causes blamed on a lone input.
FATAL = frozenset((Cause.CRASHED, Cause.TIMEOUT))  # Causes that also end the worker.


def is_over(cause: Cause, size: int, attempts: int, alone: int) -> bool:
    """Return True if `size` entries of a failed batch are given up. `alone` counts the attempts with only one entry."""
    if cause in NEVER_SPLIT:
        return attempts >= MAX_ATTEMPTS
    if size > 1:
        return False
    if cause in SEARCHED:
        return alone > 0 and attempts >= RAISES
    return alone >= DEATHS_ALONE and attempts >= MAX_ATTEMPTS


def stays_whole(cause: Cause, size: int, failures: int) -> bool:
    """Return True if a batch that failed for the `failures`th time runs again undivided."""
    return cause in NEVER_SPLIT or (cause not in SEARCHED and (size == 1 or failures <= 1))


def backoff(failures: int, rng: float) -> float:
    """Return the seconds to wait before a retry: exponential with equal jitter (Brooker, "Exponential backoff and jitter", 2015).
    The wait is between half and all of BACKOFF_BASE · 2^(failures−1), capped. `rng` is uniform in [0, 1)."""
    whole = min(BACKOFF_BASE * 2.0 ** min(failures - 1, 16), BACKOFF_CAP)
    return whole * (0.5 + 0.5 * rng)


class RetryBudgets:
    """Retry budgets of tenants, which keep retries a small share of the work, so that an outage isn't amplified.

    Each first run of an entry earns BUDGET_RATIO of a retry, and each second a trickle, up to a reserve (as in Finagle's
    RetryBudget, and in "Addressing Cascading Failures", "Site Reliability Engineering", ch. 22). The reserve pays for a few
    culprits in batches of size `largest`. What a tenant has spent is a debt, stored as the time at which it is paid off.
    Without debt, nothing is stored."""

    __slots__ = ("_each", "_paid_at", "_reserve")

    def __init__(self, largest: int) -> None:
        self._each = 1.0 / max(BUDGET_TRICKLE, BUDGET_TRICKLE_RUNS * largest)  # Seconds that pay for one retry.
        self._reserve = self._each * max(BUDGET_RESERVE, BUDGET_RUNS * largest)  # Maximum debt in seconds.
        self._paid_at: dict[str, float] = {}

    def earn(self, tenants: Iterable[str], now: float) -> None:
        if not self._paid_at:
            return
        for tenant in tenants:
            if tenant in self._paid_at:
                self._paid_at[tenant] -= BUDGET_RATIO * self._each
                if self._paid_at[tenant] <= now:
                    del self._paid_at[tenant]

    def spend(self, tenant: str, count: int, now: float) -> bool:
        """Spend `count` retries of a tenant at time `now`. Returns False, and spends none, if the tenant has fewer."""
        paid_at = max(self._paid_at.get(tenant, now), now) + count * self._each
        if paid_at - now > self._reserve + ROUNDING:
            return False
        if (
            tenant not in self._paid_at and len(self._paid_at) >= MOST_BUDGETS
        ):  # Drop the one that has owed the longest.
            del self._paid_at[next(iter(self._paid_at))]
        self._paid_at[tenant] = paid_at
        return True


FIRST_PAUSE = 0.25  # Seconds of the first pause. Doubles with each pause.
PAUSE_CAP = 30.0  # Longest pause in seconds.
KILLED_CAP = 2.0  # The same after a start that was killed from outside: nothing is wrong with the target.
STEADY_LIFE = 5.0  # A backend that has lived for this many seconds is healthy.


class RestartPauses:
    """Counts failed starts in a row."""

    def __init__(self) -> None:
        self._failures = 0

    def well(self) -> None:
        self._failures = 0

    def start_failed(self, killed: bool) -> float:
        """Return the seconds to wait after a failed start. They stay short if the backend was killed from outside."""
        self._failures += 1
        return min(FIRST_PAUSE * 2.0 ** min(self._failures - 1, 16), KILLED_CAP if killed else PAUSE_CAP)

    def died_idle(self, lived: float) -> float:
        """Return the seconds to wait after a backend that lived for `lived` seconds died while idle; 0 the first time."""
        if lived >= STEADY_LIFE:
            self._failures = 0
            return 0.0
        self._failures += 1
        return min(FIRST_PAUSE * 2.0 ** min(self._failures - 2, 16), PAUSE_CAP) if self._failures > 1 else 0.0
