"""Batch run times as measured by `headway check --record`, for models whose run time isn't linear.

Each line of the file is a JSON object with the weight of each input of a batch (such as its length), and the batch's run time:

    {"weights": [212, 57, 340], "seconds": 0.0831}

A simulated batch is hardly ever identical to a recorded one, so it gets the time of a similar one, adjusted by a formula. For n
inputs with a total weight W and a largest weight L, the formula is

    f = a + b·n + c·W + d·L + e·n·L    (a to e are at least 0, and fitted to all batches by relative least squares)

It has a term for each usual kind of cost: per call, input, token, decoding step, and padded token. Of the NEAR recorded batches
that are nearest in ln n, ln W and ln L, one is drawn at random. Its time is multiplied by f of the simulated batch, and divided
by its own f. So whatever the formula misses, such as steps and chance, comes from similar batches."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from headway.config.settings import MAX_BATCH, MOST_WEIGHT
from headway.core.batch_cost import BatchCost
from headway.errors import SettingError
from headway.model import CostShape

NEAR = 5  # Recorded batches to draw from.
OF_ABOUT_ITS_SIZE = 64  # Recorded batches of similar size, among which the nearest are searched.
LEAST_BATCHES = 20  # Minimum number of batches in a file.
MOST_BATCHES = 20_000  # Maximum number of batches in a file. More would take longer without being more accurate.
SWEEPS = 2_000  # Iterations of the fit.
DRAWS = 200  # Batches to draw for a mean.
BATCH_MS_HINT = "Give --batch-ms or --batch-times FILE; headway check measures both."
HINT = "Make one with headway check TARGET --record FILE."

_Point = tuple[float, float, float]


class RecordedBatch(msgspec.Struct, frozen=True):
    """A recorded batch: the weights of its inputs, and its run time in seconds."""

    weights: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=MOST_WEIGHT)]], msgspec.Meta(min_length=1, max_length=MAX_BATCH)
    ]
    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3_600.0)]


class _Known(NamedTuple):
    point: _Point
    ratio: float  # Run time of the recorded batch, divided by the result of the formula.


class BatchTimes:
    """Draws run times from one or more recorded batches. `padded` is True if the model seems to pad inputs to the longest."""

    def __init__(self, batches: Sequence[RecordedBatch]) -> None:
        self.weights = tuple(weight for batch in batches for weight in batch.weights)
        self.largest = max(len(batch.weights) for batch in batches)
        self.heaviest = max(self.weights)
        cost = BatchCost()
        for batch in batches:
            cost.observe(batch.weights, batch.seconds)
        self.padded = cost.shape is CostShape.PADDED
        self._line = _fitted([(_terms(batch.weights), batch.seconds) for batch in batches])
        self._known = sorted(
            _Known(_point(batch.weights), batch.seconds / self._formula(batch.weights)) for batch in batches
        )
        self._means: dict[tuple[int, tuple[int, ...], int, int], float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def draw(self, weights: Sequence[int], rng: Callable[[], float]) -> float:
        """Draw the run time in seconds of a batch with these weights. `rng` is uniform in [0, 1)."""
        near = self._near(_point(weights), NEAR)
        return self._formula(weights) * near[int(rng() * len(near))].ratio

    def mean(self, count: int, weights: tuple[int, ...], max_weight: int, near: int = 1) -> float:
        """Return the mean run time in seconds of batches of up to `count` inputs and weight `max_weight` (0: no limit). Weights
        are drawn from `weights` at random, for `near` batches at a time. They are then sorted, so that similar inputs share
        a batch."""
        key = (count, weights, max_weight, near)
        if key not in self._means:
            rng = random.Random(0)  # noqa: S311 - the same batches each time
            pools = [rng.choices(weights, k=near * count) for _ in range(DRAWS // near)]
            pools = [sorted(pool) if near > 1 else pool for pool in pools]
            batches = [pool[begin : begin + count] for pool in pools for begin in range(0, near * count, count)]
            self._means[key] = statistics.fmean(self._expected(_packed(batch, max_weight)) for batch in batches)
        return self._means[key]

    def error(self) -> float:
        """Return the median relative error of predicting each batch's time from the other batches."""
        errors = []
        for known in self._known:
            others = [near.ratio for near in self._near(known.point, NEAR + 1) if near is not known][:NEAR]
            errors.append(abs(statistics.fmean(others) / known.ratio - 1.0) if others else math.inf)
        return statistics.median(errors)

    def _expected(self, weights: Sequence[int]) -> float:
        near = self._near(_point(weights), NEAR)
        return self._formula(weights) * statistics.fmean(batch.ratio for batch in near)

    def _near(self, point: _Point, count: int) -> list[_Known]:
        size, total, longest = point
        first = bisect_left(self._known, (point, 0.0)) - OF_ABOUT_ITS_SIZE // 2
        first = max(0, min(first, len(self._known) - OF_ABOUT_ITS_SIZE))
        distances = [
            (abs(size - other[0]) + abs(total - other[1]) + abs(longest - other[2]), number)
            for number, (other, _) in enumerate(self._known[first : first + OF_ABOUT_ITS_SIZE], first)
        ]
        return [self._known[number] for _, number in nsmallest(count, distances)]

    def _formula(self, weights: Sequence[int]) -> float:
        return math.fsum(factor * term for factor, term in zip(self._line, _terms(weights), strict=True))


def read_batch_times(path: Path, setting: str = "--batch-times") -> BatchTimes:
    """Read a file of recorded batches. Raises SettingError for the option `setting` if the file is unreadable or invalid."""
    shown = str(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise SettingError(setting, shown, f"cannot be read: {exc.strerror}", HINT) from None
    decoder, batches = msgspec.json.Decoder(RecordedBatch), list[RecordedBatch]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            batches.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise SettingError(setting, shown, f"line {number} is not a recorded batch: {exc}", HINT) from None
    if not LEAST_BATCHES <= len(batches) <= MOST_BATCHES:
        reason = f"has {len(batches)} batches; it must have {LEAST_BATCHES} to {MOST_BATCHES:,}"
        raise SettingError(setting, shown, reason, HINT)
    return BatchTimes(batches)


def _packed(weights: list[int], max_weight: int) -> list[int]:
    """Return as many of the first weights as fit into a batch."""
    if not max_weight:
        return weights
    packed, left = weights[:1], max_weight - weights[0]
    for weight in weights[1:]:
        left -= weight
        if left < 0:
            break
        packed.append(weight)
    return packed


def _point(weights: Sequence[int]) -> _Point:
    return math.log(len(weights)), math.log(sum(weights)), math.log(max(weights))


def _terms(weights: Sequence[int]) -> tuple[float, ...]:
    count, longest = len(weights), max(weights)
    return (1.0, count, sum(weights), longest, count * longest)


def _fitted(batches: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Fit non-negative factors of the terms by coordinate descent, minimising the sum of squared relative errors."""
    rows = [[term / seconds for term in terms] for terms, seconds in batches]
    scales = [math.sqrt(math.fsum(row[term] ** 2 for row in rows)) for term in range(len(rows[0]))]
    columns = [[row[term] / scale for row in rows] for term, scale in enumerate(scales)]
    products = [[math.fsum(map(float.__mul__, left, right)) for right in columns] for left in columns]
    targets = [math.fsum(column) for column in columns]
    factors = [0.0] * len(columns)
    for _ in range(SWEEPS):
        for term, row in enumerate(products):
            others = math.fsum(map(float.__mul__, row, factors)) - row[term] * factors[term]
            factors[term] = max(0.0, targets[term] - others)
    return [factor / scale for factor, scale in zip(factors, scales, strict=True)]
