"""Warm-up batches, by which a start finds out what a batch of one input costs, and one of as many as it may hold.

    one input, cold ──▶ one input ──▶ … ──▶ the largest batch ──▶ the largest batch again

The first run may load and compile things that later ones reuse, and so may the first of each size, so neither tells how long a
batch takes. A batch is assumed to take at most proportionally longer, and isn't run if that may not fit into the remaining time.
Small steps then lead as far up as time allows.

A run that takes far longer than predicted says as little, as its machine may have stalled. Its size is run once more, and the
excess isn't counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

WarmUpRun = tuple[int, float]  # Size of a batch, and its run time in seconds.

BUDGET = 10.0  # Limit in seconds on all runs after the first, as predicted.

FAR = 3.0  # Multiple of the predicted time from which a run is repeated.
LEAST_STOP = 0.5  # Seconds beyond the prediction that it must take, too.


def next_size(runs: Sequence[WarmUpRun], most: int) -> int | None:
    """Return the size of the next batch, up to `most`, given all batches so far; None if enough is known, or no time is left."""
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
    """Return the sizes of runs after the first, ascending, each with its shortest time."""
    best: dict[int, float] = {}
    for size, seconds in runs[1:]:
        best[size] = min(seconds, best.get(size, seconds))
    return tuple(sorted(best.items()))


def _foreseen(runs: Sequence[WarmUpRun], at: int) -> float:
    size = runs[at][0]
    return min((seconds * size / before for before, seconds in runs[:at] if before <= size), default=math.inf)


def _stood_still(runs: Sequence[WarmUpRun], at: int) -> bool:
    """Return True if a run, the first of its size after the cold one, took far longer than predicted."""
    (size, seconds), foreseen = runs[at], _foreseen(runs, at)
    first = all(before != size for before, _ in runs[1:at])
    return first and seconds > max(FAR * foreseen, foreseen + LEAST_STOP)
