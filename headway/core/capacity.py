"""Capacity of a model, computed from how much each of its workers handles in full batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headway.core.departure import Load
from headway.core.service_model import REACH
from headway.model import Capacity, WorkerInfo, WorkerStatus

FORGOTTEN_AFTER = 120.0  # Seconds after which a capacity that is no longer published is forgotten.

STALE_AFTER = 10.0  # Seconds without a new publication after which the last capacity is no longer trusted.

LEAST_BELIEVED = 0.5  # Share of a single input's run time that even the fastest slot is assumed to need.


def capacity(
    model: str, workers: Sequence[WorkerInfo], load: Load | None, target_utilisation: float, scarce: bool = False
) -> Capacity:
    """Return the capacity of one model: the total that its healthy slots handle in full batches.

    For a slot that hasn't run a batch yet, a prediction is used: B/ℓ(B), the size of a full batch divided by its run time,
    where ℓ has the α and β of the load. If a GPU holds several models, only the share available to this one counts. Only the
    share `target_utilisation` of the capacity is usable; above it, the lowest tier is held back. A broker that is short of
    memory admits nothing, so no capacity is usable."""
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
    """Tells whether the last capacity published for a model is fresh. `now` is the monotonic time when reading begins."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._heard: dict[str, tuple[float, float]] = {}  # By model: when its last capacity was published and read.

    def hear(self, capacity: Capacity, now: float) -> bool:
        published, _ = self._heard.get(capacity.model, (None, now))
        if published != capacity.measured_at:
            self._heard[capacity.model] = capacity.measured_at, now
        return not self.is_stale(capacity.model, now)

    def is_stale(self, model: str, now: float) -> bool:
        _, heard_at = self._heard.get(model, (0.0, self._since))
        return now - heard_at > STALE_AFTER

    def keep(self, models: Collection[str]) -> None:
        self._heard = {model: heard for model, heard in self._heard.items() if model in models}


def pace(load: Load) -> float:
    """Return how many entries of mean size one slot handles per second in full batches; 0 if unknown. As in `ServiceModel`, the
    run time stays flat beyond REACH times the largest batch seen. Otherwise one slow small batch could predict a pace near
    zero, and the throttle would then never let a larger batch form."""
    size = min(load.max_batch, load.largest * REACH) if load.largest > 0.0 else load.max_batch
    seconds = load.alpha + load.beta * size
    return load.max_batch / (seconds * load.entry_size) if seconds > 0.0 else 0.0


def least_seconds(load: Load, healthy: Sequence[WorkerInfo]) -> float:
    """Return a lower bound on the seconds that a request takes, no matter how many workers there are, or 0 if unknown. The
    bound is roughly the run time of a batch of one, or half of that if the slots differ. It is never more than the fastest slot
    takes for a full batch."""
    if load.largest <= 0.0:
        return 0.0
    single = load.alpha + load.beta
    believed = LEAST_BELIEVED * single
    fastest = max((worker.items_per_second for worker in healthy), default=0.0)
    full = load.max_batch / load.entry_size / fastest if fastest > 0.0 else math.inf
    return min(believed if load.paces else max(single - 2.0 * load.deviation, believed), full)
