"""Shares in the tokens of several inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.backends.remote.backend import shares


def test_tokens_are_shared_by_weight_and_evenly_without_any() -> None:
    assert shares(10, [1, 3, 1]) == [2, 6, 2]
    assert shares(10, [0, 0, 0]) == [3, 3, 4]
    assert shares(0, [1, 2]) == [0, 0]
    assert shares(5, []) == []


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_no_token_is_lost_and_no_share_is_off_by_more_than_one(total: int, weights: list[int]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    assert not whole or all(
        abs(part - total * weight / whole) <= 1 for part, weight in zip(parts, weights, strict=True)
    )
