"""Record of a load test: the outcome of each request, written as it comes. Raw latencies go into flat arrays, which takes a tenth
of a microsecond each. Percentiles come when the load is over."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import fsum, sqrt


class Stream:
    """Outcomes of one tier's requests. Latencies are seconds from the due time to the answer's last byte."""

    __slots__ = ("answered", "failed", "name", "refused", "refused_without_retry_after")

    def __init__(self, name: str) -> None:
        self.name = name
        self.answered = array("d")  # Latencies of answers with a 2xx status.
        self.refused = array("d")  # Latencies of refusals, status 429 or 503.
        self.refused_without_retry_after = 0  # Refusals that did not say when to come back.
        self.failed: Counter[str] = Counter()  # Outcomes but 2xx: status and error code, or the fate of the connection.


class Record:
    """Outcomes and measurements of a load test while it runs, for tiers of these names."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.streams = [Stream(name) for name in tiers]
        self.sent = [0] * len(tiers)  # Requests that have been due, by tier.
        self.dues = array("d")  # Due times of the requests, in seconds from the start.
        self.lags = array("d")  # Seconds by which the generator was late for each request.
        self.mismatches = 0  # 2xx answers that are not the right answer to their request.
        self.mismatched: list[str] = []  # The first few wrong answers.
        self.first_refused = ""  # Text of the first 4xx answer other than 429; empty if there was none.
        self.waited = 0  # Requests for which no connection was free when they were due.
        self.opened = 0  # Connections opened.
        self.peak = 0  # Most connections open at once.
        self.last_answer = 0.0  # Seconds from the start to the last answer of any status.
        self.elapsed = 0.0  # Seconds from the start until every request had its outcome.
        self.cpu = 0.0  # CPU seconds of the generator, user and system.
        self.interrupted = False  # True if the load was stopped early.

    @property
    def variation(self) -> float:
        """Coefficient of variation of the gaps between due times: 0 for equal gaps, about 1 for Poisson."""
        return spacing(self.dues)[1]


def spacing(instants: Sequence[float]) -> tuple[float, float]:
    """Return mean and coefficient of variation of the gaps between ascending times; 0 and 0 without gaps, or without time."""
    gaps = [later - before for before, later in pairwise(instants)]
    mean = fsum(gaps) / len(gaps) if gaps else 0.0
    return mean, sqrt(fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean if mean > 0.0 else 0.0
