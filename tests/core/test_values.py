import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import parameters, values

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@given(TREES, st.sampled_from((None, 1)), st.booleans())
def test_every_json_value_comes_back_as_it_went(tree: Any, indent: int | None, ascii: bool) -> None:
    value = values.read(json.dumps(tree, indent=indent, ensure_ascii=ascii).encode())
    assert isinstance(value, str) == isinstance(tree, str)
    assert values.build(value) == tree
    assert json.loads(values.as_json(value)) == tree
    assert msgspec.json.decode(msgspec.json.encode([values.embedded(value)])) == [values.build(value)]
    assert values.of_json(values.as_json(value)) == value


@given(st.binary(max_size=60) | st.text(alphabet='[]{}",:\\ud80c0e1.-+nulltrue \0', max_size=60).map(str.encode))
def test_any_octets_are_read_as_json_is_or_refused(text: bytes) -> None:
    try:
        value = values.read(text)
    except (values.NoValue, msgspec.MsgspecError, UnicodeDecodeError):
        return
    try:
        values.build(value)
    except msgspec.ValidationError as exc:
        assert "out of range" in str(exc)
    json.loads(text)
    assert values.shown(value).encode()


@pytest.mark.parametrize(
    "text", [rb'"\ud800"', rb'["\udc00 a"]', rb'{"\ud83d":1}', rb'["a\\\ud800b"]', rb'["\uD83D\u0041"]']
)
def test_a_lone_surrogate_is_no_value(text: bytes) -> None:
    with pytest.raises((values.NoValue, msgspec.DecodeError)):
        values.read(text)


@pytest.mark.parametrize("text", [rb'["\ud83d\ude00"]', rb'["\\ud800"]', rb'["\\\\u0000", "\\u0000"]'])
def test_escapes_that_only_look_like_half_a_pair_are_taken(text: bytes) -> None:
    assert values.build(values.read(text)) == json.loads(text)


@pytest.mark.parametrize("text", [rb'"\u0000"', rb'[["a\u0000"]]', rb'{"\u0000":1}', rb'["\\\u0000"]'])
def test_a_nul_is_refused_anywhere(text: bytes) -> None:
    with pytest.raises(values.NoValue, match="U\\+0000"):
        values.read(text)


def test_nesting_is_bounded_and_brackets_in_texts_do_not_count() -> None:
    deepest = b"[" * values.MAX_DEPTH + b"]" * values.MAX_DEPTH
    assert values.read(deepest) == deepest
    assert values.read(b"[" + deepest[1:-1] + b"," + deepest[1:-1] + b"]")
    assert values.read(json.dumps(["[" * 500, '"[{' * 500]).encode())
    assert values.read(b"[" + b"[]," * 500 + b"1]")
    for deeper in (b"[" + deepest + b"]", b'{"a":' * 101 + b"1" + b"}" * 101, b"[[]," * 101 + b"1" + b"]" * 101):
        with pytest.raises(values.NoValue, match="deeper than 100 levels"):
            values.read(deeper)
    with pytest.raises(RecursionError):
        values.read(b"[" * 100_000)


@pytest.mark.parametrize(("value", "most"), [("ab", 2), ("é", 4), ("é".encode(), 2), (b"[1]", 3)])
def test_the_room_of_a_value_is_that_of_its_octets_or_four_for_a_character(value: str | bytes, most: int) -> None:
    assert values.room(value) == most


@pytest.mark.parametrize(
    "text",
    [
        b"1e999",
        b"[-1.5E+400]",
        b"[" + b"9" * 400 + b".0]",
        b"9" * 4301,
        b'{"e1000":[' + b"9" * 250 + b"e99]}",
        b"[" + b"1e308," * 900 + b"1e309]",
    ],
    ids=lambda text: text[:12].decode(),
)
def test_a_number_out_of_range_is_no_value(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="out of range"):
        values.build(text)
    with pytest.raises(values.NoValue, match=r"holds a number out of range: -?[19]"):
        values.read(text)


@pytest.mark.parametrize(
    "text",
    [
        b"1e308",
        b"-1E-999",
        b"9" * 4300,
        b"0." + b"9" * 5000,
        b'["1e999", "\\"1e999"]',
        b'{"' + b"9" * 5000 + b'":1e007}',
    ],
    ids=lambda text: text[:12].decode(),
)
def test_a_number_that_only_looks_out_of_range_is_taken(text: bytes) -> None:
    assert values.build(values.read(text)) == json.loads(text)


@given(
    st.dictionaries(TEXT, TREES, max_size=5).map(lambda tree: json.dumps(tree).encode())
    | st.text(alphabet='[]{}",:\\ud80c0e1.-+nulltrue \0', max_size=60).map(lambda text: b"{" + text.encode() + b"}")
)
def test_members_are_read_of_what_a_worker_can_build_and_of_nothing_else(text: bytes) -> None:
    try:
        members = values.read_members(text, 8)
    except (values.NoValue, msgspec.MsgspecError) as exc:
        if "deeper" in str(exc):
            return
        with pytest.raises(msgspec.MsgspecError):
            parameters.decode(text)
        return
    assert {name: msgspec.json.decode(raw) for name, raw in members.items()} == parameters.decode(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (rb'{"a":[1e999]}', "out of range"),
        (b'{"a":[' + b"1e308," * 1001 + b"1]}", "more than 1000 numbers"),
        (b'{"a":' + b"[" * 8 + b"]" * 8 + b"}", "deeper than 8 levels"),
    ],
)
def test_members_that_no_worker_could_build_say_why(text: bytes, said: str) -> None:
    with pytest.raises(values.NoValue, match=said):
        values.read_members(text, 8)


def test_members_may_hold_what_an_input_may_not_and_brackets_in_texts() -> None:
    assert list(values.read_members(rb'{"a":"\u0000","b":"[[[[[[[[[[[["}', 2)) == ["a", "b"]
