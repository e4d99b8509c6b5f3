"""Rows of tensors: how much a request with tensors weighs, which others it may share a batch with, and which models take tensors.

A request whose tensors have k rows is one entry that counts as k in a batch. Its weight is its number of rows, and the weight of a
batch is limited to as many rows as it may have entries. A batch is one call of its target. So if axes may have any length, rows
only run together if they have one shape or, for a target whose inputs are padded, if they need little padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from hashlib import blake2b

from headway.core.tensors import SIZES, fits, header_of, rows_of
from headway.model import RowsTogether, Tensors, TensorSpec, Value, ValueKind, WorkerInfo, WorkerStatus

PADDED_FREELY = 1 << 20  # If a padded call has at most this many bytes, rows of any lengths run together.
MOST_PADDED = 4  # A larger padded call may have at most this many times its rows' bytes.
_ELEMENT = 8  # Bytes that a BYTES element takes in the array of a call.
NUMBER_BYTES = 5  # Bytes of a shape number: enough to keep clients from finding two shapes with the same number.


def counted(workers: Iterable[WorkerInfo]) -> dict[str, bool]:
    """Return for each model whether a healthy worker takes tensors or call parameters. If so, its entries have rows or
    shapes."""
    counting: dict[str, bool] = {}
    for worker in workers:
        if worker.takes and worker.status is WorkerStatus.HEALTHY:
            counts = worker.takes == ValueKind.TENSORS.value or worker.per_call != ()
            counting[worker.model] = counting.get(worker.model, False) or counts
    return counting


def weight(value: Value, max_batch: int, max_weight: int) -> int:
    """Return the weight of a value's rows, at most that of a full batch. If `max_weight` is 0, each row weighs 1."""
    rows = min(rows_of(value), max_batch)
    return math.ceil(rows * max_weight / max_batch) if max_weight else rows


def shape_number(value: Value, together: RowsTogether, specs: tuple[TensorSpec, ...], max_batch: int) -> int:
    """Return a number that values share if they may run in one call. `together` and `specs` say what the model takes."""
    if together is RowsTogether.ANY or not isinstance(value, Tensors):
        return 0
    heads = header_of(value).heads
    shapes = {head.name if len(heads) > 1 else "": head.shape[1:] for head in heads}
    if together is RowsTogether.PADDED:
        known = {spec.name if len(specs) > 1 else "": spec.shape for spec in specs}
        if shapes.keys() == known.keys() and all(fits(shape, known[name]) for name, shape in shapes.items()):
            free = {
                name: [size for size, want in zip(shape, known[name], strict=True) if want == -1]
                for name, shape in shapes.items()
            }
            longest = max(itertools.chain(*free.values()), default=0)
            if max_batch * sum(_bytes_of_row(spec, longest) for spec in specs) <= PADDED_FREELY:
                return 0
            shapes = {name: tuple(_step(size, len(sizes)) for size in sizes) for name, sizes in free.items()}
    digest = blake2b(repr(sorted(shapes.items())).encode(), digest_size=NUMBER_BYTES).digest()
    return int.from_bytes(digest, "little")


def _bytes_of_row(spec: TensorSpec, longest: int) -> int:
    return (SIZES[spec.datatype] or _ELEMENT) * math.prod(longest if size == -1 else size for size in spec.shape)


def _step(size: int, axes: int) -> int:
    """Return the number of the step that a length belongs to. `axes` is the number of free axes of the rows. Padding rows to
    the longest in their step makes them at most MOST_PADDED times as big."""
    return math.ceil(math.log(size, MOST_PADDED) * axes) if size else -1
