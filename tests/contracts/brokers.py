"""Harnesses of the broker suite, one for each adapter. Each has its own event loop and clock. To add a broker, write a
class here and add it to HARNESSES; the tests only use the ports. Redis and Valkey are real servers, but their steps
take no time on the loop's clock, which they use instead of their own."""

import asyncio
import itertools
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace as replace_fields

from headway.brokers.memory.broker import LEASE_SECONDS, MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryBoard, MemoryFleet
from headway.brokers.redis import function_library
from headway.brokers.redis.blocking_reads import GATHERED
from headway.brokers.redis.board import RedisBoard
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.brokers.redis.fleet import RedisFleet
from headway.core.departure import Load, Policy, Rule
from headway.core.fair_queue import GONE
from headway.core.queue_limits import QUEUE_BYTES, QueueLimits
from headway.core.ratelimit import counting_as
from headway.core.retention import KeptLimits
from headway.core.tensors import Tensor, TensorHead, pack, unpack
from headway.model import (
    BatchFailure,
    Cause,
    Entry,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    Octets,
    ProcessInfo,
    QueueName,
    Reply,
    Role,
    Slot,
    Tensors,
    Value,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Board, Broker, DeadLetters, Fleet
from headway.runtime.counters import BrokerCounts
from tests.servers.redis import TESTED, RunningServer
from tests.virtual_time import ServedLoop, VirtualLoop

T = TypeVar("T")

MAX_BATCH = 8
MAX_QUEUE = 60
LIMITS = QueueLimits(tiers=3, max_batch=MAX_BATCH, reserved_share=0.25, max_queue=MAX_QUEUE)
MAX_WEIGHT = 40
WEIGHED = replace(LIMITS, max_weight=MAX_WEIGHT)
KEPT_LIMITS = KeptLimits.of(400_000, 100_000)
MODELS = ("m", "other")
"""Batches of the second are also limited by weight."""
NAMED_QUEUES = (*MODELS, "m@3")
"""Queue names: one per model for any version, and one for a single version."""
QUEUES = {"m": LIMITS, "other": WEIGHED}
TRACE = bytes(range(33)) + b"vendor=1"
MOST_ATTEMPTS = 3 + int(math.log2(MAX_BATCH))
"""Runs of a whole batch, then one for each halving."""


class Harness(ABC):
    """A fresh broker for MODELS within LIMITS, its event loop, and a fleet and a board, each seen by two processes."""

    broker: Broker
    dead: DeadLetters
    fleet: Fleet
    fleet_peer: Fleet
    board: Board
    board_peer: Board
    lease_seconds: float
    grain: float
    """Seconds by which a timer or an expiry may be late."""
    reads_apart = False
    """Whether outputs are read after their replies."""
    first_read = 0.0
    """Seconds until the first read of a queue for a gateway begins."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._runner = asyncio.Runner(loop_factory=lambda: loop)

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the harness's loop, which coroutine tests run on too."""
        return self._runner.run(act)

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def now(self) -> float:
        return self._loop.time()

    async def settle(self) -> None:
        await self._loop.settle()

    @abstractmethod
    def peer(self) -> Broker:
        return self.broker

    def endless(self) -> list[str]:
        """Names of the data stored outside the process that never expires."""
        return []

    def apart(self, kinds: str) -> list[str]:
        """Names of separately stored data: inputs (P), outputs (R), and who reads (Q) or keeps (K) the outputs."""
        return []

    def close(self) -> None:
        self._runner.close()

    async def claim(self, worker: str = "gpu-0", model: str = "m", limit: int = MAX_BATCH) -> Lease:
        return await granted(self.broker, slot(worker, model, limit))

    async def answer(self, lease: Lease) -> None:
        settled = await self.broker.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
        assert not settled.fenced

    async def reaping(self, seconds: float) -> None:
        """Let time pass, reaping as often as the broker asks for it."""
        until = self.now() + seconds
        while (left := until - self.now()) > 1e-9:
            due = await self.broker.reap()
            assert due > 0.0
            await self.advance(min(due, left))
        await self.broker.reap()

    async def healthy(self, *workers: str, model: str = "m", **how: Any) -> None:
        for worker in workers:
            await beat(self.broker, worker, model=model, **how)


class NearBroker(MemoryBroker):
    """A broker whose gateway, in the same process, hands it entries one by one, except those of a list."""

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        if any(entry.payer for entry in entries):
            return await super().enqueue(entries)
        return [self.take(entry) for entry in entries]


class MemoryHarness(Harness):
    """The in-process broker, on virtual time."""

    broker: MemoryBroker
    lease_seconds = LEASE_SECONDS
    grain = 0.051

    def __init__(
        self, queue_bytes: int = QUEUE_BYTES, limits: QueueLimits = LIMITS, kind: type[MemoryBroker] = MemoryBroker
    ) -> None:
        loop = VirtualLoop()
        super().__init__(loop)
        self.dead = DeadLetterBox()
        rng = random.Random(7)
        queues = QUEUES | {"m": limits}
        self.broker = kind(queues, self.dead, BrokerCounts(), loop.time, rng.random, KEPT_LIMITS, queue_bytes)
        self._queue_bytes = queue_bytes
        self.fleet = self.fleet_peer = MemoryFleet(loop.time)
        self.board = self.board_peer = MemoryBoard(loop.time)

    @property
    def room(self) -> int:
        return self.broker._room.free

    def peer(self) -> Broker:
        return self.broker

    def endless(self) -> list[str]:
        live = [key for key, queued in self.broker._entries.items() if queued.state != GONE]
        busy = live or self.broker._running or any(queue.depth for queue in self.broker._queues.values())
        return [] if busy or self.room == self._queue_bytes else ["room of entries that are gone"]


class KnownServer(RedisConnection):
    """A connection that loads the library only into servers that don't have it, as that takes longer than most tests.
    If a server has lost it, the next call loads it again, as in production."""

    _known: ClassVar[set[tuple[str, str]]] = set()

    async def _try_library(self) -> None:
        server = self._url, function_library.VERSION
        if server not in self._known:
            await super()._try_library()
            self._known.add(server)


def linked(server: RunningServer, count: int, act: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Call `act` with the connections of `count` processes and the clock that they share."""
    with asyncio.Runner(loop_factory=lambda: ServedLoop(server.url)) as runner:
        clock = runner.get_loop().time
        links = [KnownServer(server.url, timeout=math.inf, clock=clock) for _ in range(count)]

        async def main() -> None:
            for link in links:
                await link.open()
            try:
                await act(*links, clock)
            finally:
                for link in links:
                    await link.close()

        runner.run(main())


class RedisHarness(Harness):
    """A broker shared by two processes, on a real server that holds nothing else."""

    lease_seconds = 3.0
    grain = 0.051
    first_read = GATHERED

    def __init__(
        self,
        server: RunningServer,
        shards: int = 1,
        limits: QueueLimits = LIMITS,
        queue_bytes: int = QUEUE_BYTES,
        apart_from: float = math.inf,
    ) -> None:
        loop = ServedLoop(server.url)
        super().__init__(loop)
        self._server = server
        self._queue_bytes, self.reads_apart = queue_bytes, apart_from < math.inf
        self._links: list[RedisConnection] = [
            KnownServer(server.url, timeout=math.inf, clock=loop.time) for _ in range(2)
        ]
        rng = random.Random(7)
        queues = QUEUES | {"m": limits}
        budgets = self.lease_seconds, KEPT_LIMITS, queue_bytes, apart_from
        self._brokers = [
            RedisBroker(link, queues, BrokerCounts(), rng.random, shards, *budgets) for link in self._links
        ]
        self.broker = self._brokers[0]
        self.dead = RedisDeadLetters(self._links[0], self._brokers[0].queue_names, shards)
        self.fleet, self.fleet_peer = (RedisFleet(link) for link in self._links)
        self.board, self.board_peer = (RedisBoard(link) for link in self._links)
        self.run(self._open())

    def peer(self) -> Broker:
        return self._brokers[1]

    def endless(self) -> list[str]:
        return [key for key, left in self._server.ends().items() if left < 0]

    @property
    def room(self) -> int:
        """Free bytes for waiting entries."""
        accounts = [key for key in self._server.ends() if key.endswith(":b")]
        return self._queue_bytes - sum(int(self._server.command("ZSCORE", key, b"\xff")) for key in accounts)

    def apart(self, kinds: str) -> list[str]:
        return [key for key in self._server.ends() if re.search(f":[{kinds}]:", key)]

    def close(self) -> None:
        self.run(self._close())
        super().close()

    async def _open(self) -> None:
        for link in self._links:
            await link.open()

    async def _close(self) -> None:
        for broker in self._brokers:
            await broker.close()
        for link in self._links:
            await link.close()


HARNESSES: dict[str, Callable[..., Harness]] = {
    "memory": lambda _, **how: MemoryHarness(**how),
    "near": lambda _, **how: MemoryHarness(kind=NearBroker, **how),
    "valkey": lambda servers, **how: RedisHarness(servers.of("valkey"), **how),
    "apart": lambda servers, **how: RedisHarness(
        servers.of("valkey"), apart_from=0, **how
    ),  # Each value is stored apart.
    "redis": lambda servers, **how: RedisHarness(servers.of("redis"), **how),
}
EXAMPLES = ("memory", *TESTED)
"""The harnesses that run the examples. The state machines run on all."""


class Fixed:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def rule(self, load: Load) -> Rule:
        return self._rule


AT_ONCE: Policy = Fixed(Rule(size=1))
"""Everything that waits leaves immediately."""
WHEN_FULL: Policy = Fixed(Rule(size=MAX_BATCH, headway=math.inf))
"""Only full or urgent batches leave."""

_numbers = itertools.count()


def ask(
    input: Value | None = None,
    *,
    id: str | None = None,
    model: str = "m",
    tier: int = 1,
    tenant: str = "t",
    gateway: str = "g",
    queue_timeout: float = 60.0,
    timeout: float = 120.0,
    version: str = "",
    **how: Any,
) -> Entry:
    """Make an entry with an id of its own, and long timeouts by default."""
    id = f"id-{next(_numbers)}" if id is None else id
    input = f"input of {id}" if input is None else input
    name = queue(model)
    how["version"] = version or name.version
    return Entry(id, name.model, input, tier, tenant, gateway, queue_timeout, timeout, **how)


def several(count: int, *limits: Limit, **how: Any) -> list[Entry]:
    """Make the entries of one request. The first pays for all of them, and counts as all of them."""
    parts = [replace_fields(ask(**how), nonce=1000 + next(_numbers)) for _ in range(count)]
    payer, charged = parts[0].nonce, tuple(counting_as(limit, count) for limit in limits)
    first = replace_fields(parts[0], limits=charged, payer=payer, count=count)
    return [first, *(replace_fields(part, payer=payer) for part in parts[1:])]


async def leave(broker: Broker, *entries: Entry) -> None:
    for gateway in {entry.gateway for entry in entries}:
        await broker.withdraw([entry.submission for entry in entries if entry.gateway == gateway], gateway)


def output(input: Value) -> Value:
    if isinstance(input, Tensors):
        return pack(
            [Tensor(TensorHead("y", one.head.datatype, one.head.shape), bytes(one.data)[::-1]) for one in unpack(input)]
        )
    if isinstance(input, Octets):
        return Octets(b"[" + input.content + b"]")
    return f"<{input}>" if isinstance(input, str) else b"[" + input + b"]"


def tensors(rows: int = 1, content: bytes = b"\1\2", name: str = "x") -> Tensors:
    """Make tensors with `rows` rows, each of `content` and its row number."""
    data = b"".join(content + bytes([row % 256]) for row in range(rows))
    return pack([Tensor(TensorHead(name, "UINT8", (rows, len(content) + 1)), data)])


def queue(text: str) -> QueueName:
    model, _, version = text.partition("@")
    return QueueName(model, version)


def slot(worker: str = "gpu-0", model: str = "m", limit: int = MAX_BATCH) -> Slot:
    name = queue(model)
    return Slot(worker, name.model, limit, version=name.version)


def failed(cause: Cause = Cause.RAISED, worker: str = "gpu-0") -> BatchFailure:
    return BatchFailure(cause, f"it {cause.value}", worker)


def ids(entries: Sequence[Entry] | Sequence[Reply]) -> list[str]:
    return [one.id for one in entries]


async def drained(harness: Harness, gateway: str = "g", after: int = 0) -> dict[str, Reply]:
    """All replies that are ready for a gateway after a cursor, by id. Checks that there is one for each id."""
    replies = await in_mailbox(harness, gateway, after)
    by_id = {reply.id: reply for reply in replies}
    assert len(by_id) == len(replies)
    return by_id


async def in_mailbox(harness: Harness, gateway: str = "g", after: int = 0) -> Sequence[Reply]:
    replies, _ = await read_mailbox(harness, harness.broker, gateway, after)
    return replies


async def read_mailbox(
    harness: Harness, broker: Broker, gateway: str = "g", after: int = 0
) -> tuple[Sequence[Reply], int]:
    """All replies that are ready for a gateway after a cursor, in order, and the new cursor."""
    await harness.settle()  # An earlier read may still be under way: wait for its replies too.
    reader = asyncio.ensure_future(broker.replies(gateway, after))
    await harness.settle()
    if not reader.done():
        reader.cancel()
        return [], after
    if harness.reads_apart:  # Replies with separately stored outputs come last.
        await reader
        return await broker.replies(gateway, after)
    return await reader


def failure_of(reply: Reply) -> Failure:
    assert reply.failure is not None
    return reply.failure


def holds(claimed: Lease | NoWork) -> NoWork:
    assert isinstance(claimed, NoWork)
    return claimed


async def beat(
    broker: Broker, worker: str, *, model: str = "m", status: WorkerStatus = WorkerStatus.HEALTHY, **how: Any
) -> None:
    await broker.heartbeat(WorkerInfo(worker_id=worker, model=model, status=status, **how))


async def attend(fleet: Fleet, id: str) -> None:
    await fleet.heartbeat(ProcessInfo(id=id, role=Role.GATEWAY, host="h", pid=1))


async def granted(broker: Broker, to: Slot) -> Lease:
    lease = await broker.claim(to, AT_ONCE)
    assert isinstance(lease, Lease)
    return lease


async def answered(broker: Broker, to: Slot) -> Lease:
    """Claim a batch of everything that waits, and answer it correctly."""
    lease = await granted(broker, to)
    assert not (await broker.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])).fenced
    return lease


async def outcome_of(broker: Broker, task: str) -> Reply:
    kept = await broker.outcome("t", task)
    assert isinstance(kept, Reply)
    return kept


async def fail_all(harness: Harness) -> None:
    while any(one.depth for one in await harness.broker.depths()):
        claimed = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(claimed, Lease):
            await harness.broker.release(claimed, failed())
        await harness.advance(0.5)


async def measure(harness: Harness, seconds: float, workers: tuple[str, ...] = ("gpu-0",), model: str = "m") -> None:
    await harness.healthy(*workers, model=model)
    for _ in range(3):
        await harness.broker.enqueue([ask(gateway="nobody", model=model) for _ in range(MAX_BATCH)])
        lease = await harness.claim(model=model)
        await harness.advance(seconds)
        await harness.answer(lease)
