"""Cost and arrival rate of a model, learnt from noisy data."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.service_model import LEAST_SEEN, REACH, ArrivalRate, ServiceModel


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

    def test_follows_a_change(self) -> None:
        model = learnt(0.1, 0.0)
        rng = random.Random(2)
        for _ in range(300):
            size = rng.randint(1, 64)
            model.observe(size, 0.02 + 0.001 * size)
        assert model.alpha == pytest.approx(0.02, abs=0.001)
        assert model.beta == pytest.approx(0.001, rel=0.05)

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

    def test_nothing_is_foretold_far_beyond_what_was_seen(self) -> None:
        """A slow batch of three among batches of one is no reason to expect ten seconds of a batch of a hundred."""
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
        """Until it is, every free GPU leaves with what little is there, and the rest waits for them."""
        measured = ArrivalRate()
        for step in range(100):
            measured.observe(1, step / 10_000)
        assert measured.at(0.01) == pytest.approx(10_000.0, rel=0.05)
        soon = ArrivalRate()
        for step in range(30):
            soon.observe(1, step / 10_000)
        assert soon.at(0.003) == pytest.approx(10_000.0, rel=0.05)

    def test_a_first_arrival_is_no_rate_and_two_at_once_are_no_flood(self) -> None:
        measured = ArrivalRate()
        measured.observe(1, 5.0)
        assert measured.at(5.0) == 0.0
        measured.observe(1, 5.0)
        assert measured.at(5.0) <= 1000.0
        assert measured.at(5.1) <= 10.6

    @pytest.mark.parametrize("seed", range(3))
    def test_finds_the_rate_of_poisson_arrivals_without_bias(self, seed: int) -> None:
        rng, measured, now, seen = random.Random(seed), ArrivalRate(), 0.0, list[float]()
        while now < 40.0:
            now += rng.expovariate(200.0)
            measured.observe(1, now)
            seen.append(measured.at(now))
        assert sum(seen) / len(seen) == pytest.approx(200.0, rel=0.05)

    def test_fades_when_nothing_comes(self) -> None:
        measured = ArrivalRate()
        for step in range(3000):
            measured.observe(1, step / 1000)
        assert measured.at(4.0) == pytest.approx(1000.0 * math.exp(-1.0), rel=0.1)
        assert measured.at(20.0) < 0.001

    def test_arrivals_at_one_instant_count_together(self) -> None:
        one, many = ArrivalRate(), ArrivalRate()
        for step in range(100):
            one.observe(10, step / 100)
            for _ in range(10):
                many.observe(1, step / 100)
        assert one.at(1.0) == pytest.approx(many.at(1.0))

    @given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 5.0)), max_size=100))
    def test_is_never_negative_nor_beyond_all_that_came(self, steps: list[tuple[int, float]]) -> None:
        measured, now, total = ArrivalRate(), 0.0, 0
        for count, pause in steps:
            now += pause
            measured.observe(count, now)
            total += count
            assert 0.0 <= measured.at(now) <= total / LEAST_SEEN
