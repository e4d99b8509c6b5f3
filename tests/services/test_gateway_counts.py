"""Counts, records and memory use of requests that are answered, expire, are refused, or whose clients leave."""

import asyncio

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headway import errors
from headway.core.tensors import Tensor, TensorHead, pack
from headway.gateway import gateway, request_log
from headway.gateway.gateway import OutcomeCounts, TenantCounts
from headway.gateway.pending import NOBODY, Ending, FutureSink, Observer, PendingRequest
from headway.gateway.request_log import RecentRequests
from headway.model import BatchRun, DedupKind, Entry, EntryState, Failure, Principal, Reply, RequestStatus, TokenCount
from headway.oip.metadata import statistics_of
from headway.runtime.counters import GatewayCounts
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Fleet
from tests.services.requests import request

WHO = (ANYBODY.user, ANYBODY.tenant)
GRAIN = 0.03
"""Seconds by which a deadline may be seen late."""


@pytest.mark.fleet(1.0, max_batch=1)
async def test_each_outcome_is_counted_and_noted_with_the_time_that_it_took(fleet: Fleet) -> None:
    answered = fleet.ask("answered")
    expired = [fleet.ask(f"expired {number}", timeout=0.5) for number in range(2)]
    gone = [fleet.ask(f"gone {number}") for number in range(2)]
    await asyncio.sleep(0.2)
    for one in gone:
        fleet.gateway.abandon(one, ANYBODY.tenant, one.id)
    await fleet.answered(answered, *expired)
    assert fleet.backends[0].batches == [["answered"]]
    counts = {"ok": 1, "deadline_exceeded": 2, "cancelled": 2}
    assert fleet.counters.gateway.requests == {("m", "paid", outcome): count for outcome, count in counts.items()}
    took = {entry.input: seconds for entry, seconds, _ in fleet.journals[0].notes}
    assert took == pytest.approx(
        {"answered": 1.0, "expired 0": 0.5, "expired 1": 0.5, "gone 0": 0.2, "gone 1": 0.2}, abs=GRAIN
    )
    assert all((reply.id, reply.tenant) == (entry.id, entry.tenant) for entry, _, reply in fleet.journals[0].notes)
    assert fleet.counters.gateway.failed_seconds == {"m": pytest.approx(1.0, abs=2 * GRAIN)}
    latencies = fleet.counters.gateway.request_seconds["m", "paid"]
    assert latencies.count == 3 and latencies.sum == pytest.approx(2.0, abs=2 * GRAIN)


@pytest.mark.fleet(1.0, max_batch=1)
async def test_headway_s_own_share_of_a_request_is_what_neither_the_queue_nor_the_run_took(fleet: Fleet) -> None:
    await fleet.answered(*(fleet.ask(f"text {number}") for number in range(3)))
    waits, own = fleet.counters.gateway.queue_seconds["m", "paid"], fleet.counters.gateway.overhead_seconds
    assert waits.count == 3 and waits.sum == pytest.approx(3.0, abs=0.1)
    assert own.count == 3 and own.sum == pytest.approx(0.0, abs=0.1)


@pytest.mark.fleet(1.0, max_batch=1)
async def test_where_a_request_stands_is_known_while_it_is_held_and_afterwards(fleet: Fleet) -> None:
    first, late = fleet.ask("first", tier=0), fleet.ask("late", timeout=0.5)
    await asyncio.sleep(0.2)
    standing = await fleet.gateway.status(late.id)
    assert standing is not None and standing.state is EntryState.QUEUED
    assert (standing.user, standing.tenant, standing.model, standing.tier) == (*WHO, "m", 1)
    assert standing.seconds == pytest.approx(0.2, abs=GRAIN)
    await fleet.answered(first, late)
    await asyncio.sleep(3.0)
    done, failed = [await fleet.gateway.status(one.id, ANYBODY.tenant) for one in (first, late)]
    assert done is not None and done.state is EntryState.COMPLETED
    assert (done.user, done.tenant, done.model, done.tier) == (*WHO, "m", 0)
    assert done.seconds == pytest.approx(1.0, abs=GRAIN) and done.since == pytest.approx(3.0, abs=GRAIN)
    assert done.ran is not None and done.ran.worker == "gpu-0"
    assert failed is not None and failed.state is EntryState.FAILED
    assert failed.failure is not None and failed.failure.code == errors.DEADLINE_EXCEEDED
    assert await fleet.gateway.status(first.id, "another") is None


async def test_an_answer_that_could_not_be_written_is_told_to_operators_and_hurts_nobody_else(fleet: Fleet) -> None:
    class Broken(FutureSink):
        def answer(self, reply: Reply) -> None:
            raise RuntimeError("connection object is broken")

    with capture_logs() as lines:
        fleet.gateway.submit(Broken(), asked := request())
        assert await fleet.answered(fleet.ask("b")) == ["ok"]
        await fleet.gateway.emptied()
    [line] = [line for line in lines if line["log_level"] == "error"]
    assert line["request_id"] == asked.id and line["exc_info"]


async def test_an_observer_that_fails_costs_nobody_an_answer(fleet: Fleet) -> None:
    def fail(*facts: object) -> None:
        raise RuntimeError("the observer is broken")

    fleet.journals[0].finished = fail  # type: ignore[assignment, method-assign]
    with capture_logs() as lines:
        assert await fleet.answered(fleet.ask("a"), fleet.ask("b")) == ["ok", "ok"]
    errors = [line["event"] for line in lines if line["log_level"] == "error"]
    assert errors == ["a request observer failed"]


WRONG = Failure(errors.REJECTED_BY_MODEL, "no")


NOW = 10.0


def answered(
    id: str, tenant: str = "t", model: str = "m", seconds: float = 1.0, failed: bool = False
) -> PendingRequest:
    entry = Entry(id, model, "input", 0, tenant, "gateway", 1.0, 4.0)
    reply = Reply(id, tenant, None, Failure("CODE", "why")) if failed else Reply(id, tenant, "output")
    since = NOW - seconds
    return PendingRequest(NOBODY, Principal("u", tenant, 0), entry, since, since + 4.0, None, reply=reply)


def test_only_tenants_that_have_asked_are_counted() -> None:
    observers: list[Observer] = []
    counts = TenantCounts(("paid",), ("m",), observers.append)
    assert observers == []
    own = counts.of("a")
    assert observers == [counts]
    counts.finished([answered("id", tenant) for tenant in "aba"], Ending.REPLIED, NOW)
    assert own is counts.of("a") and own.requests == {("m", "paid", "ok"): 2}
    assert counts.of("b").requests == {}
    assert observers == [counts]
    counts.forget("m")
    assert counts.of("a").requests == {}


def test_rows_of_tensors_count_as_inferences_and_as_the_size_of_their_batch() -> None:
    counters = GatewayCounts()
    counts = OutcomeCounts(counters, ("paid",), ("m",))
    runs = BatchRun("gpu-0", 3, 0.5, 1.0), BatchRun("gpu-1", 1, 0.5, 1.0)

    def of_rows(rows: int, run: BatchRun, shared: DedupKind | None = None, failed: bool = False) -> PendingRequest:
        request = answered("id", "a")
        data = pack([Tensor(TensorHead("x", "UINT8", (rows,)), bytes(rows))])
        request.entry = replace(request.entry, input=data, weight=rows)
        request.reply = replace(request.reply, ran=run, shared=shared, failure=WRONG if failed else None)
        return request

    others = of_rows(5, runs[1], failed=True), of_rows(9, runs[1], DedupKind.SAME)
    counts.finished([], Ending.REPLIED, NOW)  # All of them had already ended.
    counts.finished([*others, of_rows(4, runs[0]), of_rows(1, runs[0]), of_rows(2, runs[0])], Ending.REPLIED, NOW)
    one = statistics_of(counters, "m", "1", lambda: 5.0, lambda: 1e9)
    sizes = [(each.batch_size, each.compute_infer.count) for each in one.batch_stats]
    assert (one.inference_count, one.execution_count, sizes) == (7, 2, [(5, 1), (7, 1)])
    counters.forget("m")
    assert not counters.more_rows


def test_a_batch_is_counted_once_though_its_replies_come_one_by_one() -> None:
    counters, run = GatewayCounts(), BatchRun("gpu-0", 2, 0.5, 1.0)
    counts = OutcomeCounts(counters, ("paid",), ("m",))
    for id in "ab":
        request = answered(id)
        request.reply = replace(request.reply, ran=run)
        counts.finished([request], Ending.REPLIED, NOW)
    [((_, size), total)] = counters.runs.items()
    assert (size, total.count, total.seconds, counters.last_answer) == (2, 1, 0.5, {"m": NOW})


def test_the_tenant_that_has_not_asked_for_the_longest_makes_room() -> None:
    counts = TenantCounts(("paid",), ("m",), lambda counts: None)
    own = {number: counts.of(str(number)) for number in range(gateway.MOST_ASKING)}
    counts.of("0")
    counts.of("one more")
    assert counts.of("0") is own[0]
    assert counts.of("1") is not own[1]


def test_tokens_are_counted_by_tenant_and_those_of_further_tenants_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MOST_TENANTS", 2)
    counters = GatewayCounts()
    counts = OutcomeCounts(counters, ("paid",), ("m",))

    def told(tenant: str, used: int | None, shared: DedupKind | None = None) -> PendingRequest:
        request = answered("id", tenant)
        request.reply = Reply("id", tenant, "o", shared=shared, tokens=None if used is None else TokenCount(used))
        return request

    counts.finished([told("a", 3), told("a", None), told("b", 4), told("a", 3, DedupKind.SAME)], Ending.REPLIED, NOW)
    counts.finished([told("c", 5), told("d", 6), told("a", 1)], Ending.REPLIED, NOW)
    assert counters.tokens == {
        ("m", "a", "run"): 4, ("m", "a", "shared"): 3, ("m", "b", "run"): 4, ("m", "other", "run"): 11,
    }  # fmt: skip
    counters.forget("m")
    assert counters.tokens == {}


def found(recent: RecentRequests, id: str, tenant: str | None = "t") -> RequestStatus:
    status = recent.find(id, tenant)
    assert status is not None
    return status


def test_each_of_those_that_ended_together_has_its_own() -> None:
    recent = RecentRequests(lambda: NOW + 5.0)
    together = [
        answered("a", seconds=1.0),
        answered("ab", seconds=2.0),
        answered("b", "other", seconds=3.0),
        answered("c", model="n"),
    ]
    recent.finished([*together, answered("d", failed=True)], Ending.REPLIED, NOW)
    assert [found(recent, id, None).seconds for id in ("a", "ab", "b", "c")] == [1.0, 2.0, 3.0, 1.0]
    assert [found(recent, id, None).model for id in ("a", "c")] == ["m", "n"]
    assert found(recent, "a").state == EntryState.COMPLETED and found(recent, "a").since == 5.0
    assert found(recent, "d").state == EntryState.FAILED and found(recent, "d").failure == Failure("CODE", "why")
    assert found(recent, "b", "other").tenant == "other"


@pytest.mark.parametrize("id", ["", "b", "a\nab", "ab\n", "no"])
def test_no_other_text_finds_one(id: str) -> None:
    recent = RecentRequests(lambda: NOW)
    recent.finished([answered("a"), answered("ab")], Ending.REPLIED, NOW)
    assert recent.find(id, None) is None
    assert recent.find("a", "other") is None


def test_the_newest_of_an_id_is_told_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "REMEMBERED", 4)
    recent = RecentRequests(lambda: NOW)
    recent.finished([answered("a", seconds=1.0), answered("a", seconds=2.0)], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 2.0
    recent.finished([answered("a", seconds=3.0), answered("b")], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 3.0
    recent.finished([answered("c")], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 3.0
    recent.finished([answered("d"), answered("e"), answered("f")], Ending.REPLIED, NOW)
    assert recent.find("a", None) is None and recent.find("b", None) is None
    assert found(recent, "c").seconds == 1.0


def test_who_left_is_not_remembered() -> None:
    recent = RecentRequests(lambda: NOW)
    recent.finished([answered("a")], Ending.LEFT, NOW)
    assert recent.find("a", None) is None
