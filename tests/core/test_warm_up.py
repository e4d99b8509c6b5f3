"""Batches that a start runs, and the deadlines that fit what they show."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.deadlines import fitting, flags
from headway.core.service_model import BUDGET, WarmUpRun, measured, next_size


def all_runs(most: int, seconds: Callable[[int], float], cold: float = 0.0) -> list[WarmUpRun]:
    runs: list[WarmUpRun] = []
    while (size := next_size(runs, most)) is not None:
        runs.append((size, seconds(size) + (cold if not runs else 0.0)))
        assert len(runs) < 50
    return runs


def test_a_quick_model_is_measured_at_both_ends_and_the_shortest_run_of_a_size_counts() -> None:
    runs = all_runs(64, lambda size: 0.01 + 0.001 * size, cold=3.0)
    assert [size for size, _ in runs] == [1, 1, 64, 64]
    assert measured(runs) == ((1, 0.011), (64, 0.074))
    assert measured([(1, 5.0), (1, 0.1), (64, 2.0), (64, 0.2)]) == ((1, 0.1), (64, 0.2))


def test_a_slow_model_is_led_up_in_small_steps() -> None:
    runs = all_runs(32, lambda size: 1.0 + 0.01 * size)
    sizes = [size for size, _ in runs]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 32


def test_one_that_takes_too_long_for_one_input_is_run_once() -> None:
    assert [size for size, _ in all_runs(32, lambda size: BUDGET + 1.0)] == [1]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_machine_that_stands_still_once_is_not_taken_for_the_speed_of_the_model(at: int) -> None:
    runs: list[WarmUpRun] = []
    while (size := next_size(runs, 32)) is not None:
        runs.append((size, 0.01 + 0.001 * size + (10.0 if len(runs) == at else 0.0)))
        assert len(runs) < 8
    assert dict(measured(runs)) == pytest.approx({1: 0.011, 32: 0.042})


def test_a_batch_that_is_slow_again_is_the_speed_of_the_model() -> None:
    runs = all_runs(32, lambda size: 9.0 if size == 32 else 0.01)
    assert [size for size, _ in runs] == [1, 1, 32, 32]
    assert measured(runs) == ((1, 0.01), (32, 9.0))


def test_the_largest_batch_may_be_one_input() -> None:
    assert [size for size, _ in all_runs(1, lambda size: 0.1)] == [1, 1]


@given(st.integers(1, 4096), st.floats(0.0, 30.0), st.floats(0.0, 1.0), st.floats(0.0, 100.0))
@pytest.mark.filterwarnings("error")
def test_no_start_takes_longer_than_its_budget(most: int, alpha: float, beta: float, cold: float) -> None:
    runs = all_runs(most, lambda size: alpha + beta * size, cold)
    assert runs[0][0] == 1
    assert sum(seconds for _, seconds in runs[1:]) <= BUDGET * (1 + 1e-9)
    assert all(1 <= size <= most for size, _ in runs)


def test_who_just_missed_a_batch_can_wait_for_it_and_ride_in_the_next() -> None:
    assert fitting(10.0) == {"gpu_timeout_ms": 20_000, "queue_timeout_ms": 20_000, "request_timeout_ms": 40_000}
    assert fitting(10.01)["queue_timeout_ms"] == 21_000


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.15, 10.01, 200.0, 500.0, 5000.0])
def test_what_fits_are_settings_that_are_taken(seconds: float) -> None:
    fits = fitting(seconds)
    if seconds:
        Settings(**{name: float(value) for name, value in fits.items()})  # type: ignore[arg-type]
    assert fits["queue_timeout_ms"] <= fits["request_timeout_ms"]


def test_only_deadlines_that_are_too_short_are_raised() -> None:
    limits = {"gpu_timeout_ms": 60_000.0, "queue_timeout_ms": 2000.0, "request_timeout_ms": 39_000.0}
    assert flags(10.0, limits) == "--queue-timeout-ms 20000 --request-timeout-ms 40000"
    assert flags(10.0, {"gpu_timeout_ms": 3000.0}) == "--gpu-timeout-ms 20000"
    assert flags(0.5, {"gpu_timeout_ms": 3000.0}) == ""
