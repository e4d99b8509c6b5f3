import io
from array import array
from typing import Any

import msgspec
import pytest
from rich.console import Console

from headway.load.report import Record, Report, make_report, show, to_json
from headway.load.spec import LoadSpec, Target

MILLISECOND = 0.001


def order(**settings: Any) -> LoadSpec:
    target = Target("h", 80, "h:80", "/v1/inference")
    return LoadSpec(**{"target": target, "rate": 100.0, "duration": 10.0, "promise": 0.2, **settings})


def record_of(spec: LoadSpec, latencies: list[float]) -> Record:
    record = Record(spec.tiers)
    record.sent[0] = len(latencies)
    record.dues = array("d", [number / spec.rate for number in range(len(latencies))])
    record.lags = array("d", [MILLISECOND] * len(latencies))
    record.streams[0].answered = array("d", latencies)
    record.elapsed, record.last_answer, record.cpu = 10.0, 9.0, 0.5
    return record


def report_of(spec: LoadSpec, record: Record) -> Report:
    return make_report(spec, record, ["headway", "bench"], "2026-01-01T00:00:00+00:00")


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None, highlight=False)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_percentiles_are_those_of_the_latencies() -> None:
    spec = order()
    latency = report_of(spec, record_of(spec, [n * MILLISECOND for n in range(1, 1001)])).total.latency_ms
    assert (latency.count, latency.max) == (1000, 1000.0)
    percentiles = (latency.mean, latency.p50, latency.p90, latency.p95, latency.p99, latency.p999)
    assert percentiles == pytest.approx((500.5, 500, 900, 950, 990, 999), rel=0.001)


def test_goodput_counts_answers_in_time_per_second_of_load() -> None:
    spec = order()
    record = record_of(spec, [0.1] * 300 + [0.2] * 100 + [0.21] * 600)
    record.last_answer = 20.0
    total = report_of(spec, record).total
    assert total.goodput == 40.0
    assert total.answered_rate == 50.0
    assert report_of(order(promise=None), record).total.goodput is None


def test_refusals_and_failures_are_apart_and_all_add_up() -> None:
    spec = order(mix={"paid": 1.0, "free": 1.0})
    record = record_of(spec, [0.1, 0.1])
    record.sent = [2, 4]
    record.dues = array("d", [0.0] * 6)
    free = record.streams[1]
    free.failed.update({"503 SERVICE_OVERLOADED": 1, "429 SHED": 2, "timeout": 1})
    free.refused = array("d", [0.001, 0.002, 0.003])
    free.refused_without_retry_after = 1
    report = report_of(spec, record)
    assert (report.total.answered, report.total.refused, report.total.failed) == (2, 3, 1)
    assert sum(report.total.outcomes.values()) == report.total.requests == 6
    assert report.tiers["free"].refusal_ms.max == 3.0
    assert report.tiers["paid"].outcomes == {"ok": 2}
    text = shown(report)
    assert "Refusals (429, 503): 3, 1 without Retry-After" in text
    assert "429 SHED" in text
    assert not report.unreached
    record = record_of(order(), [])
    record.sent, record.dues = [2], array("d", [0.0, 1.0])
    record.streams[0].failed.update({"connect ECONNREFUSED": 2})
    report = report_of(order(), record)
    assert report.unreached
    assert "No request got an answer." in shown(report)


def test_rows_are_told_beside_requests() -> None:
    spec = order(body={"inputs": [{"shape": [8, 4]}]}, member="")
    report = report_of(spec, record_of(spec, [0.1] * 50))
    assert (report.rows, report.answered_rows_rate) == (8, 8 * report.total.answered_rate)
    assert f"answered {report.total.answered_rate:,.1f}/s: {report.answered_rows_rate:,.1f} rows/s." in shown(report)
    assert "rows" not in shown(report_of(order(), record_of(order(), [0.1])))


def test_an_empty_load_is_reported_and_an_interrupted_one_over_the_time_it_had() -> None:
    spec = order()
    report = report_of(spec, record_of(spec, []))
    assert (report.total.requests, report.total.latency_ms.count, report.arrivals_cv) == (0, 0, 0.0)
    assert "–" in shown(report)
    spec = order(duration=1_000.0)
    record = record_of(spec, [0.1] * 50)
    record.interrupted, record.elapsed, record.last_answer = True, 5.0, 5.0
    report = report_of(spec, record)
    assert (report.offered_rate, report.total.goodput) == (10.0, 10.0)
    assert "Interrupted after 5.0 s." in shown(report)


@pytest.mark.parametrize(("dues", "variation"), [([0, 1, 2, 3], 0.0), ([0, 1, 4], 0.5), ([], 0.0), ([1, 1, 1], 0.0)])
def test_burstiness_is_the_variation_of_the_gaps(dues: list[float], variation: float) -> None:
    record = Record(["all"])
    record.dues = array("d", dues)
    assert record.variation == pytest.approx(variation)


def test_wrong_answers_and_a_late_generator_are_said() -> None:
    spec = order(expect="upper")
    record = record_of(spec, [0.1] * 50)
    record.lags = array("d", [0.05] * 50)
    record.mismatches, record.mismatched = 2, ["request 3: [bold]?"]
    report = report_of(spec, record)
    assert report.mismatches == 2
    text = shown(report)
    assert "50 answers checked (upper): 2 wrong" in text
    assert "request 3: [bold]?" in text
    assert "The generator itself was late" in text
    assert report_of(order(), record).mismatches is None


def test_the_report_in_json_has_command_url_tiers_and_generator() -> None:
    spec = order(mix={"paid": 1.0})
    found = msgspec.json.decode(to_json(report_of(spec, record_of(spec, [0.1] * 50))))
    assert found["command"] == ["headway", "bench"]
    assert found["url"] == "http://h:80/v1/inference"
    assert found["tiers"]["paid"]["latency_ms"]["p99.9"] == pytest.approx(100, rel=0.001)
    assert found["generator"]["cpu_us_per_request"] == 10_000.0
    assert found["generator"]["lag_ms"]["max"] == 1.0
    assert msgspec.json.decode(to_json(report_of(spec, record_of(spec, []))), type=Report).total.requests == 0
