"""Promises of the broker when the server loses its data, or part of it."""

from __future__ import annotations

import asyncio

from headway.model import Completion, ItemResult, NoWork
from tests.contracts.brokers import (
    AT_ONCE,
    ask,
    drained,
    failed,
    ids,
    output,
    slot,
    story,
)
from tests.redis.stand import Stand
from tests.servers.redis import RunningServer


def dumped(server: RunningServer) -> dict[bytes, bytes]:
    """All keys as they are."""
    return {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}


def restore(server: RunningServer, keys: dict[bytes, bytes]) -> None:
    """Put back a copy of the server's keys, as if nothing had happened since."""
    server.flush()
    for key, value in keys.items():
        server.command("RESTORE", key, 3_600_000, value)


@story
async def test_a_claim_ends_when_only_the_figures_are_left(harness: Stand) -> None:
    """A server that drops part of its file at the start keeps what was written outside of transactions."""
    await harness.broker.enqueue([ask() for _ in range(3)])
    for key in harness.server.command("KEYS", "*{m:0}:*"):
        if not key.endswith(b":q"):
            harness.server.command("DEL", key)
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)
    entry = ask()
    assert list(await harness.broker.enqueue([entry])) == [None]
    assert ids((await harness.claim()).entries) == [entry.id]


@story
async def test_a_loss_shows_in_the_epoch_and_what_was_lost_is_let_in_again(harness: Stand) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([ask(id="before")])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, after=cursor) == {}
    await harness.broker.enqueue([entry])
    before = harness.broker.epoch
    harness.server.flush()
    await harness.advance(0.1)
    await harness.broker.reap()
    assert harness.broker.epoch != before
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.settle()  # What was read while the loss was noticed comes once.
    assert list(await drained(harness)) == ["a"]


@story
async def test_a_lease_of_before_the_loss_is_fenced_off_after_it(harness: Stand) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    stale = await harness.claim("gpu-0")
    harness.server.flush()
    await harness.advance(0.1)
    await harness.peer().enqueue([entry])
    fresh = await harness.peer().claim(slot("gpu-1"), AT_ONCE)
    assert not isinstance(fresh, NoWork)
    assert not await harness.broker.extend(stale)
    assert not await harness.broker.release(stale, failed())
    assert await harness.broker.complete(stale, [ItemResult("stale")]) == Completion(0, 0, fenced=True)
    await harness.answer(fresh)
    assert (await drained(harness))["a"].output == output(entry.input)


@story
async def test_a_lease_that_a_failover_has_forgotten_is_fenced_off(harness: Stand) -> None:
    """The replica that takes over has not heard of the last claims, and grants others in their place."""
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    replica = dumped(harness.server)
    forgotten = await harness.claim("gpu-0", limit=1)
    restore(harness.server, replica)
    await harness.advance(0.01)
    granted = await harness.peer().claim(slot("gpu-1"), AT_ONCE)
    assert not isinstance(granted, NoWork)
    assert not await harness.broker.extend(forgotten)
    assert await harness.broker.complete(forgotten, [ItemResult("forgotten")]) == Completion(0, 0, fenced=True)
    await harness.answer(granted)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {id: output(f"input of {id}") for id in "ab"}


@story
async def test_slots_that_sleep_through_a_loss_are_woken_after_it(harness: Stand) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    harness.server.flush()
    await harness.advance(0.1)
    await harness.peer().enqueue([ask(id="a")])
    await harness.reaping(3.0)
    assert listening.done()
    assert ids((await harness.claim()).entries) == ["a"]
