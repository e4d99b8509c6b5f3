"""Calls to an API with a quota take turns, evenly apart."""

from __future__ import annotations

import pytest

from headway.core.ratelimit import CallPace


def test_calls_at_once_wait_for_their_turns_and_rest_saves_none_up() -> None:
    pace = CallPace(8.0)
    assert [pace.take(0.0) for _ in range(3)] == pytest.approx([0.0, 0.125, 0.25])
    assert pace.take(0.3) == pytest.approx(0.075)
    assert [pace.take(9.0), pace.take(9.0)] == pytest.approx([0.0, 0.125])


def test_without_a_rate_nobody_waits() -> None:
    pace = CallPace(0.0)
    assert [pace.take(0.0) for _ in range(1000)] == [0.0] * 1000
