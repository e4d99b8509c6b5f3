"""Capacity of the workers of a model, from what each of them does in full batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headway.core.departure import Load
from headway.core.service_model import REACH
from headway.model import Capacity, WorkerInfo, WorkerStatus

FORGOTTEN_AFTER = 120.0
"""Seconds after which a capacity that nobody publishes any more, as of a model that is gone, is forgotten."""

STALE_AFTER = 10.0
"""Seconds without a newly published capacity after which the last one is no longer believed."""

LEAST_BELIEVED = 0.5
"""Part of the measured time of a batch of one within which certainly none comes back: slots differ, and so do batches."""


def capacity(
    model: str, workers: Sequence[WorkerInfo], load: Load | None, target_utilisation: float, scarce: bool = False
) -> Capacity:
    """Return the capacity of one model: the sum of what its healthy slots do in full batches.

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
        drained=sum(worker.status is WorkerStatus.DRAINED for worker in own),
        items_per_second=items,
        usable_per_second=0.0 if scarce else items * target_utilisation,
        scarce=scarce,
        estimated=any(worker.estimated or not worker.items_per_second for worker in healthy),
        least_seconds=least_seconds(load, healthy) if load is not None else 0.0,
    )


class Freshness:
    """Freshness of the capacities that one process reads, by when each was last published anew.

    Arguments:
        now: instant, in monotonic seconds, since which it reads them.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._heard: dict[str, tuple[float, float]] = {}
        """Broker instant of the last publication for each model, and when it was first read here."""

    def hear(self, capacity: Capacity, now: float) -> bool:
        """Take note of a capacity that is read; False when it is stale."""
        published, _ = self._heard.get(capacity.model, (None, now))
        if published != capacity.measured_at:
            self._heard[capacity.model] = capacity.measured_at, now
        return not self.is_stale(capacity.model, now)

    def is_stale(self, model: str, now: float) -> bool:
        """Return True if nothing new was heard of a model's capacity for long."""
        _, heard_at = self._heard.get(model, (0.0, self._since))
        return now - heard_at > STALE_AFTER

    def keep(self, models: Collection[str]) -> None:
        """Forget all models but these."""
        self._heard = {model: heard for model, heard in self._heard.items() if model in models}


def pace(load: Load) -> float:
    """Return the entries of mean size per second that one slot does in full batches; 0 as long as no batch was measured.

    As for admission, the line is believed up to REACH times the largest batch seen, and level from there: two small
    batches, one of them slow by accident, would else foretell a capacity of next to nothing, and a throttle that goes by
    it would never let a larger batch come together.
    """
    size = min(load.max_batch, load.largest * REACH) if load.largest > 0.0 else load.max_batch
    seconds = load.alpha + load.beta * size
    return load.max_batch / (seconds * load.entry_size) if seconds > 0.0 else 0.0


def least_seconds(load: Load, healthy: Sequence[WorkerInfo]) -> float:
    """Return the seconds within which no worker answers a request, however many there are; 0 as long as no batch was measured.

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
