"""Padding of arrays: which rows of several lengths run in one call, and how they become one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headway.backends.process.array_data import Rows, numpy
from headway.backends.process.array_kind import free_axes
from headway.core.rows import MOST_PADDED, PADDED_FREELY
from headway.model import TensorSpec


def padded_alike(entries: list[Rows]) -> list[list[Rows]]:
    """Entries in as few groups as pad little: one long row would make all rows of its call as long, and its memory without bound."""
    together = _Padding()
    if all(together.takes(one) for one in entries):  # Nearly always.
        return [entries]
    found: list[tuple[_Padding, list[Rows]]] = []
    for one in sorted(entries, key=_bytes_of, reverse=True):
        for padding, group in found:
            if padding.takes(one):
                group.append(one)
                break
        else:
            padding = _Padding()
            padding.takes(one)
            found.append((padding, [one]))
    return [group for _, group in found]


def padded(columns: Sequence[Any], spec: TensorSpec, pad: float) -> tuple[Any, Any]:
    """Rows of several shapes as one array, and the lengths of their free axes.

    Arguments:
        columns: arrays, the first axis of each is its rows.
        spec: specification of the input.
        pad: number to fill up with; texts are filled up with empty ones.

    Returns:
        The array, and the lengths: one number for each row or, where several axes are free, one for each of them.
    """
    np = numpy()
    free = free_axes(spec)
    counts = [len(one) for one in columns]
    sizes = np.array([[one.shape[axis] for axis in free] for one in columns], np.int64)
    lengths = np.repeat(sizes[:, 0] if len(free) == 1 else sizes, counts, axis=0)
    shape = tuple(max(sizes) for sizes in zip(*(one.shape[1:] for one in columns), strict=True))
    if all(one.shape[1:] == shape for one in columns):
        return columns[0] if len(columns) == 1 else np.concatenate(columns), lengths
    filler: Any = b"" if columns[0].dtype.kind == "O" else pad
    whole = np.full((sum(counts), *shape), filler, columns[0].dtype)
    at = 0
    for one in columns:
        whole[(slice(at, at + len(one)), *map(slice, one.shape[1:]))] = one
        at += len(one)
    return whole, lengths


class _Padding:
    """Room that the rows of a call take when they are padded."""

    __slots__ = ("_own", "_rows", "_shapes")

    def __init__(self) -> None:
        self._own = self._rows = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def takes(self, one: Rows) -> bool:
        """Add an entry, unless too much of the room would be padding. The first one fits."""
        rows, own, size = self._rows + one.length, self._own + _bytes_of(one), 0
        shapes = {}
        for name, array in one.arrays.items():
            shape = array.shape[1:]
            shapes[name] = shape = tuple(map(max, self._shapes.get(name, shape), shape))
            size += rows * math.prod(shape) * array.itemsize
        if size > max(PADDED_FREELY, MOST_PADDED * own):
            return False
        self._rows, self._own, self._shapes = rows, own, shapes
        return True


def _bytes_of(one: Rows) -> int:
    return sum(array.nbytes for array in one.arrays.values())
