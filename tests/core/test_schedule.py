"""Paced departures where an even gap alone is not enough: full batches in step, and the first request of a burst."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from msgspec.structs import replace

from headway.core import policies
from headway.core.departure import Dispatch, Hold, Load, QueueSnapshot, Rule, decide
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.service_model import ServiceModel
from tests.core.entries import entry
from tests.core.fleet import Seen, drive

SPACED = Rule(10, headway=0.05, service=0.1, pace=0.0475, tolerance=0.01)


class TestDecide:
    def test_a_full_batch_waits_for_the_schedule_less_the_lead(self) -> None:
        view = QueueSnapshot(10, 1.0, 9.0, last_departure=1.0, schedule=1.04)
        held = decide(SPACED, view, 1.0)
        assert isinstance(held, Hold)
        assert held.until == pytest.approx(1.03)
        assert decide(SPACED, view, 1.031) == Dispatch("full")

    def test_it_never_waits_longer_than_one_that_is_not_full(self) -> None:
        view = QueueSnapshot(10, 1.0, 9.0, last_departure=1.0, schedule=7.0)
        assert decide(SPACED, view, 1.0) == Hold(1.05)
        assert decide(SPACED, view, 1.05) == Dispatch("headway")

    def test_nor_beyond_a_deadline_or_a_window(self) -> None:
        late = QueueSnapshot(10, 1.0, due=1.1, last_departure=1.0, schedule=1.04)
        assert decide(SPACED, late, 1.0) == Dispatch("deadline")
        windowed = Rule(10, headway=0.05, window=0.02, pace=0.05, tolerance=0.0)
        assert decide(windowed, QueueSnapshot(10, 1.0, 9.0, 1.0, schedule=1.05), 1.02) == Dispatch("window")

    def test_policies_that_do_not_space_send_it_at_once(self) -> None:
        assert decide(Rule(10), QueueSnapshot(10, 1.0, 9.0, 1.0, schedule=7.0), 1.0) == Dispatch("full")


class TestPaced:
    @pytest.mark.parametrize(
        ("load", "spaced"),
        [
            (Load(10_000.0, 0.1, 0.0, 11, 100), True),
            (Load(5_000.0, 0.1, 0.0, 11, 100), False),
            (Load(900.0, 0.1, 0.0, 1, 100), False),
            (Load(5.0, 0.1, 0.0, 2, 100), False),
            (Load(1_601.0, 0.1, 0.0, 2, 100), True),
            (Load(1_600.0, 0.1, 0.0, 2, 100), False),
        ],
        ids=[
            "a busy fleet",
            "one with GPUs to spare",
            "one GPU has nobody to bunch with",
            "few arrivals",
            "two GPUs above the bound",
            "two GPUs on the bound",
        ],
    )
    def test_spaces_full_batches_where_there_is_something_to_space(self, load: Load, spaced: bool) -> None:
        rule = policies.build("paced", None).rule(load)
        assert (rule.pace > 0.0) == spaced
        assert math.isinf(rule.tolerance) != spaced

    def test_the_schedule_is_faster_than_the_fleet(self) -> None:
        load = Load(20_000.0, 0.1, 0.001, 4, 100)
        assert 0.9 < policies.build("paced", None).rule(load).pace / (load.batch_seconds(100) / 4) < 1.0

    def test_what_varies_by_chance_is_not_held(self) -> None:
        steady = Load(10_000.0, 0.1, 0.0, 11, 100)
        varying = Load(10_000.0, 0.1, 0.0, 11, 100, deviation=0.01)
        policy = policies.build("paced", None)
        assert policy.rule(varying).tolerance == pytest.approx(policy.rule(steady).tolerance + 0.04)


@pytest.mark.parametrize("rate", [950.0, 1500.0], ids=["near saturation", "overload"])
def test_bunched_gpus_are_spread_while_every_batch_is_full(rate: float) -> None:
    """Four GPUs wait while a backlog of four batches arrives at once: they begin in step, with no batch to spare."""
    queue = ModelQueue(QueueLimits(tiers=1, max_batch=25))
    arrivals = [0.0] * 100 + [number / rate for number in range(1, int(rate * 4))]
    coming = ((at, entry(str(number))) for number, at in enumerate(arrivals))
    seen = drive(queue, policies.build("paced", None), coming, slots=4, seconds=lambda size: 0.1, until=4)
    assert _widest_gap(seen, 0.0, 0.5) > 0.09
    assert _widest_gap(seen, 3.0, 4.0) < 0.035
    assert sum(size for left_at, size, _ in seen.batches if left_at >= 3.0) >= 0.97 * min(rate, 1000)


def _widest_gap(seen: Seen, start: float, end: float) -> float:
    times = [left_at for left_at, _, _ in seen.batches if start <= left_at < end]
    return max(later - before for before, later in pairwise(times))


class TestGather:
    RULE = Rule(100, headway=0.05, service=0.1, gather=0.04, quiet=0.01)

    def test_the_first_of_a_burst_is_given_a_gap_to_gather_others(self) -> None:
        assert decide(self.RULE, QueueSnapshot(1, 2.0, 9.0, last_departure=1.0, newest=2.0), 2.0) == Hold(2.01)
        assert decide(self.RULE, QueueSnapshot(30, 2.0, 9.0, last_departure=1.0, newest=2.035), 2.035) == Hold(2.04)
        assert decide(self.RULE, QueueSnapshot(31, 2.0, 9.0, last_departure=1.0, newest=2.04), 2.04) == Dispatch(
            "headway"
        )

    def test_until_nobody_follows(self) -> None:
        assert decide(self.RULE, QueueSnapshot(7, 2.0, 9.0, last_departure=1.0, newest=2.01), 2.02) == Dispatch(
            "headway"
        )

    def test_and_leaves_full_at_once(self) -> None:
        assert decide(self.RULE, QueueSnapshot(100, 2.0, 9.0, last_departure=1.0, newest=2.0), 2.0) == Dispatch("full")

    def test_a_batch_with_too_little_company_waits_for_more_in_silence(self) -> None:
        rule = replace(self.RULE, company=8)
        alone = QueueSnapshot(7, 2.0, 9.0, last_departure=1.0, newest=2.01)
        assert decide(rule, alone, 2.02) == Hold(2.04)
        assert decide(rule, alone, 2.04) == Dispatch("headway")
        assert decide(rule, QueueSnapshot(8, 2.0, 9.0, last_departure=1.0, newest=2.01), 2.02) == Dispatch("headway")

    @pytest.mark.parametrize(("rate", "gathers"), [(1000.0, True), (59.0, False), (19.0, False)])
    def test_only_where_others_were_due(self, rate: float, gathers: bool) -> None:
        """A gap of 50 ms: three mean gaps between arrivals must fit into it."""
        rule = policies.build("paced", None).rule(Load(rate, 0.1, 0.0, 2, 100))
        assert (rule.gather > 0.0) == gathers
        assert rule.gather + rule.quiet <= max(0.05, 2 * rule.quiet)

    def test_bursts_ride_together(self) -> None:
        """A burst of 60 over 15 ms, every 300 ms: two GPUs that never hold would send its first request alone."""
        burst = [round(start * 0.3 + number * 0.00025, 6) for start in range(20) for number in range(60)]
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=100))
        coming = ((at, entry(str(number))) for number, at in enumerate(burst))
        seen = drive(queue, policies.build("paced", None), coming, slots=2, seconds=lambda size: 0.1, until=6)
        sizes = [size for left_at, size, _ in seen.batches if left_at > 2.0]
        assert min(sizes) > 50


class TestDeviation:
    def test_of_exact_batch_times_is_nothing(self) -> None:
        model = ServiceModel()
        for size in (1, 50, 100, 7, 30) * 10:
            model.observe(size, 0.08 + 0.0002 * size)
        assert model.deviation < 0.001

    def test_of_varying_ones_is_about_theirs(self) -> None:
        model = ServiceModel()
        for number in range(400):
            model.observe(50, 0.1 + (0.01 if number % 2 else -0.01))
        assert model.deviation == pytest.approx(0.0125, rel=0.05)

    def test_one_stray_batch_sways_it_little(self) -> None:
        model = ServiceModel()
        for number in range(100):
            model.observe(50, 1.0 if number == 99 else 0.1)
        assert model.deviation < 0.03
