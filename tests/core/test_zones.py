"""Zones: where a request waits, and when another zone helps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import zones

SLOTS = st.dictionaries(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 8))


@given(own=st.sampled_from(["", "a", "b"]), slots=SLOTS, turn=st.integers(0, 10**9))
def test_a_request_stays_in_its_zone_while_a_slot_is_there_and_goes_where_one_is(
    own: str, slots: dict[str, int], turn: int
) -> None:
    chosen = zones.choose(own, slots, turn)
    if slots.get(own):
        assert chosen == own
    elif any(slots.values()):
        assert slots[chosen] > 0
    else:
        assert chosen == own


def test_requests_of_a_zone_without_slots_are_spread_by_slots_from_the_first_on() -> None:
    slots = {"a": 6, "b": 3, "c": 1}
    for first in (0, 7, 1000):
        counts = Counter(zones.choose("", slots, first + turn) for turn in range(100))
        assert counts == {zone: pytest.approx(10 * count, abs=3) for zone, count in slots.items()}


@pytest.mark.parametrize(
    ("depth", "slots", "waited", "batch_seconds", "expected"),
    [
        (0, 0, 0.0, 0.1, False),
        (1, 0, 0.0, 0.1, True),  # Nobody is at home.
        (500, 4, 0.1, 0.1, False),  # All came just now: the slots at home have had no turn yet.
        (1, 4, 0.101, 0.1, True),
        (1, 4, 0.009, 0.001, False),  # A hop costs more than that.
        (1, 4, 0.011, 0.0, True),
    ],
)
def test_a_zone_is_behind_when_an_entry_has_waited_for_longer_than_a_batch_takes(
    depth: int, slots: int, waited: float, batch_seconds: float, expected: bool
) -> None:
    assert zones.behind(depth, slots, waited, batch_seconds) is expected
