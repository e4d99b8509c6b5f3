"""Record of a simulation. It consists of flat arrays, so that a million requests easily fit into memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter

from headway.simulator.scenario import Scenario

REFUSED, EXPIRED, FAILED = "refused", "expired", "failed"


class Record:
    """The requests that arrived and the batches that ran after the scenario's warm-up."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.arrived = array("d")  # Arrival times of the answered requests.
        self.latency = array("d")  # Latencies of the answered requests, in seconds.
        self.tier = array("H")  # Tiers of the answered requests, by index.
        self.offered = [0] * len(scenario.mix)  # Requests that arrived, by tier.
        self.lost: Counter[tuple[str, str, int]] = Counter()  # Requests without an answer, by kind, reason and tier.
        self.left_at = array("d")  # Start times of batches.
        self.size = array("L")  # Entries of those batches.
        self.bulk = 0  # Bulk entries answered between the warm-up and the end of arrivals.
        self.filled = 0.0  # Sum of the fill of all batches.
        self.shard = array("H")  # Shards from which batches were claimed.
        self.stolen = 0  # Batches claimed by workers with another home shard.
        self.reasons: Counter[str] = Counter()  # Reasons why batches started.
        self.busy = 0.0  # Seconds that GPUs ran after the warm-up, without overhead.
        self.down = 0.0  # Seconds that workers were dead after the warm-up.
        self.died_at = array("d")  # Times at which workers died.
        self.retried = 0  # Entries that were queued again because their batch failed.
        self.estimates = (0.0, 0.0, 0.0, 0.0)  # The queue's last λ (per second), α, β and deviation (in seconds).
        self._last = -math.inf
        self._gaps = 0
        self._gap_sum = 0.0
        self._gap_squares = 0.0

    @property
    def deaths(self) -> int:
        return len(self.died_at)

    def came(self, tier: int, now: float) -> None:
        if now < self.scenario.warmup:
            return
        self.offered[tier] += 1
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

    def lose(self, kind: str, reason: str, tier: int, arrived: float) -> None:
        if arrived >= self.scenario.warmup:
            self.lost[kind, reason, tier] += 1

    def departed(self, size: int, reason: str, now: float, shard: int, stolen: bool, fill: float) -> None:
        """Record the start of a batch. `fill` is its share of a full batch, by weight if entries are weighed."""
        if self.scenario.warmup <= now < self.scenario.duration:
            self.left_at.append(now)
            self.size.append(size)
            self.filled += fill
            self.shard.append(shard)
            self.stolen += stolen
            self.reasons[reason] += 1

    def ran(self, since: float, seconds: float) -> None:
        """Record that a GPU ran for `seconds`. Only the part between the warm-up and the end of arrivals counts."""
        self.busy += self._within(since, since + seconds)

    def was_down(self, since: float, until: float) -> None:
        self.down += self._within(since, until)

    @property
    def gap_variation(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 0 if regular, 1 for Poisson, higher if burstier."""
        if self._gaps < 2 or self._gap_sum <= 0.0:
            return 0.0
        return math.sqrt(max(0.0, self._gaps * self._gap_squares / self._gap_sum**2 - 1.0))

    def _within(self, since: float, until: float) -> float:
        return max(0.0, min(until, self.scenario.duration) - max(since, self.scenario.warmup))
