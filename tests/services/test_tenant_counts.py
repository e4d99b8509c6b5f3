"""Counts of single tenants, and the last answered requests by id and tenant."""

import pytest
from msgspec.structs import replace

from headway import errors
from headway.core.tensors import Tensor, TensorHead, pack
from headway.gateway import gateway, request_log
from headway.gateway.gateway import OutcomeCounts, TenantCounts
from headway.gateway.pending import NOBODY, Ending, Observer, PendingRequest
from headway.gateway.request_log import RecentRequests
from headway.model import BatchRun, DedupKind, Entry, EntryState, Failure, Principal, Reply, RequestStatus, TokenCount
from headway.oip.metadata import statistics_of
from headway.runtime.counters import GatewayCounts

WRONG = Failure(errors.REJECTED_BY_MODEL, "no")


def ended(tenant: str, model: str = "m") -> PendingRequest:
    entry = Entry("id", model, "input", 0, tenant, "gateway", 1.0, 1.0)
    return PendingRequest(NOBODY, Principal("u", tenant, 0), entry, 0.0, 1.0, None, reply=Reply("id", tenant, "output"))


def test_only_tenants_that_have_asked_are_counted() -> None:
    observers: list[Observer] = []
    counts = TenantCounts(("paid",), ("m",), observers.append)
    assert observers == []
    own = counts.of("a")
    assert observers == [counts]
    counts.finished([ended("a"), ended("b"), ended("a")], Ending.REPLIED, 1.0)
    assert own is counts.of("a") and own.requests == {("m", "paid", "ok"): 2}
    assert counts.of("b").requests == {}
    assert observers == [counts]
    counts.forget("m")
    assert counts.of("a").requests == {}


def test_rows_of_tensors_count_as_inferences_and_as_the_size_of_their_batch() -> None:
    counters = GatewayCounts()
    counts = OutcomeCounts(counters, ("paid",), ("m",))
    runs = BatchRun("gpu-0", 3, 0.5, 1.0), BatchRun("gpu-1", 1, 0.5, 1.0)

    def answered(rows: int, run: BatchRun, shared: DedupKind | None = None, failed: bool = False) -> PendingRequest:
        request = ended("a")
        data = pack([Tensor(TensorHead("x", "UINT8", (rows,)), bytes(rows))])
        request.entry = replace(request.entry, input=data, weight=rows)
        request.reply = replace(request.reply, ran=run, shared=shared, failure=WRONG if failed else None)
        return request

    others = answered(5, runs[1], failed=True), answered(9, runs[1], DedupKind.SAME)
    counts.finished([], Ending.REPLIED, 2.0)  # All had ended before.
    counts.finished([*others, answered(4, runs[0]), answered(1, runs[0]), answered(2, runs[0])], Ending.REPLIED, 2.0)
    one = statistics_of(counters, "m", "1", lambda: 5.0, lambda: 1e9)
    sizes = [(each.batch_size, each.compute_infer.count) for each in one.batch_stats]
    assert (one.inference_count, one.execution_count, sizes) == (7, 2, [(5, 1), (7, 1)])
    counters.forget("m")
    assert not counters.more_rows


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
        request = ended(tenant)
        request.reply = Reply("id", tenant, "o", shared=shared, tokens=None if used is None else TokenCount(used))
        return request

    counts.finished([told("a", 3), told("a", None), told("b", 4), told("a", 3, DedupKind.SAME)], Ending.REPLIED, 1.0)
    counts.finished([told("c", 5), told("d", 6), told("a", 1)], Ending.REPLIED, 1.0)
    assert counters.tokens == {
        ("m", "a", "run"): 4, ("m", "a", "shared"): 3, ("m", "b", "run"): 4, ("m", "other", "run"): 11,
    }  # fmt: skip
    counters.forget("m")
    assert counters.tokens == {}


NOW = 10.0


def answered(
    id: str, tenant: str = "t", model: str = "m", seconds: float = 1.0, failed: bool = False
) -> PendingRequest:
    entry = Entry(id, model, "input", 0, tenant, "gateway", 1.0, 4.0)
    reply = Reply(id, tenant, None, Failure("CODE", "why")) if failed else Reply(id, tenant, "output")
    since = NOW - seconds
    return PendingRequest(NOBODY, Principal("u", tenant, 0), entry, since, since + 4.0, None, reply=reply)


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
