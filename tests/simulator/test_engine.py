"""Simulations: invariants of any scenario, bulk jobs, weighted entries, shards, and gateways that gather."""

import functools
import statistics
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from headway.core.bulk import FIRST_CREDIT
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.record import EXPIRED, FAILED, REFUSED, Record
from headway.simulator.report import Report, describe, make_report, show
from headway.simulator.scenario import POLICIES, USUAL_MIX, Faults, Kill, QueueRules, Scenario, Step, Topology
from headway.simulator.traffic import read_weights
from tests.simulator.test_numbers import p95

CALM = Scenario(rate=300.0, workers=2, alpha=0.05, max_batch=32, duration=4.0, warmup=0.0)


def lost(record: Record, kind: str, reason: str | None = None) -> int:
    return sum(count for key, count in record.lost.items() if key[0] == kind and reason in (None, key[1]))


scenarios = st.builds(
    Scenario, rate=st.floats(1.0, 800.0), workers=st.integers(1, 12), alpha=st.floats(0.001, 0.3),
    beta=st.floats(0.0, 0.01), max_batch=st.integers(1, 40), jitter=st.sampled_from([0.0, 0.1, 1.0]),
    overhead=st.floats(0.0, 0.01), policy=st.sampled_from(POLICIES), duration=st.just(1.0), warmup=st.sampled_from([0.0, 0.3]),
    mix=st.sampled_from([{"all": 1.0}, dict(USUAL_MIX)]), tenants=st.integers(1, 3), seed=st.integers(0, 99),
    faults=st.builds(
        Faults, slow=st.sampled_from([1.0, 3.0]), fail_every=st.sampled_from([0.0, 0.5]),
        kills=st.sampled_from([(), (Kill(0.4, 1),)]), restart=st.floats(0.0, 5.0), poison=st.sampled_from([0.0, 0.01]),
    ),
    queue=st.builds(
        QueueRules, queue_timeout=st.floats(0.01, 2.0), timeout=st.floats(0.01, 4.0), max_queue=st.sampled_from([5, 20_000]),
    ),
    topology=st.builds(
        Topology, gateways=st.sampled_from([1, 3]), gather=st.sampled_from([0.0, 0.002]), shards=st.sampled_from([1, 2, 16]),
    ),
)  # fmt: skip


@settings(max_examples=40)
@given(scenario=scenarios)
def test_every_request_has_exactly_one_outcome(scenario: Scenario) -> None:
    record = simulate(scenario)
    for tier in range(len(scenario.mix)):
        answered = sum(1 for of in record.tier if of == tier)
        without = sum(count for (_, _, of), count in record.lost.items() if of == tier)
        assert answered + without == record.offered[tier]
    assert all(latency <= scenario.queue.timeout + scenario.topology.gather + 1e-9 for latency in record.latency)
    assert all(1 <= size <= scenario.max_batch for size in record.size)
    assert 0.0 <= record.busy + record.down <= scenario.workers * scenario.duration * (1 + 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    faults = Faults(fail_every=1.0, restart=0.1, poison=0.002)
    scenario = replace(CALM, policy=policy, jitter=0.2, faults=faults, mix=USUAL_MIX, duration=1.0)
    first, second, other = simulate(scenario), simulate(scenario), simulate(replace(scenario, seed=1))
    assert (first.latency, first.left_at, first.lost) == (second.latency, second.left_at, second.lost)
    assert first.latency != other.latency


def test_one_by_one_the_wait_is_that_of_pollaczek_and_khinchine() -> None:
    """Batches of one on one GPU form an M/D/1 queue, whose mean wait is ρ·ℓ / 2(1−ρ)."""
    load, seconds = 0.6, 0.01
    scenario = replace(CALM, rate=load / seconds, workers=1, alpha=seconds, max_batch=1, overhead=0.0, policy="eager")
    scenario = replace(scenario, duration=120.0)
    waits = [latency - seconds for latency in simulate(scenario).latency]
    assert statistics.fmean(waits) == pytest.approx(load * seconds / (2 * (1 - load)), rel=0.1)


def test_the_time_of_a_batch_varies_as_told() -> None:
    scenario = Scenario(rate=1.0, workers=1, alpha=0.05, max_batch=1, overhead=0.0, jitter=0.3, duration=2000.0)
    run = simulate(scenario)
    quick = sorted(run.latency)[: len(run.latency) * 9 // 10]
    assert statistics.median(quick) == pytest.approx(0.05, rel=0.1)
    assert statistics.fmean(run.latency) == pytest.approx(0.05, rel=0.1)
    assert run.estimates[3] == pytest.approx(0.3 * 0.05, rel=0.4)


class TestTraffic:
    def test_whole_numbers_are_numbers(self) -> None:
        """If comparing ints with floats failed, arrivals would never end."""
        trace = tuple(range(20))
        whole = simulate(replace(CALM, rate=100, trace=trace, duration=2, warmup=0))
        assert sum(whole.offered) == sum(
            simulate(replace(CALM, rate=100.0, trace=tuple(map(float, trace)), duration=2.0, warmup=0.0)).offered
        )

    def test_poisson_has_a_variation_of_one_and_a_trace_is_replayed_at_the_rate(self) -> None:
        assert simulate(replace(CALM, duration=20.0)).gap_variation == pytest.approx(1.0, abs=0.05)
        trace = tuple(float(burst) + number / 1000 for burst in range(10) for number in range(50))
        record = simulate(replace(CALM, rate=200.0, trace=trace, duration=10.0))
        assert sum(record.offered) == pytest.approx(2000, rel=0.02)
        assert record.gap_variation > 3.0

    def test_the_rate_changes_in_steps(self) -> None:
        scenario = replace(CALM, rate=10.0, steps=(Step(5.0, 200.0), Step(10.0, 10.0)), duration=15.0)
        arrived = simulate(scenario).arrived
        counts = [sum(1 for at in arrived if start <= at < start + 5) for start in (0, 5, 10)]
        assert counts == [pytest.approx(50, abs=25), pytest.approx(1000, abs=120), pytest.approx(50, abs=25)]

    def test_tiers_come_by_their_weights(self) -> None:
        offered = simulate(replace(CALM, mix=USUAL_MIX, duration=10.0)).offered
        assert [share / sum(offered) for share in offered] == pytest.approx([0.05, 0.25, 0.70], abs=0.03)


def test_a_slow_worker_takes_longer() -> None:
    slow = simulate(replace(CALM, rate=100.0, overhead=0.0, faults=Faults(slow=3.0)))
    assert max(slow.latency) > 3 * CALM.alpha
    assert statistics.median(slow.latency) < 2 * CALM.alpha


class TestFailures:
    def test_a_dead_workers_batch_runs_again_elsewhere(self) -> None:
        record = simulate(replace(CALM, faults=Faults(kills=(Kill(1.02, 1),), restart=1.0)))
        assert (record.deaths, record.retried > 0, sum(record.lost.values())) == (1, True, 0)
        assert record.down == pytest.approx(1.0)

    def test_without_any_worker_requests_wait_until_their_deadline(self) -> None:
        faults, queue = Faults(kills=(Kill(1.0, 2),), restart=2.0), QueueRules(queue_timeout=0.2)
        record = simulate(replace(CALM, faults=faults, queue=queue))
        assert lost(record, EXPIRED, "no_workers") > 100
        assert lost(record, REFUSED) + lost(record, FAILED) + lost(record, EXPIRED, "queue") < 100
        assert max(record.arrived) > 3.9

    def test_poison_is_isolated_and_the_innocent_are_answered(self) -> None:
        record = simulate(replace(CALM, rate=200.0, workers=4, faults=Faults(poison=0.003), duration=6.0))
        rejected = lost(record, FAILED, "rejected")
        assert 0 < rejected < 12
        assert sum(record.lost.values()) == rejected
        assert record.retried > rejected


class TestClosedLoop:
    LOOP = replace(CALM, rate=0.0, clients=6)

    @settings(max_examples=15)
    @given(scenario=scenarios, clients=st.integers(1, 50))
    def test_no_client_has_two_requests_at_a_time(self, scenario: Scenario, clients: int) -> None:
        record = simulate(replace(scenario, rate=0.0, clients=clients, warmup=0.0))
        scenario = record.scenario
        assert len(record.latency) + sum(record.lost.values()) == sum(record.offered)
        changes = [(at, 1) for at in record.arrived]
        changes += [(at + latency, -1) for at, latency in zip(record.arrived, record.latency, strict=True)]
        outstanding = most = 0
        for _, change in sorted(changes):
            outstanding += change
            most = max(most, outstanding)
        assert most <= scenario.clients

    def test_refused_clients_come_again(self) -> None:
        record = simulate(
            replace(self.LOOP, clients=40, max_batch=4, queue=QueueRules(queue_timeout=0.06, timeout=0.2))
        )
        assert lost(record, REFUSED) > 0
        assert len(record.latency) > 100


HARD = Scenario(
    rate=900.0, workers=2, alpha=0.05, max_batch=16, duration=3.0, warmup=0.5, mix=USUAL_MIX,
    queue=QueueRules(timeout=0.2, promise=0.1), faults=Faults(fail_every=1.0, restart=0.2),
)  # fmt: skip


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


def test_of_no_requests_there_is_a_report_and_json_holds_all_of_one() -> None:
    report = make_report(simulate(Scenario(rate=0.01, workers=1, alpha=0.1, max_batch=8, duration=0.01, warmup=0.0)))
    assert (report.total.requests, report.batches.count, report.utilisation) == (0, 0, 0.0)
    report = make_report(simulate(HARD))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert describe(HARD)["workers"] == 2


def test_people_are_shown_what_matters() -> None:
    console = Console(file=StringIO(), width=160)
    show(HARD, [make_report(simulate(HARD))], "Poisson", console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for part in ("variation of gaps", "enterprise", "p95", "within 100 ms/s", "refused: shed", "worker deaths"):
        assert part in text


H1 = Scenario(
    rate=1000.0, workers=2, alpha=0.1, max_batch=100, duration=14.0, warmup=4.0, queue=QueueRules(promise=0.2)
)


def both(**given: Any) -> tuple[Report, Report]:
    scenario = replace(H1, **given)
    return make_report(simulate(scenario)), make_report(simulate(replace(scenario, bulk=True)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lone_request_finds_a_gpu(workers: int) -> None:
    """Except for one in a hundred, and for the first credit."""
    scenario = replace(H1, rate=1.0, workers=workers, duration=200.0)
    waited, beside = (
        sum(latency > 0.104 for latency in simulate(replace(scenario, bulk=bulk)).latency) for bulk in (False, True)
    )
    assert beside - waited <= 0.01 * 190 + FIRST_CREDIT


@pytest.mark.parametrize(("load", "beta"), [(0.5, 0.0), (0.95, 0.0), (0.5, 0.0008)])
def test_at_every_load_others_are_as_fast_as_without_or_within_the_promise(load: float, beta: float) -> None:
    """If seats take time, they are filled as far as the promise allows."""
    without, beside = both(rate=load * 4 * 100 / 0.1015, workers=4, duration=8.0, alpha=0.1 - 100 * beta, beta=beta)
    if beta:
        assert beside.total.in_time == beside.total.requests
    else:
        assert beside.total.latency_ms.p95 <= 1.03 * without.total.latency_ms.p95
    assert beside.total.answered == without.total.answered
    assert beside.bulk is not None
    assert beside.bulk >= 0.8 * (1 - load) * 4 * 100 / 0.1015


WEIGHED = Scenario(
    rate=250.0, workers=2, alpha=0.02, beta=0.0001, max_batch=64, weights=tuple(range(10, 91)), max_weight=1000,
    duration=10.0, warmup=2.0,
)  # fmt: skip
"""Two GPUs, 20 ms a batch and a tenth of a millisecond for each unit of weight."""


@pytest.mark.parametrize(
    ("text", "weights"), [("5-8", (5, 6, 7, 8)), ("3-3", (3,)), ("a file", (7, 12))], ids=["range", "one", "file"]
)
def test_weights_are_a_range_or_a_file(text: str, weights: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("7\n12\n")
    assert read_weights(str(file) if text == "a file" else text) == weights


def test_other_weights_and_files_are_refused_and_a_bound_on_weight_without_any(tmp_path: Path) -> None:
    for name, content in (("empty", ""), ("letters", "a\n"), ("nothing", "0\n")):
        (tmp_path / name).write_text(content)
    for text in ("0-5", "9-5", "nowhere", "5-99999999999", *map(str, tmp_path.iterdir())):
        with pytest.raises(SettingError, match=r"^--weights"):
            read_weights(text)
    with pytest.raises(SettingError, match="--max-batch-weight"):
        replace(CALM, max_weight=100)


def test_a_full_batch_holds_what_its_weight_allows() -> None:
    assert replace(WEIGHED, max_weight=0).full == 64
    assert WEIGHED.full == 20
    assert WEIGHED.cycle(64) == pytest.approx(0.02 + 0.1 + WEIGHED.overhead)
    assert WEIGHED.capacity == pytest.approx(2 * 20 / WEIGHED.cycle(64))


def test_batches_are_bounded_by_weight_and_their_time_is_learnt() -> None:
    record = simulate(WEIGHED)
    report = make_report(record)
    assert max(record.size) < 40
    assert 0.3 < report.batches.fill <= 1.0
    assert report.total.answered == report.total.requests
    assert record.estimates[1] == pytest.approx(0.02 + 0.0015, rel=0.1)
    assert describe(record.scenario)["weights"] == 81


FLEET = Scenario(
    rate=7_000.0, workers=8, alpha=0.1, max_batch=100, duration=3.0, warmup=1.5, topology=Topology(gateways=4, gather=0.002)
)  # fmt: skip


@functools.cache
def report(shards: int, gateways: int = 4, gather: float = 0.002, **changes: Any) -> Report:
    topology = Topology(shards=shards, gateways=gateways, gather=gather)
    return make_report(simulate(replace(FLEET, topology=topology, **changes)))


class TestShards:
    def test_a_shard_has_the_latency_even_gaps_and_full_batches_of_its_slots(self) -> None:
        """Latency is spread evenly between α and α(1 + 1/m) for m home slots, plus overhead and gathering."""
        cut, whole = report(shards=2), report(shards=1)
        assert cut.total.latency_ms.p95 == pytest.approx(100 * (1 + 0.95 / 4) + 1.5 + 2, abs=3)
        assert cut.total.answered == cut.total.requests
        assert cut.batches.fill == pytest.approx(whole.batches.fill, rel=0.03)
        assert cut.batches.stolen < 0.02, "in the calm hardly anything is stolen"
        assert cut.batches.shard_gap_cv is not None
        assert cut.batches.shard_gap_cv < 0.05
        assert whole.batches.shard_gap_cv is None

    def test_a_fleet_with_too_few_slots_is_not_cut_into_shards(self) -> None:
        """Seven slots make one shard, however many shards are allowed."""
        few = replace(FLEET, workers=7, rate=6_000.0)
        whole, cut = simulate(few), simulate(replace(few, topology=replace(few.topology, shards=16)))
        assert (cut.latency, cut.left_at) == (whole.latency, whole.left_at)

    def test_a_shard_with_a_slow_slot_is_helped(self) -> None:
        helped = report(shards=2, faults=Faults(slow=3.0), rate=6_500.0, duration=4.0)
        assert helped.total.latency_ms.p95 < 200
        assert helped.batches.stolen > 0.0


def test_what_waits_in_shards_out_of_use_is_taken_by_others_soon() -> None:
    """Nine of sixteen workers die, so three of four shards go unused until all are back.
    Entries that ran on the dead ones run again. Others wait no longer than a look and a gap or two."""
    topology, faults = replace(FLEET.topology, shards=4), Faults(kills=(Kill(2.0, 9),), restart=0.5)
    fleet = replace(FLEET, topology=topology, faults=faults, workers=16, rate=5_000.0, warmup=1.0)
    record = simulate(fleet)
    assert record.stolen > 0
    assert sum(record.lost.values()) == 0
    assert len(record.latency) == sum(record.offered)

    assert p95(record, 2.0, 2.5) < 0.3
    assert p95(record, 2.7, 3.0) == pytest.approx(p95(record, 1.5, 1.9), abs=0.01), "as before once the dead are back"


class TestGateways:
    def test_gathering_is_part_of_the_latency_but_not_of_a_lone_request_s(self) -> None:
        without, gathered = (
            simulate(replace(FLEET, topology=Topology(gather=gather))).latency for gather in (0.0, 0.01)
        )
        assert 0.003 < statistics.fmean(gathered) - statistics.fmean(without) < 0.012
        lone = replace(FLEET, rate=1.0, duration=60.0, topology=Topology(gateways=4, gather=0.05))
        assert statistics.median(simulate(lone).latency) == pytest.approx(lone.alpha + lone.overhead)

    def test_a_large_group_is_dealt_out(self) -> None:
        """80 requests at a time in one of two shards would make every batch too full or too empty."""
        lumpy = report(shards=2, gateways=1, gather=0.01)
        assert lumpy.batches.shard_gap_cv is not None
        assert lumpy.batches.shard_gap_cv < 0.05
        assert lumpy.total.latency_ms.p95 < 140
