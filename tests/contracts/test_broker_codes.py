"""Promises of every broker on workers whose code changes: who asks once new code is there gets nothing in common with old code."""

import pytest

from headway.core.health import DEGRADED_AFTER
from headway.model import Entry, EntryState, ItemResult, Lease, ModelReport, Reply, Slot, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Harness, ask, drained, failed
from tests.contracts.dedup_keys import admit, key, refused, renewing, same, sharing, task

VERSIONS = ["", "3"]


async def beat(harness: Harness, worker: str, code: str, version: str = "", status: str = "healthy") -> None:
    runs = ModelReport(version, code)
    told = WorkerInfo(worker_id=worker, model="m", status=WorkerStatus(status), runs=runs, version=version)
    await harness.broker.heartbeat(told)


async def claim(harness: Harness, code: str, version: str = "") -> Lease:
    lease = await harness.broker.claim(Slot("gpu-0", "m", MAX_BATCH, 0, ModelReport(version, code), version), AT_ONCE)
    assert isinstance(lease, Lease)
    return lease


async def complete(harness: Harness, lease: Lease, code: str) -> None:
    await harness.broker.complete(lease, [ItemResult(code) for _ in lease.entries])


async def run(harness: Harness, code: str, version: str = "") -> None:
    await complete(harness, await claim(harness, code, version), code)


async def answers(harness: Harness, *found: str) -> dict[str, tuple[str, bool]]:
    """Output of each reply, and whether it was kept."""
    replies = await drained(harness)
    assert all(reply.output is not None for reply in replies.values())
    return {id: (str(replies[id].output), replies[id].kept) for id in found}


async def waits(harness: Harness, id: str) -> bool:
    return await harness.broker.state("t", id) is EntryState.QUEUED


@pytest.mark.parametrize("version", VERSIONS)
async def test_answers_of_old_code_are_not_given_once_new_code_is_there(harness: Harness, version: str) -> None:
    await beat(harness, "gpu-0", "old", version)
    await admit(harness, sharing("first", same(f"s@{version}"), version=version))
    await run(harness, "old", version)
    await admit(harness, sharing("second", same(f"s@{version}"), version=version))
    await beat(harness, "gpu-0", "new", version)
    await admit(harness, sharing("third", same(f"s@{version}"), version=version))
    await run(harness, "new", version)
    await admit(harness, sharing("fourth", same(f"s@{version}"), version=version))
    told = await answers(harness, "first", "second", "third", "fourth")
    assert told == {"first": ("old", False), "second": ("old", True), "third": ("new", False), "fourth": ("new", True)}


async def test_while_old_workers_serve_only_outputs_of_the_newest_code_are_kept(harness: Harness) -> None:
    await beat(harness, "gpu-0", "old")
    await beat(harness, "gpu-1", "new")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await admit(harness, sharing("second", same()))
    await run(harness, "new")
    await beat(harness, "gpu-0", "old")
    await admit(harness, sharing("third", same()))
    await beat(harness, "gpu-2", "old")  # Old code that serves anyway is not new for one more worker.
    await admit(harness, sharing("fourth", same()))
    told = await answers(harness, "first", "second", "third", "fourth")
    assert told == {"first": ("old", False), "second": ("new", False), "third": ("new", True), "fourth": ("new", True)}


@pytest.mark.parametrize("leaves", ["offline", "silently"])
async def test_code_that_is_taken_back_leaves_the_answers_of_the_code_before(harness: Harness, leaves: str) -> None:
    await beat(harness, "gpu-0", "old")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await beat(harness, "gpu-1", "new")
    await admit(harness, sharing("second", same()))
    await run(harness, "new")
    if leaves == "offline":
        await beat(harness, "gpu-1", "new", status="offline")
    else:
        await harness.advance(DEGRADED_AFTER / 2)
        await beat(harness, "gpu-0", "old")
        await harness.advance(DEGRADED_AFTER / 2 + 0.1)
        await beat(harness, "gpu-0", "old")
    await admit(harness, sharing("third", same()))
    assert (await answers(harness, "third")) == {"third": ("old", True)}


async def test_who_renews_gets_an_answer_of_its_own_that_is_kept_instead(harness: Harness) -> None:
    await beat(harness, "gpu-0", "code")
    await admit(harness, sharing("first", same()))
    await run(harness, "code")
    await admit(harness, sharing("second", renewing()), sharing("third", renewing()))
    await complete(harness, await claim(harness, "code"), "after")
    await admit(harness, sharing("fourth", same()))
    expected = {"first": ("code", False), "second": ("after", False), "third": ("after", False)}
    assert await answers(harness, *expected, "fourth") == expected | {"fourth": ("after", True)}


async def test_new_code_of_a_cold_worker_makes_who_asks_wait_for_it_once_no_worker_is_healthy(harness: Harness) -> None:
    await beat(harness, "gpu-0", "old")
    await beat(harness, "gpu-1", "new", status="cold")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await admit(harness, sharing("second", same()))
    await beat(harness, "gpu-0", "old", status="cold")
    await admit(harness, sharing("third", same()))  # Either may be loaded next.
    assert await answers(harness, "second", "third") == {"second": ("old", True), "third": ("old", True)}
    await beat(harness, "gpu-0", "old", status="offline")
    await admit(harness, sharing("fourth", same()))
    assert await waits(harness, "fourth")
    await beat(harness, "gpu-1", "new")
    await run(harness, "new")
    await beat(harness, "gpu-1", "new", status="cold")
    await admit(harness, sharing("fifth", same()))
    assert await answers(harness, "fourth", "fifth") == {"fourth": ("new", False), "fifth": ("new", True)}
    await beat(harness, "gpu-1", "old", status="cold")  # It is taken back.
    await admit(harness, sharing("sixth", same()))
    assert await answers(harness, "sixth") == {"sixth": ("old", True)}


async def test_a_rejection_is_not_kept_for_identical_requests(harness: Harness) -> None:
    await admit(harness, sharing("first", same()))
    await harness.broker.complete(await harness.claim(), [ItemResult(None, "no")])
    await admit(harness, sharing("second", same()))
    assert await waits(harness, "second")


async def test_nobody_joins_what_began_before_new_code_was_there(harness: Harness) -> None:
    await beat(harness, "gpu-0", "old")
    await admit(harness, sharing("first", same()))
    running = await claim(harness, "old")
    await admit(harness, sharing("follower", same()))
    await beat(harness, "gpu-0", "new")
    await admit(harness, sharing("later", same()))
    assert await waits(harness, "later")
    await complete(harness, running, "old")
    await run(harness, "new")
    await admit(harness, sharing("last", same()))
    told = await answers(harness, "first", "follower", "later", "last")
    assert told == {"first": ("old", False), "follower": ("old", False), "later": ("new", False), "last": ("new", True)}


async def test_a_task_and_an_idempotency_key_stand_for_their_submission_whatever_the_code(harness: Harness) -> None:
    await beat(harness, "gpu-0", "old")
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness, "old")
    await beat(harness, "gpu-0", "new")
    await admit(harness, sharing("second", key()))
    assert await answers(harness, "second") == {"second": ("old", True)}
    outcome = await harness.broker.outcome("t", "first")
    assert isinstance(outcome, Reply)
    assert outcome.output == "old"


@pytest.mark.parametrize("change", ["other code", "a worker more", "the old worker leaves"])
async def test_an_input_that_raised_in_old_code_runs_again_in_new_code(harness: Harness, change: str) -> None:
    def bad() -> Entry:
        return ask("poison", caller="bob")

    await beat(harness, "gpu-0", "old")
    if change == "the old worker leaves":
        await beat(harness, "gpu-1", "new")
    await admit(harness, bad())
    for _ in range(2):
        await harness.advance(0.6)
        await harness.broker.release(await claim(harness, "old"), failed())
    assert (await refused(harness, bad())).reason == "culprit"
    if change == "the old worker leaves":
        await beat(harness, "gpu-0", "old", status="offline")
    else:
        await beat(harness, "gpu-0" if change == "other code" else "gpu-1", "new")
    await admit(harness, bad())
