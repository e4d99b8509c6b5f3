"""Estimate of the weight that a function of the target gives an input, from the input's length.

The function runs next to the target, which is too late for the queue. So the queue estimates weights by a line that is fitted
to past results: weight = a + b · octets. Octets are bytes of UTF-8; in any script, a tokenizer cuts these more evenly than
characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headway.model import Value, WeightLine

DECAY = 0.98  # Factor by which the past fades at each new batch, so that about the last 50 count.
MARGIN = 2.0  # Standard deviations of a full batch's weight by which the estimate is raised, so that few batches are too heavy.
SPREAD = 0.5  # Variance of lengths needed to fit a slope. Below it, the line goes through the origin.
MOST_WEIGHT = 2_000_000_000  # Limit on the weight of an input or a batch.
UNKNOWN = WeightLine(0.0, 1.0)  # Line if the function is unknown: each octet weighs 1.


def octets(value: Value) -> int:
    """Return the length of a value in octets of UTF-8."""
    if isinstance(value, str) and not value.isascii():
        return len(value.encode("utf-8", "surrogatepass"))
    return len(value)


def estimated(line: WeightLine, value: Value) -> int:
    """Return an input's weight according to a line; at least 1."""
    weight = line.fixed + line.by_octet * octets(value)
    return int(min(max(weight, 1.0), MOST_WEIGHT))


def mean_line(lines: Iterable[WeightLine]) -> WeightLine | None:
    """Return the mean of several processes' lines, or None if there are none."""
    known = list(lines)
    if not known:
        return None
    return WeightLine(sum(line.fixed for line in known) / len(known), sum(line.by_octet for line in known) / len(known))


class WeightEstimate:
    """One process's estimate of a weight function. The line is fitted by least squares with decaying weights, and raised so
    that a full batch (at most `max_batch` inputs) rarely exceeds `most`, the limit on its weight (0 for none)."""

    def __init__(self, function: str, most: int, max_batch: int) -> None:
        self.function, self.most = function, most
        self.latest: Sequence[int] = ()  # Weights of the inputs of the last batch.
        self._max_batch = max_batch
        self._count = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def observe(self, lengths: Sequence[int], weights: Sequence[int]) -> None:
        self.latest = weights
        self._count = self._count * DECAY + len(weights)
        self._x = self._x * DECAY + sum(lengths)
        self._y = self._y * DECAY + sum(weights)
        self._xx = self._xx * DECAY + sum(length * length for length in lengths)
        self._xy = self._xy * DECAY + sum(x * y for x, y in zip(lengths, weights, strict=True))
        self._yy = self._yy * DECAY + sum(weight * weight for weight in weights)

    @property
    def mean(self) -> float:
        """Mean weight of recent inputs; 0 before the first."""
        return self._y / self._count if self._count else 0.0

    @property
    def line(self) -> WeightLine | None:
        """Line by which to weigh inputs before they run; None before the first run."""
        if not self._count:
            return None
        x, y = self._x / self._count, self.mean
        spread = self._xx / self._count - x * x
        together = self._xy / self._count - x * y
        off = self._yy / self._count - y * y
        if spread <= SPREAD:
            fixed, slope = (0.0, y / x) if x else (y, 0.0)
        else:
            slope = max(together / spread, 0.0)
            fixed, off = y - slope * x, off - slope * together
        full = min(self._max_batch, max(self.most / max(y, 1.0), 1.0))
        margin = MARGIN * math.sqrt(max(off, 0.0) / full) if self.most else 0.0
        return WeightLine(fixed + margin, slope)
