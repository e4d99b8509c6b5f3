"""Every broker when things go wrong: lost leases, failed batches, known culprits, missed deadlines, missing outputs."""

from typing import Any

import msgspec
import pytest

from headway import errors
from headway.core.departure import APART, RETRY
from headway.core.retry import SEARCHED
from headway.core.suspects import APART_SECONDS, MOST_APART
from headway.model import (
    MOST_OUTPUT,
    BatchFailure,
    Cause,
    DedupKind,
    Entry,
    ItemResult,
    Lease,
    Limit,
    ModelReport,
    NoWork,
    Slot,
    WorkerInfo,
    WorkerStatus,
)
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Harness, ask, drained, failed, failure_of, leave, output, slot
from tests.contracts.dedup_keys import admit, came_by, code, key, nothing_runs, refused, same, task


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (Cause.RAISED, errors.REJECTED_BY_MODEL),
        (Cause.CRASHED, errors.REJECTED_BY_MODEL),
        (Cause.TIMEOUT, errors.REJECTED_BY_MODEL),
        (Cause.BAD_OUTPUT, errors.BACKEND_ERROR),
        (Cause.REMOTE, errors.BACKEND_ERROR),
        (Cause.REFUSED, errors.REJECTED_BY_MODEL),
    ],
)
async def test_who_fails_alone_hears_why_and_becomes_a_dead_letter(harness: Harness, cause: Cause, code: str) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    runs = 2 if cause in SEARCHED else 3
    for worker in ("gpu-0", "gpu-1", "gpu-2")[3 - runs :]:
        failure = BatchFailure(cause, "no good at /srv/model.py", worker, shown="no good")
        await harness.broker.release(await harness.claim(worker), failure)
        await harness.advance(1.0)
    reply = (await drained(harness))["a"]
    told = failure_of(reply)
    assert (told.code, told.message, told.reason, reply.attempts) == (code, "no good", cause.value, runs)
    [letter] = await harness.dead.find("a")
    assert (letter.entry, letter.error, letter.cause) == (entry, failure.message, cause.value)
    assert (letter.attempts, letter.worker) == (runs, "gpu-2")


@pytest.mark.parametrize(
    ("workers", "code", "reason"),
    [((), errors.NO_WORKERS, "no_workers"), (("gpu-0",), errors.DEADLINE_EXCEEDED, "queue")],
)
async def test_the_queue_deadline_fires_on_time(
    harness: Harness, workers: tuple[str, ...], code: str, reason: str
) -> None:
    assert 0.0 < await harness.broker.reap() <= 1.0
    await harness.broker.enqueue([ask(id="a", queue_timeout=1.0, timeout=4.0), ask(id="soon", queue_timeout=0.3)])
    await harness.healthy(*workers)
    assert 0.0 < await harness.broker.reap() <= 0.3 + 1e-6
    await harness.reaping(0.3 + harness.grain)
    assert set(await drained(harness)) == {"soon"}
    await harness.reaping(0.7 - 2 * harness.grain)
    assert set(await drained(harness)) == {"soon"}
    await harness.reaping(2 * harness.grain)
    reply = (await drained(harness))["a"]
    failure = failure_of(reply)
    assert (failure.code, failure.reason, failure.retry_after is None) == (code, reason, bool(workers))
    assert reply.queued == pytest.approx(1.0, abs=2 * harness.grain)


@pytest.mark.parametrize(("cause", "code", "reason"), [
    (Cause.TIMEOUT, errors.DEADLINE_EXCEEDED, "gpu"),
    (Cause.CRASHED, errors.NO_WORKERS, "no_workers"),
])  # fmt: skip
async def test_who_has_no_time_left_after_a_run_beyond_the_gpu_deadline_hears_that_the_model_is_too_slow(
    harness: Harness, cause: Cause, code: str, reason: str
) -> None:
    await harness.broker.enqueue([ask(id=id, timeout=4.0) for id in ("a", "b")])
    await harness.advance(3.0)
    await harness.broker.release(await harness.claim(), failed(cause))
    await harness.reaping(1.5)
    replies = await drained(harness)
    told = [failure_of(replies[id]) for id in ("a", "b")]
    assert {(failure.code, failure.reason) for failure in told} == {(code, reason)}
    assert all(("the model was too slow" in failure.message) is (cause is Cause.TIMEOUT) for failure in told)


@pytest.mark.parametrize("how", ["raised", "item", "lost"])
async def test_a_failed_run_tells_its_version_and_its_batch(harness: Harness, how: str) -> None:
    broker, slot = harness.broker, Slot("host/gpu-0", "m", MAX_BATCH, runs=ModelReport("b:7"), version="b:7")
    await harness.healthy(slot.worker, runs=slot.runs, version="b:7")
    await broker.enqueue([ask(id="a", version="b:7", queue_timeout=60.0, timeout=60.0)])
    leases, reply = list[Lease](), None
    while reply is None:
        claimed = await broker.claim(slot, AT_ONCE)
        if isinstance(claimed, Lease):
            leases.append(claimed)
            if how == "raised":
                await broker.release(claimed, BatchFailure(Cause.RAISED, "no good", slot.worker))
            elif how == "item":
                await broker.complete(claimed, [ItemResult(None, "no good")])
        await harness.advance(harness.lease_seconds + 0.5 if how == "lost" else 0.5)
        await broker.reap()
        reply = (await drained(harness)).get("a")
    last = leases[-1]
    assert len({lease.batch_id for lease in leases}) == len(leases)
    assert last.batch_id == f"host/gpu-0@{last.granted_at:.6f}"
    assert reply.failure is not None and reply.ran is not None
    assert (reply.ran.version, reply.ran.batch_id) == ("b:7", last.batch_id)
    [letter] = await harness.dead.find("a")
    assert (letter.worker, letter.version, letter.batch_id) == (slot.worker, "b:7", last.batch_id)
    [listed] = await harness.dead.list()
    assert (listed.version, listed.batch_id) == ("b:7", last.batch_id)


def bad(text: str = "poison", tenant: str = "evil", caller: str = "bob") -> Entry:
    return ask(text, tenant=tenant, caller=caller)


async def run_all(harness: Harness) -> None:
    while any(one.depth for one in await harness.broker.depths()):
        await harness.advance(0.6)
        lease = await harness.claim()
        if any("poison" in str(entry.input) for entry in lease.entries):
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)


async def reason(harness: Harness, entry: Entry) -> str:
    await admit(harness, entry)
    await harness.advance(0.6)
    lease = await harness.claim()
    await harness.answer(lease)
    return lease.reason


async def test_so_many_callers_ride_apart_and_those_that_failed_last(harness: Harness) -> None:
    for number in range(MOST_APART + 1):
        await admit(harness, bad(f"poison {number}", caller=f"{number}"))
        await run_all(harness)
    assert await reason(harness, bad("fine", caller="0")) != APART
    assert await reason(harness, bad("fine", caller="1")) == APART
    assert await reason(harness, bad("fine", caller=f"{MOST_APART}")) == APART


TWO_AN_HOUR = Limit("key:two", "key", 1 / 30, 2.0)


def under(how: str, nonce: int) -> Entry:
    """A poisonous request under a key or an id, submitted again."""
    asked, who = b"asked", {"tenant": "evil", "caller": "bob", "limits": (TWO_AN_HOUR,)}
    if how == "a key":
        return ask("poison", id=f"a{nonce}", nonce=nonce, dedup_keys=(key("k", asked),), **who)  # type: ignore[arg-type]
    if nonce == 1 or how == "a task":
        return ask("poison", id="a", nonce=nonce, dedup_keys=(task("a", digest=asked),), **who)  # type: ignore[arg-type]
    return ask("poison", id="a", nonce=nonce, digest=asked, **who)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["a key", "a task", "the id of a task"])
async def test_a_rejection_that_is_kept_comes_before_what_is_known_of_its_input(harness: Harness, how: str) -> None:
    await admit(harness, under(how, 1))
    await run_all(harness)
    [first] = (await drained(harness)).values()
    assert code(first) == errors.REJECTED_BY_MODEL
    _, cursor = await harness.broker.replies("g", 0)
    await admit(harness, again := under(how, 2))
    await nothing_runs(harness)
    [second] = (await drained(harness, after=cursor)).values()
    assert (second.id, second.nonce, second.failure) == (again.id, again.nonce, first.failure)
    assert came_by(second) == (DedupKind.KEY if how == "a key" else DedupKind.TASK, True)
    assert (await refused(harness, under(how, 3))).code == errors.RATE_LIMITED, "both were counted"


@pytest.mark.parametrize("change", [{"pid": 2}, {"restarts": 1}, {"worker_id": "gpu-1"}])
async def test_a_new_backend_or_worker_gets_to_try_what_only_raised(harness: Harness, change: dict[str, Any]) -> None:
    beat = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY)
    await harness.broker.heartbeat(beat)
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.broker.heartbeat(beat)
    assert (await refused(harness, bad())).reason == "culprit"
    await harness.broker.heartbeat(msgspec.structs.replace(beat, **change))
    await harness.broker.reap()
    await admit(harness, bad())


SIZE = 5 << 20


def large(caller: str = "eve", **how: object) -> Entry:
    return ask(f"large {caller}", tenant="evil", caller=caller, **how)  # type: ignore[arg-type]


def is_large(entry: Entry) -> bool:
    return str(entry.input).startswith("large")


async def left_out(harness: Harness, lease: Lease) -> None:
    items = [
        ItemResult(None, left_out=SIZE) if is_large(one) else ItemResult(output(one.input)) for one in lease.entries
    ]
    settled = await harness.broker.complete(lease, items)
    assert (settled.answered, settled.departed) == (sum(not is_large(one) for one in lease.entries), 0)


async def test_the_others_are_answered_and_those_left_out_run_again_apart(harness: Harness) -> None:
    entries = [ask(), large(), large("mallory"), large()]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    assert len(lease.entries) == 4
    await harness.advance(1.0)
    await left_out(harness, lease)
    told = await drained(harness)
    assert set(told) == {entry.id for entry in entries if not is_large(entry)}
    callers = []
    for _ in range(2):
        lease = await harness.claim()
        assert lease.reason == RETRY
        callers.append({entry.caller for entry in lease.entries})
        await harness.advance(1.0)
        await harness.answer(lease)
    assert not any(load.alpha for load in (await harness.broker.loads()).values()), "their time is nobody else's pace"
    assert callers in ([{"eve"}, {"mallory"}], [{"mallory"}, {"eve"}])
    told = await drained(harness)
    assert {id: reply.output for id, reply in told.items()} == {one.id: output(one.input) for one in entries}
    assert not await harness.dead.count()
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)


async def test_whose_outputs_were_left_out_rides_apart_for_a_while_as_many_as_have_room(harness: Harness) -> None:
    await harness.broker.enqueue([large(), ask()])
    await left_out(harness, await harness.claim())
    await harness.answer(await harness.claim())
    await harness.broker.enqueue([*(large() for _ in range(4)), ask()])
    await harness.advance(0.6)
    batches = [await harness.claim("gpu-0"), await harness.claim("gpu-1"), await harness.claim("gpu-2")]
    assert sorted(len(lease.entries) for lease in batches) == [1, 1, MOST_OUTPUT // SIZE]
    assert sorted(lease.reason == APART for lease in batches) == [False, True, True]
    for lease in batches:
        await harness.answer(lease)
    await harness.advance(APART_SECONDS)
    await harness.broker.enqueue([large(), ask()])
    assert len((await harness.claim()).entries) == 2


async def test_who_shares_an_answer_gets_it_from_the_next_run_and_who_is_late_or_gone_gets_none(
    harness: Harness,
) -> None:
    await harness.healthy("gpu-0")
    first, second = (large(dedup_keys=(same(),)) for _ in range(2))
    late, gone = large(timeout=1.0, queue_timeout=1.0), large()
    await admit(harness, first, second, late, gone, ask())
    lease = await harness.claim()
    await leave(harness.broker, gone)
    items = [ItemResult(None, left_out=SIZE) if is_large(one) else ItemResult("out") for one in lease.entries]
    assert (await harness.broker.complete(lease, items)).departed == 1
    await harness.reaping(1.1)
    lease = await harness.claim()
    assert [one.id for one in lease.entries] == [first.id]
    await harness.answer(lease)
    replies = await drained(harness)
    assert replies[first.id].output == replies[second.id].output == output(first.input)
    assert failure_of(replies[late.id]).code == "DEADLINE_EXCEEDED"
    assert gone.id not in replies
