"""Starts into full load: what the first seconds are like when only the warm-up is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario


def p95(record: Record, begin: float, end: float) -> float:
    """95th percentile in seconds of the requests that came between two instants."""
    came = [latency for arrived, latency in zip(record.arrived, record.latency, strict=True) if begin <= arrived < end]
    return percentile(sorted(came), 0.95)


def test_a_start_into_98_per_cent_settles_within_3_s() -> None:
    """32 GPUs of 200 ms, batches of at most 64, 10,000 requests/s from the first instant."""
    run = simulate(Scenario(rate=10_000.0, workers=32, alpha=0.2, max_batch=64, duration=6.0, warmup=0.0))
    assert sum(run.lost.values()) == 0
    assert p95(run, 0.0, 1.0) <= 0.24
    assert p95(run, 3.0, 6.0) <= 0.22


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 0.9, 0.95])
@pytest.mark.parametrize(("alpha", "beta", "max_batch"), [(0.1, 0.0, 100), (0.1, 0.0, 32), (0.05, 0.001, 32)])
def test_the_first_second_of_six_gpus_is_no_worse_than_with_windows(
    alpha: float, beta: float, max_batch: int, load: float
) -> None:
    full = alpha + beta * max_batch + 0.0015
    start = Scenario(
        rate=load * 6 * max_batch / full,
        workers=6,
        alpha=alpha,
        beta=beta,
        max_batch=max_batch,
        duration=1.0,
        warmup=0.0,
    )
    paced, window = (p95(simulate(replace(start, policy=policy)), 0.0, 1.0) for policy in ("paced", "window"))
    assert paced <= 1.05 * window
