"""Behaviour of every broker when things go wrong: lost leases, failed batches, deadlines that pass."""

from __future__ import annotations

import pytest

from headway import errors
from headway.core.retry import MAX_ATTEMPTS, SEARCHED
from headway.model import (
    BatchFailure,
    Cause,
    ItemResult,
    Lease,
    ModelReport,
    NoWork,
    Slot,
    WorkerInfo,
    WorkerStatus,
)  # fmt: skip
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    Harness,
    ask,
    drained,
    failed,
    ids,
    slot,
    story,
)
from tests.contracts.dedup_keys import admit, key, sharing


@story
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


@story
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


@story
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


@story
async def test_a_death_for_which_no_input_is_blamed_is_not_kept_under_its_key(harness: Harness) -> None:
    await admit(harness, sharing("first", key()))
    for _ in range(MAX_ATTEMPTS):
        await harness.advance(0.6)
        await harness.broker.release(await harness.claim(), failed(Cause.REMOTE))
    assert (await drained(harness))["first"].failure is not None
    await admit(harness, sharing("second", key()))
    assert ids((await harness.claim()).entries) == ["second"]


@story
async def test_retries_end_with_their_budget_which_first_runs_and_time_fill_again(harness: Harness) -> None:
    async def runs() -> int:
        """Runs of a full batch, each of which fails by no input's fault."""
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
@story
async def test_who_fails_alone_hears_why_and_is_kept_as_a_dead_letter(
    harness: Harness, cause: Cause, code: str
) -> None:
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


@story
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


@story
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


@story
async def test_a_short_deadline_fires_on_time_after_a_long_silence(harness: Harness) -> None:
    """`reap` must be due often enough for what may be enqueued before it is called again."""
    await harness.broker.reap()
    await harness.broker.enqueue([ask(id="a", queue_timeout=0.3)])
    await harness.reaping(0.3 + harness.grain)
    assert "a" in await drained(harness)


@story
async def test_with_healthy_workers_the_queue_deadline_is_504(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([ask(id="a", queue_timeout=1.0, timeout=4.0)])
    await harness.reaping(1.0 + harness.grain)
    reply = (await drained(harness))["a"]
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.reason) == (errors.DEADLINE_EXCEEDED, "queue")


@story
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


@story
async def test_workers_that_come_back_in_time_find_everything_waiting(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.reaping(11.0)  # It is offline by now.
    await harness.broker.enqueue([ask(id="a", queue_timeout=2.0)])
    await harness.reaping(1.5)
    lease = await harness.broker.claim(slot(), AT_ONCE)
    assert isinstance(lease, Lease)
    await harness.answer(lease)
    assert (await drained(harness))["a"].failure is None


@story
async def test_reap_says_when_it_is_due(harness: Harness) -> None:
    await harness.broker.enqueue([ask(queue_timeout=0.03)])
    assert 0.0 < await harness.broker.reap() <= 0.03 + 1e-6
    await harness.claim()
    assert 0.0 < await harness.broker.reap() <= 1.0


@story
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


@story
async def test_who_is_late_when_its_batch_is_killed_hears_that_the_model_is_too_slow(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", timeout=2.5)])
    lease = await harness.claim()
    await harness.advance(2.6)
    await harness.broker.release(lease, failed(Cause.TIMEOUT))
    failure = (await drained(harness))["a"].failure
    assert failure is not None
    assert (failure.code, failure.reason) == (errors.DEADLINE_EXCEEDED, "gpu")


@pytest.mark.parametrize("how", ["raised", "item", "lost"])
@story
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
