"""Cost of one caller's failures for another, on every broker: nothing but a fair share of the GPUs."""

from __future__ import annotations

import msgspec
import pytest

from headway import errors
from headway.core.culprits import KNOWN_SECONDS
from headway.core.fair_queue import BATCH_PAGES, PAGE
from headway.core.queue import MIXED_SECONDS, QUARANTINE_BATCHES
from headway.core.retry import BUDGET_RESERVE, RAISES
from headway.model import Cause, DedupKind, Entry, Limit, Reply, WorkerInfo, WorkerStatus
from tests.contracts.brokers import (
    MAX_BATCH,
    MAX_QUEUE,
    MAX_WEIGHT,
    Harness,
    ask,
    drained,
    failed,
    ids,
    leave,
    slot,
    story,
)
from tests.contracts.dedup_keys import admit, came_by, key, nothing_runs, refused, same, task


def code(reply: Reply) -> str:
    return reply.failure.code if reply.failure is not None else ""


def good(number: int) -> Entry:
    return ask(f"good {number}", tenant="good", caller="ann")


def bad(text: str = "poison", tenant: str = "evil", caller: str = "bob") -> Entry:
    return ask(text, tenant=tenant, caller=caller)


async def run_all(harness: Harness, cause: Cause = Cause.RAISED) -> list[list[str]]:
    """Run what waits to its end; the inputs of each batch."""
    runs = []
    while any(one.depth for one in await harness.broker.depths()):
        await harness.advance(0.6)
        lease = await harness.claim()
        runs.append([str(entry.input) for entry in lease.entries])
        if any("poison" in str(entry.input) for entry in lease.entries):
            await harness.broker.release(lease, failed(cause))
        else:
            await harness.answer(lease)
    return runs


@story
async def test_a_batch_that_raised_is_cut_between_callers(harness: Harness) -> None:
    await harness.broker.enqueue([*map(good, range(5)), bad(), bad("fine")])
    first, second, *_ = await run_all(harness)
    assert len(first) == 7
    assert sorted(second) == sorted(f"good {number}" for number in range(5))
    replies = (await drained(harness)).values()
    assert sorted(map(code, replies)) == [""] * 6 + [errors.REJECTED_BY_MODEL]


@story
async def test_a_tenant_that_spent_its_retries_spent_nobody_elses(harness: Harness) -> None:
    largest = int(max(BUDGET_RESERVE, 10 * MAX_BATCH))
    for _ in range(largest // MAX_BATCH):
        await harness.broker.enqueue([ask(tenant="evil") for _ in range(MAX_BATCH)])
        await harness.broker.release(await harness.claim(), failed(Cause.LEASE_LOST))
        await harness.advance(0.05)
        await harness.answer(await harness.claim())
    await drained(harness)
    mixed = [ask(id="mine", tenant="good"), *(ask(tenant="evil") for _ in range(MAX_BATCH - 1))]
    await harness.broker.enqueue(mixed)
    await harness.broker.release(await harness.claim(), failed(Cause.LEASE_LOST))
    await harness.advance(0.05)
    again = await harness.claim()
    assert "mine" in ids(again.entries)


@story
async def test_who_sent_a_culprit_rides_apart_until_it_behaves(harness: Harness) -> None:
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.broker.enqueue([good(1), bad("fine"), good(2)])
    assert sorted(map(sorted, await run_all(harness))) == [["fine"], ["good 1", "good 2"]]
    await harness.advance(60.0)
    await harness.broker.enqueue([good(1), bad("fine"), good(2)])
    assert len(await run_all(harness)) == 1


@story
async def test_who_rides_apart_waits_as_long_as_its_deadline_allows_while_nobody_else_does(harness: Harness) -> None:
    def heavy(text: str, nonce: int = 0, count: int = 1) -> Entry:
        asked = ask(text, tenant="evil", caller="bob", model="other", weight=MAX_WEIGHT, nonce=nonce)
        return msgspec.structs.replace(asked, payer=nonce, count=count)

    await admit(harness, heavy("poison"))
    for _ in range(RAISES):
        await harness.broker.release(await harness.claim(model="other"), failed(Cause.RAISED))
        await harness.advance(0.6)
    most = QUARANTINE_BATCHES
    await admit(harness, *(heavy(f"fine {number}") for number in range(most + 1)))
    await admit(harness, ask(tenant="good", model="other"))
    verdict = await refused(harness, heavy("too many beside others"))
    assert (verdict.code, verdict.reason) == (errors.SERVICE_OVERLOADED, "overloaded")
    assert "run apart" in verdict.message
    verdict = await refused(harness, heavy("several", 9, most + 1))
    assert verdict.code == errors.PAYLOAD_TOO_LARGE
    assert f"run apart for 30 s after one that failed: up to {most} may be" in verdict.message


@story
async def test_an_input_that_failed_alone_is_turned_down_without_a_run(harness: Harness) -> None:
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    same = [bad(), bad(caller="carol"), bad(tenant="good"), bad("poison 2"), bad(caller="")]
    verdicts = await harness.peer().enqueue(same)
    told = [None if verdict is None else (verdict.code, verdict.reason) for verdict in verdicts]
    known = (errors.REJECTED_BY_MODEL, "culprit")
    assert told == [known, known, None, None, None], "it is the input's fault, each tenant for itself; a replay runs"
    await run_all(harness)
    await harness.advance(KNOWN_SECONDS + 1.0)
    assert await harness.broker.enqueue([bad()]) == [None]


@story
async def test_the_repeated_refusal_carries_the_first_error(harness: Harness) -> None:
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    [first] = (await drained(harness)).values()
    assert first.failure is not None
    told = (await refused(harness, bad())).message
    assert first.failure.message in told
    assert "not run again" in told


@pytest.mark.parametrize("backend", [{"pid": 2}, {"restarts": 1}])
@story
async def test_a_worker_with_another_backend_forgets_what_only_raised(
    harness: Harness, backend: dict[str, int]
) -> None:
    def beat(**told: int) -> WorkerInfo:
        return WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, **told)  # type: ignore[arg-type]

    await harness.broker.heartbeat(beat())
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.broker.heartbeat(beat())
    assert (await refused(harness, bad())).reason == "culprit"
    await harness.broker.heartbeat(beat(**backend))
    await admit(harness, bad())


TWO_AN_HOUR = Limit("key:two", "key", 1 / 30, 2.0)


def under(how: str, nonce: int) -> Entry:
    """A poisonous request under a key or an id, submitted once more."""
    asked, who = b"asked", {"tenant": "evil", "caller": "bob", "limits": (TWO_AN_HOUR,)}
    if how == "a key":
        return ask("poison", id=f"a{nonce}", nonce=nonce, dedup_keys=(key("k", asked),), **who)  # type: ignore[arg-type]
    if nonce == 1 or how == "a task":
        return ask("poison", id="a", nonce=nonce, dedup_keys=(task("a", digest=asked),), **who)  # type: ignore[arg-type]
    return ask("poison", id="a", nonce=nonce, digest=asked, **who)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["a key", "a task", "the id of a task"])
@story
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


@story
async def test_a_key_that_was_used_for_another_request_is_misused_whatever_is_known_of_the_input(
    harness: Harness,
) -> None:
    await admit(harness, bad(), ask("fine", id="a", tenant="evil", caller="bob", dedup_keys=(key("k", b"fine"),)))
    await run_all(harness)
    other = ask("poison", tenant="evil", caller="bob", dedup_keys=(key("k", b"poison"),))
    assert (await refused(harness, other)).code == errors.IDEMPOTENCY_MISUSE


@story
async def test_who_asks_for_a_known_culprit_under_a_new_key_is_turned_down_and_counted(harness: Harness) -> None:
    await admit(harness, bad())
    await run_all(harness)

    def asked(name: str) -> Entry:
        return ask("poison", tenant="evil", caller="bob", dedup_keys=(key(name), same()), limits=(TWO_AN_HOUR,))

    told = [(await refused(harness, asked(name))).code for name in ("k", "k", "l")]
    assert told == [errors.REJECTED_BY_MODEL, errors.REJECTED_BY_MODEL, errors.RATE_LIMITED]
    await nothing_runs(harness)


@story
async def test_who_followed_what_became_known_as_a_culprit_does_not_run_either(harness: Harness) -> None:
    """The first under a key is too late; meanwhile its input failed elsewhere."""
    await admit(harness, bad())
    for _ in range(RAISES - 1):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(0.6)
    lease = await harness.claim()
    first = ask("poison", id="a", tenant="evil", caller="bob", dedup_keys=(key(),), queue_timeout=5.0)
    await admit(harness, first)
    await admit(harness, ask("poison", id="b", tenant="evil", caller="bob", dedup_keys=(key(),)))
    await harness.broker.release(lease, failed())
    await harness.advance(6.0)
    await harness.broker.reap()
    replies = await drained(harness)
    assert code(replies["a"]) in (errors.DEADLINE_EXCEEDED, errors.NO_WORKERS)
    assert code(replies["b"]) == errors.REJECTED_BY_MODEL
    await nothing_runs(harness)


@story
async def test_what_only_raised_is_tried_again_by_a_worker_that_comes(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.healthy("gpu-0", "gpu-1")
    await harness.broker.reap()
    assert await harness.broker.enqueue([bad()]) == [None]


@story
async def test_what_died_beside_others_and_once_alone_is_not_blamed_yet(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    for _ in range(3):  # Whole, whole, and one of them alone.
        lease = await harness.claim()
        await harness.broker.release(lease, failed(Cause.CRASHED))
        await harness.advance(1.0)
    assert len(lease.entries) == 1
    assert await drained(harness) == {}
    while any(one.depth for one in await harness.broker.depths()):
        await harness.answer(await harness.claim())
    assert {reply.failure for reply in (await drained(harness)).values()} == {None}


@story
async def test_a_slot_for_one_searches_all_the_same(harness: Harness) -> None:
    await harness.broker.enqueue([bad("poison"), *(bad(f"fine {number}") for number in range(5))])
    await harness.broker.release(await harness.claim(), failed())
    while any(one.depth for one in await harness.broker.depths()):
        await harness.advance(0.6)
        lease = await harness.claim(limit=slot().max_batch // MAX_BATCH)
        assert len(lease.entries) == 1
        if lease.entries[0].input == "poison":
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)
    replies = (await drained(harness)).values()
    assert sorted(map(code, replies)) == [""] * 5 + [errors.REJECTED_BY_MODEL]


@story
async def test_no_tenant_takes_all_places_of_the_queue(harness: Harness) -> None:
    verdicts = await harness.broker.enqueue([ask(tenant="evil") for _ in range(MAX_QUEUE)])
    assert [one is None for one in verdicts] == [True] * 54 + [False] * 6, "nine times what is free, at most"
    assert verdicts[-1] is not None
    assert verdicts[-1].code == errors.SERVICE_OVERLOADED
    assert await harness.peer().enqueue([*map(good, range(4)), ask(tenant="evil")]) == [None] * 4 + [verdicts[-1]]
    for _ in range(2):
        await harness.answer(await harness.claim())
    again = await harness.broker.enqueue([ask(tenant="evil") for _ in range(MAX_QUEUE)])
    assert again.count(None) == 12


@story
async def test_large_inputs_of_one_tenant_take_few_places_beside_anothers(harness: Harness) -> None:
    large = "x" * PAGE * BATCH_PAGES
    waiting = [ask(large, id=f"large {number}", tenant="evil") for number in range(4)]
    await harness.broker.enqueue([*waiting, *map(good, range(3))])
    await leave(harness.broker, waiting[1])
    batch = await harness.claim()
    assert [str(entry.input)[:6] for entry in batch.entries] == ["x" * 6, "good 0", "good 1", "good 2"]
    await harness.broker.enqueue([*map(good, range(MAX_BATCH))])
    batch = await harness.claim()
    assert "evil" not in [entry.tenant for entry in batch.entries], "its next one costs as many turns as it has pages"
    assert ids((await harness.claim()).entries) == ["large 2"]
    await harness.broker.enqueue([ask(large, id="large 4", tenant="evil")])
    await harness.advance(MIXED_SECONDS)
    assert ids((await harness.claim()).entries) == ["large 3", "large 4"], "nobody else has asked for a while"
