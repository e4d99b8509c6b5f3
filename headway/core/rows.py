"""Rows of tensors: what a request for a model that takes tensors weighs, and which models those are.

A request whose tensors have k rows is one entry that counts as k of a batch. So its weight is its rows, and a batch is bounded by the
weight of as many rows as it may have entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headway.core.tensors import rows_of
from headway.model import Value, ValueKind, WorkerInfo, WorkerStatus


def counted(workers: Iterable[WorkerInfo]) -> dict[str, bool]:
    """Whether rows count, by each model of which healthy workers tell what they take: while any of them takes tensors."""
    found: dict[str, bool] = {}
    for worker in workers:
        if worker.takes and worker.status is WorkerStatus.HEALTHY:
            found[worker.model] = found.get(worker.model, False) or worker.takes == ValueKind.TENSORS.value
    return found


def weight(value: Value, max_batch: int, max_weight: int) -> int:
    """Weight of the rows of a value, that of a full batch at most. What are no tensors is one row.

    Arguments:
        value: value for the model.
        max_batch: most rows of a batch.
        max_weight: most weight of a batch; 0 where that bounds none, and each row weighs 1.
    """
    rows = min(rows_of(value), max_batch)
    return math.ceil(rows * max_weight / max_batch) if max_weight else rows
