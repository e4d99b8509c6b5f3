"""Requests with several inputs: how they are answered, refused and abandoned, and what their common id shows."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from headway import errors
from headway.core import failures, values
from headway.errors import BackendError
from headway.gateway.broker_session import MOST_COPIED
from headway.gateway.fan_out import AT_ONCE, BYTES_AT_ONCE, FEW, FanOut, joined
from headway.model import (
    BatchRun,
    DedupKind,
    Entry,
    EntryState,
    Failure,
    LedgerRecord,
    Limit,
    Principal,
    Reply,
    RequestStatus,
    Value,
)
from headway.runtime.fair_turns import FairTurns
from headway.runtime.request_id import new_id
from tests.services.calls import failure_of, several
from tests.services.fake_backend import FakeBackend
from tests.services.requests import request
from tests.services.stand import Stand, recorded, served
from tests.virtual_time import Clock, run

ADA = Principal("ada", "acme", 1)
FREE = Principal("bob", "acme", 2, (Limit("key-1", "key", 6000.0, 1000.0),))
ID = "0189f7a4-1111-7222-8333-444455556666"


def fan_out(
    stand: Stand, inputs: Sequence[str], timeout: float = 30.0, caller: Principal = ADA, *, id: str = ID, **how: Any
) -> tuple[FanOut, asyncio.Future[Sequence[Reply]]]:
    return several(stand.gateway, inputs, caller, id=id, timeout=timeout, **how)


async def refusal_of(ended: Awaitable[Sequence[Reply]]) -> Failure:
    [reply] = await ended
    return failure_of(reply)


async def test_a_deadline_holds_for_all_and_the_first_to_miss_it_is_named(stand: Stand) -> None:
    _, ended = fan_out(stand, ["a"] * 20, timeout=0.15)
    [reply] = await ended
    assert (reply.id, failure_of(reply).code) == (ID, errors.DEADLINE_EXCEEDED)
    assert failure_of(reply).message.startswith("input 8 of 20, counted from 0: ")
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("count", [1, 2, 8])
async def test_an_idle_service_blames_the_deadline_however_many_inputs_come(count: int, stand: Stand) -> None:
    for _ in range(3):
        await fan_out(stand, ["a"] * 8)[1]
    failure = await refusal_of(fan_out(stand, ["a"] * count, 0.05, FREE, tier=2)[1])
    assert failure.code == errors.DEADLINE_EXCEEDED


@pytest.mark.stand(max_queue=10)
async def test_a_list_that_does_not_fit_is_refused_whole_and_leaves_nothing_behind(stand: Stand) -> None:
    _, ended = fan_out(stand, ["a"] * 20)
    assert (await refusal_of(ended)).code == errors.SERVICE_OVERLOADED
    await asyncio.sleep(1.0)
    assert not any(tier.depth for tier in await stand.broker.depths())


@pytest.mark.parametrize(("tier", "caller"), [(1, ADA), (2, FREE)])
async def test_a_list_that_is_always_late_is_no_demand(tier: int, caller: Principal, stand: Stand) -> None:
    for _ in range(3):
        await fan_out(stand, ["a"] * 8)[1]
    throttle = stand.gateway.limiter.throttles["m"]
    throttle.higher = throttle.lowest = 0
    throttle.least_seconds = 0.05
    for count, timeout in ((FEW, 0.15), (30, 0.3), (75, 0.3)):
        failure = await refusal_of(fan_out(stand, ["a"] * count, timeout, caller, tier=tier)[1])
        assert failure.reason == failures.LIST
        assert (throttle.higher, throttle.lowest) == (0, 0)


async def test_no_input_of_a_list_is_in_before_the_one_that_pays_though_somebody_owes(stand: Stand) -> None:
    for _ in range(3):
        await fan_out(stand, ["a"] * 8)[1]
    limits = FREE.limits
    stand.gateway.limiter.charge((Limit("key-2", "key", 60.0, 1.0),))
    _, ended = fan_out(stand, ["a"] * FEW, 0.15, Principal("eve", "other", 1, limits))
    assert not any(tier.depth for tier in await stand.broker.depths())
    assert (await refusal_of(ended)).reason == failures.LIST
    assert stand.gateway.limiter.throttles["m"].higher == 3 * 8


async def test_a_list_that_is_left_runs_no_further(stand: Stand) -> None:
    whole, ended = fan_out(stand, [f"text {number}" for number in range(3 * AT_ONCE)])
    whole.abandon()
    await asyncio.sleep(2.0)
    assert sum(map(len, stand.backends[0].batches)) <= 8
    assert not ended.done()


@pytest.mark.parametrize(
    ("replies", "marks"),
    [
        ([(DedupKind.SAME, True)] * 2, (DedupKind.SAME, True)),
        ([(DedupKind.SAME, True), (DedupKind.SAME, False)], (DedupKind.SAME, False)),
        ([(DedupKind.SAME, True), (None, False)], (None, False)),
    ],
)
def test_replies_are_joined_and_marked_by_what_holds_for_all(
    replies: list[tuple[DedupKind | None, bool]], marks: tuple[DedupKind | None, bool]
) -> None:
    found = [Reply(str(place), "t", "output", shared=one, kept=kept) for place, (one, kept) in enumerate(replies)]
    reply = joined("id", found)
    assert (reply.id, reply.shared, reply.kept) == ("id", *marks)


def test_joined_replies_tell_all_versions_that_answered_and_one_by_one_the_only_one() -> None:
    runs = {version: BatchRun("gpu-0", 1, 0.1, 5.0, version) for version in ("3", "4")}

    def told(versions: str) -> str:
        replies = [Reply(str(place), "t", "output", ran=runs[version]) for place, version in enumerate(versions)]
        reply = joined("0", replies)
        assert reply.ran is not None
        return reply.ran.version

    assert [told("3"), told("333"), told("343"), told("443")] == ["3", "3", "3,4", "4,3"]
    assert runs["3"].version == "3", "the run of a batch is shared by its answers"


async def test_a_prompt_of_many_choices_is_digested_once(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    read: list[Value] = []
    canonical = values.canonical

    def noted(value: Value) -> bytes:
        read.append(value)
        return canonical(value)

    monkeypatch.setattr(values, "canonical", noted)
    async with served(clock) as stand:
        inputs = ["a"] * (AT_ONCE + 9) + ["b"] * 50
        for key in ("k", "k", "l"):
            replies = await fan_out(stand, inputs, id=new_id(), key=key)[1]
            assert [reply.output for reply in replies] == [text.upper() for text in inputs]
            assert sorted(map(str, read)) == ["a", "a", "b", "b"], "for the whole, and for its parts"
            read.clear()


def throttled(stand: Stand, burst: float) -> None:
    stand.gateway.limiter.throttles["m"].set_rate(burst, stand._clock())


async def refusal(stand: Stand, count: int, model: str = "m") -> Failure:
    inputs = [f"text {number}" for number in range(count)]
    return await refusal_of(fan_out(stand, inputs, caller=FREE, tier=2, model=model)[1])


async def test_what_the_lowest_tier_has_no_room_for_is_refused_before_it_is_charged(stand: Stand) -> None:
    throttled(stand, 100.0)
    assert stand.gateway.limiter.throttles["m"].admit("acme", stand._clock(), 80) == 0.0
    failure = await refusal(stand, 90)
    assert (failure.code, failure.reason) == (errors.SHED, "capacity")
    assert failure.message == "shed: this tier is limited to what the fleet can handle"
    assert failure.retry_after == pytest.approx(0.7)
    assert stand.broker.rate_limit_debt(FREE.limits[0]) == 0.0
    never = await refusal(stand, 101)
    assert (never.code, never.reason) == (errors.SHED, "capacity")
    assert "101 inputs in one request, but this tier is currently limited to 100 at a time; send fewer" in never.message
    _, ended = fan_out(stand, ["a"] * 20, caller=FREE, tier=2)
    assert len(await ended) == 20


async def test_entries_to_be_copied_go_in_calls_of_few_bytes(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    """Every part gets its own copy of the parameters, even if there are few entries."""
    calls: list[int] = []
    enqueue = stand.broker.enqueue
    monkeypatch.setattr(type(stand.broker), "apart_from", 64 << 10)

    async def counted(entries: Sequence[Entry]) -> Sequence[Failure | None]:
        calls.append(sum(len(entry.parameters) for entry in entries))
        return await enqueue(entries)

    monkeypatch.setattr(stand.broker, "enqueue", counted)
    replies = await asked_with(stand, 120, b'"' + b"x" * 60_000 + b'"')
    assert [reply.output for reply in replies] == ["A"] * 120
    assert sum(calls) == 120 * 60_002
    assert max(calls) < MOST_COPIED + 60_002


async def asked_with(stand: Stand, count: int, parameters: bytes) -> Sequence[Reply]:
    return await fan_out(stand, ["a"] * count, id=new_id(), parameters=parameters)[1]


@pytest.mark.stand(max_body_bytes=10000)
async def test_a_list_of_too_many_bytes_and_parameters_hears_how_many_may_be(stand: Stand) -> None:
    failure = await refusal_of(asked_with(stand, 160, b"x" * 900))
    assert failure.code == errors.PAYLOAD_TOO_LARGE
    assert failure.message == (
        "160 inputs come to 160 bytes, plus 160 times 900 bytes of parameters, which are sent with each; at most 80000 are allowed in "
        "one request (8 times max_body_bytes). Send fewer inputs at a time"
    )
    assert not stand.backends[0].batches
    assert len(await asked_with(stand, 80, b"x" * 900)) == 80
    assert len(await asked_with(stand, 1, b"x" * 90_000)) == 1, "one input is bounded by the body"


async def test_a_list_that_is_refused_as_a_whole_is_charged_and_counted_as_a_wrong_request(clock: Clock) -> None:
    limited = Principal("eve", "acme", 1, (Limit("key-2", "key", 60.0, 10.0),))
    one_at_once = Principal("cyd", "acme", 1, (Limit("key-3", "key", 60.0, 1.0),))
    async with served(clock, max_body_bytes=10_000) as stand:

        def wrong() -> float:
            return stand.counters.gateway.requests["m", "paid", "payload_too_large"]

        for count, caller, reason in ((11, limited, "burst"), (2, one_at_once, "burst"), (160, ADA, "")):
            before = wrong()
            _, ended = fan_out(stand, ["a"] * count, caller=caller, id=new_id(), parameters=b"x" * 900)
            failure = await refusal_of(ended)
            assert (failure.code, failure.reason) == (errors.PAYLOAD_TOO_LARGE, reason)
            assert wrong() == before + 1
        limiter = stand.gateway.limiter
        for _ in range(9):
            assert limiter.excess(stand.gateway.counted(limited.limits), stand.gateway.broker) is None
            fan_out(stand, ["a"] * 11, caller=limited)
        assert limiter.excess(stand.gateway.counted(limited.limits), stand.gateway.broker) is not None
        debts = dict(limiter.debts)
        _, ended = fan_out(stand, ["a"] * 11, caller=limited)
        failure = await refusal_of(ended)
        assert failure.code == errors.PAYLOAD_TOO_LARGE, "it would never fit, whenever it came back"
        assert dict(limiter.debts) == debts, "beyond the limit a refusal costs nothing"


@pytest.mark.parametrize("count", [3, 11], ids=["that would fit", "that never fits"])
async def test_a_list_for_an_unknown_model_is_refused_as_a_request_is(count: int, clock: Clock) -> None:
    limits = (Limit("key-1", "key", 0.001, 3.0),)
    some, all_ = Principal("cyd", "acme", 1, limits, models=frozenset(["m"])), Principal("cyd", "acme", 1, limits)
    async with served(clock) as stand:
        for caller, code in ((all_, errors.NOT_FOUND), (some, errors.FORBIDDEN)):
            stand.gateway.limiter.debts.clear()
            codes = []
            for _ in range(3):
                single = await stand.gateway.ask(request("a", caller, model="n"))
                stand.gateway.limiter.refund(limits)
                refused = await refusal_of(fan_out(stand, ["a"] * count, caller=caller, id=new_id(), model="n")[1])
                codes.append((failure_of(single).code, refused.code))
            assert codes == [(code, code)] * 3
            assert stand.gateway.limiter.excess(limits, stand.gateway.broker) is not None, "each was charged as one"


@pytest.mark.stand(memory_mb=64)
async def test_parts_are_submitted_in_slices_of_few_bytes(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    line = stand.gateway.turns = Line()
    _, ended = fan_out(stand, ["a"] * 20, parameters=b"x" * (BYTES_AT_ONCE // 4))
    assert await slices(stand, line, monkeypatch) == [1, 4, 4, 4, 4, 3], "the first of large ones goes ahead"
    assert len(await ended) == 20


class Line(FairTurns):
    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.waiting: list[tuple[str, Callable[[], None]]] = []

    def wait(self, tenant: str, begin: Callable[[], None]) -> None:
        self.waiting.append((tenant, begin))


async def slices(stand: Stand, line: Line, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the line take its turns, and return how many parts it submitted in each."""
    submitted, submit = 0, stand.gateway.submit

    def counted(*how: object) -> bool:
        nonlocal submitted
        submitted += 1
        return submit(*how)  # type: ignore[arg-type]

    monkeypatch.setattr(stand.gateway, "submit", counted)
    steps = list[int]()
    for _ in range(100):
        if line.waiting:
            [(_, begin)], before = line.waiting, submitted
            line.waiting.clear()
            begin()
            steps.append(submitted - before)
        await asyncio.sleep(0)
    return steps


async def test_many_inputs_wait_slice_by_slice_and_few_do_not(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    line = stand.gateway.turns = Line()
    _, few = fan_out(stand, ["few"] * FEW)
    assert stand.gateway.pending == FEW
    _, many = fan_out(stand, ["a"] * (AT_ONCE + 2), caller=Principal("eve", "globex", 1))
    assert line.waiting[0][0] == "globex"
    assert await slices(stand, line, monkeypatch) == [1, AT_ONCE, 1], "the first goes ahead"
    assert (len(await few), len(await many)) == (FEW, AT_ONCE + 2)


async def test_a_long_list_that_is_refused_has_made_one_entry(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    """The first part is judged for the whole list. Entries for the others are never made."""
    await fan_out(stand, ["a"] * 16)[1]
    ran = sum(map(len, stand.backends[0].batches))
    line = stand.gateway.turns = Line()
    _, ended = fan_out(stand, ["a"] * 1000, timeout=2.0)
    assert await slices(stand, line, monkeypatch) == [1]
    failure = await refusal_of(ended)
    assert (failure.code, failure.reason) == (errors.PAYLOAD_TOO_LARGE, "list")
    assert failure.message.startswith("this many inputs in one request")
    await asyncio.sleep(2.0)
    assert sum(map(len, stand.backends[0].batches)) == ran


async def test_what_a_request_waits_for_its_turn_is_of_its_deadline(stand: Stand) -> None:
    line = stand.gateway.turns = Line()
    _, ended = fan_out(stand, ["a"] * (FEW + 1), timeout=0.5)
    await asyncio.sleep(0.3)
    line.waiting.pop()[1]()
    assert (await refusal_of(ended)).code == errors.DEADLINE_EXCEEDED


async def test_places_of_inputs_that_were_not_submitted_are_given_back(stand: Stand) -> None:
    throttled(stand, 200.0)
    whole, _ = fan_out(stand, [f"text {number}" for number in range(200)], caller=FREE, tier=2)
    await asyncio.sleep(0.0)
    whole.abandon()
    throttle = stand.gateway.limiter.throttles["m"]
    assert throttle.admit("acme", stand._clock(), 200) > 0.0
    assert throttle.admit("acme", stand._clock(), 199) == 0.0
    await asyncio.sleep(2.0)


def reject(entries: Sequence[Entry]) -> BackendError | None:
    return BackendError("no good") if any(entry.input == "bad" for entry in entries) else None


@dataclass
class Outcome:
    """What a client got for a request with several inputs, and what the ledger, look-ups and dead letters say about it.
    `part_of` has the request that each input was reported to belong to, while it waited and after it ended."""

    replies: Sequence[Reply]
    row: LedgerRecord
    parts: list[LedgerRecord]
    status: RequestStatus
    letters: list[str]
    part_of: list[tuple[str, str]]


def outcome_of(inputs: Sequence[str], timeout: float = 30.0, leave_after: float | None = None) -> Outcome:
    async def main(clock: Clock) -> Outcome:
        stand = Stand(clock, FakeBackend(0.1, reject), max_batch=2)

        async def part_of(id: str) -> str:
            status = await stand.gateway.status(id)
            return "forgotten" if status is None else status.part_of

        async with recorded(clock, stand) as ledger:
            whole, ended = fan_out(stand, inputs, timeout)
            held = [id for _, id in stand.gateway.held if id != ID]
            before = [await part_of(id) for id in held]
            if leave_after is None:
                await ended
            else:
                await asyncio.sleep(leave_after)
                whole.abandon()
            await asyncio.sleep(5.0)
            status = await stand.gateway.status(ID)
            assert status is not None
            after = [await part_of(id) for id in held]
            letters = [letter.entry.id for letter in await stand.dead.list()]
        [row] = [record for record in ledger.records if record.id == ID]
        parts = [record for record in ledger.records if record.id != ID]
        replies = ended.result() if ended.done() else ()
        return Outcome(replies, row, parts, status, letters, list(zip(before, after, strict=True)))

    return run(main)


def test_a_list_that_fails_is_failed_by_its_id_and_names_the_part_that_failed() -> None:
    outcome = outcome_of(["a", "b", "c", "bad", "e", "f"])
    failure = failure_of(outcome.replies[0])
    assert failure.code == errors.REJECTED_BY_MODEL
    assert (outcome.row.status, outcome.row.error, outcome.row.part_of) == ("failed", errors.REJECTED_BY_MODEL, "")
    assert [part.part_of for part in outcome.parts] == [ID] * 5
    assert [part.id for part in outcome.parts if part.error == errors.REJECTED_BY_MODEL] == outcome.letters
    assert (outcome.status.state, outcome.status.failure) == (EntryState.FAILED, failure)
    assert [outcome.status.failed_part] == outcome.letters
    assert outcome.status.seconds == pytest.approx(outcome.row.latency_ms / 1000)
    assert outcome.row.completed_at == pytest.approx(outcome.row.created_at + outcome.status.seconds)


@pytest.mark.parametrize(
    ("inputs", "timeout", "code"),
    [
        (["bad", "b", "c"], 30.0, errors.REJECTED_BY_MODEL),
        (["a", "bad"], 30.0, errors.REJECTED_BY_MODEL),
        (["a"] * 8, 0.25, errors.DEADLINE_EXCEEDED),
    ],
    ids=["first input", "second input", "late"],
)
def test_a_list_is_failed_by_its_id_whatever_failed_first(inputs: list[str], timeout: float, code: str) -> None:
    outcome = outcome_of(inputs, timeout)
    assert (outcome.row.status, outcome.row.error) == ("failed", code)
    assert (outcome.status.state, outcome.status.failure) == (EntryState.FAILED, outcome.replies[0].failure)


def test_a_list_that_is_answered_took_as_long_as_its_last_input() -> None:
    outcome = outcome_of(["a"] * 6)
    assert len(outcome.replies) == 6
    assert (outcome.row.status, outcome.row.error) == ("completed", "")
    assert outcome.row.latency_ms == pytest.approx(300, abs=30)
    assert {part.status for part in outcome.parts} == {"completed"}
    assert outcome.part_of == [(ID, ID)] * 5
    assert (outcome.status.state, outcome.status.failed_part, outcome.status.part_of) == (EntryState.COMPLETED, "", "")
    assert outcome.status.seconds == pytest.approx(0.3, abs=0.03)


def test_a_list_whose_client_leaves_is_cancelled_by_its_id_also_where_its_first_input_was_answered() -> None:
    outcome = outcome_of(["a"] * 8, leave_after=0.15)
    assert (outcome.row.status, outcome.row.error) == ("failed", errors.CANCELLED)
    assert any(part.status == "completed" for part in outcome.parts)


async def test_a_list_of_which_the_first_input_is_answered_is_processed_until_the_last_is(clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.1), max_batch=1)
    async with stand:
        _, ended = fan_out(stand, list("abc"), 9.0)
        await asyncio.sleep(0.15)
        status = await stand.gateway.status(ID)
        assert status is not None
        assert (status.state, status.since) == (EntryState.PROCESSING, None)
        assert status.seconds == pytest.approx(0.15, abs=0.03)
        await ended


async def test_the_outcome_of_a_list_that_is_remembered_holds_none_of_its_inputs_and_outputs(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.1)) as stand:
        await fan_out(stand, ["secret", "b"], 9.0)[1]
        assert "secret" not in repr(stand.gateway._recent._last).lower()
