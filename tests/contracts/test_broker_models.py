"""Models of a broker: each has a queue of its own, and further ones may come while it works."""

from __future__ import annotations

import asyncio

from headway import errors
from headway.core.dedup import follower
from headway.model import ItemResult, ModelReport, Slot
from tests.contracts.brokers import AT_ONCE, LIMITS, MAX_BATCH, Harness, ask, drained, output, slot, story
from tests.contracts.dedup_keys import admit, refused, task


@story
async def test_an_entry_for_a_model_without_a_queue_is_refused_and_the_others_are_let_in(harness: Harness) -> None:
    strange, known = ask("x", model="strange"), ask("y")
    refusal, admitted = await harness.broker.enqueue([strange, known])
    assert refusal is not None
    assert (refusal.code, admitted) == (errors.NO_WORKERS, None)
    assert [entry.input for entry in (await harness.claim()).entries] == ["y"]


@story
async def test_a_model_that_comes_later_is_served_to_whoever_waits_already(harness: Harness) -> None:
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    assert (await refused(harness, ask("early", model="late"))).code == errors.NO_WORKERS
    harness.broker.know({"late": LIMITS})
    await harness.healthy("late-0", model="late")
    entry = ask("later", model="late")
    await admit(harness, entry)
    lease = await harness.claim("late-0", "late")
    await harness.answer(lease)
    await harness.settle()
    assert reading.done(), "a gateway that waited before the model came gets its replies"
    replies, _ = await reading
    assert [(reply.id, reply.output) for reply in replies] == [(entry.id, output("later"))]
    assert {one.model for one in await harness.broker.depths()} == {"m", "other", "late"}
    assert set(map(str, await harness.broker.loads())) == {"m", "other", "late"}


@story
async def test_a_model_that_is_known_keeps_what_waits_when_it_is_named_again(harness: Harness) -> None:
    await admit(harness, ask("a"))
    harness.broker.know({"m": LIMITS})
    assert [entry.input for entry in (await harness.claim()).entries] == ["a"]


@story
async def test_a_task_is_found_by_who_does_not_know_its_model(harness: Harness) -> None:
    entry = ask("a", model="other", dedup_keys=(task("job"),), id="job")
    await admit(harness, entry)
    assert await harness.broker.enqueue([follower("sub", "job", "t", "g2", 60.0, 1)]) == [None]
    await harness.answer(await harness.claim("other-0", "other"))
    [reply] = (await drained(harness, "g2")).values()
    assert (reply.id, reply.output) == ("sub", output("a"))
    [refusal] = await harness.broker.enqueue([follower("none", "no such", "t", "g2", 60.0, 2)])
    assert refusal is not None


@story
async def test_the_run_of_a_reply_tells_the_version_that_ran(harness: Harness) -> None:
    await admit(harness, ask("a"), ask("b", dedup_keys=(task("job"),), id="job"))
    versioned = Slot("gpu-0", "m", MAX_BATCH, 0, ModelReport("7"))
    lease = await harness.broker.claim(versioned, AT_ONCE)
    await harness.broker.complete(lease, [ItemResult("x"), ItemResult("y")])  # type: ignore[arg-type]
    versions = {reply.ran.version for reply in (await drained(harness)).values() if reply.ran is not None}
    kept = await harness.broker.outcome("t", "job")
    assert (versions, kept.ran.version) == ({"7"}, "7")  # type: ignore[union-attr]
    assert slot().runs.version == ""
