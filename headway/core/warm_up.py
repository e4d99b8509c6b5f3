"""Batches that a start runs to find out what a batch costs: of one input, and of as many as a batch may hold.

    one input, cold ──▶ one input ──▶ … ──▶ the largest batch ──▶ the largest batch again

The first run may load and compile what later ones find ready, and so may the first of each size: neither says what a
batch takes. A batch is taken to need at most as much longer as it is larger, and is not run when that may not fit into
the time left. Small steps then lead as far up as time allows.

A run that takes far longer than those before it foresee says as little: its machine may have stood still. Its size is run once
more, and what it took beyond that is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WarmUpRun = tuple[int, float]
"""Size of a batch, and its run time in seconds."""

BUDGET = 10.0
"""Most seconds that all runs after the first may take together, as far as can be foreseen."""

FAR = 3.0
"""Times as long as foreseen from which on a run is run once more."""
LEAST_STOP = 0.5
"""Least seconds beyond what was foreseen for that."""


def next_size(runs: Sequence[WarmUpRun], most: int) -> int | None:
    """Return the size of the batch to run next; None when enough is known, or no time is left.

    Arguments:
        runs: all batches so far, in order; the first is of one input.
        most: size of the largest batch.
    """
    if not runs:
        return 1
    took = [_foreseen(runs, at) if _stood_still(runs, at) else runs[at][1] for at in range(1, len(runs))]
    left = BUDGET - sum(took)
    if len(runs) == 1:
        return 1 if runs[0][1] <= left else None
    if _stood_still(runs, len(runs) - 1):
        return runs[-1][0]
    largest = max(size for size, _ in runs)
    seconds = min(seconds for size, seconds in runs[1:] if size == largest)
    if largest < most:
        fits = most if seconds <= 0.0 else int(min(largest * left / seconds, most))
        return fits if fits > largest else None
    again = most > 1 and [size for size, _ in runs].count(most) == 1
    return most if again and seconds <= left else None


def measured(runs: Sequence[WarmUpRun]) -> tuple[WarmUpRun, ...]:
    """Return the sizes that were run after the first run, ascending, each with its shortest run time."""
    best: dict[int, float] = {}
    for size, seconds in runs[1:]:
        best[size] = min(seconds, best.get(size, seconds))
    return tuple(sorted(best.items()))


def _foreseen(runs: Sequence[WarmUpRun], at: int) -> float:
    """Return the most seconds that the run at a place was expected to take, by those before it."""
    size = runs[at][0]
    return min((seconds * size / before for before, seconds in runs[:at] if before <= size), default=math.inf)


def _stood_still(runs: Sequence[WarmUpRun], at: int) -> bool:
    """Return True if the run at a place, which is the first of its size but for the cold one, took far longer than foreseen."""
    (size, seconds), foreseen = runs[at], _foreseen(runs, at)
    first = all(before != size for before, _ in runs[1:at])
    return first and seconds > max(FAR * foreseen, foreseen + LEAST_STOP)
