"""A queue cut into shards, and gateways that gather: what it may cost, and that it costs no more."""

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import Report, make_report, percentile
from headway.simulator.scenario import Kill, Scenario

FLEET = Scenario(rate=7_000.0, workers=8, alpha=0.1, max_batch=100, duration=3.0, warmup=1.5, gateways=4, gather=0.002)


@functools.cache
def report(**changes: object) -> Report:
    return make_report(simulate(replace(FLEET, **changes)))  # type: ignore[arg-type]


class TestShards:
    def test_a_shard_has_the_latency_of_its_slots(self) -> None:
        """Latency is even between α and α(1 + 1/m), for m slots at home; overhead and gathering come on top."""
        cut = report(shards=2)
        assert cut.total.latency_ms.p95 == pytest.approx(100 * (1 + 0.95 / 4) + 1.5 + 2, abs=3)
        assert cut.total.answered == cut.total.requests

    def test_batches_of_each_shard_are_evenly_spaced(self) -> None:
        cut, whole = report(shards=2).batches, report(shards=1).batches
        assert cut.shard_gap_cv is not None
        assert cut.shard_gap_cv < 0.05
        assert whole.shard_gap_cv is None

    def test_batches_are_as_full_as_those_of_one_queue_and_in_the_calm_nothing_is_stolen(self) -> None:
        assert report(shards=2).batches.fill == pytest.approx(report(shards=1).batches.fill, rel=0.03)
        assert report(shards=2).batches.stolen < 0.02

    def test_a_fleet_with_too_few_slots_is_not_cut_into_shards(self) -> None:
        """Seven slots make one shard, however many there may be."""
        few = replace(FLEET, workers=7, rate=6_000.0)
        whole, cut = simulate(few), simulate(replace(few, shards=16))
        assert (cut.latency, cut.left_at) == (whole.latency, whole.left_at)

    @pytest.mark.parametrize("workers", [8, 16])
    def test_latency_stays_flat_as_the_fleet_grows(self, workers: int) -> None:
        grown = report(shards=16, workers=workers, rate=880.0 * workers, duration=2.5)
        assert 120 < grown.total.latency_ms.p95 < 134

    def test_unequal_shards_get_what_they_can_carry(self) -> None:
        """Eleven slots on two shards are six and five."""
        uneven = simulate(replace(FLEET, shards=2, workers=11, rate=10_000.0, duration=5.0, warmup=3.5))
        carried = [sum(n for n, of in zip(uneven.size, uneven.shard, strict=True) if of == shard) for shard in (0, 1)]
        assert carried[0] / sum(carried) == pytest.approx(6 / 11, abs=0.01)
        assert make_report(uneven).total.latency_ms.p95 <= 125

    def test_old_depths_are_worse_than_none(self) -> None:
        """To deal out in turn is to need no depths."""
        known, since = [0, 0, 0, 0], 0.0

        def emptiest_a_while_ago(depths: Sequence[int], now: float) -> int:
            nonlocal known, since
            if now - since > 0.05:
                known, since = list(depths), now
            return known.index(min(known))

        fleet = replace(FLEET, shards=4, workers=16, rate=14_000.0)
        misled = make_report(simulate(fleet, emptiest_a_while_ago))
        assert misled.total.latency_ms.p95 > make_report(simulate(fleet)).total.latency_ms.p95 + 20

    def test_a_shard_with_a_slow_slot_is_helped(self) -> None:
        slow = {"shards": 2, "slow": 3.0, "rate": 6_500.0, "duration": 4.0}
        assert report(**slow).total.latency_ms.p95 < 200
        assert report(**slow).batches.stolen > 0.0


class TestHelp:
    DIES = replace(FLEET, shards=4, workers=16, rate=5_000.0, kills=(Kill(2.0, 9),), restart=0.5, warmup=1.0)

    @pytest.fixture(scope="class")
    @classmethod
    def record(cls) -> Record:
        """Nine of sixteen die, so three of four shards go out of use while entries wait in them; then all come back."""
        return simulate(cls.DIES)

    def test_what_waits_in_a_shard_out_of_use_is_taken_by_others(self, record: Record) -> None:
        assert record.stolen > 0
        assert sum(record.lost.values()) == 0
        assert len(record.latency) == sum(record.offered)

    def test_what_waits_in_a_shard_out_of_use_is_taken_soon(self, record: Record) -> None:
        """Entries that ran with those that died run again; nothing else waits longer than a look and a gap or two."""
        then = [seconds for at, seconds in zip(record.arrived, record.latency, strict=True) if 2.0 <= at < 2.5]
        assert percentile(sorted(then), 0.95) < 0.3

    def test_latency_is_as_before_once_dead_workers_are_back(self, record: Record) -> None:
        calm, after = (
            percentile(sorted(s for at, s in zip(record.arrived, record.latency, strict=True) if a <= at < b), 0.95)
            for a, b in ((1.5, 1.9), (2.7, 3.0))
        )
        assert after == pytest.approx(calm, abs=0.01)


class TestGateways:
    def test_the_number_of_gateways_changes_no_latency(self) -> None:
        one, three = (simulate(replace(FLEET, gather=0.0, gateways=count)) for count in (1, 3))
        assert one.latency == three.latency

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
