"""Hosts that the simulated fleets in shards and in zones are made of: one GPU each, 100 ms a batch of at most 100."""

from __future__ import annotations

from headway.simulator.record import Record
from headway.simulator.report import Report, percentile
from headway.simulator.scenario import Scenario

ALPHA, MAX_BATCH, OVERHEAD = 0.1, 100, 0.0015
PER_GPU = MAX_BATCH / (ALPHA + OVERHEAD)
"""Requests per second of one host."""
SETTLED, REQUESTS = 6.0, 120_000
"""Seconds of warm-up, and requests measured, at least MEASURED seconds of them."""
MEASURED = 2.0


def scenario_of(hosts: int, rate: float, **changes: object) -> Scenario:
    """Scenario of so many hosts at a rate; each gateway makes a call at most every 2 ms."""
    known: dict[str, object] = {
        "rate": rate,
        "workers": hosts,
        "alpha": ALPHA,
        "max_batch": MAX_BATCH,
        "overhead": OVERHEAD,
        "duration": SETTLED + max(MEASURED, REQUESTS / rate),
        "warmup": SETTLED,
        "gather": 0.002,
    }
    return Scenario(**{**known, **changes})  # type: ignore[arg-type]


def latency_and_fill(report: Report) -> dict[str, float]:
    """Percentiles of latency in ms, and the fill of batches in percent."""
    latency = report.total.latency_ms
    return {"p50": latency.p50, "p95": latency.p95, "p99": latency.p99, "fill %": 100 * report.batches.fill}


def latency_between(record: Record, since: float, until: float, share: float = 0.95) -> float:
    """Percentile in ms of the latency of requests that came within a span."""
    then = sorted(took for at, took in zip(record.arrived, record.latency, strict=True) if since <= at < until)
    return 1000 * percentile(then, share)
