"""The paced policy under Poisson arrivals, cold starts, overload and autoscaling. Other policies are no faster."""

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headway.core.scaling.scaler import PLAN, RULES, ScaleLimits
from headway.core.scaling.sizing import BatchCost, fewest_slots
from headway.errors import SettingError
from headway.simulator.day import DAY, Day, day_arrivals, record_counts, simulate_day
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import Report, make_report, percentile
from headway.simulator.scenario import USUAL_MIX, Faults, QueueRules, Scenario


def p95(record: Record, begin: float = 0.0, end: float = math.inf) -> float:
    came = [latency for arrived, latency in zip(record.arrived, record.latency, strict=True) if begin <= arrived < end]
    return percentile(sorted(came), 0.95)


def run(**scenario: Any) -> Report:
    return make_report(simulate(Scenario(**{"warmup": 1.0, "seed": 1, **scenario})))


@pytest.mark.parametrize(
    ("rate", "workers", "alpha", "max_batch", "p95", "duration"),
    [
        (1_000, 2, 0.100, 100, 155, 20),
        (10_000, 11, 0.100, 100, 125, 4),
        (1_000, 2, 0.050, 32, 85, 20),
        (10_000, 17, 0.050, 32, 70, 4),
    ],
    ids=["1,000/s on 2 of 100 ms", "10,000/s on 11 of 100 ms", "1,000/s on 2 of 50 ms", "10,000/s on 17 of 50 ms"],
)
def test_the_simulated_95th_percentile_is_within_what_was_promised(
    rate: float, workers: int, alpha: float, max_batch: int, p95: float, duration: float
) -> None:
    report = run(rate=rate, workers=workers, alpha=alpha, max_batch=max_batch, duration=duration)
    assert report.total.latency_ms.p95 <= p95
    assert report.total.answered == report.total.requests
    assert report.batches.gap_cv < 0.1


def test_a_fleet_at_98_percent_load_comes_out_of_step() -> None:
    """The fleet starts in step, as the batch time isn't known yet. Near saturation, nearly every batch is full."""
    report = run(rate=2_500, workers=8, alpha=0.2, max_batch=64, duration=24, warmup=16)
    assert report.offered_rate / report.capacity > 0.96
    assert report.batches.gap_cv < 0.35
    assert report.total.latency_ms.p95 <= 260


def test_a_start_into_98_per_cent_settles_within_3_s() -> None:
    """32 GPUs run up to 64 requests in 200 ms, and get 10,000 requests/s from the start."""
    run = simulate(Scenario(rate=10_000.0, workers=32, alpha=0.2, max_batch=64, duration=6.0, warmup=0.0))
    assert sum(run.lost.values()) == 0
    assert p95(run, 0.0, 1.0) <= 0.24
    assert p95(run, 3.0, 6.0) <= 0.22


@pytest.mark.parametrize(
    ("alpha", "beta", "max_batch", "load"),
    [(0.1, 0.0, 100, 0.3), (0.05, 0.001, 32, 0.6), (0.1, 0.0, 32, 0.8), (0.1, 0.0, 100, 0.9), (0.05, 0.001, 32, 0.95)],
)
def test_the_first_second_is_no_worse_than_with_windows(alpha: float, beta: float, max_batch: int, load: float) -> None:
    rate = load * 6 * max_batch / (alpha + beta * max_batch + 0.0015)
    start = Scenario(rate=rate, workers=6, alpha=alpha, beta=beta, max_batch=max_batch, duration=1.0, warmup=0.0)
    paced, window = (p95(simulate(replace(start, policy=policy))) for policy in ("paced", "window"))
    assert paced <= 1.05 * window


@pytest.mark.parametrize(
    ("rate", "target", "goodput"),
    [(3_000.0, 1.0, 0.99), (6_000.0, 1.0, 0.97), (2_000.0, 0.7, 0.66), (1_700.0, 1.0, 0.0)],
)
def test_an_overload_leaves_no_capacity_unused_and_the_lowest_tier_bears_it(
    rate: float, target: float, goodput: float
) -> None:
    """Two GPUs take 100 ms for a batch of 100: 1,970 requests/s. Promise and deadline are 200 ms."""
    scenario = Scenario(
        rate=rate, workers=2, alpha=0.1, max_batch=100, duration=12.0, warmup=2.0, mix=USUAL_MIX,
        queue=QueueRules(timeout=0.2, promise=0.2, target_utilisation=target),
    )  # fmt: skip
    report = make_report(simulate(scenario))
    total, tiers = report.total, report.tiers
    assert total.goodput >= goodput * report.capacity
    for tier in ("enterprise", "paid"):
        assert tiers[tier].answered >= 0.999 * tiers[tier].requests
    if rate < report.capacity:
        assert total.reasons == {}
    elif target == 1.0:
        assert tiers["enterprise"].latency_ms.p95 <= 155
        assert tiers["free"].expired < 0.004 * tiers["free"].requests
    else:
        assert total.goodput <= 0.74 * report.capacity
        assert total.reasons["refused: capacity"] >= 0.99 * total.refused


def test_one_tier_alone_is_never_throttled() -> None:
    queue = QueueRules(target_utilisation=0.1)
    lone = run(rate=1_900.0, workers=2, alpha=0.1, max_batch=100, duration=6.0, queue=queue)
    assert lone.total.refused == 0


COST = BatchCost(0.1, 0.001, 32)


def test_a_plan_takes_fewer_gpu_hours_than_rules_keeps_the_promise_and_follows_the_wave() -> None:
    day = Day(rate=1000, cost=COST, promise=0.25, start=120)
    found = {policy: simulate_day(day, policy) for policy in (RULES, PLAN)}
    assert found[PLAN].gpu_hours < found[RULES].gpu_hours
    assert found[PLAN].within >= found[RULES].within
    plan = found[PLAN]
    assert plan.ups + plan.downs < 80
    assert plan.fewest < plan.most / 3


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
def test_the_formula_agrees_with_plans(alpha: float, max_batch: int, rate: float, promise: float, slots: int) -> None:
    assert fewest_slots(BatchCost(alpha + 0.0015, 0.0, max_batch), rate, promise) == slots


MOST = 1.03
PATIENT = QueueRules(queue_timeout=30.0, timeout=30.0)
POLICIES = ("paced", "window", "eager")


def at(load: float, workers: int, alpha: float, beta: float, max_batch: int, **more: Any) -> Scenario:
    """Return a scenario of Poisson arrivals. `load` is a share of the workers' capacity."""
    rate = load * workers * max_batch / (alpha + beta * max_batch)
    how: dict[str, Any] = {"duration": 10.0, **more}
    return Scenario(rate=rate, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, **how)


def unlike(workers: int, slow: float, rate: float) -> Scenario:
    """Return a scenario in which one GPU is slower."""
    duration, faults = 6000.0 / rate + 5.0, Faults(slow=slow)
    return Scenario(rate=rate, workers=workers, alpha=0.2, max_batch=64, faults=faults, jitter=0.1, duration=duration)


UNLIKE_PAIR = Scenario(
    rate=330.0, workers=2, alpha=0.05, max_batch=32, faults=Faults(slow=1.5), duration=40.0, warmup=20.0, queue=PATIENT
)


@pytest.mark.parametrize(
    "scenario",
    [
        # Batches that take longer the fuller they are.
        at(0.5, 6, 0.1, 0.002, 64),
        at(0.5, 2, 0.1, 0.0, 100),
        # Varying times.
        at(0.7, 5, 0.2, 0.025, 16, jitter=0.3, duration=70.0),
        at(0.6, 1, 0.05, 0.002, 32, jitter=0.3, duration=55.0),
        # One slower GPU.
        unlike(2, 3.0, 265.0),
        unlike(8, 2.0, 2040.0),
        # Two unlike GPUs that do better without gaps.
        UNLIKE_PAIR,
    ],
)
def test_requests_wait_no_longer(scenario: Scenario) -> None:
    paced, *others = (p95(simulate(replace(scenario, policy=name))) for name in POLICIES)
    assert paced <= MOST * min(others)


def clients(
    count: int, workers: int, alpha: float, beta: float, max_batch: int, seconds: float, **more: Any
) -> Scenario:
    """Return a scenario of clients that ask again once answered, for `seconds` after a warm-up of a fifth of that."""
    return Scenario(
        clients=count, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, duration=1.2 * seconds,
        warmup=0.2 * seconds, **more,
    )  # fmt: skip


def together(count: int, workers: int, alpha: float, beta: float, max_batch: int, slow: float) -> Scenario:
    """Return a scenario in which clients do best in groups, one per GPU, without gaps."""
    cycle = alpha + beta * max_batch
    return clients(count, workers, alpha, beta, max_batch, 100 * cycle, faults=Faults(slow=slow), queue=PATIENT)


@pytest.mark.parametrize(
    ("scenario", "least", "seeds"),
    [
        # Clients that return together don't stay together forever while the other GPU is idle.
        (clients(4, 2, 0.02, 0.002, 64, 10.0), 0.97, 1),
        (clients(16, 2, 0.02, 0.002, 64, 10.0, jitter=0.05), 0.97, 1),
        # If there are as many GPUs as clients, each has its own.
        (clients(4, 4, 0.1, 0.003, 32, 24.0, faults=Faults(slow=1.5), jitter=0.3), 0.97, 1),
        # All fit into one batch. With a window they stay together from the start; other rules get there by chance.
        (clients(16, 7, 0.02, 0.00125, 32, 8.3, faults=Faults(slow=3.0), jitter=0.3), 1.08, 2),
        (together(16, 5, 0.02, 0.00125, 32, 1.5), 1.08, 1),
    ],
)
def test_clients_get_as_many_answers(scenario: Scenario, least: float, seeds: int) -> None:
    paced, *others = (
        sum(len(simulate(replace(scenario, policy=name, seed=seed)).latency) for seed in range(seeds))
        for name in POLICIES
    )
    assert paced >= least * max(others)
