"""Overload of the usual mix of tiers: admission by deadline, and the throttle of the lowest tier as gateways have it."""

from __future__ import annotations

import pytest

from headway.simulator.engine import simulate
from headway.simulator.report import Report, make_report
from headway.simulator.scenario import USUAL_MIX, Scenario


def overloaded(rate: float, **changes: float) -> Report:
    """Two GPUs, 100 ms for a batch of 100: 1,970 requests/s; promise and deadline are 200 ms."""
    return make_report(
        simulate(
            Scenario(
                rate=rate, workers=2, alpha=0.1, max_batch=100, duration=12.0, warmup=2.0, mix=USUAL_MIX, timeout=0.2,
                promise=0.2, **changes,  # type: ignore[arg-type]
            )
        )
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "share"), [(3_000.0, 0.99), (6_000.0, 0.97)])
def test_by_default_an_overload_leaves_no_capacity_unused(rate: float, share: float) -> None:
    report = overloaded(rate)
    assert report.total.goodput >= share * report.capacity
    for tier in ("enterprise", "paid"):
        assert report.tiers[tier].answered >= 0.999 * report.tiers[tier].requests


def test_below_the_capacity_nobody_is_refused() -> None:
    assert overloaded(1_700.0).total.reasons == {}


def test_a_lower_target_utilisation_holds_the_lowest_tier_back() -> None:
    report = overloaded(2_000.0, target_utilisation=0.7)
    assert report.total.goodput == pytest.approx(0.7 * report.capacity, rel=0.06)
    assert report.total.reasons["refused: capacity"] >= 0.99 * report.total.refused
    assert report.tiers["paid"].refused == report.tiers["enterprise"].refused == 0


def test_one_tier_alone_is_never_throttled() -> None:
    lone = Scenario(rate=1_900.0, workers=2, alpha=0.1, max_batch=100, duration=6.0, target_utilisation=0.1)
    assert make_report(simulate(lone)).total.refused == 0
