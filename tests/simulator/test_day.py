"""A simulated day under the autoscaler."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest

from headway.core.scaling.scaler import PLAN, RULES, ScaleLimits
from headway.core.scaling.sizing import BatchCost, fewest_slots
from headway.errors import SettingError
from headway.simulator.day import DAY, FIXED, Day, DayReport, day_arrivals, record_counts, simulate_day

COST = BatchCost(0.1, 0.001, 32)


@functools.cache
def reports() -> dict[str, DayReport]:
    day = Day(rate=1000, cost=COST, promise=0.25, start=120)
    return {policy: simulate_day(day, policy) for policy in (RULES, PLAN, FIXED)}


def test_a_plan_takes_fewer_gpu_hours_than_rules_and_keeps_the_promise_as_often() -> None:
    found = reports()
    assert found[PLAN].gpu_hours < found[RULES].gpu_hours < found[FIXED].gpu_hours
    assert found[PLAN].within >= found[RULES].within
    assert found[FIXED].ups == found[FIXED].downs == 0
    assert found[FIXED].within > 0.95


def test_a_plan_follows_the_wave_with_a_bounded_number_of_changes() -> None:
    found = reports()[PLAN]
    assert found.ups + found.downs < 80
    assert found.fewest < found.most / 3


def test_a_day_has_its_wave_and_its_doubling() -> None:
    arrivals, dispersion = day_arrivals(Day(rate=1000, cost=COST, promise=0.25, start=60))
    assert len(arrivals) == DAY
    assert sum(arrivals[:600]) / 600 == pytest.approx(400, rel=0.02)
    assert sum(arrivals[39_000:39_600]) / 600 == pytest.approx(1570, rel=0.03)
    assert sum(arrivals[39_700:40_300]) / 600 == pytest.approx(2 * 1570, rel=0.03)
    assert dispersion == 1.0


def test_a_record_is_sped_up_to_the_rate() -> None:
    rng = random.Random(1)
    now, trace = 0.0, []
    for _ in range(20_000):
        now += rng.expovariate(3.0)
        trace.append(now)
    counts, dispersion = record_counts(trace, 500)
    assert sum(counts) / len(counts) == pytest.approx(500, rel=0.01)
    assert dispersion == pytest.approx(1.0, abs=0.2)


ASKED = {1000: 1.0, 1005: 2.0, 1017: 1.0, 1100: 1.0}
"""Requests by the second in which they come."""


@pytest.mark.parametrize("policy", [RULES, PLAN])
@pytest.mark.parametrize(("timeout", "held", "sent_away"), [(4.0, 1.0, 3.0), (30.0, 4.0, 0.0)])
def test_at_zero_requests_are_held_for_a_start_that_is_over_in_time_and_others_get_503(
    policy: str, timeout: float, held: float, sent_away: float
) -> None:
    day = Day(rate=0.001, cost=COST, promise=0.25, start=20, timeout=timeout, limits=ScaleLimits(idle_after=300.0))
    traffic = [ASKED.get(second, 0.0) for second in range(2000)], 1.0
    found = simulate_day(day, policy, traffic=traffic)
    assert (found.held, found.sent_away, found.starts, found.fewest) == (held, sent_away, 1, 0)
    assert (found.within, found.refused) == (0.2, sent_away / 5), "who was held is late, and one found a worker"
    silent = 3600 * found.zero_hours
    assert silent == pytest.approx(1000 - 300 + 20 + 2000 - 1400, abs=5)
    assert 3600 * found.gpu_hours == pytest.approx(2000 - silent + 20, abs=5), "a GPU that starts is paid for"
    kept = simulate_day(msgspec.structs.replace(day, limits=ScaleLimits()), policy, traffic=traffic)
    assert (kept.zero_hours, kept.starts, 3600 * kept.gpu_hours, kept.within) == (0.0, 0, 2000, 1.0)


def test_few_arrivals_leave_seconds_without_any() -> None:
    arrivals, _ = day_arrivals(Day(rate=0.1, cost=COST, promise=0.25, start=60))
    assert sum(arrivals) == pytest.approx(0.1 * (DAY + 3660 * 1.59), rel=0.05)
    assert 0.85 < arrivals.count(0.0) / DAY < 0.95
    assert all(one == int(one) for one in arrivals)


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"limits": ScaleLimits(idle_after=-1.0)}, "--scale-to-zero-after-s"),
        ({"rate": 0.0}, "--rate"),
        ({"start": -1.0}, "--cold-start-s"),
        ({"promise": 0.1}, "--promise"),
    ],
)
def test_a_day_that_cannot_be_is_refused(wrong: dict[str, float], setting: str) -> None:
    with pytest.raises(SettingError, match=setting):
        Day(**{"rate": 1000, "cost": COST, "promise": 0.25, "start": 60, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alpha", "max_batch", "rate", "promise", "slots"),
    [
        (0.1, 100, 1000, 0.2, 2),
        (0.1, 100, 10_000, 0.2, 11),
        (0.05, 32, 1000, 0.5, 2),
        (0.05, 32, 10_000, 0.5, 17),
        (0.05, 64, 10_000, 0.1, 9),
    ],
)
def test_the_formula_finds_as_many_slots_as_the_planner(
    alpha: float, max_batch: int, rate: float, promise: float, slots: int
) -> None:
    assert fewest_slots(BatchCost(alpha + 0.0015, 0.0, max_batch), rate, promise) == slots
