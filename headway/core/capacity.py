"""Capacity of the workers of a model, from what each of them does in full batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.departure import Load
from headway.core.service_model import REACH
from headway.model import Capacity, WorkerInfo, WorkerStatus

FORGOTTEN_AFTER = 120.0
"""Seconds after which a capacity that nobody publishes any more, as of a model that is gone, is forgotten."""

LEAST_BELIEVED = 0.5
"""Part of the measured time of a batch of one within which certainly none comes back: slots differ, and so do batches."""


def capacity(
    model: str, workers: Sequence[WorkerInfo], load: Load | None, target_utilisation: float, scarce: bool = False
) -> Capacity:
    """Capacity of one model: the sum of what its healthy slots do in full batches.

    A slot that has not run a batch yet is taken to do as the others, by the load's α and β: B/ℓ(B), a full batch over
    the time that it takes. Of a GPU that holds several models the share counts that this one can have.

    Arguments:
        model: name of the model; workers of others are left out.
        workers: the worker registry.
        load: load of the model; None when nothing is known.
        target_utilisation: share of the measured capacity above which the lowest tier is held back, 0 to 1.
        scarce: whether the broker's memory is nearly full; it then admits nothing, so that no capacity is usable.
    """
    own = [worker for worker in workers if worker.model == model]
    healthy = [worker for worker in own if worker.status is WorkerStatus.HEALTHY]
    usual = pace(load) if load is not None else 0.0
    items = math.fsum((worker.items_per_second or usual) * worker.share for worker in healthy)
    return Capacity(
        model=model,
        healthy=len(healthy),
        degraded=sum(worker.status is WorkerStatus.DEGRADED for worker in own),
        items_per_second=items,
        usable_per_second=0.0 if scarce else items * target_utilisation,
        scarce=scarce,
        estimated=any(worker.estimated or not worker.items_per_second for worker in healthy),
        least_seconds=least_seconds(load, healthy) if load is not None else 0.0,
    )


def pace(load: Load) -> float:
    """Entries of mean size per second that one slot does in full batches; 0 as long as no batch was measured.

    As for admission, the line is believed up to REACH times the largest batch seen, and level from there: two small
    batches, one of them slow by accident, would else foretell a capacity of next to nothing, and a throttle that goes by
    it would never let a larger batch come together.
    """
    size = min(load.max_batch, load.largest * REACH) if load.largest > 0.0 else load.max_batch
    seconds = load.alpha + load.beta * size
    return load.max_batch / (seconds * load.entry_size) if seconds > 0.0 else 0.0


def least_seconds(load: Load, healthy: Sequence[WorkerInfo]) -> float:
    """Seconds within which no worker answers a request, however many there are; 0 as long as no batch was measured.

    A batch of one takes about this long; the measure is believed down to half of it, and no further where slots differ. It
    is never longer than a full batch of the fastest slot, which measures that by itself.
    """
    if load.largest <= 0.0:
        return 0.0
    one = load.alpha + load.beta
    believed = LEAST_BELIEVED * one
    fastest = max((worker.items_per_second for worker in healthy), default=0.0)
    full = load.max_batch / load.entry_size / fastest if fastest > 0.0 else math.inf
    return min(believed if load.paces else max(one - 2.0 * load.deviation, believed), full)
