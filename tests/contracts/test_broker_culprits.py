"""Promises of every broker on inputs that are known to fail: they are turned down, and what is kept or limited comes first."""

from __future__ import annotations

import pytest

from headway import errors
from headway.core.culprits import KNOWN_SECONDS, MOST_APART
from headway.core.departure import APART
from headway.model import DedupKind, Entry, Lease, Limit, NoWork, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Harness, ask, drained, failed, slot, story
from tests.contracts.dedup_keys import admit, came_by, code, key, nothing_runs, refused, same, task


def bad(text: str = "poison", tenant: str = "evil", caller: str = "bob") -> Entry:
    return ask(text, tenant=tenant, caller=caller)


async def run_all(harness: Harness) -> None:
    """Run what waits to its end."""
    while any(one.depth for one in await harness.broker.depths()):
        await harness.advance(0.6)
        lease = await harness.claim()
        if any("poison" in str(entry.input) for entry in lease.entries):
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)


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


async def reason(harness: Harness, entry: Entry) -> str:
    """Reason for which a batch of this entry leaves."""
    await admit(harness, entry)
    await harness.advance(0.6)
    lease = await harness.claim()
    await harness.answer(lease)
    return lease.reason


@story
async def test_so_many_callers_ride_apart_and_those_that_failed_last(harness: Harness) -> None:
    for number in range(MOST_APART + 1):
        await admit(harness, bad(f"poison {number}", caller=f"{number}"))
        await run_all(harness)
    assert await reason(harness, bad("fine", caller="0")) != APART
    assert await reason(harness, bad("fine", caller="1")) == APART
    assert await reason(harness, bad("fine", caller=f"{MOST_APART}")) == APART


@story
async def test_a_full_group_of_a_caller_that_rides_apart_leaves_at_once(harness: Harness) -> None:
    await admit(harness, bad(), ask(tenant="good"))
    await run_all(harness)
    await admit(harness, ask(tenant="good"))
    lease = await harness.claim()
    await harness.advance(0.5)
    await harness.answer(lease)
    await admit(harness, bad("fine"))
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)
    await admit(harness, *(bad(f"fine {number}") for number in range(MAX_BATCH - 1)))
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), Lease)


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
async def test_what_only_raised_is_tried_again_by_a_worker_that_comes(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.healthy("gpu-0", "gpu-1")
    await harness.broker.reap()
    assert await harness.broker.enqueue([bad()]) == [None]
