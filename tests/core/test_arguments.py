import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.arguments import NoArguments, read, shown, write

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex("[a-z_]{1,8}", fullmatch=True).map(lambda name: f"x{name}")


def test_positional_and_named_arguments_are_read() -> None:
    text = "'a', b'b', size=3, deep={'x': [1.5, (None, True)]}, less=-1, of={1, 2}"
    positional, named = read(text)
    assert positional == ["a", b"b"]
    assert named == {"size": 3, "deep": {"x": [1.5, (None, True)]}, "less": -1, "of": {1, 2}}


def test_an_empty_text_holds_no_arguments_and_a_comment_does_not_hide_the_end() -> None:
    assert read(" ") == ([], {})
    assert read("n=1 # all") == ([], {"n": 1})


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_named_arguments_that_are_written_are_read_as_they_were(named: dict[str, Any]) -> None:
    assert read(write(named)) == ([], named)


@given(st.text(alphabet="f()[]{}'\"\\\n =,*.:abc019#\0", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text)
    except NoArguments:
        return
    shown(text)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"a-b": 1}, "'a-b' is not the name"),
        ({"class": 1}, "not written as in a call"),
        ({"a": math.nan}, "argument a holds a nan"),
        ({"a": [object()]}, "argument a holds a object"),
    ],
)
def test_what_has_no_literal_is_not_written(named: dict[str, Any], says: str) -> None:
    with pytest.raises(NoArguments, match=says):
        write(named)


def test_a_long_text_is_refused() -> None:
    with pytest.raises(NoArguments, match="at most 100000"):
        read("1," * 50_001)


def test_values_are_not_shown() -> None:
    assert shown("'a', 'b', key='c'") == "…, …, key=…"
