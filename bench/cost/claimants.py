"""The other processes of claims.py: many worker hosts in one, and a gateway in another, on a real Redis.

    python bench/cost/claimants.py hosts --url redis://127.0.0.1:6379/0 --hosts 64 --shards 16 --rate 5120

Each host has connections of its own and one slot that sleeps for its batch time. The gateway enqueues what has come in
the last two milliseconds, and reads the answers. Both print `READY` when they are at work, and what they did when they
are told to end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import msgspec
import uvloop

from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.core import policies
from headway.core.health import HEARTBEAT_EVERY
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import Entry, ItemResult, NoWork, Slot, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id

BATCH_SECONDS, MAX_BATCH = 0.1, 10
TICK = 0.002
"""Seconds for which the gateway gathers."""
LEFT_SECONDS = 5.0
"""Longest wait for answers once no more is sent."""
MODEL, GATEWAY = "default", "gateway"
READY = b"READY\n"
LIMITS = {MODEL: QueueLimits(tiers=3, max_batch=MAX_BATCH)}

T = TypeVar("T")


class Done(msgspec.Struct):
    """What one process did.

    Attributes:
        grants: instant (of the server's clock), size and slot of each batch that was claimed.
        asked: instants of all claims, granted or not.
        answered: instants at which right answers came.
        wrong: answers that were not right.
        sent: entries admitted.
        refused: entries that were not.
        unavailable: calls that came to nothing, and were made again.
    """

    grants: list[tuple[float, int, str]] = msgspec.field(default_factory=list)
    asked: list[float] = msgspec.field(default_factory=list)
    answered: list[float] = msgspec.field(default_factory=list)
    wrong: int = 0
    sent: int = 0
    refused: int = 0
    unavailable: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The other processes of claims.py.")
    parser.add_argument("part", choices=["hosts", "gateway"])
    parser.add_argument("--url", required=True, help="of Redis")
    parser.add_argument("--hosts", type=int, default=4, help="how many worker hosts")
    parser.add_argument("--shards", type=int, default=1, help="how many shards")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.part == "hosts":
            done = runner.run(_hosts(options.url, options.hosts, options.shards))
        else:
            done = runner.run(_Gateway(options.rate).run(options.url, options.shards))
    sys.stdout.buffer.write(msgspec.json.encode(done))
    return 0


def slot_of(number: int) -> str:
    """Name of the slot of a host."""
    return f"host-{number:03d}/gpu-0"


async def _hosts(url: str, hosts: int, shards: int) -> Done:
    """All worker hosts, until SIGTERM."""
    done, over = Done(), _told_to_end()
    async with AsyncExitStack() as stack:
        tasks = []
        for number in range(hosts):
            worker = slot_of(number)
            broker = await _broker(stack, url, shards, worker)
            tasks += [_claim_on(broker, worker, done), _heartbeat_on(broker, worker, done), _reap_on(broker, done)]
        print(READY.decode(), end="", flush=True)
        await _until(over, [asyncio.create_task(task) for task in tasks])
    return done


async def _claim_on(broker: RedisBroker, worker: str, done: Done) -> None:
    slot, policy = Slot(worker, MODEL, MAX_BATCH), policies.build("paced", None)
    while True:
        done.asked.append(time.time())
        claimed = await _surely(done, lambda: broker.claim(slot, policy))
        if isinstance(claimed, NoWork):
            await _surely(done, partial(broker.wait_for_work, slot, claimed.until))
            continue
        done.grants.append((claimed.granted_at, len(claimed.entries), worker))
        await asyncio.sleep(BATCH_SECONDS)
        items = [ItemResult(str(entry.input).upper()) for entry in claimed.entries]
        await _surely(done, partial(broker.complete, claimed, items))


async def _heartbeat_on(broker: RedisBroker, worker: str, done: Done) -> None:
    info = WorkerInfo(worker_id=worker, model=MODEL, status=WorkerStatus.HEALTHY)
    while True:
        await _surely(done, lambda: broker.heartbeat(info))
        await asyncio.sleep(HEARTBEAT_EVERY)


async def _reap_on(broker: RedisBroker, done: Done) -> None:
    while True:
        pause = await _surely(done, broker.reap)
        await asyncio.sleep(max(pause, 0.01))


async def _surely(done: Done, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call until it is answered, as the services do."""
    while True:
        try:
            return await call()
        except BrokerUnavailable:
            done.unavailable += 1


class _Gateway:
    """Entries at a steady rate until SIGTERM; then waits for what is still under way."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._done = Done()
        self._held: dict[str, str] = {}
        self._empty = asyncio.Event()

    async def run(self, url: str, shards: int) -> Done:
        """Returns what became of all entries."""
        over = _told_to_end()
        async with AsyncExitStack() as stack:
            broker = await _broker(stack, url, shards, GATEWAY)
            reading = asyncio.create_task(self._read_on(broker))
            print(READY.decode(), end="", flush=True)
            await _until(over, [asyncio.create_task(self._send_on(broker))])
            if self._held:
                self._empty.clear()
                await asyncio.wait({reading, asyncio.create_task(self._empty.wait())}, timeout=LEFT_SECONDS)
            over.set()
            await _until(over, [reading])
        return self._done

    async def _send_on(self, broker: RedisBroker) -> None:
        rng, loop = random.Random(0), asyncio.get_running_loop()
        due, number = loop.time(), 0
        while True:
            await asyncio.sleep(TICK)
            entries = []
            while due <= loop.time():
                due += rng.expovariate(self._rate)
                number += 1
                entries.append(Entry(new_id(), MODEL, f"input number {number}", 1, "bench", GATEWAY, 10.0, 20.0))
            if entries:
                await asyncio.shield(self._send(broker, entries))

    async def _send(self, broker: RedisBroker, entries: Sequence[Entry]) -> None:
        self._held.update((entry.id, str(entry.input)) for entry in entries)
        verdicts = await _surely(self._done, lambda: broker.enqueue(entries))
        for entry, failure in zip(entries, verdicts, strict=True):
            if failure is None:
                self._done.sent += 1
            else:
                self._done.refused += 1
                self._held.pop(entry.id, None)

    async def _read_on(self, broker: RedisBroker) -> None:
        cursor = 0
        while True:
            replies, cursor = await _surely(self._done, partial(broker.replies, GATEWAY, cursor))
            now = time.time()
            for reply in replies:
                text = self._held.pop(reply.id, None)
                if text is None or reply.output != text.upper():
                    self._done.wrong += 1
                else:
                    self._done.answered.append(now)
            if not self._held:
                self._empty.set()


async def _broker(stack: AsyncExitStack, url: str, shards: int, process: str) -> RedisBroker:
    link = RedisConnection(url, process=process)
    stack.push_async_callback(link.close)
    await link.open()
    broker = RedisBroker(link, LIMITS, Counters(), random.random, shards=shards)
    stack.push_async_callback(broker.close)
    return broker


def _told_to_end() -> asyncio.Event:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    return over


async def _until(over: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Return when told to end, with the tasks ended; raises what one of them raised before."""
    waiting = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (waiting, *tasks):
            task.cancel()
        outcomes = await asyncio.gather(waiting, *tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


if __name__ == "__main__":
    sys.exit(main())
