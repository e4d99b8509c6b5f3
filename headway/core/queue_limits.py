"""Bounds of a queue, and the size of what is in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import msgspec

from headway.core.fair_queue import BATCH_ROUNDS, LOOKED_AT
from headway.core.weight_estimate import MOST_WEIGHT
from headway.model import CostLine, Entry


class Padding(msgspec.Struct, frozen=True):
    """Cost of a place in a batch of a model that pads all inputs to the longest.

    Attributes:
        longest: mean weight to which inputs were filled up of late.
        fixed: weight that takes as long as one place's share of the fixed part of a full batch.
    """

    longest: float
    fixed: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of a queue.

    They are the number of tiers, the largest batch, the share kept for lower tiers and the most entries waiting. Two
    depths are those from which the lowest tier is refused, and all tiers but the highest; None for as many as can be
    served in time.

    Attributes:
        max_weight: most weight of a batch; 0 where entries are not weighed.
        rows: whether entries have rows or parameters of a call, so that only those of one shape ride together.
        promise: latency in seconds that was promised; 0 for none.
        delayed: share of the entries that may wait for a batch of bulk entries; see `core.bulk`.
        unit: weight of one of the places of a batch; infinite where entries are not weighed.
        padding: what a place costs where the model pads, so that entries of like weight ride together; None elsewhere.
        round_weight: weight that costs a tenant one round; 0 where entries are not weighed, and cost one each.
        least_cost: rounds that one of the places of a batch costs; an entry costs no less, however light.
    """

    tiers: int
    max_batch: int
    reserved_share: float = 0.1
    max_queue: int = 20_000
    shed_at: tuple[int, int] | None = None
    max_weight: int = 0
    rows: bool = False
    promise: float = 0.0
    delayed: float = 0.01
    padding: Padding | None = None
    unit: float = field(init=False, default=math.inf)
    round_weight: float = field(init=False, default=0.0)
    least_cost: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        if self.max_weight:
            object.__setattr__(self, "unit", self.max_weight / self.max_batch)
            rounds = min(self.max_batch, BATCH_ROUNDS)
            object.__setattr__(self, "round_weight", self.max_weight / rounds)
            object.__setattr__(self, "least_cost", rounds / self.max_batch)

    def filling_up(self, line: CostLine | None) -> QueueLimits:
        """Return the bounds of a queue whose model fills inputs up to the longest of a call and takes times on this line; None: of one that does not."""
        if line is None:
            return self
        fixed = min(line.alpha / line.beta / self.max_batch, MOST_WEIGHT) if line.beta else 0.0
        return replace(self, padding=Padding(line.longest, fixed))

    @property
    def weighs(self) -> bool:
        """True if entries are weighed."""
        return self.max_weight > 0 or self.padding is not None

    def counting_rows(self) -> QueueLimits:
        """Return the bounds of a queue whose entries have rows, as many of which fit into a batch as entries of one row.

        Where batches are bounded by weight anyway, entries weigh enough for that; see `headway.core.rows.weight`. Where the
        model pads, entries weigh their length, and have one row each.
        """
        most = self.max_weight if self.padding is not None else self.max_weight or self.max_batch
        return replace(self, max_weight=most, rows=True)

    def shed(self, tier: int, depth: int) -> int:
        """Return the entries by which the queue is too long for one more of a tier; 0 or less when it may come in."""
        if self.shed_at is None or tier == 0:
            return 0
        return depth + 1 - self.shed_at[0 if tier == self.tiers - 1 else 1]

    def weight(self, entry: Entry) -> int:
        """Return the weight with which an entry counts: its own, or that of a full batch if it is heavier, since it runs alone."""
        return min(entry.weight, self.max_weight) if self.max_weight else entry.weight

    def cost(self, entry: Entry) -> float:
        """Return the rounds that the weight of an entry costs its tenant; a batch that is full by number costs as many as any."""
        if self.padding is not None:
            return min(self.padded_cost(entry.weight), LOOKED_AT)
        if not self.max_weight:
            return 1
        return min(max(entry.weight / self.round_weight, self.least_cost), LOOKED_AT)

    def padded_cost(self, weight: float) -> float:
        """Return the rounds that a place costs which is filled up to this weight, where the model pads."""
        padding = self.padding
        return (padding.fixed + weight) / (padding.fixed + padding.longest) if padding is not None else 1.0

    def line_at(self, alpha: float, beta: float, longest: float) -> tuple[float, float]:
        """Return the line of the run time by size, given the usual one, of a batch whose places are filled up to this weight where the model pads."""
        padding = self.padding
        if padding is None:
            return alpha, beta
        each = (alpha + beta * self.max_batch) / (padding.fixed + padding.longest)
        return each * padding.fixed, each * longest / self.max_batch

    def size(self, count: int, weight: float) -> float:
        """Return the size of `count` entries that weigh `weight` together; that of a full batch is `max_batch`.

        It is their number, or the places that their weight takes if these are more. The run time of a batch goes by its
        size, and so does all that is reckoned with run times. Where entries are not weighed it is their number.
        """
        places = weight / self.unit
        return places if places > count else count

    def others(self, entry: Entry) -> float:
        """Return the size of what comes with an entry, which is judged as the last of them."""
        others = entry.count - 1
        return self.size(others, others * self.weight(entry)) if others > 0 else 0

    def fits(self, ahead: float, entry: Entry, batches: float) -> bool:
        """Return True if so many batches hold an entry beside what is ahead of it, of this size."""
        return ahead + self.size(1, self.weight(entry)) <= batches * self.max_batch
