"""Record of a simulation, in flat arrays, so that a million requests fit easily."""

from __future__ import annotations

import math
from array import array
from collections import Counter

from headway.simulator.scenario import Scenario

REFUSED, EXPIRED, FAILED = "refused", "expired", "failed"


class Record:
    """Outcomes of the requests that came, and the batches that left, after the scenario's warm-up."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.arrived = array("d")  # Instants at which the answered requests came.
        self.latency = array("d")  # Latencies of the answered requests, in seconds.
        self.tier = array("H")  # Tiers of the answered requests, by index.
        self.offered = [0] * len(scenario.mix)  # Requests that came, by tier.
        self.lost: Counter[tuple[str, str, int]] = Counter()  # Requests without an answer, by kind, reason and tier.
        self.poisonous = 0  # Requests that fail any batch they are in, and so can never be answered.
        self.harmed = 0  # Harmless requests without an answer.
        self.left_at = array("d")  # Instants at which batches left.
        self.size = array("L")  # Entries of those batches.
        self.bulk = 0  # Bulk entries answered between the warm-up and the end of arrivals.
        self.filled = 0.0  # Fill of all batches, added up.
        self.shard = array("H")  # Shards that the batches left.
        self.stolen = 0  # Batches taken by workers of another home shard.
        self.reasons: Counter[str] = Counter()  # Reasons why batches left.
        self.busy = 0.0  # Seconds that GPUs ran after the warm-up, without overhead.
        self.down = 0.0  # Seconds that workers were dead after the warm-up.
        self.died_at = array("d")  # Instants at which workers died.
        self.retried = 0  # Entries that were queued again as their batch failed.
        self.estimates = (0.0, 0.0, 0.0, 0.0)  # The queue's at the last request: λ per second; α, β, deviation in s.
        self._last = -math.inf
        self._gaps = 0
        self._gap_sum = 0.0
        self._gap_squares = 0.0

    @property
    def deaths(self) -> int:
        return len(self.died_at)

    @property
    def unharmed(self) -> float:
        """Share of the answerable requests that were answered."""
        good = sum(self.offered) - self.poisonous
        return 1.0 - self.harmed / good if good else 1.0

    def came(self, tier: int, now: float, poison: bool = False) -> None:
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
        if arrived >= self.scenario.warmup:
            self.arrived.append(arrived)
            self.latency.append(now - arrived)
            self.tier.append(tier)

    def bulk_answered(self, count: int, now: float) -> None:
        if self.scenario.warmup <= now < self.scenario.duration:
            self.bulk += count

    def lose(self, kind: str, reason: str, tier: int, arrived: float, poison: bool = False) -> None:
        if arrived >= self.scenario.warmup:
            self.lost[kind, reason, tier] += 1
            self.harmed += not poison

    def departed(
        self, size: int, reason: str, now: float, shard: int = 0, stolen: bool = False, fill: float | None = None
    ) -> None:
        """Note a batch that left. `fill` is its share of a full batch, if entries are weighed."""
        if self.scenario.warmup <= now < self.scenario.duration:
            self.left_at.append(now)
            self.size.append(size)
            self.filled += size / self.scenario.max_batch if fill is None else fill
            self.shard.append(shard)
            self.stolen += stolen
            self.reasons[reason] += 1

    def ran(self, since: float, seconds: float) -> None:
        """Note that a GPU ran for `seconds`. Only the part between the warm-up and the end of arrivals counts."""
        self.busy += self._within(since, since + seconds)

    def was_down(self, since: float, until: float) -> None:
        self.down += self._within(since, until)

    @property
    def gap_variation(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 0 even, 1 Poisson, more is burstier."""
        if self._gaps < 2 or self._gap_sum <= 0.0:
            return 0.0
        return math.sqrt(max(0.0, self._gaps * self._gap_squares / self._gap_sum**2 - 1.0))

    def _within(self, since: float, until: float) -> float:
        return max(0.0, min(until, self.scenario.duration) - max(since, self.scenario.warmup))
