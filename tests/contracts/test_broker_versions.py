"""Versions of a model: each has a queue of its own, beside the one for any, and all is the model's for who asks."""

import asyncio

from headway import errors
from headway.core.dedup import follower
from headway.model import EntryState, ItemResult, Lease, ModelReport, NoWork, Slot, TierDepth
from tests.contracts.brokers import (
    AT_ONCE,
    LIMITS,
    MAX_BATCH,
    MAX_QUEUE,
    Harness,
    ask,
    drained,
    failure_of,
    holds,
    output,
)
from tests.contracts.dedup_keys import admit, task


def slot_of(version: str, worker: str = "gpu-0", *, helps: str | None = None) -> Slot:
    if helps is None:
        return Slot(worker, "m", MAX_BATCH, 0, ModelReport(version), version)
    return Slot(worker, "m", MAX_BATCH, 0, ModelReport(helps), version, helps=True)


async def claimed(harness: Harness, slot: Slot) -> Lease:
    lease = await harness.broker.claim(slot, AT_ONCE)
    assert isinstance(lease, Lease)
    return lease


async def test_a_slot_gets_what_waits_for_its_version_and_nothing_else(harness: Harness) -> None:
    await harness.healthy("old", runs=ModelReport("3"), version="3")
    await harness.healthy("new", runs=ModelReport("4"), version="4")
    await admit(harness, *(ask(f"{version}", version=version) for version in ("3", "4", "4", "")))
    lease = await claimed(harness, slot_of("4", "new"))
    assert [(entry.input, entry.version) for entry in lease.entries] == [("4", "4"), ("4", "4")]
    await harness.answer(lease)
    assert isinstance(await harness.broker.claim(slot_of("4", "new"), AT_ONCE), NoWork)
    new = await drained(harness)
    await harness.answer(await claimed(harness, slot_of("3", "old")))
    old = await drained(harness, after=len(new))
    assert [[one.ran.version for one in those.values() if one.ran] for those in (new, old)] == [["4", "4"], ["3"]]
    waiting = {(one.model, one.version): one.depth for one in await harness.broker.depths() if one.tier == 1}
    assert {key: depth for key, depth in waiting.items() if depth} == {("m", ""): 1}


async def test_what_waits_is_told_by_version_and_another_process_sees_it_by_the_workers(harness: Harness) -> None:
    await harness.healthy("gpu-0", runs=ModelReport("3"), version="3")
    await admit(harness, ask(version="3"))
    peer = harness.peer()
    assert {(worker.model, worker.version) for worker in await peer.workers()} == {("m", "3")}
    assert TierDepth("m", 1, 1, 0.0, "3") in await peer.depths()
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
    lease = await claimed(harness, slot_of("3", helps="4"))
    assert [(entry.input, entry.pinned) for entry in lease.entries] == [("free", False), ("pinned", True)]
    elsewhere = ItemResult(None, "no worker runs version '3'", elsewhere=True)
    await harness.broker.complete(lease, [ItemResult(output("free")), elsewhere])
    replies = await drained(harness)
    assert (replies[free.id].output, replies[free.id].ran.version) == (output("free"), "4")  # type: ignore[union-attr]
    assert failure_of(replies[pinned.id]).code == errors.NO_WORKERS
    assert await harness.dead.count() == 0
    assert isinstance(await harness.broker.claim(slot_of("3", helps="4"), AT_ONCE), NoWork)


async def test_a_task_is_followed_and_ended_whatever_its_version(harness: Harness) -> None:
    await harness.healthy("gpu-0", runs=ModelReport("3"), version="3")
    await admit(harness, ask("a", version="3", dedup_keys=(task("job"),), id="job"))
    assert await harness.broker.outcome("t", "job") is EntryState.QUEUED
    following = [follower("unknown", "job", "t", "g2", 60.0, 1), follower("known", "job", "t", "g2", 60.0, 2, "m", "3")]
    assert await harness.broker.enqueue(following) == [None, None]
    await harness.answer(await claimed(harness, slot_of("3")))
    replies = await drained(harness, "g2")
    assert {id: reply.output for id, reply in replies.items()} == dict.fromkeys(("known", "unknown"), output("a"))
    await admit(harness, ask("b", version="3", dedup_keys=(task("other"),), id="other"))
    await harness.broker.cancel_task("t", "other")
    assert isinstance(await harness.broker.claim(slot_of("3"), AT_ONCE), NoWork)


async def test_a_queue_that_comes_while_figures_are_asked_for_is_in_the_next_ones(harness: Harness) -> None:
    broker = harness.broker
    unknown = follower("sub", "no such", "t", "g2", 60.0, 1)
    asked = [asyncio.ensure_future(one) for one in (broker.depths(), broker.loads(), broker.enqueue([unknown]))]
    await asyncio.sleep(0)
    broker.know({"late": LIMITS})
    await asyncio.gather(*asked)
    assert "late" in {one.model for one in await broker.depths()}
