"""Slots of different speed. A slot's factor is how many times as long a batch takes on it as on an average slot.

All slots of a queue serve one model, so their run times have one shape: ℓᵢ(n) = fᵢ·(α + βn). A slot's run times relative to the
common line give fᵢ after a few batches, while α and β of each slot would need many. The line is learnt from times divided by fᵢ, so
that "slow GPU, larger batch" isn't mistaken for β.

Factors are rounded to a grid coarser than their random variation, so similar slots have the same factor, and a queue only counts the
slots for each. They are scaled so that the mean of 1/fᵢ is 1. Then k slots together do as much as k average slots.

`SlotPace` is the throughput of one slot in full batches, learnt from its own batches. If a batch takes as long as its longest
input, no line fits all sizes. So once nearly full batches have been seen, they alone determine how long a full batch takes.
Before that, the estimate from the start-up batches is used, scaled by how much longer later batches took."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set

import msgspec

from headway.core.service_model import REACH, ServiceModel, WarmUpRun

STEP = 0.2  # Natural logarithm of the ratio of two neighbouring factors: about a fifth.
LOWEST = -4  # Steps from the usual factor down to the smallest, which is less than half of it.
FACTORS = tuple(math.exp(STEP * steps) for steps in range(LOWEST, 8))  # All factors before scaling, ascending.
USUAL = -LOWEST  # Index of factor 1, which a slot has until its batches show otherwise.
ERROR = 0.03  # Standard deviation that noise in run times may leave in a factor. More noise requires a longer memory.
MOST_WEIGHT = 0.3  # Limit on the weight of the newest batch, however little run times vary.
PRIOR = 5  # The assumption that all slots are alike weighs as much as this many batches.
LEAST_DEVIATION = 1e-3  # Smallest relative standard deviation of run times that is believed.
PADDED_DOUBT = 2.0  # Multiple of the deviation for models that pad, because their run times depend more on the entries.
UNSURE = 1.5  # A factor this close to 1, in deviations × √(weight of a batch), may differ from it by chance.
UNSURE_FOR = 20  # UNSURE applies until a queue's slots have run this many batches each. Then the line is known.
STRAY = 2.0  # A batch counts as at most its slot's factor times this, and at least the factor divided by this.


def weight_of(deviation: float, batches: float) -> float:
    """Return the weight of a slot's newest batch, given the number of batches before it and the deviation of run times relative
    to their mean."""
    ratio = (ERROR / max(deviation, LEAST_DEVIATION)) ** 2
    return max(1.0 / (batches + PRIOR), min(MOST_WEIGHT, 2.0 * ratio / (1.0 + ratio)))


def position_of(raw: float) -> int:
    """Return the index of the value in FACTORS that is nearest to a measured factor."""
    steps = math.floor(math.log(raw) / STEP + 0.5)
    return min(max(steps - LOWEST, 0), len(FACTORS) - 1)


class _Known(msgspec.Struct):
    ran_at: int
    raw: float = 1.0
    batches: int = 0
    position: int = USUAL


class SlotFactors:
    """Factors of one queue's home slots. Other slots count as average."""

    __slots__ = ("_known", "_scale", "_slots", "counts")

    def __init__(self) -> None:
        self.counts = [0] * len(
            FACTORS
        )  # Number of slots for each factor except USUAL, so that all are 0 if slots are alike.
        self._known: dict[str, _Known] = {}
        self._slots = 0
        self._scale = 1.0

    @property
    def workers(self) -> Set[str]:
        return self._known.keys()

    def keep(self, slots: int, workers: Collection[str], departures: int) -> None:
        """Set the number of home slots, and their workers. What was learnt about other workers is forgotten."""
        self._slots = slots
        for worker in [worker for worker in self._known if worker not in workers]:
            self._count(self._known.pop(worker).position, -1)
        for worker in workers:
            if worker not in self._known:
                self._known[worker] = _Known(departures)
        self._scale = scale(self.counts, slots)

    def learn(
        self, line: ServiceModel, worker: str, size: float, seconds: float, departures: int, doubt: float = 1.0
    ) -> None:
        """Learn from a run how fast its slot is relative to others, and how long batches take on a slot of factor 1 (`line`).
        The deviation of run times is multiplied by `doubt`."""
        factor, foretold = self.of(worker), line.seconds(size)
        if foretold > 0.0:
            self.observe(worker, seconds / foretold, doubt * line.deviation / foretold, departures)
        line.observe(size, seconds / factor)

    def observe(self, worker: str, ratio: float, deviation: float, departures: int) -> None:
        """Learn from the ratio of a batch's run time to the line's prediction, given the deviation of run times relative to their
        mean, and the number of batches that have left the queue so far."""
        known = self._known.get(worker)
        if known is None or ratio <= 0.0:
            return
        ratio = min(max(ratio, known.raw / STRAY), known.raw * STRAY)
        weight = weight_of(deviation, known.batches)
        known.raw += (ratio - known.raw) * weight
        known.batches += 1
        known.ran_at = departures
        begins = departures < UNSURE_FOR * self._slots
        unsure = begins and abs(known.raw - 1.0) < UNSURE * deviation * math.sqrt(weight)
        position = USUAL if unsure else position_of(known.raw)
        if position != known.position:
            self._count(known.position, -1)
            self._count(position, 1)
            known.position = position

    def of(self, worker: str) -> float:
        known = self._known.get(worker)
        return FACTORS[USUAL if known is None else known.position] * self._scale

    def standing(self, worker: str, departures: int) -> tuple[float, int]:
        """Return a slot's factor, and the number of departures since its last batch came back."""
        known = self._known.get(worker)
        return self.of(worker), 0 if known is None else departures - known.ran_at

    def paces(self) -> tuple[int, ...]:
        return paces(self.counts, self._slots)

    def _count(self, position: int, change: int) -> None:
        if position != USUAL:
            self.counts[position] += change
            self._scale = scale(self.counts, self._slots)


def paces(counts: Sequence[int], slots: int) -> tuple[int, ...]:
    """Return the number of slots for each of FACTORS, given the `counts` for all but USUAL. Empty if all slots are alike."""
    if not any(counts):
        return ()
    return (*counts[:USUAL], max(slots - sum(counts), 0), *counts[USUAL + 1 :])


def scale(counts: Collection[int], slots: int) -> float:
    """Return the number by which to scale FACTORS so that the mean of their inverses over all slots is 1; see `paces`."""
    apart = sum(counts)
    if not apart or slots <= 0:
        return 1.0
    inverse = sum(count / factor for count, factor in zip(counts, FACTORS, strict=True))
    return (inverse + max(slots - apart, 0)) / max(slots, apart)


NEAR = 0.75  # A batch counts as nearly full from this share of the largest batch.
DECAY = 0.98  # Factor by which the past fades at each nearly full batch, so that about the last 50 count.
RUN = 6  # If this many nearly full batches in a row are all much slower or all much faster than the mean, the slot changed.
SEEN = 2.0  # Weight of nearly full batches from which they are trusted more than the line.
LEAST = 12.0  # Weight of nearly full batches from which the pace may count as measured.
TOLERANCE = 0.1  # Largest relative error, with 95 % confidence, of a pace that counts as measured.
KEPT_TOLERANCE = 0.15  # Relative error at which a pace no longer counts as measured. It is larger to avoid flapping.
CONFIDENCE = 2.5  # Standard errors in half a 95 % confidence interval of a few values, whose spread is uncertain, too.
DOUBT = 0.5  # Possible error of the seconds added to a batch that wasn't quite full, as a share of these seconds.


class Average:
    """Exponentially weighted mean of one or more values, and their variance around it."""

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
        self.estimated = True  # True if too few nearly full batches have been seen to be sure of the pace.
        self._max = max_batch
        self.line = ServiceModel()  # Run time by size, fitted to all batches that it ran.
        self._warm: ServiceModel | None = None  # Line fitted to the start-up batches, if the largest was among them.
        self._ratio = Average(DECAY)  # Run times of batches relative to that line.
        self._full, self._shift = (
            Average(DECAY),
            Average(DECAY),
        )  # Times of nearly full batches, if full; seconds added for that.
        self._run: list[float] = []  # The latest of these times, if all are far from the mean on the same side.

    def warmed(self, runs: Sequence[WarmUpRun]) -> None:
        """Learn from the start-up batches how much longer a full batch takes than a smaller one."""
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
        """Add the time of a nearly full batch. If several in a row show that the slot has changed, forget earlier batches."""
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
        """Return the run time of a full batch; 0 if unknown. If no start-up batch had that size, a line through small batches is
        trusted only up to a multiple of their size, as in `core.capacity.pace`."""
        if self._full.weight >= SEEN:
            return self._full.mean
        if self._warm is not None:
            return self._warm.seconds(self._max) * (self._ratio.mean if self._ratio.weight else 1.0)
        line = self.line
        return line.alpha + line.beta * min(self._max, line.largest * REACH)
