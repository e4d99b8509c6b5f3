"""Pauses between the starts of a backend that does not stay."""

from __future__ import annotations

import pytest

from headway.core.retry import KILLED_CAP, PAUSE_CAP, STEADY_LIFE, RestartPauses


def test_starts_that_fail_come_at_ever_longer_intervals() -> None:
    pauses = RestartPauses()
    assert [pauses.start_failed(False) for _ in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, PAUSE_CAP, PAUSE_CAP]
    pauses.well()
    assert pauses.start_failed(False) == 0.25


def test_starts_that_others_kill_are_not_put_off_for_long() -> None:
    pauses = RestartPauses()
    assert [pauses.start_failed(True) for _ in range(6)] == [0.25, 0.5, 1, KILLED_CAP, KILLED_CAP, KILLED_CAP]


def test_a_first_death_costs_no_pause_and_the_next_ones_do() -> None:
    pauses = RestartPauses()
    assert [pauses.died_idle(0.1) for _ in range(4)] == [0.0, 0.25, 0.5, 1.0]
    assert pauses.start_failed(False) == 4.0


@pytest.mark.parametrize("life", [STEADY_LIFE, 1e6])
def test_some_seconds_of_life_end_the_pauses(life: float) -> None:
    pauses = RestartPauses()
    for _ in range(20):
        pauses.died_idle(0.1)
    assert pauses.died_idle(life) == 0.0
    assert [pauses.died_idle(0.1) for _ in range(2)] == [0.0, 0.25]
