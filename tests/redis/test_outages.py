"""The server is silent, slow, gone, or back without its data: in real time, as its own behaviour matters here."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.brokers.redis import connection as links
from headway.brokers.redis.broker import RedisBroker
from headway.errors import BrokerUnavailable
from headway.model import EntryState, ItemResult, Lease, NoWork
from tests.contracts.brokers import AT_ONCE, answered, ask, beat, failed, granted, ids, output, slot
from tests.e2e.client import wait_until
from tests.redis.stand import TIMEOUT, brokers, hasty, heard, refused, until
from tests.servers.redis import KINDS, RedisServer, client

BLOCK = 0.3
"""Seconds of a blocking read here."""


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BLOCK", BLOCK)


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(kind, tmp_path, durable=True) as own:
        yield own


@contextlib.contextmanager
def sleeping(server: RedisServer) -> Iterator[None]:
    with client(server.url) as one:
        connection = one.connection_pool.get_connection()
        connection.send_command("DEBUG", "SLEEP", "1.0")
        yield
        connection.read_response()
        one.connection_pool.release(connection)


def ended(server: RedisServer) -> list[int]:
    found = server.command("INFO", "commandstats")
    return [found.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in ("xread", "blpop")]


def is_read(server: RedisServer) -> bool:
    with client(server.url) as one:
        return any(other["cmd"] == "xread" and "b" in other["flags"] for other in one.client_list())


async def reads(server: RedisServer) -> list[int]:
    """Wait until both are under way. Returns how many had ended by then."""
    await asyncio.to_thread(wait_until, lambda: server.command("INFO", "clients")["blocked_clients"] == 2)
    return ended(server)


async def begun_anew(server: RedisServer, before: list[int], *waiting: asyncio.Task[Any]) -> None:
    """Wait until the reads under way have ended, and those after them use the short timeout. Answers may still be on
    their way, but once the second read is answered, the first answer has arrived."""

    def both() -> bool:
        counted = zip(waiting, ended(server), before, strict=True)
        return all(one.done() or now > then + 1 for one, now, then in counted)

    await asyncio.to_thread(wait_until, both)


def every_call(broker: RedisBroker, lease: Lease) -> list[Callable[[], Awaitable[Any]]]:
    """One call of each kind; all can be repeated."""
    return [
        lambda: broker.enqueue([ask(id="new")]),
        lambda: broker.claim(slot(), AT_ONCE),
        lambda: broker.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries]),
        lambda: broker.release(lease, failed()),
        lambda: broker.extend(lease),
        lambda: broker.withdraw([("t", "unknown", 0)], "g"),
        lambda: broker.state("t", "a"),
        lambda: beat(broker, "gpu-0"),
        broker.workers,
        broker.depths,
        broker.loads,
        broker.reap,
    ]


async def test_every_call_to_a_silent_server_ends_in_time_and_can_be_made_again(server: RedisServer) -> None:
    async with brokers(server.url) as [broker]:
        entries = [ask(id="a"), ask(id="b")]
        await broker.enqueue(entries[:1])
        lease = await granted(broker, slot("gpu-1"))
        reading = asyncio.create_task(broker.replies("g", 0))
        listening = asyncio.create_task(broker.wait_for_work(slot("gpu-2"), None))
        before = await reads(server)
        with hasty(broker):
            await begun_anew(server, before, reading, listening)
            with server.silent():
                await asyncio.gather(*(refused(call()) for call in every_call(broker, lease)))
                for waiting in (reading, listening):
                    await refused(waiting, BLOCK + TIMEOUT)
        # Everything is done now, and nothing twice. Completion and release came in either order.
        assert await until(lambda: broker.enqueue([ask(id="new"), entries[1]])) == [None, None]
        await broker.release(lease, failed())
        assert sum(one.depth for one in await broker.depths()) <= 3
        done: set[str] = set()
        while len(done) < 3:
            claimed = await broker.claim(slot(), AT_ONCE)
            if isinstance(claimed, NoWork):
                await asyncio.sleep(0.02)
                if await broker.state("t", "a") is None:
                    done.add("a")
                continue
            assert not done & set(ids(claimed.entries))
            done |= set(ids(claimed.entries))
            await broker.complete(claimed, [ItemResult(output(rider.input)) for rider in claimed.entries])
        assert await heard(broker, "g", 3) == {id: output(f"input of {id}") for id in ("a", "b", "new")}


@pytest.mark.parametrize("kind", KINDS)
async def test_work_goes_on_after_a_restart_with_the_data(server: RedisServer) -> None:
    async with brokers(server.url) as [broker]:
        await broker.enqueue([ask(id="a")])
        lease = await granted(broker, slot())
        await broker.enqueue([ask(id="b")])
        reading = asyncio.create_task(broker.replies("g", 0))
        await asyncio.to_thread(wait_until, lambda: is_read(server))
        epoch = broker.epoch
        server.kill()
        await refused(broker.enqueue([ask(id="c")]))
        server.start()
        assert await until(lambda: broker.state("t", "b")) is EntryState.QUEUED
        assert await broker.extend(lease)
        settled = await broker.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
        assert settled.answered == 1
        await answered(broker, slot())
        assert broker.epoch == epoch
        with pytest.raises(BrokerUnavailable):
            await reading
        assert list(await heard(broker, "g", 2)) == ["a", "b"]


async def test_a_call_that_was_given_up_is_not_done_later(server: RedisServer) -> None:
    async with brokers(server.url) as [broker]:
        await broker.enqueue([ask(id="a")])  # The server's clock is known by now.
        with sleeping(server), hasty(broker):
            given_up = (
                broker.enqueue([ask(id="b")]),
                broker.claim(slot(), AT_ONCE),
                broker.withdraw([("t", "a", 0)], "g"),
            )
            await asyncio.gather(*map(refused, given_up))
        for _ in range(3):  # The server has handled everything sent before.
            assert await broker.state("t", "b") is None
            assert await broker.state("t", "a") is EntryState.QUEUED


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broker_that_takes_reads_only_is_told_from_one_that_is_gone_or_refuses(server: RedisServer) -> None:
    async with brokers(server.url) as [broker]:
        await broker.enqueue([ask(id="a")])
        server.command("CLIENT", "PAUSE", 60_000, "WRITE")
        with hasty(broker):
            await refused(broker.enqueue([ask(id="b")]))
        assert await broker.takes_reads_only()
        server.command("CLIENT", "UNPAUSE")
        assert await until(lambda: broker.enqueue([ask(id="b")])) == [None]
        server.command("ACL", "SETUSER", "default", "-fcall")
        await refused(broker.enqueue([ask(id="c")]))
        assert not await broker.takes_reads_only()
        server.command("ACL", "SETUSER", "default", "+fcall")
        with server.silent():
            with hasty(broker):
                await refused(broker.enqueue([ask(id="c")]))
            assert not await broker.takes_reads_only()
        assert await until(lambda: broker.enqueue([ask(id="c")])) == [None]
        server.kill()
        await refused(broker.enqueue([ask(id="d")]))
        assert not await broker.takes_reads_only()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_was_just_deposed_may_answer_no_read_and_is_not_taken_for_gone(server: RedisServer) -> None:
    async with brokers(server.url) as [broker]:
        await broker.enqueue([ask(id="a")])
        server.command("REPLICAOF", "127.0.0.1", "1")
        await refused(broker.enqueue([ask(id="b")]))
        assert await broker.takes_reads_only()
        server.kill()
        assert await broker.takes_reads_only()
        with hasty(broker):
            while await broker.takes_reads_only():  # Until it is longer ago than a call may take.
                pass
