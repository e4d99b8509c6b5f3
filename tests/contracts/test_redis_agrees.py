"""The library inside the server decides as the core does: both get the same random trace and do the same.

Compared after each step: who is admitted and how long others are told to wait, what rides and why the batch leaves, how
long a claim waits, what is answered as too late, dead or out of tries, and everything that policies use.
"""

import asyncio
import copy
import math
import random
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import astuple

from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.claims import Granted
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.function_library import SECTIONS
from headway.brokers.redis.shard_queue import Queue
from headway.core import failures
from headway.core.admission import Refused
from headway.core.bulk import QUIET
from headway.core.departure import Departure, Hold, Rule
from headway.core.fair_queue import LOOK_AHEAD, PAGE, QueuedEntry
from headway.core.health import DEGRADED_AFTER, HEARTBEAT_EVERY, REST_EVERY, grace
from headway.core.queue import ModelQueue
from headway.core.queue_limits import Padding, QueueLimits
from headway.core.suspects import LONE_ROOM
from headway.model import (
    MOST_OUTPUT,
    BatchFailure,
    Cause,
    Completion,
    Entry,
    Failure,
    ItemResult,
    QueueName,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.counters import BrokerCounts
from tests.contracts.brokers import Fixed, ask, linked, slot
from tests.servers.redis import RunningServer, SharedServers
from tests.virtual_time import Clock

LIMITS = QueueLimits(tiers=3, max_batch=16, reserved_share=0.2, max_queue=120)
WEIGHED = replace(LIMITS, max_weight=100)
WEIGHTS = (1, 3, 6, 7, 30, 99, 100, 101, 900)
ROWS = LIMITS.counting_rows()
BULK = replace(LIMITS, promise=0.4, delayed=0.3)
BULK_WEIGHED = replace(WEIGHED, promise=0.4, delayed=0.3)
PADS = Padding(12.0, 3.0)
PADDED, PADDED_WEIGHED = replace(LIMITS, padding=PADS), replace(WEIGHED, padding=PADS)
BULK_PADDED = replace(BULK, padding=PADS)
TRACED = {
    "valkey": LIMITS,
    "weighed": WEIGHED,
    "padded": PADDED,
    "padded-weighed": PADDED_WEIGHED,
    "padded-together": PADDED.counting_rows(),
    "padded-weighed-together": PADDED_WEIGHED.counting_rows(),
    "rows": ROWS,
    "bulk": BULK,
    "bulk-weighed": BULK_WEIGHED,
    "bulk-padded": BULK_PADDED,
    "bulk-padded-weighed": replace(BULK_WEIGHED, padding=PADS),
}
COUNTS = (1, 1, 1, 2, 5, 15, 16, 17, 40)
"""Weights in rows: of most requests, of full batches, and of requests too large for a batch."""
STEPS = 120
SEEDS = range(5)
ENDS = ("finish", "finish", "finish", "fail", "hand back")
SIZES = (1 << 20, 5 << 20, MOST_OUTPUT, LONE_ROOM)
"""Bytes of outputs that are left out."""


class Pair:
    """One queue in the server and one here, driven in the same way."""

    def __init__(
        self, seed: int, link: RedisConnection, now: Any, server: RunningServer, limits: QueueLimits = LIMITS
    ) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.weights = COUNTS if limits is ROWS else WEIGHTS if limits.weighs else (1,)
        self.shapes = (0, 7, 1 << 39, *range(9, 40 if seed % 2 else 9)) if limits.rows else (0,)
        self.large = [size * PAGE // 2 * "x" for size in (5, 9, 21)] if seed % 2 else []
        self.now = now
        self.broker = RedisBroker(link, {"m": limits}, BrokerCounts(), lambda: 0.5, lease_seconds=1e6)
        self.there: Queue = self.broker._queues[QueueName("m")][0]
        self.queue = ModelQueue(limits)
        self.known: dict[str, QueuedEntry] = {}
        self.running: list[tuple[Granted, Departure]] = []
        self.idle: set[str] = set()
        self.healthy: dict[str, float] = {}
        """Times of the last heartbeats of healthy workers."""
        self.bulk: set[str] = set()
        self.ended: set[str] = set()
        self.told: set[str] = set()
        self.cursor = 0
        self.ends: tuple[str, ...] = ENDS
        """Ways in which batches end, each as likely as it is frequent here."""
        self.rest = QUIET
        """Longest pause of a queue with bulk entries."""

    async def start_clocks(self) -> None:
        await self.offer([ask(tier=tier) for tier in range(LIMITS.tiers)])

    async def enqueue(self) -> None:
        rng = self.rng
        texts = (None, None, None, None, None, "poison", f"poison {rng.randrange(9)}", *self.large)
        entries = [
            ask(
                text := rng.choice(texts),
                tier=rng.randrange(3),
                tenant=rng.choice("aab"),
                # With a caller it may need a call of its own, which changes the order.
                caller="" if text in self.large else rng.choice(("", "one", "two")),
                queue_timeout=rng.choice((0.05, 0.5, 60.0)),
                timeout=rng.choice((0.3, 2.0, 120.0)),
                weight=rng.choice(self.weights),
                shape=rng.choice(self.shapes),
            )
            for _ in range(rng.choice((1, 1, 2, 5, 20)))
        ]
        count = rng.choice((1, 1, 1, 9, 40, 600))
        nonce = rng.getrandbits(30) if count > 1 else 0
        entries[-1] = msgspec.structs.replace(entries[-1], count=count, nonce=nonce, payer=nonce)
        await self.offer(entries)

    async def offer(self, entries: list[Entry]) -> None:
        answers = await self.there.enqueue(entries)
        for entry, verdict in zip(entries, answers, strict=True):
            if (error := self.queue.culprits.knows(entry, self.now())) is not None:
                assert verdict == failures.known_culprit(error)
                continue
            offered = self.queue.offer(entry, self.now())
            if isinstance(offered, Refused):
                assert isinstance(verdict, Failure)
                expected = failures.refusal(offered)
                assert (verdict.code, verdict.message) == (expected.code, expected.message)
                assert verdict.retry_after == (None if offered.most else pytest.approx(offered.wait))
            else:
                assert verdict is None
                self.known[entry.id] = offered

    async def enqueue_bulk(self) -> None:
        rng = self.rng
        texts = (None, None, "poison", *self.large)
        apart = rng.choice((0, 0, 0, 1, 2))
        entries = [
            ask(
                rng.choice(texts), tier=LIMITS.tiers, tenant=rng.choice("aabc"), queue_timeout=1e6, timeout=1e6,
                weight=rng.choice(self.weights), shape=apart and rng.randint(1, 2),
            )
            for _ in range(rng.choice((1, 5, 20, 40)))
        ]  # fmt: skip
        verdicts = await self.there.enqueue(entries, "enqueue_bulk")
        for entry, verdict in zip(entries, verdicts, strict=True):
            offered = self.queue.offer_bulk(entry, self.now())
            assert (verdict is None) == (offered is not None)
            if offered is not None:
                self.known[entry.id] = offered
                self.bulk.add(entry.id)

    def rule(self) -> Rule:
        rng = self.rng
        return Rule(
            size=rng.randint(1, 16),
            headway=rng.choice((None, 0.0, 0.02, 0.2)),
            gap_each=rng.choice((0.0, 0.05)),
            split=rng.choice((0.0, 0.3, 9.0)),
            window=rng.choice((math.inf, 0.05, 0.4)),
            rate=rng.choice((0.0, 10.0, 1e6)),
            service=rng.choice((0.0, 0.1)),
            pace=rng.choice((0.0, 0.03)),
            tolerance=rng.choice((math.inf, 0.01)),
            gather=rng.choice((0.0, 0.02)),
            quiet=rng.choice((0.0, 0.005)),
            team=rng.choice((0.0, 1.0, 2.0)),
            speed=rng.choice((1.0, 1.7)),
            slowest=rng.choice((math.inf, 0.9, 1.1)),
            batch=rng.choice((0.0, 0.1)),
        )

    async def claim(self) -> None:
        worker, policy, limit = self.rng.choice(("gpu-0", "gpu-1")), Fixed(self.rule()), self.rng.choice((3, 16))
        self.note(self.queue.expire(self.now()))
        here = self.queue.depart(worker, limit, policy, self.now())
        there = await self.there.claim(slot(worker, "m", limit), policy, f"{self.rng.random()}", guest=False)
        if isinstance(here, Hold):
            assert not isinstance(there, Granted)
            self.idle.add(worker)
            if len(self.idle) == 1:
                assert (math.inf if there.until is None else there.until) == pytest.approx(here.until)
            return
        assert isinstance(there, Granted)
        self.idle.discard(worker)
        self.note(here.late)
        assert [entry.id for entry in there.lease.entries] == [member.entry.id for member in here.members]
        assert there.lease.reason == here.reason
        assert there.waited == pytest.approx([here.left_at - member.arrived for member in here.members])
        assert there.lease.time_left == pytest.approx(min(member.due for member in here.members) - self.now())
        self.running.append((there, here))

    async def end(self) -> None:
        if not self.running:
            return
        there, here = self.running.pop(self.rng.randrange(len(self.running)))
        how = self.rng.choice(self.ends)
        poisoned = any(str(member.entry.input).startswith("poison") for member in here.members)
        how = "fail" if poisoned and how in ("finish", "leave out") else how
        if how == "finish":
            wanted = self.queue.finish(here, self.now())
            settled = await self.broker.complete(there.lease, [ItemResult("out") for _ in there.lease.entries])
            assert settled.answered == len(wanted)
            self.note(wanted)
        elif how == "leave out":
            await self.leave_out(there, here)
        elif how == "fail":
            throw = self.rng.random()
            cause = Cause.RAISED if poisoned and self.rng.random() < 0.8 else self.rng.choice(list(Cause))
            count = len(here.members)
            places: tuple[int, ...] = ()
            if cause is Cause.RAISED and count > 1 and self.rng.random() < 0.5:
                places = tuple(sorted(self.rng.sample(range(count), self.rng.randrange(1, count))))
            failure = BatchFailure(cause, "it failed", here.worker, places=places)
            after = self.queue.fail(here, failure.cause, self.now(), lambda: throw, failures.shown(failure), places)
            again = await self.there.release(there.lease.fence // 256, there.lease, failure, throw)
            assert again == after.again
            self.note([*after.dead, *after.spent, *after.late, *after.bulk])
        else:
            self.queue.hand_back(here, self.now())
            assert await self.there.release(there.lease.fence // 256, there.lease, None) == 0

    async def leave_out(self, there: Granted, here: Departure) -> None:
        """Complete a batch without some outputs, none of them a bulk entry's: those are dealt with before."""
        others = len(here.members) - here.bulk
        places = set(self.rng.sample(range(others), self.rng.randint(min(1, others), others)))
        sizes = [self.rng.choice(SIZES) if place in places else 0 for place in range(len(here.members))]
        wanted = self.queue.finish(here, self.now(), learns=not places)
        left_out = {member.entry.id: size for member, size in zip(here.members, sizes, strict=True) if size}
        again = [(member, left_out[member.entry.id]) for member in wanted if member.entry.id in left_out]
        if again:
            self.queue.leave_out(here, again, self.now())
        items = [ItemResult(None, left_out=size) if size else ItemResult("out") for size in sizes]
        settled = await self.broker.complete(there.lease, items)
        answered = [member for member in wanted if member.entry.id not in left_out]
        assert settled == Completion(len(answered), len(here.members) - len(wanted))
        self.note(answered)

    async def withdraw(self) -> None:
        if self.known:
            entry = self.known[self.rng.choice(sorted(self.known))].entry
            if entry.id not in self.ended:
                self.ended.add(entry.id)
                self.queue.remove(self.known.pop(entry.id))
                await self.broker.withdraw([(entry.tenant, entry.id, entry.nonce)], "g")

    async def beat(self) -> None:
        status = self.rng.choice((WorkerStatus.HEALTHY, WorkerStatus.DEGRADED))
        worker = self.rng.choice(("gpu-0", "gpu-1"))
        renewed = status is WorkerStatus.HEALTHY and self.rng.random() < 0.2
        every = self.rng.choice((HEARTBEAT_EVERY, REST_EVERY))
        await self.there.heartbeat(WorkerInfo(worker_id=worker, model="m", status=status, every=every), renewed)
        if renewed:
            self.queue.culprits.renew(self.now())
        look = await self.there.look()
        before = set(self.healthy)
        self.healthy.pop(worker, None)
        if status is WorkerStatus.HEALTHY:
            self.healthy[worker] = self.now() + grace(every)
        self.healthy = {name: at for name, at in self.healthy.items() if at > self.now() - DEGRADED_AFTER}
        assert look.load.slots == len(self.healthy)
        if set(self.healthy) != before:
            self.queue.set_slots(len(self.healthy), set(self.healthy), now=self.now())

    def note(self, members: list[QueuedEntry]) -> None:
        for member in members:
            if self.known.pop(member.entry.id, None) is not None:
                self.ended.add(member.entry.id)
                self.told.add(member.entry.id)

    def bulk_figures(self) -> dict[str, float]:
        stored: bytes = self.server.command("GET", f"{self.there._key}q")
        names = SECTIONS["BULK"]
        return dict(zip(names, struct.unpack(f"<{len(names)}d", stored[-8 * len(names) :]), strict=True))

    async def compare(self) -> None:
        look = await self.there.look()
        rates = self.queue._rates
        self.queue._rates = copy.deepcopy(rates)  # Looking starts the rate clocks here, but not in the server.
        here, held = self.queue.load(self.now()), self.queue.bulk_held(self.now())
        self.queue._rates = rates
        assert look.load.paces == here.paces
        assert astuple(look.load)[:-2] == pytest.approx(astuple(here)[:-2])
        depths = self.queue.depths(self.now())
        assert [depth for depth, _ in look.tiers] == [depth for depth, _ in depths]
        if (bulk := self.queue.bulk) is not None:
            there = self.bulk_figures()
            assert there["bulk"] + there["bulk_apart"] == bulk.depth
            assert there["bulk_busy"] == bulk.busy
            assert there["bulk_credit"] == pytest.approx(bulk.credit)
            assert look.bulk is not None
            assert (look.bulk.waiting, look.bulk.delayed, look.bulk.busy) == (bulk.depth, bulk.delayed, bulk.busy)
            assert look.bulk.held == pytest.approx(held)
        assert [waited for _, waited in look.tiers] == pytest.approx([waited for _, waited in depths])
        assert (await self.there.contender("m")).waits == (self.queue.depth > 0)
        if len(self.weights) == 1:
            assert (await self.there.glance())[0] == self.queue.depth


async def trace(pair: Pair) -> None:
    rng = pair.rng
    steps = [pair.enqueue, pair.enqueue, pair.claim, pair.claim, pair.end, pair.withdraw, pair.beat]
    pauses = [0.0, 0.001, 0.02, 0.2]
    if pair.queue.limits.promise:
        steps += [pair.enqueue_bulk, pair.claim, pair.claim, pair.end, pair.end, pair.beat]
        pauses += [*pauses, *pauses, pair.rest]
    await pair.start_clocks()
    for _ in range(STEPS):
        await rng.choice(steps)()
        await pair.compare()
        await asyncio.sleep(rng.choice(pauses))
    pair.note(pair.queue.expire(pair.now()))
    await pair.there.reap(0.5)
    replies: set[str] = set()
    if pair.told:
        found, _ = await pair.broker.replies("g", 0)
        replies = {reply.id for reply in found}
    assert replies == pair.told


@pytest.mark.usefixtures("all_written")
@pytest.mark.parametrize(
    ("seed", "kind", "limits"),
    [
        *(pytest.param(seed, "valkey", TRACED[name], id=f"{seed}-{name}") for name in TRACED for seed in SEEDS),
        *(pytest.param(seed, "valkey", BULK, id=f"{seed}-bulk") for seed in range(len(SEEDS), 2 * len(SEEDS))),
        pytest.param(0, "redis", LIMITS, id="0-redis"),
    ],
)
def test_a_random_trace_comes_out_the_same(seed: int, kind: str, limits: QueueLimits, servers: SharedServers) -> None:
    play(trace, seed, kind, limits, servers)


@pytest.mark.usefixtures("all_written")
@pytest.mark.processes
@pytest.mark.parametrize("limits", [LIMITS, ROWS, BULK_PADDED], ids=["even", "rows", "bulk"])
@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_that_are_left_out_come_out_the_same(seed: int, limits: QueueLimits, servers: SharedServers) -> None:
    async def without_some(pair: Pair) -> None:
        pair.ends = (*ENDS, "leave out", "leave out")
        pair.rest = 1.0  # Far from APART_SECONDS: there and here, a different look forgets the past.
        await trace(pair)

    play(without_some, seed, "valkey", limits, servers)


@pytest.mark.usefixtures("all_written")
@pytest.mark.processes
@pytest.mark.parametrize("others", [LOOK_AHEAD - 1, LOOK_AHEAD])
def test_as_many_are_looked_at_for_one_of_a_shape(others: int, servers: SharedServers) -> None:
    async def one_of_a_shape_far_behind(pair: Pair) -> None:
        shapes = (1, *range(2, others + 2), 1)
        await pair.offer([ask(tenant="ab"[number % 2], shape=shape) for number, shape in enumerate(shapes)])
        await pair.claim()
        assert len(pair.running[0][1].members) == (2 if others < LOOK_AHEAD else 1)

    play(one_of_a_shape_far_behind, 0, "valkey", ROWS, servers)


def play(
    script: Callable[[Pair], Awaitable[None]], seed: int, kind: str, limits: QueueLimits, servers: SharedServers
) -> None:
    server = servers.of(kind)

    async def main(link: RedisConnection, now: Clock) -> None:
        pair = Pair(seed, link, now, server, limits)
        try:
            await script(pair)
        finally:
            await pair.broker.close()

    linked(server, 1, main)
