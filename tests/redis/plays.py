"""A play on Redis: workers come and go on two hosts, each with a gateway, and every admitted entry gets one outcome."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.core.departure import Rule
from headway.core.health import HEARTBEAT_EVERY
from headway.errors import BrokerUnavailable
from headway.model import Cause, Entry, ItemResult, NoWork, Reply
from headway.ports import Broker
from tests.contracts.brokers import MAX_BATCH, Fixed, ask, beat, failed, output, slot
from tests.redis.stand import Stand

WINDOW = 0.05
POLICY = Fixed(Rule(size=MAX_BATCH, window=WINDOW, rate=1e6))
GROUPS = (1, 1, 1, 3, 12)
"""Sizes of groups of requests that come together."""
WORKERS = tuple(f"gpu-{number}" for number in range(12))
T = TypeVar("T")


class Play:
    """A play on the two hosts of a stand. Each call is repeated until the server answers; `troubles` counts the calls
    that failed. `disturbed` holds the ids of entries whose batch failed; `fails` is the share of batches that do."""

    def __init__(self, harness: Stand, seed: int, fails: float = 0.05) -> None:
        self.harness = harness
        self.hosts: list[Broker] = [harness.broker, harness.peer()]
        self.rng = random.Random(seed)
        self.asked: dict[str, Entry] = {}
        self.replies: dict[str, Reply] = {}
        self.disturbed: set[str] = set()
        self.troubles = 0
        self._fails = fails
        self._workers: dict[str, list[asyncio.Task[None]]] = {}
        self._others = [
            asyncio.create_task(act(number)) for number in range(len(self.hosts)) for act in (self._reap, self._read)
        ]

    def start(self, *workers: str) -> None:
        for worker in workers:
            host = self.hosts[WORKERS.index(worker) % 2]
            self._workers[worker] = [asyncio.create_task(act(worker, host)) for act in (self._beat, self._work)]

    async def kill(self, *workers: str) -> None:
        await _ended([task for worker in workers for task in self._workers.pop(worker)])

    async def ask(self, count: int) -> None:
        host = self.rng.randrange(2)
        entries = [ask(gateway=f"g-{host}", tenant=self.rng.choice("ab")) for _ in range(count)]
        verdicts = await self._until(lambda: self.hosts[host].enqueue(entries))
        self.asked |= {entry.id: entry for entry, verdict in zip(entries, verdicts, strict=True) if verdict is None}

    async def rush(self, seconds: float, disturb: Callable[[], object] = lambda: None) -> None:
        until = self.harness.now() + seconds
        while self.harness.now() < until:
            await self.harness.advance(self.rng.expovariate(50.0))
            if self.rng.random() < 0.3:
                disturb()
            await self.ask(self.rng.choice(GROUPS))

    async def close(self) -> None:
        """Check that every entry was answered once and correctly, and that nothing is left."""
        assert set(self.replies) == set(self.asked)
        for id, reply in self.replies.items():
            assert reply.output == output(self.asked[id].input)
            assert reply.attempts == 1 or id in self.disturbed or self._fails
        assert not any(one.depth for one in await self.hosts[0].depths())
        await self.kill(*self._workers)
        await _ended(self._others)

    async def _until(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except BrokerUnavailable:
                self.troubles += 1
                await self.harness.advance(0.02)

    async def _beat(self, worker: str, host: Broker) -> None:
        while True:
            await self._until(lambda: beat(host, worker))
            await self.harness.advance(HEARTBEAT_EVERY)

    async def _work(self, worker: str, host: Broker) -> None:
        async def claimed() -> None:
            claimed = await host.claim(slot(worker), POLICY)
            if isinstance(claimed, NoWork):
                await host.wait_for_work(slot(worker), claimed.until)
                return
            await self.harness.advance(0.02)
            items = [ItemResult(output(rider.input)) for rider in claimed.entries]
            if self.rng.random() < self._fails:
                self.disturbed |= {rider.id for rider in claimed.entries}
                await host.release(claimed, failed(Cause.CRASHED, worker) if self.rng.random() < 0.5 else None)
            else:
                await self._until(lambda: host.complete(claimed, items))

        while True:
            await self._until(claimed)

    async def _reap(self, number: int) -> None:
        while True:
            await self.harness.advance(await self._until(self.hosts[number].reap))

    async def _read(self, number: int) -> None:
        cursor = 0
        while True:
            replies, cursor = await self._until(lambda after=cursor: self.hosts[number].replies(f"g-{number}", after))  # type: ignore[misc]
            for reply in replies:
                assert reply.id not in self.replies
                self.replies[reply.id] = reply


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise outcome or AssertionError("it ended by itself")
