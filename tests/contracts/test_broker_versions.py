"""Versions of a model, each with its own queue beside the shared one, and new code: nobody gets old code's answers."""

import asyncio

import pytest

from headway import errors
from headway.core.dedup import follower
from headway.core.health import DEGRADED_AFTER
from headway.model import Entry, EntryState, ItemResult, Lease, ModelReport, Slot, WorkerStatus
from tests.contracts.brokers import (
    AT_ONCE,
    LIMITS,
    MAX_BATCH,
    MAX_QUEUE,
    Harness,
    ask,
    beat,
    drained,
    failed,
    failure_of,
    granted,
    holds,
    outcome_of,
    output,
)
from tests.contracts.dedup_keys import admit, key, refused, renewing, same, sharing, task


def slot_of(version: str, worker: str = "gpu-0", *, helps: str | None = None) -> Slot:
    if helps is None:
        return Slot(worker, "m", MAX_BATCH, 0, ModelReport(version), version)
    return Slot(worker, "m", MAX_BATCH, 0, ModelReport(helps), version, helps=True)


async def test_what_waits_is_told_by_version_and_another_process_sees_it_by_the_workers(harness: Harness) -> None:
    await harness.healthy("gpu-0", runs=ModelReport("3"), version="3")
    await admit(harness, ask(version="3"))
    peer = harness.peer()
    assert {(worker.model, worker.version) for worker in await peer.workers()} == {("m", "3")}
    await harness.advance(1.5)
    [waits] = [one for one in await peer.depths() if one.depth]
    assert (waits.model, waits.tier, waits.depth, waits.version) == ("m", 1, 1, "3")
    assert waits.oldest_seconds == pytest.approx(1.5, abs=harness.grain)
    assert {"m", "m@3"} <= set(map(str, await peer.loads()))
    verdicts = await harness.broker.enqueue([ask(version="3", tenant=f"t{number}") for number in range(100)])
    assert verdicts.count(None) == MAX_QUEUE - 1, "bounds are those of the model"


async def test_an_idle_slot_is_woken_by_what_comes_for_its_version(harness: Harness) -> None:
    await harness.healthy("gpu-0", runs=ModelReport("3"), version="3")
    slot = slot_of("3")
    until = holds(await harness.broker.claim(slot, AT_ONCE)).until
    waiting = harness.broker.wait_for_work(slot, until)
    sleeper = asyncio.ensure_future(waiting)
    await harness.settle()
    await admit(harness, ask())
    await harness.settle()
    assert not sleeper.done()
    await admit(harness, ask(version="3"))
    await harness.settle()
    assert sleeper.done()


async def test_a_slot_of_another_version_helps_where_nobody_is_left(harness: Harness) -> None:
    await harness.healthy("gpu-0", runs=ModelReport("4"), version="4")
    free, pinned = ask("free", version="3"), ask("pinned", version="3", pinned=True)
    await admit(harness, free, pinned)
    lease = await granted(harness.broker, slot_of("3", helps="4"))
    assert [(entry.input, entry.pinned) for entry in lease.entries] == [("free", False), ("pinned", True)]
    elsewhere = ItemResult(None, "no worker runs version '3'", elsewhere=True)
    await harness.broker.complete(lease, [ItemResult(output("free")), elsewhere])
    replies = await drained(harness)
    assert (replies[free.id].output, replies[free.id].ran.version) == (output("free"), "4")  # type: ignore[union-attr]
    assert failure_of(replies[pinned.id]).code == errors.NO_WORKERS
    assert await harness.dead.count() == 0
    holds(await harness.broker.claim(slot_of("3", helps="4"), AT_ONCE))


async def test_a_queue_that_comes_while_figures_are_asked_for_is_in_the_next_ones(harness: Harness) -> None:
    broker = harness.broker
    unknown = follower("sub", "no such", "t", "g2", 60.0, 1)
    asked = [asyncio.ensure_future(one) for one in (broker.depths(), broker.loads(), broker.enqueue([unknown]))]
    await asyncio.sleep(0)
    broker.know({"late": LIMITS})
    await asyncio.gather(*asked)
    assert "late" in {one.model for one in await broker.depths()}


VERSIONS = ["", "3"]


async def told(harness: Harness, worker: str, code: str, version: str = "", status: str = "healthy") -> None:
    await beat(harness.broker, worker, status=WorkerStatus(status), runs=ModelReport(version, code), version=version)


async def claim(harness: Harness, code: str, version: str = "") -> Lease:
    return await granted(harness.broker, Slot("gpu-0", "m", MAX_BATCH, 0, ModelReport(version, code), version))


async def complete(harness: Harness, lease: Lease, code: str) -> None:
    await harness.broker.complete(lease, [ItemResult(code) for _ in lease.entries])


async def run(harness: Harness, code: str, version: str = "") -> None:
    await complete(harness, await claim(harness, code, version), code)


async def answers(harness: Harness, *found: str) -> dict[str, tuple[str, bool]]:
    """Output of each reply, and whether it is a kept one."""
    replies = await drained(harness)
    assert all(reply.output is not None for reply in replies.values())
    return {id: (str(replies[id].output), replies[id].kept) for id in found}


async def waits(harness: Harness, id: str) -> bool:
    return await harness.broker.state("t", id) is EntryState.QUEUED


@pytest.mark.parametrize("version", VERSIONS)
async def test_answers_of_old_code_are_not_given_once_new_code_is_there(harness: Harness, version: str) -> None:
    await told(harness, "gpu-0", "old", version)
    await admit(harness, sharing("first", same(f"s@{version}"), version=version))
    await run(harness, "old", version)
    await admit(harness, sharing("second", same(f"s@{version}"), version=version))
    await told(harness, "gpu-0", "new", version)
    await admit(harness, sharing("third", same(f"s@{version}"), version=version))
    await run(harness, "new", version)
    await admit(harness, sharing("fourth", same(f"s@{version}"), version=version))
    found = await answers(harness, "first", "second", "third", "fourth")
    assert found == {"first": ("old", False), "second": ("old", True), "third": ("new", False), "fourth": ("new", True)}


async def test_while_old_workers_serve_only_outputs_of_the_newest_code_are_kept(harness: Harness) -> None:
    await told(harness, "gpu-0", "old")
    await told(harness, "gpu-1", "new")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await admit(harness, sharing("second", same()))
    await run(harness, "new")
    await told(harness, "gpu-0", "old")
    await admit(harness, sharing("third", same()))
    await told(harness, "gpu-2", "old")  # One more worker doesn't make the old code new.
    await admit(harness, sharing("fourth", same()))
    found = await answers(harness, "first", "second", "third", "fourth")
    assert found == {"first": ("old", False), "second": ("new", False), "third": ("new", True), "fourth": ("new", True)}


@pytest.mark.parametrize("leaves", ["offline", "silently"])
async def test_code_that_is_taken_back_leaves_the_answers_of_the_code_before(harness: Harness, leaves: str) -> None:
    await told(harness, "gpu-0", "old")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await told(harness, "gpu-1", "new")
    await admit(harness, sharing("second", same()))
    await run(harness, "new")
    if leaves == "offline":
        await told(harness, "gpu-1", "new", status="offline")
    else:
        await harness.advance(DEGRADED_AFTER / 2)
        await told(harness, "gpu-0", "old")
        await harness.advance(DEGRADED_AFTER / 2 + 0.1)
        await told(harness, "gpu-0", "old")
    await admit(harness, sharing("third", same()))
    assert (await answers(harness, "third")) == {"third": ("old", True)}


async def test_who_renews_gets_an_answer_of_its_own_that_is_kept_instead(harness: Harness) -> None:
    await told(harness, "gpu-0", "code")
    await admit(harness, sharing("first", same()))
    await run(harness, "code")
    await admit(harness, sharing("second", renewing()), sharing("third", renewing()))
    await complete(harness, await claim(harness, "code"), "after")
    await admit(harness, sharing("fourth", same()))
    expected = {"first": ("code", False), "second": ("after", False), "third": ("after", False)}
    assert await answers(harness, *expected, "fourth") == expected | {"fourth": ("after", True)}


async def test_new_code_of_a_cold_worker_makes_who_asks_wait_for_it_once_no_worker_is_healthy(harness: Harness) -> None:
    await told(harness, "gpu-0", "old")
    await told(harness, "gpu-1", "new", status="cold")
    await admit(harness, sharing("first", same()))
    await run(harness, "old")
    await admit(harness, sharing("second", same()))
    await told(harness, "gpu-0", "old", status="cold")
    await admit(harness, sharing("third", same()))  # Either may be loaded next.
    assert await answers(harness, "second", "third") == {"second": ("old", True), "third": ("old", True)}
    await told(harness, "gpu-0", "old", status="offline")
    await admit(harness, sharing("fourth", same()))
    assert await waits(harness, "fourth")
    await told(harness, "gpu-1", "new")
    await run(harness, "new")
    await told(harness, "gpu-1", "new", status="cold")
    await admit(harness, sharing("fifth", same()))
    assert await answers(harness, "fourth", "fifth") == {"fourth": ("new", False), "fifth": ("new", True)}
    await told(harness, "gpu-1", "old", status="cold")  # The new code is rolled back.
    await admit(harness, sharing("sixth", same()))
    assert await answers(harness, "sixth") == {"sixth": ("old", True)}


async def test_nobody_joins_what_began_before_new_code_was_there(harness: Harness) -> None:
    await told(harness, "gpu-0", "old")
    await admit(harness, sharing("first", same()))
    running = await claim(harness, "old")
    await admit(harness, sharing("follower", same()))
    await told(harness, "gpu-0", "new")
    await admit(harness, sharing("later", same()))
    assert await waits(harness, "later")
    await complete(harness, running, "old")
    await run(harness, "new")
    await admit(harness, sharing("last", same()))
    found = await answers(harness, "first", "follower", "later", "last")
    assert found == {
        "first": ("old", False),
        "follower": ("old", False),
        "later": ("new", False),
        "last": ("new", True),
    }


async def test_a_task_and_an_idempotency_key_stand_for_their_submission_whatever_the_code(harness: Harness) -> None:
    await told(harness, "gpu-0", "old")
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness, "old")
    await told(harness, "gpu-0", "new")
    await admit(harness, sharing("second", key()))
    assert await answers(harness, "second") == {"second": ("old", True)}
    assert (await outcome_of(harness.broker, "first")).output == "old"


@pytest.mark.parametrize("change", ["other code", "a worker more", "the old worker leaves"])
async def test_an_input_that_raised_in_old_code_runs_again_in_new_code(harness: Harness, change: str) -> None:
    def bad() -> Entry:
        return ask("poison", caller="bob")

    await told(harness, "gpu-0", "old")
    if change == "the old worker leaves":
        await told(harness, "gpu-1", "new")
    await admit(harness, bad())
    for _ in range(2):
        await harness.advance(0.6)
        await harness.broker.release(await claim(harness, "old"), failed())
    assert (await refused(harness, bad())).reason == "culprit"
    if change == "the old worker leaves":
        await told(harness, "gpu-0", "old", status="offline")
    else:
        await told(harness, "gpu-0" if change == "other code" else "gpu-1", "new")
    await admit(harness, bad())
