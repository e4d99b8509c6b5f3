"""Parameters that a call has once: which are the same, and what requests with others have in common."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headway.core.call_parameters import per_call, shape_number, values_of
from headway.core.parameters import CANONICAL
from headway.model import ALL_PARAMETERS, PerCall, WorkerInfo, WorkerStatus

SAME = [
    (b"", b"{}"),
    (b'{"t":1}', b'{"t":1.0}'),
    (b'{"t":1e2}', b'{ "t" : 100 }'),
    (b'{"t":0}', b'{"t":-0.0}'),
    (b'{"t":9007199254740994}', b'{"t":9.007199254740994e15}'),
    (b'{"t":0.1}', b'{"t":1e-1}'),
    (b'{"t":"\\u0041"}', b'{"t":"A"}'),
    (b'{"t":{"a":[1,{"b":2}],"c":null}}', b'{"t":{"c":null,"a":[1.0,{"b":2}]}}'),
    (b'{"t":1e300}', b'{"t":1.0e300}'),
]
OTHERS = [
    (b'{"t":1}', b""),
    (b'{"t":null}', b""),
    (b'{"t":1}', b'{"t":true}'),
    (b'{"t":0}', b'{"t":false}'),
    (b'{"t":1}', b'{"t":"1"}'),
    (b'{"t":1}', b'{"t":1.0000000000000002}'),
    (b'{"t":[1,2]}', b'{"t":[2,1]}'),
    (b'{"t":{"a":1}}', b'{"t":[["a",1]]}'),
    (b'{"t":9007199254740993}', b'{"t":9007199254740992}'),
]


@pytest.mark.parametrize("names", [ALL_PARAMETERS, ("t",), ("s", "t")])
@pytest.mark.parametrize(("one", "other"), SAME)
def test_parameters_are_the_same_by_value(one: bytes, other: bytes, names: PerCall) -> None:
    assert values_of(one, names) == values_of(other, names)
    assert shape_number(one, names, 0) == shape_number(other, names, 0)


@pytest.mark.parametrize("names", [ALL_PARAMETERS, ("t",), ("s", "t")])
@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_other_parameters_are_told_apart(one: bytes, other: bytes, names: PerCall) -> None:
    assert values_of(one, names) != values_of(other, names)
    assert shape_number(one, names, 0) != shape_number(other, names, 0)


def test_only_parameters_that_are_named_count() -> None:
    assert values_of(b'{"t":1,"seed":5}', ("t",)) == values_of(b'{"seed":6,"t":1}', ("t",))
    assert values_of(b'{"seed":5}', ("t",)) == b""
    assert values_of(b'{"t":1,"seed":5}', ALL_PARAMETERS) != values_of(b'{"t":1,"seed":6}', ALL_PARAMETERS)


def test_a_number_is_that_of_the_rows_too() -> None:
    assert shape_number(b"", ("t",), 7) == 7
    numbers = {shape_number(text, ("t",), shape) for text in (b'{"t":1}', b'{"t":2}') for shape in (0, 7, 8)}
    assert len(numbers) == 6
    assert all(0 < number < 1 << 40 for number in numbers)


def test_of_long_values_the_spelling_counts_and_what_is_out_of_range_does_no_harm() -> None:
    long = b'{"t":"%s"}' % (b"x" * CANONICAL)
    assert values_of(long, ALL_PARAMETERS) == long
    assert values_of(b'{"t":1e999}', ALL_PARAMETERS) == b'{"t":1e999}'


def worker(names: PerCall) -> WorkerInfo:
    return WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, takes="text", per_call=names)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ()),
        ([()], ()),
        ([("t",), ()], ("t",)),
        ([("t", "s"), ("a", "t")], ("a", "s", "t")),
        ([("t",), ALL_PARAMETERS], ALL_PARAMETERS),
    ],
)
def test_while_workers_differ_what_any_of_them_names_counts(told: Iterable[PerCall], expected: PerCall) -> None:
    assert per_call(map(worker, told)) == expected
