"""Rows of several lengths in one call: filled up where that takes little, and apart where a few would make all of them long."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headway.backends.process import arrays
from headway.backends.process.array_data import Rows, array_of, column, tensor_of
from headway.backends.process.array_kind import NAMED, ArrayKind
from headway.backends.process.arrays import padded_alike
from headway.backends.process.frames import Outputs
from headway.backends.process.usercode import describe
from headway.core.rows import shape_number
from headway.core.tensors import Header, TensorHead, pack, unpack
from headway.model import RowsTogether, Tensors, TensorSpec


def calls_of(rows: list[np.ndarray], axes: int = 1) -> list[tuple[int, ...]]:
    """Shapes of the calls that rows run in; each gets its own sum back."""
    shapes = []

    def call(inputs: Any, _places: list[int]) -> object:
        shapes.append(inputs["a"].shape)
        return {"sum": inputs["a"].reshape(len(inputs["a"]), -1).sum(axis=1)}

    kind = ArrayKind(NAMED, True, (TensorSpec("a", "INT64", (-1,) * axes),), pad=0)
    found = arrays.run(1, [pack([tensor_of("a", column(row))]) for row in rows], kind, 0, call, describe)
    assert isinstance(found, Outputs)
    assert [int(array_of(unpack(Tensors(one))[0], "INT64")[0]) for one in found.outputs] == [
        int(row.sum()) for row in rows
    ]
    return shapes


def ones(*shape: int) -> np.ndarray:
    return np.ones((1, *shape), np.int64)


def test_short_rows_of_any_lengths_run_in_one_call() -> None:
    assert calls_of([ones(length) for length in (1, 512, 3, 0, 17)]) == [(5, 512)]


def test_long_rows_of_like_lengths_run_in_one_call() -> None:
    assert calls_of([ones(100_000), ones(40_000), ones(70_000)]) == [(3, 100_000)]


def test_a_long_row_is_no_burden_for_the_short_ones_beside_it() -> None:
    shapes = calls_of([ones(length) for length in (5, 100_000, *[7] * 60, 90_000)])
    assert len(shapes) == 2
    assert sum(rows * length for rows, length in shapes) <= 4 * 200_000


def test_rows_long_in_one_axis_each_do_not_take_the_product() -> None:
    shapes = calls_of([ones(1, 100_000), ones(2, 3), ones(100_000, 1), ones(1, 90_000), ones(80_000, 1)], axes=2)
    assert sum(rows * one * other for rows, one, other in shapes) <= 4 * 370_000 + (1 << 17)
    assert len(shapes) <= 3


SIZE = st.one_of(st.integers(0, 40), st.integers(0, 3000))
CORNERS = [
    (round(2 ** (one / 2)), round(2 ** (two / 2)), round(2 ** (21 - (one + two) / 2)))
    for one in range(43)
    for two in range(43 - one)
]
"""Rows of about two mebibytes each, of which any two far apart fill up to many times that."""


@given(
    st.lists(st.tuples(st.integers(1, 3), st.tuples(*[SIZE] * 3), SIZE), min_size=2, max_size=16),
    st.integers(1, 3),
)
@example([(1, corner, 1) for corner in CORNERS], 3)
def test_rows_that_may_ride_together_are_filled_up_in_one_call(
    asked: list[tuple[int, tuple[int, ...], int]], axes: int
) -> None:
    specs = (TensorSpec("a", "UINT8", (-1,) * axes), TensorSpec("b", "FP64", (4, -1)))
    alike: dict[int, list[Rows]] = {}
    for place, (rows, first, second) in enumerate(asked):
        shapes = {"a": (rows, *first[:axes]), "b": (rows, 4, second)}
        header = Header(False, tuple(TensorHead(one.name, one.datatype, shapes[one.name]) for one in specs))
        content = msgspec.msgpack.encode(header)
        value = Tensors(len(content).to_bytes(4, "little") + content + bytes(-(4 + len(content)) % 16))
        number = shape_number(value, RowsTogether.PADDED, specs, 3 * len(asked))
        arrays = {
            "a": np.broadcast_to(np.zeros((), np.uint8), shapes["a"]),
            "b": np.broadcast_to(np.zeros(()), shapes["b"]),
        }
        alike.setdefault(number, []).append(Rows(place, arrays, rows, True))
    assert all(len(padded_alike(group)) == 1 for group in alike.values())
