"""The cases that the paced policy was made for: Poisson arrivals, 1.5 ms of overhead between two batches of a GPU."""

from __future__ import annotations

import pytest

from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import Report, make_report
from headway.simulator.scenario import USUAL_MIX, Scenario


def run(rate: float, workers: int, alpha: float, max_batch: int, duration: float, warmup: float = 1.0) -> Report:
    scenario = Scenario(
        rate=rate, workers=workers, alpha=alpha, max_batch=max_batch, duration=duration, warmup=warmup, seed=1
    )
    return make_report(simulate(scenario))


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
    report = run(rate, workers, alpha, max_batch, duration)
    assert report.total.latency_ms.p95 <= p95
    assert report.total.answered == report.total.requests
    assert report.batches.gap_cv < 0.1


def test_the_99th_percentile_at_89_percent_load() -> None:
    assert run(10_000, 9, 0.050, 64, 4).total.latency_ms.p99 <= 80


def test_a_fleet_at_98_percent_load_comes_out_of_step() -> None:
    """The fleet starts in step, since the batch time is not known yet; near saturation nearly every batch is full."""
    report = run(2_500, 8, 0.200, 64, duration=24, warmup=16)
    assert report.offered_rate / report.capacity > 0.96
    assert report.batches.gap_cv < 0.35
    assert report.total.latency_ms.p95 <= 260


def test_without_holding_batches_are_uneven_and_the_95th_percentile_is_higher() -> None:
    scenario = Scenario(rate=1_000, workers=2, alpha=0.1, max_batch=100, duration=15, policy="eager")
    report = make_report(simulate(scenario))
    assert report.batches.gap_cv > 0.5
    assert report.total.latency_ms.p95 > 170


class TestOverload:
    """3,000 requests/s, capacity for 1,970, a promise and deadline of 200 ms."""

    @pytest.fixture(scope="class")
    @classmethod
    def record(cls) -> Record:
        return simulate(
            Scenario(
                rate=3_000,
                workers=2,
                alpha=0.1,
                max_batch=100,
                timeout=0.2,
                promise=0.2,
                mix=USUAL_MIX,
                duration=18,
                warmup=6,
            )
        )

    def test_goodput_under_overload_is_the_capacity(self, record: Record) -> None:
        report = make_report(record)
        assert report.total.goodput >= 0.95 * report.capacity

    def test_the_highest_tier_is_unharmed_under_overload(self, record: Record) -> None:
        highest = make_report(record).tiers["enterprise"]
        assert highest.answered == highest.requests
        assert highest.latency_ms.p95 <= 155

    def test_the_lowest_tier_is_refused_under_overload(self, record: Record) -> None:
        tiers = make_report(record).tiers
        assert tiers["paid"].answered == tiers["paid"].requests
        assert tiers["free"].refused > 0.4 * tiers["free"].requests
        assert tiers["free"].expired < 0.001 * tiers["free"].requests
