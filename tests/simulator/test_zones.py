"""A fleet in zones: batches stay within them, a zone that is behind is helped, and one that is lost costs no request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.core.zones import behind
from headway.errors import SettingError
from headway.simulator.engine import LEASE_SECONDS, simulate
from headway.simulator.record import Record
from headway.simulator.report import make_report, percentile
from headway.simulator.scenario import Kill, Scenario

FLEET = Scenario(
    rate=7_000.0, workers=12, alpha=0.1, max_batch=100, duration=4.0, warmup=2.0, gateways=6, gather=0.002, zones=3
)


def p95(record: Record, since: float, until: float) -> float:
    took = [took for at, took in zip(record.arrived, record.latency, strict=True) if since <= at < until]
    return 1000 * percentile(sorted(took), 0.95)


def test_in_the_calm_batches_stay_in_their_zone_and_are_as_full_as_those_of_one_queue() -> None:
    record, whole = simulate(FLEET), make_report(simulate(replace(FLEET, zones=1)))
    cut = make_report(record)
    assert len(record.crossed) == 0
    assert cut.total.answered == cut.total.requests
    assert cut.batches.fill == pytest.approx(whole.batches.fill, rel=0.03)
    assert cut.total.latency_ms.p95 == pytest.approx(100 * (1 + 0.95 / 4) + 1.5 + 2, abs=3)
    assert cut.batches.shard_gap_cv is not None
    assert cut.batches.shard_gap_cv < 0.05


def test_zones_may_be_cut_into_shards() -> None:
    cut = make_report(simulate(replace(FLEET, workers=24, rate=14_000.0, shards=2, duration=3.0, warmup=1.5)))
    assert cut.total.answered == cut.total.requests
    assert cut.total.latency_ms.p95 < 135


def test_a_zone_that_gets_more_than_it_can_carry_is_helped() -> None:
    """Of four gateways two are in the first zone: half of the load comes there, and a third of the workers."""
    uneven = replace(FLEET, gateways=4, rate=9_000.0, duration=6.0, queue_timeout=10.0, timeout=20.0)
    record = simulate(uneven)
    assert not record.lost
    assert len(record.crossed) >= 10
    assert p95(record, 5.0, 6.0) < 300


def test_of_a_zone_that_dies_unheard_nothing_is_lost_and_latency_is_back_once_all_know_it() -> None:
    kill = Kill(3.0, FLEET.workers // 3, silent=True)
    lost = replace(FLEET, rate=5_000.0, kills=(kill,), restart=3600.0, duration=9.0, queue_timeout=10.0, timeout=20.0)
    record = simulate(lost)
    assert not record.lost
    assert sum(record.offered) == len(record.latency)
    assert not [at for at in record.crossed if at < 3.0]
    assert record.crossed
    assert p95(record, 3.0 + LEASE_SECONDS + 0.5, 9.0) < 1.1 * p95(record, 2.0, 3.0)
    retried = [took for at, took in zip(record.arrived, record.latency, strict=True) if at < 3.0 < at + took - 1.0]
    assert retried  # What ran there has waited for its lease to end.


def test_no_zone_is_without_a_worker_or_a_gateway() -> None:
    for zones, workers, gateways in ((4, 3, 6), (3, 12, 2), (0, 12, 6)):
        with pytest.raises(SettingError) as caught:
            replace(FLEET, zones=zones, workers=workers, gateways=gateways)
        assert "--zones" in str(caught.value)


def test_a_zone_that_keeps_up_is_not_behind() -> None:
    assert not behind(100, 4, waited=0.099, batch_seconds=0.1)
