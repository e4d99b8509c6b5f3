"""Many worker hosts on one Redis: does a claim cost the same, and do batches leave as evenly, with 64 as with 4?

    python bench/cost/claims.py                about three minutes
    python bench/cost/claims.py --seconds 4    a first impression
    python bench/cost/claims.py --hosts 64 --shards 16

Worker hosts are tasks in one process here, each with connections of its own to a real Redis and one slot that sleeps
for its batch time; so what is measured is the claims and not the functions. The load grows with the hosts (80
requests/s for each, in batches of at most 10 that take 100 ms), so that batches are equally full and a request costs
the same if nothing grows. The gateway is a task in another process that enqueues what has come in the last two
milliseconds, and reads the answers.

Redis is on the core of servers, the rest on the other. Spacing is the coefficient of variation of the intervals between
departures: 0 is even, 1 is random. With shards each of them spaces the departures of the slots that are at home in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import msgspec
import uvloop

from bench.stand import processes, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Operations, Redis
from bench.stand.stand import Broken, on_load_core
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
WARM_UP = 5.0
END_SECONDS = 30.0
STEP_SECONDS = 2.0
GROWTH = 1.1
"""Most that a cost may grow from the fewest hosts to the most."""
UNEVEN = 0.5
"""Largest coefficient of variation of the intervals that still counts as even."""

TABLES = {
    "what is carried, and how evenly (intervals between departures in ms)": (
        "hosts", "offered/s", "answered/s", "claims/s", "batch", "interval", "CV", "CV at home", "unavailable", "amiss",
    ),
    "what it costs (CPU in µs; calls by Redis's own clock)": (
        "hosts", "redis µs/claim", "redis µs/request", "host µs/claim", "gateway µs/request", "tries/claim",
        "scripts/request", "µs a claim call", "µs a completion call",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """One set-up: how many hosts and shards."""

    hosts: int
    shards: int

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.hosts * EACH


def main() -> int:
    options = _options()
    if options.part:
        return _take_part(options.part, options.url, Load(*options.hosts, *options.shards))
    stand.end_in_order()
    findings = Findings(
        "claims", seconds=options.seconds, each=EACH, batch_ms=BATCH_SECONDS * 1000, max_batch=MAX_BATCH,
        warm_up_s=WARM_UP, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"Load for {options.seconds:g} s each; {stand.PINNING}.")
    for number in options.shards:
        rows = [_measure(findings, Load(hosts, number), options.seconds) for hosts in options.hosts]
        title = f"{number} shard{'s' if number > 1 else ''}"
        for heading, columns in TABLES.items():
            findings.table(f"{title}; {heading}", [{name: row[name] for name in columns} for row in rows])
        for what in ("redis µs/claim", "redis µs/request", "µs a claim call"):
            bound = f"{title}: {what}, with the most hosts against the fewest"
            findings.at_most(bound, rows[-1][what] / rows[0][what], GROWTH)
        worst = max(row["CV at home"] for row in rows)
        findings.at_most(f"{title}: unevenness of departures (0 even, 1 random)", worst, UNEVEN)
        findings.none(f"{title}: entries refused, lost or answered wrongly", sum(row["amiss"] for row in rows))
    return findings.close()


def _measure(findings: Findings, load: Load, seconds: float) -> dict[str, float]:
    with Redis("claims-redis") as redis:
        hosts = _Part("hosts", redis, load)
        try:
            hosts.wait_until_ready()
            gateway = _Part("gateway", redis, load)
            try:
                gateway.wait_until_ready()
                time.sleep(WARM_UP)
                begun, used, asked = time.time(), _usage(redis, hosts, gateway), redis.operations()
                time.sleep(seconds)
                ended, spent, asked = time.time(), _usage(redis, hosts, gateway), redis.operations() - asked
                with redis.stepping() as took:
                    time.sleep(STEP_SECONDS)
            finally:
                ours = gateway.end()
        finally:
            theirs = hosts.end()
    findings.keep(f"{load.hosts} hosts, {load.shards} shards", asked)
    cpu = {name: spent[name] - used[name] for name in spent}
    calls = {
        "µs a claim call": statistics.fmean(took["claim"]),
        "µs a completion call": statistics.fmean(took["complete"]),
    }
    return _row(load, theirs, ours, begun, ended, cpu, asked) | calls


def _row(
    load: Load, theirs: Done, ours: Done, begun: float, ended: float, cpu: dict[str, float], asked: Operations
) -> dict[str, float]:
    grants = sorted(grant for grant in theirs.grants if begun <= grant[0] < ended)
    tries = sum(begun <= instant < ended for instant in theirs.asked)
    answers = sum(begun <= instant < ended for instant in ours.answered)
    if not grants or not answers:
        raise Broken(f"{load.hosts} hosts with {load.shards} shards did nothing")
    claims = len(grants)
    return {
        "hosts": load.hosts,
        "offered/s": load.rate,
        "answered/s": answers / (ended - begun),
        "claims/s": claims / (ended - begun),
        "batch": statistics.fmean(size for _, size, _ in grants),
        "tries/claim": tries / claims,
        "redis µs/claim": cpu["redis"] / claims * 1e6,
        "redis µs/request": cpu["redis"] / answers * 1e6,
        "host µs/claim": cpu["hosts"] / claims * 1e6,
        "gateway µs/request": cpu["gateway"] / answers * 1e6,
        "scripts/request": asked.scripts / answers,
        "interval": 1000 * (ended - begun) / claims,
        "CV": variation([instant for instant, _, _ in grants]),
        "CV at home": _at_home(load, grants),
        "unavailable": theirs.unavailable + ours.unavailable,
        "amiss": ours.wrong + ours.refused + ours.sent - len(ours.answered),
    }


def _at_home(load: Load, grants: Sequence[tuple[float, int, str]]) -> float:
    """Mean unevenness within the shards."""
    slots = [slot_of(number) for number in range(load.hosts)]
    active = shards.active(load.shards, load.hosts)
    by_shard: defaultdict[int, list[float]] = defaultdict(list)
    for instant, _, slot in grants:
        by_shard[shards.home(slot, slots, active)].append(instant)
    return statistics.fmean(variation(instants) for instants in by_shard.values())


def variation(instants: Sequence[float]) -> float:
    """Coefficient of variation of the intervals between instants in order; 0 when there are too few."""
    gaps = [later - earlier for earlier, later in pairwise(instants)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps) if len(gaps) > 1 else 0.0


def _usage(redis: Redis, *parts: _Part) -> dict[str, float]:
    return {"redis": redis.server.usage()["redis"]} | {part.name: part.cpu() for part in parts}


class _Part:
    """This program in a process of its own, on the core of load generators, as the worker hosts or the gateway."""

    def __init__(self, name: str, redis: Redis, load: Load) -> None:
        self.name = name
        command = [sys.executable, __file__, "--part", name, "--url", redis.url]
        command += ["--hosts", str(load.hosts), "--shards", str(load.shards)]
        self._process = subprocess.Popen(on_load_core(command), stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Return when it is at work."""
        if self._process.stdout is None or self._process.stdout.readline() != READY:
            raise Broken(f"the {self.name} of this benchmark do not come up")

    def cpu(self) -> float:
        """CPU seconds so far."""
        found = processes.look(self._process.pid)
        return found.cpu if found is not None else 0.0

    def end(self) -> Done:
        """End it; returns what it did."""
        self._process.send_signal(signal.SIGTERM)
        try:
            said, _ = self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        if self._process.returncode:
            raise Broken(f"the {self.name} of this benchmark ended with {self._process.returncode}")
        return msgspec.json.decode(said, type=Done)


# What runs in the other processes.

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


def _take_part(part: str, url: str, load: Load) -> int:
    """Be the worker hosts, or the gateway, until SIGTERM; prints READY when at work, and in the end what was done."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if part == "hosts":
            done = runner.run(_hosts(url, load.hosts, load.shards))
        else:
            done = runner.run(_Gateway(load.rate).run(url, load.shards))
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
    broker = RedisBroker(link, LIMITS, BrokerCounts(), random.random, shards=shards)
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Claims by many worker hosts on one Redis.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), help="how many worker hosts, fewest first")
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS), help="how many shards")
    for hidden in ("--part", "--url"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
