"""Pace of a slot in full batches: near the truth, or said to be an estimate."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable

import pytest

from headway.core.slot_pace import SlotPace

MAX_BATCH = 64
Seconds = Callable[[int, random.Random], float]


def straight(size: int, rng: random.Random) -> float:
    return 0.1 + 0.002 * size


def noisy(size: int, rng: random.Random) -> float:
    return straight(size, rng) * rng.lognormvariate(-0.005, 0.1)


def by_the_longest(size: int, rng: random.Random) -> float:
    """Each input takes its own time, and the batch as long as its longest."""
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
@pytest.mark.parametrize(("least", "most"), [(1, 8), (1, 64), (32, 64), (60, 64), (64, 64)])
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


def test_full_batches_that_follow_their_longest_input_are_measured_in_the_end() -> None:
    pace = learnt(by_the_longest, [MAX_BATCH] * 200, 1)
    assert not pace.estimated
    assert pace.items_per_second == pytest.approx(true_pace(by_the_longest), rel=0.1)


def test_nothing_is_known_at_first() -> None:
    pace = SlotPace(MAX_BATCH)
    assert (pace.items_per_second, pace.estimated) == (0.0, True)


def test_before_load_the_warm_up_tells() -> None:
    """From a single input alone the pace would be taken for 64 inputs in 102 ms, more than twice the truth."""
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


def test_a_later_start_changes_nothing_once_batches_were_seen() -> None:
    pace = learnt(straight, [MAX_BATCH] * 10, 1)
    before = pace.items_per_second
    pace.warmed([(1, 9.0), (MAX_BATCH, 9.0)])
    assert pace.items_per_second == before


def test_a_batch_may_hold_one_input() -> None:
    pace = SlotPace(1)
    for _ in range(20):
        pace.observe(1, 0.05)
    assert not pace.estimated
    assert pace.items_per_second == pytest.approx(20.0)
