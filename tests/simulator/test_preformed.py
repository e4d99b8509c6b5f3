"""The usual design that Headway is compared with must be simulated fairly."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from headway.simulator.engine import simulate
from headway.simulator.scenario import Scenario
from tests.simulator.preformed import simulate_preformed

CALM = Scenario(rate=300.0, workers=40, alpha=0.05, max_batch=32, duration=20.0, warmup=0.0, overhead=0.0)


def test_a_lone_request_waits_for_the_window() -> None:
    record = simulate_preformed(replace(CALM, rate=0.5, duration=100.0), window=0.01)
    assert statistics.median(record.latency) == pytest.approx(0.06)


def test_batches_are_as_large_as_the_window_is_long() -> None:
    """The first entry opens a batch, and λ·window more come while it is open."""
    record = simulate_preformed(CALM, window=0.05)
    assert statistics.fmean(record.size) == pytest.approx(1 + 300 * 0.05, rel=0.05)
    assert set(record.reasons) == {"window"}
    assert max(record.latency) == pytest.approx(0.1)
    assert len(record.latency) == sum(record.offered)


def test_each_gateway_fills_its_own() -> None:
    record = simulate_preformed(replace(CALM, gateways=3), window=0.05)
    assert statistics.fmean(record.size) == pytest.approx(1 + 100 * 0.05, rel=0.05)


def test_a_full_batch_is_closed_at_once() -> None:
    record = simulate_preformed(replace(CALM, rate=6_000.0, duration=5.0), window=0.05)
    assert set(record.size) <= {*range(1, 32), 32}
    assert record.reasons["full"] > 0.99 * len(record.size)


def test_without_a_window_every_batch_is_full() -> None:
    record = simulate_preformed(CALM, window=math.inf)
    assert set(record.size) == {32}
    assert sum(record.offered) - len(record.latency) < 32


def test_one_gpu_is_an_m_d_1_queue() -> None:
    """Batches of one: the mean wait is ρ·ℓ / 2(1−ρ), as for any queue that serves one at a time."""
    scenario = replace(CALM, rate=10.0, workers=1, max_batch=1, duration=2000.0)
    waits = [latency - 0.05 for latency in simulate_preformed(scenario, window=0.0).latency]
    assert statistics.fmean(waits) == pytest.approx(0.5 * 0.05 / (2 * 0.5), rel=0.1)


def test_the_arrivals_are_those_of_the_other_simulation() -> None:
    ours, usual = simulate(CALM), simulate_preformed(CALM, window=0.01)
    assert (ours.offered, ours.gap_variation) == (usual.offered, usual.gap_variation)
