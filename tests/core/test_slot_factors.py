"""How fast slots are relative to each other, their pace, and which of them take part."""

import functools
import random
import statistics
from collections.abc import Callable

import pytest

from headway.core import policies
from headway.core.departure import Departure, Load
from headway.core.policies.paced import team
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.service_model import ServiceModel
from headway.core.slot_factors import FACTORS, PRIOR, USUAL, SlotFactors, SlotPace, scale
from tests.core.entries import entry

ALPHA, BETA = 0.1, 0.001


class Learnt:
    """Slots that run batches of any size, and what is learnt about them."""

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


@pytest.mark.parametrize(("slow", "slots"), [(1.2, 2), (1.5, 8), (2.0, 3), (3.0, 8)])
def test_a_slow_slot_is_found_and_how_slow_it_is(slow: float, slots: int) -> None:
    learnt = run_all({"gpu-0": slow}, slots, 40)
    assert learnt.ratio("gpu-0", "gpu-1") == pytest.approx(slow, rel=0.23)  # At most one grid step.
    line, factor = learnt.line, learnt.factors.of("gpu-1")
    assert factor * line.alpha == pytest.approx(ALPHA, rel=0.15)
    assert factor * line.beta == pytest.approx(BETA, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(2))
def test_a_slot_that_is_much_slower_is_found_in_a_few_batches_that_vary(seed: int) -> None:
    assert run_all({"gpu-0": 3.0}, 8, 5, jitter=0.3, seed=seed).ratio("gpu-0", "gpu-1") > 1.3


def test_one_run_that_takes_far_too_long_makes_no_slot_slow_and_one_that_is_fast_again_counts_so() -> None:
    learnt = run_all({}, 2, 50, jitter=0.1)
    learnt.factors.learn(learnt.line, "gpu-0", 10, 30.0, learnt.departures)
    for worker in ("gpu-0", "gpu-1", "gpu-0"):
        learnt.run(worker, 1.0)
    assert learnt.ratio("gpu-0", "gpu-1") == 1.0
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


STEPS_OF_TWO = 3
"""Steps of the grid nearest to twice as slow, 1.8."""


def fleet(fast: int, slow: int, steps: int, load: float, max_batch: int = 64) -> Load:
    """Return the load of a fleet with batches of 100 ms. `load` is a share of its capacity."""
    paces = [0] * len(FACTORS)
    paces[USUAL], paces[USUAL + steps] = fast, slow
    slots = fast + slow
    return Load(load * slots * max_batch / 0.1, 0.1, 0.0, slots, max_batch, departures=100, paces=tuple(paces))


@pytest.mark.parametrize(
    ("fast", "slow", "steps", "load", "chosen"),
    [
        (1, 1, 2, 0.3, 2),
        (1, 1, 5, 0.3, 1),
        (1, 1, 5, 0.9, 2),
        (7, 1, 2, 0.3, 7),
        (7, 1, 2, 0.95, 8),
        (4, 4, STEPS_OF_TWO, 0.2, 4),
        (4, 4, STEPS_OF_TWO, 0.8, 8),
    ],
)
def test_slow_slots_take_part_where_they_help(fast: int, slow: int, steps: int, load: float, chosen: int) -> None:
    assert team(fleet(fast, slow, steps, load)).slots == chosen


def test_gap_and_run_time_together_are_as_long_on_each_slot() -> None:
    load = fleet(1, 1, 2, 0.3)
    rule = policies.build("paced", None).rule(load)
    assert rule.headway is not None
    times = scale((*load.paces[:USUAL], 0, *load.paces[USUAL + 1 :]), load.slots)
    factors = [times * FACTORS[USUAL], times * FACTORS[USUAL + 2]]
    latencies = [rule.headway * rule.part(factor) + 0.1 * factor for factor in factors]
    assert latencies == pytest.approx([latencies[0]] * 2)
    assert all(factor < rule.slowest for factor in factors)


class Pair:
    """A fast and a slow GPU whose speeds are known."""

    def __init__(self) -> None:
        self.queue = ModelQueue(QueueLimits(1, 16, 0.0, 1000))
        self.policy = policies.build("paced", None)
        self.queue.set_slots(2, {"fast", "slow"})
        self.now = 0.0
        for _ in range(60):
            self.run("fast", 0.1)
            self.run("slow", 0.3)

    def leave(self, worker: str, size: int = 4) -> Departure:
        self.now += 10.0
        for _ in range(size):
            self.queue.offer(entry(), self.now)
        departure = self.queue.depart(worker, 16, self.policy, self.now + 1.0)
        assert isinstance(departure, Departure)
        return departure

    def run(self, worker: str, seconds: float) -> None:
        departure = self.leave(worker)
        self.now += 1.0 + seconds
        self.queue.finish(departure, self.now)


def test_of_idle_gpus_the_fastest_is_woken() -> None:
    pair = Pair()
    pair.now += 10.0
    for _ in range(16):
        pair.queue.offer(entry(), pair.now)
    assert pair.queue.wake(["slow", "fast"], pair.now) == "fast"


def test_what_waits_while_the_fast_gpu_runs_is_left_to_it() -> None:
    pair = Pair()
    pair.leave("fast")
    left_at = pair.now + 1.0
    pair.queue.offer(entry(), left_at + 0.05)
    until = pair.queue.wake(["slow"], left_at + 0.05)
    assert isinstance(until, float)
    assert until > left_at + 0.2


def test_after_one_very_long_run_a_lone_request_leaves_at_once() -> None:
    queue, policy, now = ModelQueue(QueueLimits(1, 16, 0.0, 1000)), policies.build("paced", None), 0.0
    queue.set_slots(2, {"gpu-0", "gpu-1"})
    for number in range(60):
        now += 0.2
        queue.offer(entry(), now)
        departure = queue.depart(f"gpu-{number % 2}", 16, policy, now)
        assert isinstance(departure, Departure)
        queue.finish(departure, now + (30.0 if number == 50 else 0.1))


MAX_BATCH = 64
Seconds = Callable[[int, random.Random], float]


def straight(size: int, rng: random.Random) -> float:
    return 0.1 + 0.002 * size


def noisy(size: int, rng: random.Random) -> float:
    return straight(size, rng) * rng.lognormvariate(-0.005, 0.1)


def by_the_longest(size: int, rng: random.Random) -> float:
    """Return a batch time. Inputs take random times, and the batch takes as long as its longest input."""
    return 0.02 + max(0.03 * rng.lognormvariate(0.0, 0.6) for _ in range(size))


@functools.cache
def true_pace(seconds: Seconds) -> float:
    rng = random.Random(99)
    return MAX_BATCH / statistics.fmean(seconds(MAX_BATCH, rng) for _ in range(4000))


def learnt(seconds: Seconds, sizes: list[int], seed: int) -> SlotPace:
    rng, pace = random.Random(seed), SlotPace(MAX_BATCH)
    pace.warmed([(1, seconds(1, rng)), (MAX_BATCH, seconds(MAX_BATCH, rng))])
    for size in sizes:
        pace.observe(size, seconds(size, rng))
    return pace


@pytest.mark.parametrize("seconds", [straight, noisy, by_the_longest])
@pytest.mark.parametrize(("least", "most"), [(1, 8), (1, 64), (60, 64)])
def test_after_20_batches_it_is_within_a_tenth_or_an_estimate(seconds: Seconds, least: int, most: int) -> None:
    truth, sure, right = true_pace(seconds), 0, 0
    for seed in range(40):
        rng = random.Random(1000 + seed)
        pace = learnt(seconds, [rng.randint(least, most) for _ in range(20)], seed)
        if not pace.estimated:
            sure += 1
            right += abs(pace.items_per_second / truth - 1) <= 0.1
    assert right >= 0.9 * sure - 1, "one may be chance"
    if least >= 60 and seconds is not by_the_longest:
        assert sure == 40, "twenty full batches say enough"
    if most <= 8:
        assert sure == 0, "nothing is known of full batches"


def test_before_load_the_warm_up_tells() -> None:
    """Judged by a single input, the pace would be 64 inputs in 102 ms, more than twice the true one."""
    pace = learnt(straight, [], 1)
    assert pace.estimated
    assert pace.items_per_second == pytest.approx(true_pace(straight), rel=0.01)
    small = learnt(straight, [1] * 20, 1)
    assert small.estimated
    assert small.items_per_second == pytest.approx(true_pace(straight), rel=0.1)


def test_a_slot_that_slows_down_is_followed() -> None:
    rng = random.Random(1)
    pace = learnt(straight, [MAX_BATCH] * 50, 1)
    for _ in range(10):
        pace.observe(MAX_BATCH, 2 * straight(MAX_BATCH, rng))
    assert pace.items_per_second == pytest.approx(true_pace(straight) / 2, rel=0.1)
    for _ in range(10):
        pace.observe(MAX_BATCH, 2 * straight(MAX_BATCH, rng))
    assert not pace.estimated


def test_a_pace_that_was_measured_is_not_an_estimate_again_for_a_few_stray_batches() -> None:
    rng, pace, told = random.Random(1), SlotPace(MAX_BATCH), list[bool]()
    for _ in range(2000):
        pace.observe(MAX_BATCH, by_the_longest(MAX_BATCH, rng))
        if not told or told[-1] is not pace.estimated:
            told.append(pace.estimated)
    assert len(told) <= 6, "to and fro"


def test_a_batch_may_hold_one_input() -> None:
    pace = SlotPace(1)
    for _ in range(20):
        pace.observe(1, 0.05)
    assert not pace.estimated
    assert pace.items_per_second == pytest.approx(20.0)
