"""What happened in a simulation, as it happened: flat arrays, so that a million requests fit easily."""

from __future__ import annotations

import math
from array import array
from collections import Counter

from headway.simulator.scenario import Scenario

REFUSED, EXPIRED, FAILED = "refused", "expired", "failed"


class Record:
    """Outcomes of requests by the instant they came, and departures by the instant they left.

    Arguments:
        scenario: what is simulated; its warm-up is left out of everything.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.arrived = array("d")
        """Of each answered request, the instant it came."""
        self.latency = array("d")
        """Of each answered request, seconds until its answer."""
        self.tier = array("H")
        """Of each answered request, the index of its tier."""
        self.offered = [0] * len(scenario.mix)
        """Requests that came, by tier."""
        self.lost: Counter[tuple[str, str, int]] = Counter()
        """Requests that got no answer, by kind (refused, expired or failed), reason and tier."""
        self.poisonous = 0
        """Requests that make any batch they are in fail; nobody can answer them."""
        self.harmed = 0
        """Other requests that got no answer."""
        self.left_at = array("d")
        """Of each departure, its instant."""
        self.size = array("L")
        """Of each departure, its entries."""
        self.shard = array("H")
        """Of each departure, the shard that it left."""
        self.stolen = 0
        """Departures with a worker that is at home in another shard."""
        self.reasons: Counter[str] = Counter()
        """Why batches left."""
        self.busy = 0.0
        """Seconds that GPUs ran, by batches that left after the warm-up; overhead not counted."""
        self.down = 0.0
        """Seconds that workers were dead, after the warm-up."""
        self.deaths = 0
        """Workers that died."""
        self.retried = 0
        """Entries that were queued again because their batch failed."""
        self.estimates = (0.0, 0.0, 0.0, 0.0)
        """λ in requests per second; α, β and the deviation of a batch's time in seconds, as the queue believed them
        when the last request came."""
        self._last = -math.inf
        self._gaps = 0
        self._gap_sum = 0.0
        self._gap_squares = 0.0

    @property
    def unharmed(self) -> float:
        """Share of the requests that could be answered, and were."""
        good = sum(self.offered) - self.poisonous
        return 1.0 - self.harmed / good if good else 1.0

    def came(self, tier: int, now: float, poison: bool = False) -> None:
        """A request came."""
        if now < self.scenario.warmup:
            return
        self.offered[tier] += 1
        self.poisonous += poison
        gap = now - self._last
        self._last = now
        if gap < math.inf:
            self._gaps += 1
            self._gap_sum += gap
            self._gap_squares += gap * gap

    def answered(self, tier: int, arrived: float, now: float) -> None:
        """A request was answered."""
        if arrived >= self.scenario.warmup:
            self.arrived.append(arrived)
            self.latency.append(now - arrived)
            self.tier.append(tier)

    def lose(self, kind: str, reason: str, tier: int, arrived: float, poison: bool = False) -> None:
        """A request ended without an answer."""
        if arrived >= self.scenario.warmup:
            self.lost[kind, reason, tier] += 1
            self.harmed += not poison

    def departed(self, size: int, reason: str, now: float, shard: int = 0, stolen: bool = False) -> None:
        """A batch left."""
        if self.scenario.warmup <= now < self.scenario.duration:
            self.left_at.append(now)
            self.size.append(size)
            self.shard.append(shard)
            self.stolen += stolen
            self.reasons[reason] += 1

    def ran(self, since: float, seconds: float) -> None:
        """A GPU ran for `seconds`; counts what falls between the warm-up and the end of arrivals."""
        self.busy += self._within(since, since + seconds)

    def was_down(self, since: float, until: float) -> None:
        """A worker was dead between two instants."""
        self.down += self._within(since, until)

    @property
    def gap_variation(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 0 even, 1 Poisson, more is burstier."""
        if self._gaps < 2 or self._gap_sum <= 0.0:
            return 0.0
        return math.sqrt(max(0.0, self._gaps * self._gap_squares / self._gap_sum**2 - 1.0))

    def _within(self, since: float, until: float) -> float:
        return max(0.0, min(until, self.scenario.duration) - max(since, self.scenario.warmup))
