"""Calls of a target in the child process: what they cost is learnt here, and batches of a model that pads are cut into them."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.batch_cost import BatchCost, is_news
from headway.core.weight_estimate import octets
from headway.model import CostLine, CostShape, Value

SURE = 64
"""Calls after which most are no longer looked at, where every input takes the same time."""
LOOKED_AT = 8
"""One in so many calls is looked at then."""


class Calls:
    """Calls of one target.

    Arguments:
        whole: the target takes each batch in one call.
    """

    def __init__(self, whole: bool) -> None:
        self._cost = BatchCost()
        self._whole = whole
        self._seen = 0
        self._told: CostLine | None = None

    @property
    def cuts(self) -> bool:
        """True while batches may be cut into several calls."""
        return not self._whole and self._cost.cuts

    def parts(self, weights: Sequence[int]) -> list[list[int]]:
        """Calls that a batch of inputs of these weights is run in: places of the inputs of each."""
        return self._cost.calls(weights) if self.cuts and weights else [list(range(len(weights)))]

    def ran(self, inputs: Sequence[Value], seconds: float) -> None:
        """Learn from a batch that ran in one call."""
        self._seen += 1
        if self._seen > SURE and self._cost.shape is CostShape.NUMBER and self._seen % LOOKED_AT:
            return
        weights = [*map(octets, inputs)]
        self.ran_in_parts(weights, [(weights, seconds)])

    def ran_in_parts(self, weights: Sequence[int], calls: Sequence[tuple[Sequence[int], float]]) -> None:
        """Learn from a batch of these weights that ran in calls of inputs of such weights, which took so many seconds each."""
        if weights:
            self._cost.note_batch(weights)
        for part, seconds in calls:
            self._cost.observe(part, seconds)

    def news(self) -> CostLine | None:
        """Line that holds, if it is another one than was told last."""
        line = self._cost.line
        if not is_news(line, self._told) or (self._told is None and line.shape is CostShape.NUMBER):
            return None
        self._told = line
        return line
