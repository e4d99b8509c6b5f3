"""The server loses its functions, and connections are cut, while requests come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from headway.brokers.redis import function_library
from headway.errors import BrokerUnavailable
from headway.model import Entry, ItemResult, NoWork, Reply
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, ask, output, slot, story
from tests.redis.stand import Stand
from tests.servers.redis import KINDS, RunningServer


def connections(server: RunningServer, command: str) -> list[int]:
    """The connections that wait in, or have last made, a command."""
    return [int(line["id"]) for line in server.command("CLIENT LIST") if line["cmd"] == command]


def cut(server: RunningServer, command: str) -> int:
    """Close them; how many there were."""
    ids = connections(server, command)
    for id in ids:
        server.command("CLIENT", "KILL", "ID", id)
    return len(ids)


class Traffic:
    """A gateway on each of two hosts that asks again until it knows, and slots that go on whatever happens.

    Attributes:
        asked, replies: by id.
        troubles: how often something was out of reach.
    """

    def __init__(self, stand: Stand, seed: int) -> None:
        self.asked: dict[str, Entry] = {}
        self.replies: dict[str, Reply] = {}
        self.troubles = 0
        self._stand = stand
        self._rng = random.Random(seed)
        self._hosts: list[Broker] = [stand.broker, stand.peer()]

    async def run(self, seconds: float, disturb: Callable[[], object]) -> None:
        """Let it run, and disturb it now and then; in the end everything must have been answered, once."""
        tasks = [asyncio.create_task(self._serve(number)) for number in range(4)]
        for number in range(2):
            tasks += [asyncio.create_task(act(number)) for act in (self._read, self._reap)]
        until = self._stand.now() + seconds
        while self._stand.now() < until:
            await self._stand.advance(self._rng.expovariate(50.0))
            if self._rng.random() < 0.3:
                disturb()
            await self._ask(self._rng.randrange(2))
        await self._stand.advance(5.0)
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(self.asked) > 20
        assert set(self.replies) == set(self.asked)
        assert all(reply.output == output(self.asked[id].input) for id, reply in self.replies.items())
        assert max(reply.attempts for reply in self.replies.values()) == 1

    async def _ask(self, number: int) -> None:
        entries = [ask(gateway=f"g-{number}") for _ in range(self._rng.choice((1, 3)))]
        while True:
            try:
                assert await self._hosts[number].enqueue(entries) == [None] * len(entries)
                break
            except BrokerUnavailable:
                await self._pause()
        self.asked |= {entry.id: entry for entry in entries}

    async def _serve(self, number: int) -> None:
        host, place = self._hosts[number % 2], slot(f"gpu-{number}")
        while True:
            try:
                claimed = await host.claim(place, AT_ONCE)
                if isinstance(claimed, NoWork):
                    await host.wait_for_work(place, claimed.until)
                    continue
            except BrokerUnavailable:
                await self._pause()
                continue
            items = [ItemResult(output(rider.input)) for rider in claimed.entries]
            await self._stand.advance(0.01)
            while True:
                try:
                    await host.complete(claimed, items)
                    break
                except BrokerUnavailable:
                    await self._pause()

    async def _read(self, number: int) -> None:
        cursor = 0
        while True:
            try:
                found, cursor = await self._hosts[number].replies(f"g-{number}", cursor)
            except BrokerUnavailable:
                await self._pause()
                continue
            for reply in found:
                assert reply.id not in self.replies
                self.replies[reply.id] = reply

    async def _reap(self, number: int) -> None:
        while True:
            try:
                await self._stand.advance(await self._hosts[number].reap())
            except BrokerUnavailable:
                await self._pause()

    async def _pause(self) -> None:
        self.troubles += 1
        await self._stand.advance(0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", [("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"), ("FUNCTION", "DELETE")], ids=" ".join)
@story
async def test_requests_do_not_notice_that_scripts_or_functions_were_flushed(
    harness: Stand, command: tuple[str, str]
) -> None:
    flush = (*command, function_library.VERSION) if command[1] == "DELETE" else command

    def disturb() -> None:
        if command[0] == "SCRIPT" or harness.server.command("FUNCTION", "LIST"):
            harness.server.command(*flush)

    traffic = Traffic(harness, seed=1)
    await traffic.run(1.0, disturb)
    assert traffic.troubles == 0


@story
async def test_functions_that_many_miss_at_once_are_brought_once(harness: Stand) -> None:
    harness.server.command("FUNCTION", "FLUSH")
    harness.server.command("CONFIG", "RESETSTAT")
    await asyncio.gather(*(harness.broker.enqueue([ask()]) for _ in range(20)))
    loads = harness.server.command("INFO", "commandstats")["cmdstat_function|load"]["calls"]
    assert loads == 1


@pytest.mark.parametrize("command", ["fcall", "blpop", "xread"])
@story
async def test_connections_that_are_cut_cost_nothing_but_time(harness: Stand, command: str) -> None:
    cuts = 0

    def disturb() -> None:
        nonlocal cuts
        cuts += cut(harness.server, command)

    traffic = Traffic(harness, seed=2)
    await traffic.run(1.0, disturb)
    assert cuts > 10
    assert traffic.troubles > 0


@story
async def test_a_reader_hears_once_that_its_connection_broke(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    reading = asyncio.create_task(harness.broker.replies("g", 0))
    await harness.settle()
    assert cut(harness.server, "xread") == 1  # For all queues.
    with pytest.raises(BrokerUnavailable):
        await reading
    await harness.answer(lease)
    for _ in range(2):
        replies, cursor = await harness.broker.replies("g", 0)
        assert ([reply.id for reply in replies], cursor) == (["a"], 1)
    reading = asyncio.create_task(harness.broker.replies("g", 1))
    await harness.advance(10.0)
    assert not reading.done()
    reading.cancel()


@story
async def test_a_slot_hears_that_its_bell_broke_and_is_woken_by_the_next_one(harness: Stand) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    assert cut(harness.server, "blpop") == 1
    with pytest.raises(BrokerUnavailable):
        await listening
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    assert not listening.done()
    await harness.peer().enqueue([ask()])
    await listening
