from __future__ import annotations

import math
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from headway.load.report import latency_ms
from headway.simulator.engine import simulate
from headway.simulator.report import Report, describe, make_report, percentile, show
from headway.simulator.scenario import USUAL_MIX, Scenario

HARD = Scenario(
    rate=900.0,
    workers=2,
    alpha=0.05,
    max_batch=16,
    duration=3.0,
    warmup=0.5,
    mix=USUAL_MIX,
    timeout=0.2,
    promise=0.1,
    fail_every=1.0,
    restart=0.2,
)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.1, 1), (0.5, 5), (0.51, 6), (0.95, 10), (1.0, 10)])
def test_percentiles_are_by_nearest_rank(share: float, value: float) -> None:
    assert percentile(range(1, 11), share) == value


def test_of_nothing_there_is_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))
    assert latency_ms([]).count == 0


def test_latencies_are_in_milliseconds() -> None:
    found = latency_ms([0.1, 0.2, 0.3])
    assert (found.count, found.p50, found.max) == (3, 200.0, 300.0)
    assert found.mean == pytest.approx(200.0)


def test_the_tiers_of_a_report_add_up_to_its_total() -> None:
    report = make_report(simulate(HARD))
    for name in ("requests", "answered", "refused", "expired", "failed", "in_time"):
        assert getattr(report.total, name) == sum(getattr(flow, name) for flow in report.tiers.values()), name
    total = report.total
    assert total.requests == total.answered + total.refused + total.expired + total.failed
    assert sum(total.reasons.values()) == total.requests - total.answered
    assert total.in_time is not None
    assert total.goodput == total.in_time / 2.5
    assert report.batches.count == sum(report.batches.reasons.values())


def test_of_no_requests_there_is_a_report_as_well() -> None:
    report = make_report(simulate(Scenario(rate=0.01, workers=1, alpha=0.1, max_batch=8, duration=0.01, warmup=0.0)))
    assert (report.total.requests, report.batches.count, report.utilisation) == (0, 0, 0.0)


def test_the_json_of_a_simulation_holds_its_whole_report() -> None:
    report = make_report(simulate(HARD))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert describe(HARD)["workers"] == 2


def test_people_are_shown_what_matters() -> None:
    console = Console(file=StringIO(), width=160)
    show(HARD, [make_report(simulate(HARD))], "Poisson", console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for part in ("variation of gaps", "enterprise", "p95", "within 100 ms/s", "refused: shed", "deaths of workers"):
        assert part in text
