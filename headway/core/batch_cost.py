"""Cost of a batch: which of three lines predicts its run time, and how to split it into calls.

    number   α + β·n           every input takes the same time
    weight   α + β·Σw          the time of an input grows with its weight, such as its length
    padded   α + β·n·max w     all inputs are padded to the longest

All three lines are fitted to past calls, and the one with the best recent forecasts is used. The number line is kept until
another line is clearly better, so that a model whose batches always take the same time keeps the number line. If a model pads,
each batch is sorted and cut wherever that saves time. Dynamic programming finds the cuts.

If every batch contains an input of the greatest length, the number line fits as well. So now and then a batch runs on trial in two
calls, the lighter inputs first. A trial is only made if α is known to be small, or can't be known because all batches are full.
If the lighter inputs take less time than their number predicts, more trials follow soon; otherwise they become rare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from headway.core.service_model import DECAY, ServiceModel
from headway.core.weight_estimate import octets
from headway.model import CostLine, CostShape, Value, WorkerInfo, WorkerStatus

NUMBER_ERROR = 0.03  # If its mean relative error is at most this, the number line is used, however good others are.
BETTER = 0.8  # A line replaces the current one if its error is at most this share of the current line's error.
RECENT = 0.05  # Weight of the newest call in the mean error of a line.
KNOWN_CALLS = 16  # Calls that must have run before a line other than the number line is used.
FIRST_TRIALS = 8  # Calls between the first two trials.
MORE_TRIALS = 256  # After a trial that shows a gain, the next follows within this many calls; otherwise, not sooner.
LAST_TRIALS = 8192  # Most calls between two trials.
MORE = 1.5  # Factor by which the distance between trials grows after a gain. Otherwise it doubles.
AS_FORETOLD = 0.75  # A trial shows a gain if the lighter inputs take less than this share of the forecast by number.
SPARED = 0.25  # A trial must save at least this share of number × longest.
FULL = 0.95  # If the mean size is at least this share of the largest, batches say little about smaller ones.
NOTICED = 0.1  # A line is reported again once it has changed by more than this share.
MOST_CALLS = 4  # Most calls that a batch is split into.
LEAST_SAVED = 0.1  # Smallest share of a batch's time that cutting it must save.
MOST_PLACES = 64  # Most places in a batch at which a cut is considered.


class BatchCost:
    """Learns the run time of calls from past calls with at least one input."""

    def __init__(self) -> None:
        self.shape = CostShape.NUMBER  # Shape of the line in use.
        self.errors = dict.fromkeys(CostShape, 0.0)  # Mean relative error of each line's recent forecasts.
        self._lines = {shape: ServiceModel() for shape in CostShape}
        self._calls = self._batches = self._inputs = self._padded = 0.0
        self._largest = 0.0  # Size of the largest batch, which decays slowly.
        self._observed, self._trial_at, self._distance = 0, KNOWN_CALLS, float(FIRST_TRIALS)
        self._tries = False  # True if the next call is the first of a batch on trial.

    @property
    def cuts(self) -> bool:
        """True if the next batch may run in several calls."""
        if self.shape is CostShape.NUMBER and self._observed >= self._trial_at:
            return self._may_try(self._lines[CostShape.NUMBER].largest)
        return self.shape is CostShape.PADDED

    def _may_try(self, spared: float) -> bool:
        """Return True if a batch may run in two calls on trial. If the model pads, this saves the time of `spared` inputs of
        the greatest length. By the number line, the saving must be at least what a second call costs. A line without a slope
        can't tell, so then batches must have been nearly full."""
        line = self._lines[CostShape.NUMBER]
        return line.alpha <= line.beta * spared if line.beta else self._inputs >= FULL * self._batches * self._largest

    def calls(self, weights: Sequence[int]) -> list[list[int]]:
        """Split a batch of at least one input into calls, in the cheapest way or on trial. Each call is a list of indices."""
        if self.shape is CostShape.PADDED or not self.cuts:
            return cut(weights, self.line)
        self._trial_at = self._observed + FIRST_TRIALS
        count, order = len(weights), sorted(range(len(weights)), key=weights.__getitem__)
        longest = weights[order[-1]]
        spared, end = max((end * (longest - weights[order[end - 1]]), end) for end in range(1, count + 1))
        if spared <= SPARED * count * longest or not self._may_try(spared / longest):
            return [list(range(count))]
        self._tries = True
        return [order[:end], order[end:]]

    def observe(self, weights: Sequence[int], seconds: float) -> None:
        if seconds <= 0.0:
            return
        count, longest = len(weights), max(weights)
        self._observed += 1
        if self._tries:
            self._note_trial(seconds / self._lines[CostShape.NUMBER].seconds(count))
        self._calls = self._calls * DECAY + 1.0
        for shape, size in zip(CostShape, (count, sum(weights), count * longest), strict=True):
            line = self._lines[shape]
            expected = line.seconds(size)
            if expected > 0.0:
                error = min(abs(expected - seconds) / seconds, 1.0)
                self.errors[shape] += (error - self.errors[shape]) * max(1.0 / self._calls, RECENT)
            line.observe(size, seconds)
        if self._calls >= KNOWN_CALLS:
            self._choose()

    def _note_trial(self, ratio: float) -> None:
        self._tries = False
        if ratio < AS_FORETOLD:
            self._distance = min(MORE * self._distance, MORE_TRIALS)
        else:
            self._distance = min(max(2.0 * self._distance, MORE_TRIALS), LAST_TRIALS)
        self._trial_at = self._observed + int(self._distance)

    def note_batch(self, weights: Sequence[int]) -> None:
        count = len(weights)
        self._batches = self._batches * DECAY + 1.0
        self._largest = max(count, self._largest * DECAY)
        self._inputs = self._inputs * DECAY + count
        self._padded = self._padded * DECAY + count * max(weights)

    def _choose(self) -> None:
        best = min(CostShape, key=self.errors.__getitem__)
        if self.errors[CostShape.NUMBER] <= NUMBER_ERROR:
            self.shape = CostShape.NUMBER
        elif self.errors[best] <= BETTER * self.errors[self.shape]:
            self.shape = best

    @property
    def line(self) -> CostLine:
        return self.line_of(self.shape)

    def line_of(self, shape: CostShape) -> CostLine:
        """Return the line of a shape, even if another shape is in use."""
        line = self._lines[shape]
        longest = max(self._padded / self._inputs, 1.0) if self._inputs else 1.0  # It is a divisor elsewhere.
        return CostLine(shape, line.alpha, line.beta, longest, self.errors[shape])


def padded(workers: Iterable[WorkerInfo]) -> dict[str, CostLine]:
    """Return the mean line of each model that pads. A model pads if most lines of its healthy workers are of the shape PADDED."""
    lines: dict[str, list[CostLine]] = {}
    for worker in workers:
        if worker.cost is not None and worker.status is WorkerStatus.HEALTHY:
            lines.setdefault(worker.model, []).append(worker.cost)
    padding = {model: [line for line in known if line.shape is CostShape.PADDED] for model, known in lines.items()}
    return {model: _mean(pads) for model, pads in padding.items() if 2 * len(pads) > len(lines[model])}


def _mean(lines: Sequence[CostLine]) -> CostLine:
    count = len(lines)
    return CostLine(
        CostShape.PADDED,
        sum(line.alpha for line in lines) / count,
        sum(line.beta for line in lines) / count,
        sum(line.longest for line in lines) / count,
    )


def is_news(line: CostLine | None, known: CostLine | None) -> bool:
    """Return True if a line differs enough from the known one to replace it."""
    if line is None or known is None:
        return line is not known
    now, before = line.alpha + line.beta * line.longest, known.alpha + known.beta * known.longest
    return (
        line.shape is not known.shape
        or abs(now - before) > NOTICED * before
        or abs(line.longest - known.longest) > NOTICED * known.longest
    )


def cut(weights: Sequence[int], line: CostLine) -> list[list[int]]:
    """Cut a batch of at least one input into the best calls, given the weights of its inputs. Each call is a list of indices,
    lightest input first. If cutting saves less than LEAST_SAVED of the batch's time, there is one call in the batch's own order."""
    count = len(weights)
    whole = line.alpha + line.beta * count * max(weights)
    enough = (1.0 - LEAST_SAVED) * whole
    if line.shape is not CostShape.PADDED or 2.0 * line.alpha + line.beta * sum(weights) > enough:
        return [list(range(count))]
    order = sorted(range(count), key=weights.__getitem__)
    places = min(count, MOST_PLACES)
    ends = [count * number // places for number in range(places + 1)]
    heaviest = [weights[order[end - 1]] for end in ends]
    costs = [0.0] + [inf] * places
    begins: list[
        list[int]
    ] = []  # Where the last call begins, for each number of calls and each place where it may end.
    least, calls = enough, 0
    for number in range(1, MOST_CALLS + 1):
        steps = [
            min((costs[begin] - line.beta * ends[begin] * heaviest[end], begin) for begin in range(end))
            for end in range(1, places + 1)
        ]
        costs = [
            inf,
            *(cost + line.alpha + line.beta * ends[end] * heaviest[end] for end, (cost, _) in enumerate(steps, 1)),
        ]
        begins.append([0, *(begin for _, begin in steps)])
        if costs[-1] <= least:
            least, calls = costs[-1], number
    parts, end = list[list[int]](), places
    for number in range(calls, 0, -1):
        begin = begins[number - 1][end]
        parts.append(order[ends[begin] : ends[end]])
        end = begin
    return parts[::-1] or [list(range(count))]


SURE = 64  # If every input takes the same time, most calls are ignored after this many.
LOOKED_AT = 8  # From then on, only one call out of this many is observed.


class Calls:
    """Learns, in the child process, how long a target's calls take. Unless `whole` is set, it cuts batches into several calls
    if the model pads, or on trial to find out whether it does."""

    def __init__(self, whole: bool) -> None:
        self._cost = BatchCost()
        self._whole = whole
        self._seen = 0
        self.reported: CostLine | None = None  # Line that `news` returned last.

    @property
    def cuts(self) -> bool:
        return not self._whole and self._cost.cuts

    def parts(self, weights: Sequence[int]) -> list[list[int]]:
        return self._cost.calls(weights) if self.cuts and weights else [list(range(len(weights)))]

    def ran(self, inputs: Sequence[Value], seconds: float) -> None:
        self._seen += 1
        if self._seen > SURE and self._cost.shape is CostShape.NUMBER and self._seen % LOOKED_AT:
            return
        weights = [*map(octets, inputs)]
        self.ran_in_parts(weights, [(weights, seconds)])

    def ran_in_parts(self, weights: Sequence[int], calls: Sequence[tuple[Sequence[int], float]]) -> None:
        if weights:
            self._cost.note_batch(weights)
        for part, seconds in calls:
            self._cost.observe(part, seconds)

    def news(self) -> CostLine | None:
        """Return the line in use if it differs enough from the one returned last, else None."""
        line = self._cost.line
        if not is_news(line, self.reported) or (self.reported is None and line.shape is CostShape.NUMBER):
            return None
        self.reported = line
        return line
