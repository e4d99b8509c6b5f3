"""Every broker when things go wrong: lost leases, failed batches, known culprits, deadlines that pass."""

import pytest

from headway import errors
from headway.core.culprits import KNOWN_SECONDS, MOST_APART
from headway.core.departure import APART
from headway.core.retry import MAX_ATTEMPTS, SEARCHED
from headway.model import (
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
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Harness, ask, drained, failed, ids, slot
from tests.contracts.dedup_keys import admit, came_by, code, key, nothing_runs, refused, same, sharing, task


async def test_an_input_that_kills_its_worker_spends_its_budget(harness: Harness) -> None:
    """Attempts are counted at the claim, so nobody has to live to count them."""
    await harness.broker.enqueue([ask(id="killer")])
    claims = 0
    while await harness.broker.state("t", "killer") is not None:
        await harness.claim(f"gpu-{claims}")
        claims += 1
        await harness.reaping(harness.lease_seconds + 1.0)
    reply = (await drained(harness))["killer"]
    assert (claims, reply.attempts) == (3, 3)
    assert reply.failure is not None
    assert reply.failure.code == errors.BACKEND_ERROR
    assert reply.failure.message == "the worker did not report in time", "which one is for operators"
    [letter] = await harness.dead.find("killer")
    assert "worker gpu-2 did not report" in letter.error


async def test_only_the_inputs_of_the_call_that_raised_are_suspected(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id=name) for name in ("a", "bad", "c", "d")])
    lease = await harness.claim()
    bad = [entry.id for entry in lease.entries].index("bad")
    near = (bad + 1) % 4
    failure = BatchFailure(Cause.RAISED, "no good", "gpu-0", places=(min(bad, near), max(bad, near)))
    await harness.broker.release(lease, failure)
    first = await harness.claim()
    suspects = {lease.entries[bad].id, lease.entries[near].id}
    assert {*ids(first.entries)} == {"a", "bad", "c", "d"} - suspects, "the others run together, and first"
    assert first.attempt == 1, "and are charged nothing"
    await harness.answer(first)
    second = await harness.claim("gpu-1")
    assert (len(second.entries), second.attempt) == (1, 2)
    assert {*ids(second.entries)} < suspects


async def test_an_input_whose_call_had_no_other_is_at_fault(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id=name) for name in ("a", "bad", "c")])
    lease = await harness.claim()
    place = [entry.id for entry in lease.entries].index("bad")
    await harness.broker.release(lease, BatchFailure(Cause.RAISED, "no good", "gpu-0", places=(place,)))
    runs = 0
    while any(depth.depth for depth in await harness.broker.depths()):
        await harness.advance(0.6)
        lease = await harness.claim()
        if "bad" in ids(lease.entries):
            assert ids(lease.entries) == ["bad"]
            runs += 1
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)
    replies = await drained(harness)
    assert runs == 1
    assert {name for name, reply in replies.items() if reply.failure is not None} == {"bad"}


async def test_a_death_for_which_no_input_is_blamed_is_not_kept_under_its_key(harness: Harness) -> None:
    await admit(harness, sharing("first", key()))
    for _ in range(MAX_ATTEMPTS):
        await harness.advance(0.6)
        await harness.broker.release(await harness.claim(), failed(Cause.REMOTE))
    assert (await drained(harness))["first"].failure is not None
    await admit(harness, sharing("second", key()))
    assert ids((await harness.claim()).entries) == ["second"]


async def test_retries_end_with_their_budget_which_first_runs_and_time_fill_again(harness: Harness) -> None:
    async def runs() -> int:
        await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
        count = 0
        while any(one.depth for one in await harness.broker.depths()):
            await harness.advance(0.1)
            await harness.broker.release(await harness.claim(), failed(Cause.REMOTE))
            count += 1
        return count

    assert [await runs() for _ in range(7)] == [3, 3, 3, 3, 3, 2, 1]
    await harness.advance(10.0)
    assert await runs() == 2


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
        await harness.broker.release(await harness.claim(worker), BatchFailure(cause, "no good", worker))
        await harness.advance(1.0)
    reply = (await drained(harness))["a"]
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.message, reply.attempts) == (code, "no good", runs)
    assert reply.failure.reason == cause.value
    [letter] = await harness.dead.find("a")
    assert (letter.entry, letter.error, letter.cause) == (entry, "no good", cause.value)
    assert (letter.attempts, letter.worker) == (runs, "gpu-2")


async def test_the_client_hears_only_what_it_may(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a")])
    for _ in range(2):
        failure = BatchFailure(Cause.RAISED, "ValueError at line 3 of /srv/model.py", "gpu-0", shown="ValueError")
        await harness.broker.release(await harness.claim(), failure)
        await harness.advance(1.0)
    told = (await drained(harness))["a"].failure
    assert told is not None
    assert told.message == "ValueError"
    [letter] = await harness.dead.find("a")
    assert letter.error == failure.message


async def test_the_queue_deadline_fires_on_time_with_no_worker_at_all(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", queue_timeout=2.0, timeout=4.0)])
    await harness.reaping(2.0 - harness.grain)
    assert await drained(harness) == {}
    await harness.reaping(2 * harness.grain)
    reply = (await drained(harness))["a"]
    assert reply.failure is not None
    assert reply.failure.code == errors.NO_WORKERS
    assert reply.failure.retry_after is not None
    assert reply.queued == pytest.approx(2.0, abs=2 * harness.grain)


async def test_a_short_deadline_fires_on_time_after_a_long_silence(harness: Harness) -> None:
    """`reap` must be due often enough for what may be enqueued before it is called again."""
    await harness.broker.reap()
    await harness.broker.enqueue([ask(id="a", queue_timeout=0.3)])
    await harness.reaping(0.3 + harness.grain)
    assert "a" in await drained(harness)


async def test_with_healthy_workers_the_queue_deadline_is_504(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([ask(id="a", queue_timeout=1.0, timeout=4.0)])
    await harness.reaping(1.0 + harness.grain)
    reply = (await drained(harness))["a"]
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.reason) == (errors.DEADLINE_EXCEEDED, "queue")


async def test_a_retry_ends_at_the_total_deadline(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([ask(id="a", queue_timeout=0.5, timeout=2.0)])
    await harness.advance(0.4)
    await harness.broker.release(await harness.claim(), failed())
    await harness.reaping(1.0)
    assert await drained(harness) == {}
    await harness.healthy("gpu-0")
    await harness.reaping(0.6 + harness.grain)
    reply = (await drained(harness))["a"]
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.reason) == (errors.DEADLINE_EXCEEDED, "total")
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)


async def test_workers_that_come_back_in_time_find_everything_waiting(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.reaping(11.0)  # It is offline by now.
    await harness.broker.enqueue([ask(id="a", queue_timeout=2.0)])
    await harness.reaping(1.5)
    lease = await harness.broker.claim(slot(), AT_ONCE)
    assert isinstance(lease, Lease)
    await harness.answer(lease)
    assert (await drained(harness))["a"].failure is None


async def test_reap_says_when_it_is_due(harness: Harness) -> None:
    await harness.broker.enqueue([ask(queue_timeout=0.03)])
    assert 0.0 < await harness.broker.reap() <= 0.03 + 1e-6
    await harness.claim()
    assert 0.0 < await harness.broker.reap() <= 1.0


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
    told = [reply.failure for reply in replies.values() if reply.failure is not None]
    assert sorted(replies) == ["a", "b"]
    assert {(failure.code, failure.reason) for failure in told} == {(code, reason)}
    assert all(("the model was too slow" in failure.message) is (cause is Cause.TIMEOUT) for failure in told)


async def test_who_is_late_when_its_batch_is_killed_hears_that_the_model_is_too_slow(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", timeout=2.5)])
    lease = await harness.claim()
    await harness.advance(2.6)
    await harness.broker.release(lease, failed(Cause.TIMEOUT))
    failure = (await drained(harness))["a"].failure
    assert failure is not None
    assert (failure.code, failure.reason) == (errors.DEADLINE_EXCEEDED, "gpu")


@pytest.mark.parametrize("how", ["raised", "item", "lost"])
async def test_a_failed_run_tells_its_version_and_its_batch(harness: Harness, how: str) -> None:
    broker, slot = harness.broker, Slot("host/gpu-0", "m", MAX_BATCH, runs=ModelReport("b:7"), version="b:7")
    await broker.heartbeat(
        WorkerInfo(worker_id=slot.worker, model="m", status=WorkerStatus.HEALTHY, runs=slot.runs, version="b:7")
    )
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
    assert reply.failure is not None
    assert reply.ran is not None
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


async def test_so_many_callers_ride_apart_and_those_that_failed_last(harness: Harness) -> None:
    for number in range(MOST_APART + 1):
        await admit(harness, bad(f"poison {number}", caller=f"{number}"))
        await run_all(harness)
    assert await reason(harness, bad("fine", caller="0")) != APART
    assert await reason(harness, bad("fine", caller="1")) == APART
    assert await reason(harness, bad("fine", caller=f"{MOST_APART}")) == APART


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


async def test_the_repeated_refusal_carries_the_first_error(harness: Harness) -> None:
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    [first] = (await drained(harness)).values()
    assert first.failure is not None
    told = (await refused(harness, bad())).message
    assert first.failure.message in told
    assert "not run again" in told


@pytest.mark.parametrize("backend", [{"pid": 2}, {"restarts": 1}])
async def test_a_worker_with_a_new_backend_forgets_what_only_raised(harness: Harness, backend: dict[str, int]) -> None:
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


async def test_a_reused_key_is_misused_whatever_is_known_of_the_input(harness: Harness) -> None:
    await admit(harness, bad(), ask("fine", id="a", tenant="evil", caller="bob", dedup_keys=(key("k", b"fine"),)))
    await run_all(harness)
    other = ask("poison", tenant="evil", caller="bob", dedup_keys=(key("k", b"poison"),))
    assert (await refused(harness, other)).code == errors.IDEMPOTENCY_MISUSE


async def test_who_asks_for_a_known_culprit_under_a_new_key_is_turned_down_and_counted(harness: Harness) -> None:
    await admit(harness, bad())
    await run_all(harness)

    def asked(name: str) -> Entry:
        return ask("poison", tenant="evil", caller="bob", dedup_keys=(key(name), same()), limits=(TWO_AN_HOUR,))

    told = [(await refused(harness, asked(name))).code for name in ("k", "k", "l")]
    assert told == [errors.REJECTED_BY_MODEL, errors.REJECTED_BY_MODEL, errors.RATE_LIMITED]
    await nothing_runs(harness)


async def test_what_only_raised_is_tried_again_by_a_worker_that_comes(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([bad()])
    await run_all(harness)
    await harness.healthy("gpu-0", "gpu-1")
    await harness.broker.reap()
    assert await harness.broker.enqueue([bad()]) == [None]
