"""How fast slots are beside each other, learnt from few noisy batches."""

from __future__ import annotations

import random

import pytest

from headway.core.service_model import ServiceModel
from headway.core.slot_factors import FACTORS, PRIOR, USUAL, SlotFactors, scale

ALPHA, BETA = 0.1, 0.001


class Learnt:
    """Slots that run batches of any size, and what is learnt of them."""

    def __init__(self, slots: int, jitter: float, seed: int) -> None:
        self.workers = [f"gpu-{number}" for number in range(slots)]
        self.line, self.factors = ServiceModel(), SlotFactors()
        self.line.warm_up([(1, ALPHA + BETA), (64, ALPHA + 64 * BETA)])
        self.departures = 0
        self.factors.keep(slots, self.workers, 0)
        self._rng, self._jitter = random.Random(seed), jitter

    def run(self, worker: str, factor: float, size: int = 0) -> None:
        size = size or self._rng.randint(1, 64)
        seconds = factor * (ALPHA + BETA * size) * max(0.1, self._rng.gauss(1.0, self._jitter))
        self.departures += 1
        self.factors.learn(self.line, worker, size, seconds, self.departures)

    def ratio(self, worker: str, other: str) -> float:
        return self.factors.of(worker) / self.factors.of(other)


def run_all(slow: dict[str, float], slots: int, batches: int, jitter: float = 0.0, seed: int = 0) -> Learnt:
    learnt = Learnt(slots, jitter, seed)
    for _ in range(batches):
        for worker in learnt.workers:
            learnt.run(worker, slow.get(worker, 1.0))
    return learnt


@pytest.mark.parametrize("slow", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_a_slow_slot_is_found_and_how_slow_it_is(slow: float, slots: int) -> None:
    learnt = run_all({"gpu-0": slow}, slots, 40)
    assert learnt.ratio("gpu-0", "gpu-1") == pytest.approx(slow, rel=0.23)  # A step of the grid, at most.
    line, factor = learnt.line, learnt.factors.of("gpu-1")
    assert factor * line.alpha == pytest.approx(ALPHA, rel=0.15)
    assert factor * line.beta == pytest.approx(BETA, rel=0.25)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slow", [1.5, 2.0])
def test_a_gpu_that_slows_down_in_service_is_noticed_within_ten_of_its_batches(slow: float, seed: int) -> None:
    learnt = run_all({}, 4, 50, jitter=0.1, seed=seed)
    assert learnt.ratio("gpu-0", "gpu-1") == 1.0
    for _ in range(10):
        for worker in learnt.workers:
            learnt.run(worker, slow if worker == "gpu-0" else 1.0)
    assert learnt.ratio("gpu-0", "gpu-1") > 1.1


def test_slots_that_are_alike_count_as_alike_whatever_chance_does() -> None:
    alike = rounds = 0
    for seed in range(5):
        learnt = Learnt(8, 0.3, seed)
        for _ in range(100):
            for worker in learnt.workers:
                learnt.run(worker, 1.0)
            alike += learnt.factors.counts.count(0) == len(FACTORS)
            rounds += 1
    assert alike > 0.6 * rounds


def test_in_the_first_batches_chance_sets_slots_apart_less_often() -> None:
    apart = rounds = 0
    for seed in range(40):
        learnt = Learnt(8, 0.3, seed)
        for _ in range(10):
            for worker in learnt.workers:
                learnt.run(worker, 1.0)
            apart += learnt.factors.counts.count(0) != len(FACTORS)
            rounds += 1
    assert apart < 0.7 * rounds  # With each factor as measured it is 0.86.


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_that_is_much_slower_is_found_in_a_few_batches_that_vary(seed: int) -> None:
    learnt = run_all({"gpu-0": 3.0}, 8, 5, jitter=0.3, seed=seed)
    assert learnt.ratio("gpu-0", "gpu-1") > 1.3


def test_larger_batches_on_the_slow_slot_are_not_taken_for_the_cost_of_an_input() -> None:
    learnt = Learnt(2, 0.0, 0)
    rng, pooled = random.Random(1), ServiceModel()
    for _ in range(100):
        for worker, factor, size in (("gpu-0", 2.0, rng.randint(24, 64)), ("gpu-1", 1.0, rng.randint(1, 32))):
            learnt.run(worker, factor, size)
            pooled.observe(size, factor * (ALPHA + BETA * size))
    assert pooled.beta > 3 * BETA
    assert learnt.factors.of("gpu-1") * learnt.line.beta == pytest.approx(BETA, rel=0.4)


@pytest.mark.parametrize(("slow", "batches"), [(1.5, 10), (2.0, 20), (3.0, 100)])
def test_slots_with_the_line_do_together_what_the_slots_do(slow: float, batches: int) -> None:
    learnt, rng = Learnt(2, 0.0, 0), random.Random(1)
    for _ in range(batches):
        learnt.run("gpu-0", slow, rng.randint(24, 64))
        learnt.run("gpu-1", 1.0, rng.randint(1, 40))
    full = ALPHA + 64 * BETA
    assert 2 * 64 / learnt.line.seconds(64) == pytest.approx(64 / full + 64 / (slow * full), rel=0.1)


def test_one_run_that_takes_far_too_long_makes_no_slot_slow() -> None:
    learnt = run_all({}, 2, 50, jitter=0.1)
    learnt.factors.learn(learnt.line, "gpu-0", 10, 30.0, learnt.departures)
    for worker in ("gpu-0", "gpu-1", "gpu-0"):
        learnt.run(worker, 1.0)
    assert learnt.ratio("gpu-0", "gpu-1") == 1.0


def test_a_slot_that_is_fast_again_counts_as_fast_again() -> None:
    learnt = run_all({"gpu-0": 2.0}, 3, 30)
    for _ in range(30):
        learnt.run("gpu-0", 1.0)
        learnt.run("gpu-1", 1.0)
    assert learnt.ratio("gpu-0", "gpu-1") == 1.0


@pytest.mark.parametrize("slots", [2, 5])
def test_the_mean_of_the_inverse_factors_is_one(slots: int) -> None:
    learnt = run_all({"gpu-0": 3.0, "gpu-1": 1.5}, slots, 30)
    assert sum(1 / learnt.factors.of(worker) for worker in learnt.workers) == pytest.approx(slots)
    paces = learnt.factors.paces()
    assert sum(paces) == slots
    assert paces[USUAL] == slots - sum(learnt.factors.counts)


def test_what_was_learnt_goes_with_the_worker() -> None:
    learnt = run_all({"gpu-0": 2.0}, 2, 30)
    assert learnt.factors.paces()
    learnt.factors.keep(1, ["gpu-1"], learnt.departures)
    learnt.factors.keep(2, ["gpu-0", "gpu-1"], learnt.departures)
    assert learnt.factors.standing("gpu-0", learnt.departures + 7)[1] == 7
    assert learnt.factors.of("gpu-0") == scale(learnt.factors.counts, 2)


def test_nothing_is_learnt_of_slots_that_are_at_home_elsewhere() -> None:
    learnt = Learnt(2, 0.0, 0)
    for _ in range(PRIOR * 4):
        learnt.run("guest", 3.0)
    assert learnt.factors.paces() == ()
    assert learnt.factors.standing("guest", 1000) == (1.0, 0)
