"""Slots that are not equally fast: which of them take part, which one is woken, and what an accident does not change."""

from __future__ import annotations

import math

import pytest

from headway.core import policies
from headway.core.batch import Departure
from headway.core.departure import Load
from headway.core.policies.paced import team
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.slot_factors import FACTORS, USUAL, scale
from tests.core.entries import entry

STEPS_OF_TWO = 3
"""Steps of the grid nearest to twice as slow, 1.8."""


def fleet(fast: int, slow: int, steps: int, load: float, max_batch: int = 64) -> Load:
    """Load of a fleet of 100 ms batches, as a share of what all of it can do."""
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
def test_slow_slots_take_part_where_that_shortens_the_latency_or_they_are_needed(
    fast: int, slow: int, steps: int, load: float, chosen: int
) -> None:
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


def test_equal_slots_have_the_rule_that_they_have_when_nothing_is_known_of_paces() -> None:
    load = fleet(4, 0, 1, 0.5)
    rule = policies.build("paced", None).rule(load)
    assert (rule.team, rule.slowest) == (0.0, math.inf)
    assert rule.headway == pytest.approx(0.025)
    assert rule.part(1.0) == 1.0


class Pair:
    """A fast and a slow GPU, known for it."""

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
