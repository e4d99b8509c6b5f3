"""Rooms of models that have places by turns: what is free is everybody's, and whoever waits gets one of another's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.core.scaling.shares import Holding, rooms


def test_what_is_free_is_room_for_every_model_up_to_its_bound() -> None:
    found = rooms({"a": Holding(1, 1, 4), "b": Holding(0, 0, 4), "c": Holding(2, 2, 3)}, 3, 0)
    assert found == {"a": 4, "b": 3, "c": 3}


def test_the_model_with_the_most_gives_one_up_for_one_that_waits() -> None:
    assert rooms({"a": Holding(0, 1, 4), "b": Holding(3, 3, 4), "c": Holding(1, 1, 4)}, 0, 0) == {
        "a": 1,
        "b": 2,
        "c": 1,
    }
    assert rooms({"a": Holding(0, 1, 4), "b": Holding(2, 2, 4), "c": Holding(1, 1, 4)}, 0, 1) == {
        "a": 1,
        "b": 2,
        "c": 1,
    }


def test_of_last_ones_any_may_be_given_up_and_by_nobody_who_has_none() -> None:
    assert rooms({"a": Holding(0, 1, 2), "b": Holding(1, 1, 2), "c": Holding(1, 1, 2), "d": Holding(0, 0, 2)}, 0, 0) == {
        "a": 1, "b": 0, "c": 0, "d": 0,
    }  # fmt: skip
    assert rooms({"a": Holding(0, 1, 2), "b": Holding(0, 1, 2)}, 0, 0) == {"a": 1, "b": 1}


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1),
    st.integers(0, 3),
)
def test_nobody_gives_up_anything_while_nobody_waits(drawn: dict[str, tuple[int, int]], free: int) -> None:
    holdings = {name: Holding(has, has, has + more) for name, (has, more) in drawn.items()}
    found = rooms(holdings, free, 0)
    assert all(holdings[name].has <= most <= holdings[name].most for name, most in found.items())
