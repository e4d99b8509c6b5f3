"""Parameters: what they mean, which count as equal, and which a call has only once."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.call_parameters import per_call, shape_number, values_of
from headway.core.parameters import CANONICAL, canonical, decode
from headway.model import ALL_PARAMETERS, PerCall, WorkerInfo, WorkerStatus

SAME = [
    (b"", b"{}"),
    (b'{"t":1}', b'{"t":1.0}'),
    (b'{"t":1e2}', b'{ "t" : 100 }'),
    (b'{"t":0}', b'{"t":-0.0}'),
    (b'{"t":0}', b'{"t":1e-400}'),
    (b'{"t":9007199254740991}', b'{"t":9.007199254740991e15}'),
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
    (b'{"t":9007199254740992}', b'{"t":9007199254740992.0}'),
    (b'{"t":18446744073709551616}', b'{"t":18446744073709551616.0}'),
]


@pytest.mark.parametrize("names", [ALL_PARAMETERS, ("t",), ("s", "t")])
@pytest.mark.parametrize(("one", "other"), SAME + OTHERS)
def test_parameters_are_the_same_by_value_and_others_are_told_apart(one: bytes, other: bytes, names: PerCall) -> None:
    same = (one, other) in SAME
    assert (values_of(one, names) == values_of(other, names)) is same
    assert (shape_number(one, names, 0) == shape_number(other, names, 0)) is same


def test_only_parameters_that_are_named_count_and_so_do_the_messages_of_a_chat() -> None:
    assert values_of(b'{"t":1,"seed":5}', ("t",)) == values_of(b'{"seed":6,"t":1}', ("t",))
    assert values_of(b'{"seed":5}', ("t",)) == b""
    assert values_of(b'{"t":1,"seed":5}', ALL_PARAMETERS) != values_of(b'{"t":1,"seed":6}', ALL_PARAMETERS)
    one, other = b'{"messages":["a"],"t":1}', b'{"messages":["b"],"t":1}'
    assert values_of(one, ALL_PARAMETERS) == values_of(other, ALL_PARAMETERS) == b'{"t":1}'
    assert values_of(one, ("messages",)) != values_of(other, ("messages",))


def test_a_number_is_that_of_the_rows_too() -> None:
    assert shape_number(b"", ("t",), 7) == 7
    numbers = {shape_number(text, ("t",), shape) for text in (b'{"t":1}', b'{"t":2}') for shape in (0, 7, 8)}
    assert len(numbers) == 6
    assert all(0 < number < 1 << 40 for number in numbers)


def test_of_long_values_the_spelling_counts_and_what_is_out_of_range_does_no_harm() -> None:
    long = b'{"t":"%s"}' % (b"x" * CANONICAL)
    assert values_of(long, ALL_PARAMETERS) == long
    assert values_of(b'{"t":1e999}', ALL_PARAMETERS) == b'{"t":1e999}'


NUMBERS = st.one_of(
    st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, False, 5, 5.0, 1e-300, 2**53, 2.0**53, -(2.0**53), 2**53 - 1, 2.0**53 - 1]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
NAMES = st.sampled_from(["t", "a", "ä", "", "B"])
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, st.sampled_from(["", "1", "ä"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: normal(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return list(map(normal, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


@st.composite
def respelled(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: draw(respelled(value[name])) for name in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return [draw(respelled(inner)) for inner in value]
    if isinstance(value, int | float) and draw(st.booleans()):
        kind = draw(st.sampled_from([int, float, bool]))
        try:
            return kind(value)
        except OverflowError:
            return value
    return value


PAIRS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=3).flatmap(
    lambda one: st.tuples(st.just(one), respelled(one))
)


@given(PAIRS)
@example(({"t": 5}, {"t": 5.0}))
@example(({"t": {"a": 0.0, "B": [1]}}, {"t": {"B": [1.0], "a": -0.0}}))
@example(({"t": 2**53}, {"t": 2.0**53}))
def test_what_rides_together_is_the_same_to_the_last_digit(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = (json.dumps(value).encode() for value in pair)
    for names in (ALL_PARAMETERS, ("t", "ä")):
        asked = [
            normal({name: value[name] for name in value if names == ALL_PARAMETERS or name in names}) for value in pair
        ]
        texts = [values_of(text, names) for text in (one, other)]
        assert [repr(decode(text or b"{}")) for text in texts] == list(map(repr, asked))
        assert (texts[0] == texts[1]) == (repr(asked[0]) == repr(asked[1]))
        if canonical(one) == canonical(other):  # A cache or an idempotency key may give both the same answer.
            assert texts[0] == texts[1]


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


@pytest.mark.parametrize("text", [b"", b"{", b'{"a":1e999}', b'{"a":-1e400}', b'{"a":NaN}', b'{"a":01}'])
def test_text_that_is_no_json_or_out_of_range_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(text)
