"""Pace of one slot in full batches, learnt from the batches that it ran itself.

Slots differ, as cards are mixed, and one may get hot. A line through all batches would mistake "slow card, larger batch" for the
cost of an input. And if a batch takes as long as its longest input, no line fits from one input to a full batch. So each slot has
figures of its own. Once batches of nearly the largest size have been seen, they alone say how long a full one takes. Before that,
it is the estimate from the start-up batches, scaled by how much longer later batches took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.service_model import REACH, ServiceModel
from headway.core.warm_up import WarmUpRun

NEAR = 0.75  # Minimum share of the largest batch from which a batch counts as nearly full.
DECAY = 0.98  # Weight of the past at each nearly full batch, so that about the last 50 count.
RUN = 6  # Nearly full batches in a row, all much slower or all much faster than the mean, that show a changed slot.
SEEN = 2.0  # Weight of nearly full batches from which they say more than the line.
LEAST = 12.0  # Weight of nearly full batches from which the pace may count as measured.
TOLERANCE = 0.1  # Limit on the relative error, with 95 % confidence, of a pace that counts as measured.
KEPT_TOLERANCE = 0.15  # Relative error at which a pace stops counting as measured, larger so that it doesn't flip.
CONFIDENCE = 2.5  # Standard errors in a 95 % confidence interval for few values, whose spread is uncertain, too.
DOUBT = 0.5  # Possible error of the seconds added to a batch that wasn't quite full, as a share of them.


class Average:
    """Exponentially weighted mean of values, of which there must be one, with the variance around it."""

    __slots__ = ("_decay", "_sum", "_sum_of_squares", "_weights_squared", "weight")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.weight = self._weights_squared = self._sum = self._sum_of_squares = 0.0

    def add(self, value: float) -> None:
        decay = self._decay
        self.weight = self.weight * decay + 1.0
        self._weights_squared = self._weights_squared * decay * decay + 1.0
        self._sum = self._sum * decay + value
        self._sum_of_squares = self._sum_of_squares * decay + value * value

    @property
    def mean(self) -> float:
        return self._sum / self.weight

    @property
    def deviation(self) -> float:
        return math.sqrt(max(self._sum_of_squares / self.weight - self.mean**2, 0.0))

    def error_of(self, deviation: float) -> float:
        return deviation * math.sqrt(self._weights_squared) / self.weight


class SlotPace:
    """Pace of one slot, whose largest batch has size `max_batch`."""

    __slots__ = ("_full", "_max", "_ratio", "_run", "_shift", "_warm", "estimated", "line")

    def __init__(self, max_batch: int) -> None:
        self.estimated = True  # True if too few nearly full batches were seen to be sure of the pace.
        self._max = max_batch
        self.line = ServiceModel()  # Run time by size, through all batches it ran.
        self._warm: ServiceModel | None = None  # Line through the batches of the start, if the largest was among them.
        self._ratio = Average(DECAY)  # Run times of batches relative to that line.
        self._full, self._shift = Average(DECAY), Average(DECAY)  # Nearly full batches as if full, and what was added.
        self._run: list[float] = []  # Their last seconds, if these are far from the mean on one side.

    def warmed(self, runs: Sequence[WarmUpRun]) -> None:
        """Learn from a start's batches how much longer a full one takes than a smaller one."""
        if runs and max(runs)[0] >= self._max:
            self._warm = ServiceModel()
            self._warm.warm_up(runs)
            self._ratio = Average(DECAY)

    def observe(self, size: float, seconds: float) -> None:
        self.line.observe(size, seconds)
        if self._warm is not None and (foretold := self._warm.seconds(size)) > 0.0:
            self._ratio.add(seconds / foretold)
        if size >= NEAR * self._max:
            shift = self.line.beta * (self._max - size)
            self._shift.add(shift)
            self._add(seconds + shift)
            self.estimated = not self._is_sure()

    @property
    def items_per_second(self) -> float:
        """Entries per second in full batches; 0 if unknown."""
        seconds = self._full_seconds()
        return self._max / seconds if seconds > 0.0 else 0.0

    def _add(self, seconds: float) -> None:
        """Add a nearly full batch. If a run of them shows that the slot changed, forget earlier ones."""
        full, run = self._full, self._run
        full.add(seconds)
        distance = seconds - full.mean
        if abs(distance) <= max(TOLERANCE * full.mean, full.deviation):
            run.clear()
            return
        if run and (run[-1] > full.mean) is not (distance > 0.0):
            run.clear()
        run.append(seconds)
        if len(run) >= RUN:
            self._full = Average(DECAY)
            for nearly_full in run:
                self._full.add(nearly_full)
            run.clear()

    def _is_sure(self) -> bool:
        full = self._full
        if full.weight < LEAST:
            return False
        error = CONFIDENCE * full.error_of(full.deviation) + DOUBT * self._shift.mean
        return error <= (TOLERANCE if self.estimated else KEPT_TOLERANCE) * full.mean

    def _full_seconds(self) -> float:
        """Return the run time of a full batch; 0 if unknown. Without a warm-up of that size a line through small batches is
        believed up to some multiple of theirs only, as in `core.capacity.pace`."""
        if self._full.weight >= SEEN:
            return self._full.mean
        if self._warm is not None:
            return self._warm.seconds(self._max) * (self._ratio.mean if self._ratio.weight else 1.0)
        line = self.line
        return line.alpha + line.beta * min(self._max, line.largest * REACH)
