"""Promises of the broker when the server loses its data, its functions, or its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headway.brokers.redis import function_library
from headway.errors import BrokerUnavailable
from headway.model import Completion, ItemResult, NoWork
from tests.contracts.brokers import (
    AT_ONCE,
    RedisHarness,
    ask,
    drained,
    failed,
    ids,
    output,
    slot,
    story,
)
from tests.servers.redis import TESTED, RedisServer


@pytest.fixture(scope="module", params=TESTED)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One of our own: what is done here to a server touches all its clients."""
    with RedisServer(request.param, tmp_path_factory.mktemp("losses")) as server:
        yield server


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    server.flush()
    made = RedisHarness(server)
    yield made
    made.close()


def lose_connections(server: RedisServer) -> None:
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def dumped(server: RedisServer) -> dict[bytes, bytes]:
    """All keys as they are."""
    return {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}


def restore(server: RedisServer, keys: dict[bytes, bytes]) -> None:
    """Put back a copy of the server's keys, as if nothing had happened since."""
    server.flush()
    for key, value in keys.items():
        server.command("RESTORE", key, 0, value)


@story
async def test_lost_functions_are_brought_back_unseen(harness: RedisHarness, server: RedisServer) -> None:
    server.command("FUNCTION", "DELETE", function_library.VERSION)
    await asyncio.gather(*(broker.enqueue([ask()]) for broker in (harness.broker, harness.peer()) for _ in range(3)))
    server.command("FUNCTION", "DELETE", function_library.VERSION)
    lease = await harness.claim()
    server.command("FUNCTION", "DELETE", function_library.VERSION)
    await harness.answer(lease)
    assert len(await drained(harness)) == 6


@story
async def test_a_claim_ends_when_only_the_figures_are_left(harness: RedisHarness, server: RedisServer) -> None:
    """A server that drops part of its file at the start keeps what was written outside of transactions."""
    await harness.broker.enqueue([ask() for _ in range(3)])
    for key in server.command("KEYS", "*{m:0}:*"):
        if not key.endswith(b":q"):
            server.command("DEL", key)
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)
    entry = ask()
    assert list(await harness.broker.enqueue([entry])) == [None]
    assert ids((await harness.claim()).entries) == [entry.id]


@story
async def test_a_loss_shows_in_the_epoch_and_what_was_lost_is_let_in_again(
    harness: RedisHarness, server: RedisServer
) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([ask(id="before")])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, after=cursor) == {}
    await harness.broker.enqueue([entry])
    before = harness.broker.epoch
    server.flush()
    await harness.advance(0.1)
    await harness.broker.reap()
    assert harness.broker.epoch != before
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.settle()  # What was read while the loss was noticed comes once.
    assert list(await drained(harness)) == ["a"]


@story
async def test_a_lease_of_before_the_loss_is_fenced_off_after_it(harness: RedisHarness, server: RedisServer) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    stale = await harness.claim("gpu-0")
    server.flush()
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
async def test_a_lease_that_a_failover_has_forgotten_is_fenced_off(harness: RedisHarness, server: RedisServer) -> None:
    """The replica that takes over has not heard of the last claims, and grants others in their place."""
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    replica = dumped(server)
    forgotten = await harness.claim("gpu-0", limit=1)
    restore(server, replica)
    await harness.advance(0.01)
    granted = await harness.peer().claim(slot("gpu-1"), AT_ONCE)
    assert not isinstance(granted, NoWork)
    assert not await harness.broker.extend(forgotten)
    assert await harness.broker.complete(forgotten, [ItemResult("forgotten")]) == Completion(0, 0, fenced=True)
    await harness.answer(granted)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {id: output(f"input of {id}") for id in "ab"}


@story
async def test_slots_that_sleep_through_a_loss_are_woken_after_it(harness: RedisHarness, server: RedisServer) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    server.flush()
    await harness.advance(0.1)
    await harness.peer().enqueue([ask(id="a")])
    await harness.reaping(3.0)
    assert listening.done()
    assert ids((await harness.claim()).entries) == ["a"]


@story
async def test_readers_and_listeners_hear_of_a_cut_and_nothing_is_lost(
    harness: RedisHarness, server: RedisServer
) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    reading = asyncio.create_task(harness.broker.replies("g", 0))
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("gpu-1"), None))
    await harness.settle()
    lose_connections(server)
    for waiting in (reading, listening):
        with pytest.raises(BrokerUnavailable):
            await waiting
    again = asyncio.create_task(harness.broker.replies("g", 0))
    await harness.settle()
    try:
        await harness.answer(lease)
    except BrokerUnavailable:  # The connection that it took was one of those that were cut.
        await harness.answer(lease)
    replies, _ = await again
    assert ids(replies) == ["a"]
