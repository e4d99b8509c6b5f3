"""A model's cost and arrival rate, learnt from noisy data; warm-up batches, and deadlines derived from them."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.deadlines import fitting, flags
from headway.core.service_model import (
    BUDGET,
    LEAST_SEEN,
    REACH,
    ArrivalRate,
    ServiceModel,
    WarmUpRun,
    measured,
    next_size,
)


def learnt(alpha: float, beta: float, noise: float = 0.0, seed: int = 1, batches: int = 400) -> ServiceModel:
    model, rng = ServiceModel(), random.Random(seed)
    for _ in range(batches):
        size = rng.randint(1, 64)
        model.observe(size, (alpha + beta * size) * rng.uniform(1 - noise, 1 + noise))
    return model


class TestServiceModel:
    @pytest.mark.parametrize("seed", range(5))
    def test_finds_the_line_under_noise(self, seed: int) -> None:
        model = learnt(0.05, 0.002, noise=0.1, seed=seed)
        assert model.alpha == pytest.approx(0.05, rel=0.2)
        assert model.beta == pytest.approx(0.002, rel=0.2)
        assert model.seconds(32) == pytest.approx(0.114, rel=0.05)

    @given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 30.0)), min_size=1, max_size=200))
    def test_no_coefficient_is_negative_and_larger_is_never_faster(self, batches: list[tuple[int, float]]) -> None:
        model = ServiceModel()
        for size, seconds in batches:
            model.observe(size, seconds)
            assert model.alpha >= -1e-9
            assert model.beta >= 0.0
            assert math.isfinite(model.seconds(100))
        expected = [model.seconds(size) for size in range(1, 101)]
        assert expected == sorted(expected)

    def test_one_run_that_takes_far_too_long_is_an_accident_and_two_are_a_change(self) -> None:
        model = learnt(0.1, 0.001, noise=0.1)
        before = model.seconds(1), model.seconds(64)
        model.observe(1, 30.0)
        assert (model.seconds(1), model.seconds(64)) == pytest.approx(before, rel=0.1)
        model = learnt(0.1, 0.0)
        for _ in range(100):
            model.observe(8, 1.0)
        assert model.seconds(8) == pytest.approx(1.0, rel=0.2)

    @pytest.mark.parametrize("disturbed", [0.35, 2.0])
    def test_a_disturbance_that_is_over_is_forgotten_within_twenty_batches(self, disturbed: float) -> None:
        model = learnt(0.06, 0.0)
        for _ in range(100):
            model.observe(8, disturbed)
        for _ in range(20):
            model.observe(8, 0.06)
        assert model.seconds(8) == pytest.approx(0.06, rel=0.25)

    def test_the_deviation_of_varying_times_is_about_theirs(self) -> None:
        model = ServiceModel()
        for number in range(400):
            model.observe(50, 0.1 + (0.01 if number % 2 else -0.01))
        assert model.deviation == pytest.approx(0.0125, rel=0.05)

    def test_nothing_is_foretold_far_beyond_what_was_seen(self) -> None:
        """One slow batch of three among batches of one doesn't mean that a batch of 100 takes ten seconds."""
        model = ServiceModel()
        model.observe(3, 0.3)
        for _ in range(20):
            model.observe(1, 0.1)
        assert model.seconds(1) == pytest.approx(0.1, rel=0.3)
        assert model.seconds(100) <= 0.1 * 3 * REACH + 1e-9

    def test_a_line_that_starts_below_nothing_is_one_from_nothing_through_the_mean(self) -> None:
        model = ServiceModel()
        model.observe(10, 0.1)
        model.observe(20, 0.3)
        assert model.alpha == 0.0
        assert model.beta == pytest.approx((0.1 + 0.3) / (10 + 20), rel=0.01)

    def test_a_warm_up_is_believed_until_batches_are_seen(self) -> None:
        model = ServiceModel()
        model.warm_up([])
        assert (model.seconds(32), model.largest) == (0.0, 0.0), "nothing is known before the first batch"
        model.warm_up([(1, 0.102), (64, 0.228)])
        assert (model.alpha, model.beta) == pytest.approx((0.1, 0.002))
        model.warm_up([(1, 9.0), (64, 9.0)])
        assert model.seconds(64) == pytest.approx(0.228)


class TestArrivalRate:
    def test_is_right_within_milliseconds_of_a_start_into_full_load(self) -> None:
        """Until then, each free GPU leaves with the little there is, and all later entries wait for them."""
        for count in (30, 100):
            arrivals = ArrivalRate()
            for step in range(count):
                arrivals.observe(1, step / 10_000)
            assert arrivals.at(count / 10_000) == pytest.approx(10_000.0, rel=0.05)

    def test_a_first_arrival_is_no_rate_and_two_at_once_are_no_flood(self) -> None:
        arrivals = ArrivalRate()
        arrivals.observe(1, 5.0)
        assert arrivals.at(5.0) == 0.0
        arrivals.observe(1, 5.0)
        assert arrivals.at(5.0) <= 1000.0
        assert arrivals.at(5.1) <= 10.6

    @pytest.mark.parametrize("seed", range(3))
    def test_finds_the_rate_of_poisson_arrivals_without_bias(self, seed: int) -> None:
        rng, arrivals, now, seen = random.Random(seed), ArrivalRate(), 0.0, list[float]()
        while now < 40.0:
            now += rng.expovariate(200.0)
            arrivals.observe(1, now)
            seen.append(arrivals.at(now))
        assert sum(seen) / len(seen) == pytest.approx(200.0, rel=0.05)

    def test_fades_when_nothing_comes(self) -> None:
        arrivals = ArrivalRate()
        for step in range(3000):
            arrivals.observe(1, step / 1000)
        assert arrivals.at(4.0) == pytest.approx(1000.0 * math.exp(-1.0), rel=0.1)
        assert arrivals.at(20.0) < 0.001

    def test_arrivals_at_one_instant_count_together(self) -> None:
        one, many = ArrivalRate(), ArrivalRate()
        for step in range(100):
            one.observe(10, step / 100)
            for _ in range(10):
                many.observe(1, step / 100)
        assert one.at(1.0) == pytest.approx(many.at(1.0))

    @given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 5.0)), max_size=100))
    def test_is_never_negative_nor_beyond_all_that_came(self, steps: list[tuple[int, float]]) -> None:
        arrivals, now, total = ArrivalRate(), 0.0, 0
        for count, pause in steps:
            now += pause
            arrivals.observe(count, now)
            total += count
            assert 0.0 <= arrivals.at(now) <= total / LEAST_SEEN


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


def test_one_that_takes_too_long_for_one_input_is_run_once_and_the_largest_batch_may_be_one_input() -> None:
    assert [size for size, _ in all_runs(32, lambda size: BUDGET + 1.0)] == [1]
    assert [size for size, _ in all_runs(1, lambda size: 0.1)] == [1, 1]


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
