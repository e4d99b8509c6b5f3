"""Bulk jobs in simulated fleets: what they get, and that others hardly notice."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from headway.core.bulk import FIRST_CREDIT
from headway.simulator.engine import simulate
from headway.simulator.report import Report, make_report
from headway.simulator.scenario import Scenario

H1 = Scenario(rate=1000.0, workers=2, alpha=0.1, max_batch=100, duration=14.0, warmup=4.0, promise=0.2)


def both(**given: Any) -> tuple[Report, Report]:
    """Reports without bulk jobs and with them."""
    scenario = replace(H1, **given)
    return make_report(simulate(scenario)), make_report(simulate(replace(scenario, bulk=True)))


def test_empty_seats_cost_nobody_anything() -> None:
    """Batches leave half full at the least number of GPUs; the other half is for bulk."""
    without, beside = both()
    assert beside.total.latency_ms.p95 == pytest.approx(without.total.latency_ms.p95, rel=0.03)
    assert beside.bulk is not None
    assert beside.bulk >= 800
    assert without.bulk is None


def test_an_idle_fleet_is_full_of_bulk() -> None:
    beside = make_report(simulate(replace(H1, rate=0.001, workers=4, bulk=True)))
    assert beside.utilisation >= 0.95
    assert beside.bulk == pytest.approx(4 * 100 / 0.1015, rel=0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lone_request_finds_a_gpu(workers: int) -> None:
    """But for one in a hundred, and for the first credit."""
    scenario = replace(H1, rate=1.0, workers=workers, duration=200.0)
    waited, beside = (
        sum(latency > 0.104 for latency in simulate(replace(scenario, bulk=bulk)).latency) for bulk in (False, True)
    )
    assert beside - waited <= 0.01 * 190 + FIRST_CREDIT


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_at_every_load_others_are_as_fast_as_without(load: float) -> None:
    without, beside = both(rate=load * 8 * 100 / 0.1015, workers=8, duration=8.0)
    assert beside.total.latency_ms.p95 <= 1.03 * without.total.latency_ms.p95
    assert beside.total.answered == without.total.answered
    assert beside.bulk is not None
    assert beside.bulk >= 0.8 * (1 - load) * 8 * 100 / 0.1015


@pytest.mark.parametrize("load", [0.1, 0.5])
def test_where_seats_take_time_they_are_filled_within_the_promise(load: float) -> None:
    without, beside = both(rate=load * 4 * 100 / 0.1015, workers=4, alpha=0.02, beta=0.0008)
    assert beside.total.in_time == beside.total.requests
    assert beside.total.answered == without.total.answered
    assert beside.bulk is not None
    assert beside.bulk >= 0.8 * (1 - load) * 4 * 100 / 0.1015


def test_where_seats_take_time_and_nothing_was_promised_they_stay_empty() -> None:
    without, beside = both(rate=400.0, workers=4, alpha=0.02, beta=0.0008, promise=None)
    assert beside.total.latency_ms.p99 == pytest.approx(without.total.latency_ms.p99)
    assert beside.bulk == 0


@pytest.mark.parametrize(("rate", "promise"), [(100.0, 0.2), (600.0, 0.2), (100.0, 0.001), (600.0, 0.001)])
def test_lines_beside_a_model_that_pads_keep_within_the_promise_or_cost_nothing(rate: float, promise: float) -> None:
    """At half the rate that it carries every batch has empty seats, and full ones all take the same time on average."""
    lengths = tuple(min(round(random.Random(number).lognormvariate(6.56, 0.88)), 2048) for number in range(2000))
    beta = 0.042 / 32 / statistics.fmean(lengths)
    given = {"workers": 2, "alpha": 0.008, "beta": beta, "max_batch": 32, "weights": lengths, "padded": True}
    without, beside = both(rate=rate, promise=promise, **given)
    assert beside.total.answered == pytest.approx(without.total.answered, rel=0.01)
    assert beside.bulk is not None
    if promise < 0.01:  # Chance alone decides between 0.9 and 1.1 in one run.
        runs = [(without, beside), *(both(rate=rate, promise=promise, seed=seed, **given) for seed in (1, 2, 3))]
        ratios = [beside.total.latency_ms.p95 / without.total.latency_ms.p95 for without, beside in runs]
        assert statistics.fmean(ratios) <= 1.05
    else:
        assert beside.total.in_time == beside.total.requests
        assert beside.bulk >= 0.7 * (800.0 - rate)


def test_under_overload_bulk_has_nothing() -> None:
    without, beside = both(rate=3000.0)
    assert beside.total.answered == pytest.approx(without.total.answered, rel=0.01)
    assert beside.bulk is not None
    assert beside.bulk < 20


def test_deaths_of_workers_hurt_nobody_more() -> None:
    without, beside = both(rate=1000.0, workers=4, fail_every=15.0)
    assert beside.total.answered == without.total.answered
    assert beside.total.latency_ms.p95 <= 1.05 * without.total.latency_ms.p95
