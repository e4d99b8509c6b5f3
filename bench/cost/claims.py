"""Many worker hosts on one Redis: does a claim cost the same, and do batches leave as evenly, with 64 as with 4?

    python bench/cost/claims.py                about three minutes
    python bench/cost/claims.py --seconds 4    a first impression
    python bench/cost/claims.py --hosts 64 --shards 16

Worker hosts and a gateway are tasks of this process on the core of load generators, each with its own connections to a real Redis on the
core of servers. A host has one slot, which sleeps for its batch time, so claims are measured and not functions. The load grows with the hosts
(80 requests/s for each, batches of at most 10 in 100 ms). So batches are equally full, and a request costs the same if nothing grows.
Spacing is the coefficient of variation of the intervals between departures: 0 is even, 1 is random. With shards it is that within a shard.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import uvloop

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.fleet import Redis
from bench.stand.stand import Broken
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.core import policies, shards
from headway.core.health import HEARTBEAT_EVERY
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import Entry, ItemResult, NoWork, Slot, WorkerInfo, WorkerStatus
from headway.runtime.counters import BrokerCounts
from headway.runtime.request_id import new_id

HOSTS, SHARDS = (4, 16, 64), (1, 16)
EACH = 80.0
"""Requests per second for each host."""
BATCH_SECONDS, MAX_BATCH = 0.1, 10
WARM_UP, STEP_SECONDS = 5.0, 2.0
LEFT_SECONDS = 5.0
"""Longest wait for answers once no more is sent."""
TICK = 0.002
"""Seconds for which the gateway gathers entries."""
GROWTH = 1.1
"""Most that a cost may grow from the fewest hosts to the most."""
UNEVEN = 0.5
"""Largest coefficient of variation that counts as even."""
MODEL, GATEWAY = "default", "gateway"
T = TypeVar("T")


@dataclass(slots=True)
class Done:
    """What hosts and gateway did.

    Attributes:
        grants: instant by Redis's clock, size and slot of each batch that was claimed.
        asked: instants of all claims, granted or not.
        answered: instants of right answers.
        unavailable: calls that failed and were made again.
    """

    grants: list[tuple[float, int, str]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    wrong: int = 0
    sent: int = 0
    refused: int = 0
    unavailable: int = 0

    async def surely(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call until it is answered, as the services do."""
        while True:
            try:
                return await call()
            except BrokerUnavailable:
                self.unavailable += 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Claims by many worker hosts on one Redis.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), help="how many worker hosts, fewest first")
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS), help="how many shards")
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings("claims", seconds=options.seconds, each=EACH, max_batch=MAX_BATCH, pinning=stand.PINNING)
    for number in options.shards:
        rows = [_measure(hosts, number, options.seconds) for hosts in options.hosts]
        title = f"{number} shard{'s' if number > 1 else ''}"
        findings.table(f"{title}; CPU in µs, a call by Redis's own clock", rows)
        for what in ("redis µs/claim", "redis µs/request", "µs a claim call"):
            bound = f"{title}: {what}, with the most hosts against the fewest"
            findings.at_most(bound, rows[-1][what] / rows[0][what], GROWTH)
        worst = max(row["CV at home"] for row in rows)
        findings.at_most(f"{title}: unevenness of departures (0 even, 1 random)", worst, UNEVEN)
        findings.none(f"{title}: entries refused, lost or answered wrongly", sum(row["amiss"] for row in rows))
    return findings.close()


def _measure(hosts: int, count: int, seconds: float) -> dict[str, float]:
    with Redis("claims-redis") as redis, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(redis, hosts, count, seconds))


async def _run(redis: Redis, hosts: int, count: int, seconds: float) -> dict[str, float]:
    """Row of a load of so many hosts and shards."""
    done, slots = Done(), [f"host-{number:03d}/gpu-0" for number in range(hosts)]
    async with AsyncExitStack() as stack:
        gateway = _Gateway(await _broker(stack, redis.url, count, GATEWAY), hosts * EACH, done)
        brokers = {worker: await _broker(stack, redis.url, count, worker) for worker in slots}
        works = [gateway.read_on(), gateway.send_on()]
        for worker, broker in brokers.items():
            works += [_claim_on(broker, worker, done), _beat_on(broker, worker, done), _reap_on(broker, done)]
        tasks = [asyncio.create_task(work) for work in works]
        running = asyncio.gather(*tasks)

        async def let_pass(span: float) -> None:
            await asyncio.wait({running}, timeout=span)
            if running.done():
                running.result()

        try:
            await let_pass(WARM_UP)
            begun, used, asked = time.time(), redis.server.usage()["redis"], redis.operations()
            await let_pass(seconds)
            ended, cpu = time.time(), redis.server.usage()["redis"] - used
            scripts = redis.operations()["scripts"] - asked["scripts"]
            with redis.stepping() as took:
                await let_pass(STEP_SECONDS)
            gateway.is_closed, until = True, time.monotonic() + LEFT_SECONDS
            await let_pass(10 * TICK)  # It may send once more.
            while gateway.held and time.monotonic() < until:
                await let_pass(TICK)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, running, return_exceptions=True)
    grants = sorted(grant for grant in done.grants if begun <= grant[0] < ended)
    answers = sum(begun <= instant < ended for instant in done.answered)
    if not grants or not answers:
        raise Broken(f"{hosts} hosts with {count} shards did nothing")
    span, claims = ended - begun, len(grants)
    return {
        "hosts": hosts,
        "answered/s": answers / span,
        "claims/s": claims / span,
        "batch": statistics.fmean(size for _, size, _ in grants),
        "CV": _variation([instant for instant, _, _ in grants]),
        "CV at home": _at_home(slots, count, grants),
        "redis µs/claim": cpu / claims * 1e6,
        "redis µs/request": cpu / answers * 1e6,
        "tries/claim": sum(begun <= instant < ended for instant in done.asked) / claims,
        "scripts/request": scripts / answers,
        "µs a claim call": statistics.fmean(took["claim"]),
        "unavailable": done.unavailable,
        "amiss": done.wrong + done.refused + done.sent - len(done.answered),
    }


def _at_home(slots: Sequence[str], count: int, grants: Sequence[tuple[float, int, str]]) -> float:
    """Mean unevenness within the shards."""
    active = shards.active(count, len(slots))
    by_shard: defaultdict[int, list[float]] = defaultdict(list)
    for instant, _, slot in grants:
        by_shard[shards.home(slot, slots, active)].append(instant)
    return statistics.fmean(_variation(instants) for instants in by_shard.values())


def _variation(instants: Sequence[float]) -> float:
    """Coefficient of variation of the intervals between instants in order; 0 when there are too few."""
    gaps = [later - earlier for earlier, later in pairwise(instants)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps) if len(gaps) > 1 else 0.0


async def _broker(stack: AsyncExitStack, url: str, count: int, process: str) -> RedisBroker:
    link = RedisConnection(url, process=process)
    stack.push_async_callback(link.close)
    await link.open()
    limits = {MODEL: QueueLimits(tiers=3, max_batch=MAX_BATCH)}
    broker = RedisBroker(link, limits, BrokerCounts(), random.random, shards=count)
    stack.push_async_callback(broker.close)
    return broker


async def _claim_on(broker: RedisBroker, worker: str, done: Done) -> None:
    slot, policy = Slot(worker, MODEL, MAX_BATCH), policies.build("paced", None)
    while True:
        done.asked.append(time.time())
        claimed = await done.surely(lambda: broker.claim(slot, policy))
        if isinstance(claimed, NoWork):
            await done.surely(partial(broker.wait_for_work, slot, claimed.until))
            continue
        done.grants.append((claimed.granted_at, len(claimed.entries), worker))
        await asyncio.sleep(BATCH_SECONDS)
        items = [ItemResult(str(entry.input).upper()) for entry in claimed.entries]
        await done.surely(partial(broker.complete, claimed, items))


async def _beat_on(broker: RedisBroker, worker: str, done: Done) -> None:
    info = WorkerInfo(worker_id=worker, model=MODEL, status=WorkerStatus.HEALTHY)
    while True:
        await done.surely(lambda: broker.heartbeat(info))
        await asyncio.sleep(HEARTBEAT_EVERY)


async def _reap_on(broker: RedisBroker, done: Done) -> None:
    while True:
        pause = await done.surely(broker.reap)
        await asyncio.sleep(max(pause, 0.01))


class _Gateway:
    """Sends entries at a steady rate until it is closed, and reads the answers to those that it holds."""

    def __init__(self, broker: RedisBroker, rate: float, done: Done) -> None:
        self.held: dict[str, str] = {}
        self.is_closed = False
        self._broker, self._rate, self._done = broker, rate, done

    async def send_on(self) -> None:
        rng, loop = random.Random(0), asyncio.get_running_loop()
        due, number = loop.time(), 0
        while not self.is_closed:
            await asyncio.sleep(TICK)
            entries = []
            while due <= loop.time():
                due += rng.expovariate(self._rate)
                number += 1
                entries.append(Entry(new_id(), MODEL, f"input number {number}", 1, "bench", GATEWAY, 10.0, 20.0))
            if entries:
                await self._send(entries)

    async def _send(self, entries: Sequence[Entry]) -> None:
        self.held.update((entry.id, str(entry.input)) for entry in entries)
        verdicts = await self._done.surely(lambda: self._broker.enqueue(entries))
        for entry, failure in zip(entries, verdicts, strict=True):
            if failure is None:
                self._done.sent += 1
            else:
                self._done.refused += 1
                self.held.pop(entry.id, None)

    async def read_on(self) -> None:
        cursor = 0
        while True:
            replies, cursor = await self._done.surely(partial(self._broker.replies, GATEWAY, cursor))
            now = time.time()
            for reply in replies:
                text = self.held.pop(reply.id, None)
                if text is None or reply.output != text.upper():
                    self._done.wrong += 1
                else:
                    self._done.answered.append(now)


if __name__ == "__main__":
    sys.exit(main())
