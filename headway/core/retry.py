"""What becomes of a batch that failed: whole again, then halves, until the culprit stands alone.

    whole (first run) ──fails──▶ whole again ──fails──▶ halves ──a half fails──▶ its halves … ──▶ one alone ──fails──▶ dead

What a remote API failed of by its own fault says nothing of the inputs: such a batch stays whole, so that one batch never
becomes many calls to an API that is in trouble.

The entries of a failed batch stay together and never ride with others again, so an input that crashes a
worker hurts nobody new. Only the one that fails alone is charged. This is adaptive group testing by
binary splitting (Hwang, "A method for detecting all defective members in a population by group testing",
JASA 67, 1972): one culprit among n costs about 2·log₂ n runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.model import Cause

MAX_ATTEMPTS = 3
"""Runs an entry gets on its own before it is given up: the first and two retries."""
NEVER_SPLIT = frozenset([Cause.REMOTE])
"""Causes that no input has to do with: a batch that failed of one is run again whole, or given up whole."""
BACKOFF_BASE = 0.010
"""Seconds before the first retry; doubles with each."""
BACKOFF_CAP = 0.5
BUDGET_RATIO = 0.2
"""Retries that each first run earns,"""
BUDGET_RESERVE = 64.0
"""most that are saved up, and what is there at first,"""
BUDGET_TRICKLE = 1.0
"""and what each second earns, whatever the traffic;"""
BUDGET_RUNS, BUDGET_TRICKLE_RUNS = 10.0, 0.1
"""but of the last two at least so many times the largest batch."""


@dataclass(frozen=True, slots=True)
class Again:
    """Run these parts again, each by itself: index ranges [start, end) of the failed batch."""

    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Dead:
    """All of the batch failed for the last time: one entry, or several that stay together."""


def plan(size: int, failures: int, attempts: int, cause: Cause) -> Again | Dead:
    """What to do with a batch that has just failed.

    Arguments:
        size: entries in it.
        failures: how often it has failed in this composition or as part of a larger one, this time included.
        attempts: most claims any of its entries has had.
        cause: what it failed of this time.
    """
    if size == 1 or cause in NEVER_SPLIT:
        return Dead() if attempts >= MAX_ATTEMPTS else Again(((0, size),))
    if failures <= 1:
        return Again(((0, size),))
    middle = size // 2
    return Again(((0, middle), (middle, size)))


def backoff(failures: int, dice: float) -> float:
    """Seconds to wait before a retry: exponential with equal jitter (Brooker, "Exponential backoff and
    jitter", 2015), between half and the whole of BACKOFF_BASE · 2^(failures−1), capped.

    Arguments:
        failures: so far, 1 or more.
        dice: uniform in [0, 1).
    """
    whole = min(BACKOFF_BASE * 2.0 ** min(failures - 1, 16), BACKOFF_CAP)
    return whole * (0.5 + 0.5 * dice)


class RetryBudget:
    """Keeps retries a small share of the work, so that an outage is not amplified.

    Counted in entries. Each first run of an entry earns `ratio` of a retry and each second a trickle, up to
    `reserve` (as Finagle's RetryBudget, and "Addressing Cascading Failures" in "Site Reliability Engineering",
    ch. 22).

    Arguments:
        ratio: retries earned per first run.
        reserve: most that can be saved up; also what is there at first.
        trickle: retries earned per second whatever the traffic.
    """

    def __init__(
        self, ratio: float = BUDGET_RATIO, reserve: float = BUDGET_RESERVE, trickle: float = BUDGET_TRICKLE
    ) -> None:
        self._ratio, self._reserve, self._trickle = ratio, reserve, trickle
        self._saved = reserve
        self._last: float | None = None

    @classmethod
    def for_batches(cls, largest: int) -> RetryBudget:
        """One that can find a few culprits in batches of up to `largest` entries before it has earned anything.

        Finding one among n re-runs about 3n entries: all, both halves, and half of what is left each time.
        """
        return cls(
            reserve=max(BUDGET_RESERVE, BUDGET_RUNS * largest),
            trickle=max(BUDGET_TRICKLE, BUDGET_TRICKLE_RUNS * largest),
        )

    def earn(self, count: int) -> None:
        """So many entries run for the first time."""
        self._saved = min(self._saved + count * self._ratio, self._reserve)

    def spend(self, count: int, now: float) -> bool:
        """Take `count` retries at instant `now`; False when they are not there (then none is taken)."""
        if self._last is not None:
            self._saved = min(self._saved + (now - self._last) * self._trickle, self._reserve)
        self._last = now
        if self._saved < count:
            return False
        self._saved -= count
        return True
