"""A queue cut into shards, and gateways that gather: what it may cost, and that it costs no more."""

import functools
import statistics
from dataclasses import replace

import pytest

from headway.simulator.engine import simulate
from headway.simulator.report import Report, make_report, percentile
from headway.simulator.scenario import Kill, Scenario

FLEET = Scenario(rate=7_000.0, workers=8, alpha=0.1, max_batch=100, duration=3.0, warmup=1.5, gateways=4, gather=0.002)


@functools.cache
def report(**changes: object) -> Report:
    return make_report(simulate(replace(FLEET, **changes)))  # type: ignore[arg-type]


class TestShards:
    def test_a_shard_has_the_latency_even_gaps_and_full_batches_of_its_slots(self) -> None:
        """Latency is even between α and α(1 + 1/m), for m slots at home; overhead and gathering come on top."""
        cut, whole = report(shards=2), report(shards=1)
        assert cut.total.latency_ms.p95 == pytest.approx(100 * (1 + 0.95 / 4) + 1.5 + 2, abs=3)
        assert cut.total.answered == cut.total.requests
        assert cut.batches.fill == pytest.approx(whole.batches.fill, rel=0.03)
        assert cut.batches.stolen < 0.02, "in the calm hardly anything is stolen"
        assert cut.batches.shard_gap_cv is not None
        assert cut.batches.shard_gap_cv < 0.05
        assert whole.batches.shard_gap_cv is None

    def test_a_fleet_with_too_few_slots_is_not_cut_into_shards(self) -> None:
        """Seven slots make one shard, however many there may be."""
        few = replace(FLEET, workers=7, rate=6_000.0)
        whole, cut = simulate(few), simulate(replace(few, shards=16))
        assert (cut.latency, cut.left_at) == (whole.latency, whole.left_at)

    def test_a_shard_with_a_slow_slot_is_helped(self) -> None:
        slow = {"shards": 2, "slow": 3.0, "rate": 6_500.0, "duration": 4.0}
        assert report(**slow).total.latency_ms.p95 < 200
        assert report(**slow).batches.stolen > 0.0


def test_what_waits_in_shards_out_of_use_is_taken_by_others_soon() -> None:
    """Nine of sixteen die, so three of four shards go out of use while entries wait in them; then all come back.

    Entries that ran with those that died run again; nothing else waits longer than a look and a gap or two.
    """
    fleet = replace(FLEET, shards=4, workers=16, rate=5_000.0, kills=(Kill(2.0, 9),), restart=0.5, warmup=1.0)
    record = simulate(fleet)
    assert record.stolen > 0
    assert sum(record.lost.values()) == 0
    assert len(record.latency) == sum(record.offered)

    def p95(begin: float, end: float) -> float:
        came = zip(record.arrived, record.latency, strict=True)
        return percentile(sorted(seconds for at, seconds in came if begin <= at < end), 0.95)

    assert p95(2.0, 2.5) < 0.3
    assert p95(2.7, 3.0) == pytest.approx(p95(1.5, 1.9), abs=0.01), "as before once the dead are back"


class TestGateways:
    def test_gathering_is_part_of_the_latency_but_not_of_a_lone_request_s(self) -> None:
        without, gathered = (simulate(replace(FLEET, gateways=1, gather=gather)).latency for gather in (0.0, 0.01))
        assert 0.003 < statistics.fmean(gathered) - statistics.fmean(without) < 0.012
        lone = replace(FLEET, rate=1.0, duration=60.0, gather=0.05)
        assert statistics.median(simulate(lone).latency) == pytest.approx(lone.alpha + lone.overhead)

    def test_a_large_group_is_dealt_out(self) -> None:
        """80 at a time into one shard of two would make every batch either too full or too empty."""
        lumpy = report(shards=2, gateways=1, gather=0.01)
        assert lumpy.batches.shard_gap_cv is not None
        assert lumpy.batches.shard_gap_cv < 0.05
        assert lumpy.total.latency_ms.p95 < 140
