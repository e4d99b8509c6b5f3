"""The broker inside one process: `core.queue` with leases, a bell, and a mailbox for each gateway.

Everything happens in one event loop and no method suspends half-way, so each is atomic. What is lost with the
process is lost; the gateway that shares the process is lost with it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headway.brokers import verdicts
from headway.core.admission import Refused
from headway.core.departure import Hold, Load, Policy
from headway.core.health import believed
from headway.core.packing import GONE, RUNNING, Queued
from headway.core.queue import Departure, ModelQueue, QueueLimits, entries_of
from headway.model import (
    BatchFailure,
    Cause,
    DeadLetter,
    Entry,
    Failure,
    Item,
    Lease,
    Ran,
    Reply,
    Settled,
    Slot,
    Stage,
    TierDepth,
    Wait,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import DeadLetters
from headway.tally import Tally

LEASE_SECONDS = 10.0
"""How long a lease lasts unless it is extended."""
REAP_EVERY = 0.05
"""Most seconds between two calls of `reap`: how late an expiry may be."""
GATHER = 0.001
"""Seconds for which entries gather: calls cost little here."""
BELL_GRAIN = 0.001
"""Least seconds a timer is set for: event loops count in milliseconds."""


@dataclass(slots=True)
class _Running:
    lease: Lease
    departure: Departure
    expires_at: float


class _Mailbox:
    """Replies to one gateway, kept until it asks with a later cursor."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.acknowledged = 0
        self.arrival = asyncio.Event()

    def put(self, replies: Iterable[Reply]) -> None:
        self.replies += replies
        self.arrival.set()

    def acknowledge(self, cursor: int) -> Sequence[Reply]:
        """Let go of the replies up to `cursor` and return them."""
        read = max(0, cursor - self.acknowledged)
        gone = self.replies[:read]
        del self.replies[:read]
        self.acknowledged += len(gone)
        return gone


class _Bell:
    """Idle workers of one model, first come first woken, and the timer that wakes the next.

    A woken worker is `coming` until it claims. Meanwhile nobody else is woken: its claim rings for what it leaves.
    """

    def __init__(self) -> None:
        self.idle: dict[str, asyncio.Future[None]] = {}
        self.coming: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.rings_at = math.inf

    def wake(self, worker: str) -> None:
        sleeper = self.idle.pop(worker, None)
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)
            self.coming.add(worker)

    def arm(self, at: float, now: float, ring: Callable[[], None]) -> None:
        """Have `ring` called at instant `at`, or before: a timer that is set for earlier is left, as it asks again."""
        if at < self.rings_at:
            if self.timer is not None:
                self.timer.cancel()
            self.rings_at = at
            self.timer = asyncio.get_running_loop().call_later(max(at - now, BELL_GRAIN), self._rung, ring)

    def _rung(self, ring: Callable[[], None]) -> None:
        self.timer, self.rings_at = None, math.inf
        ring()


class MemoryBroker:
    """Broker for one process. See `headway.ports.Broker` for the methods and the laws.

    Arguments:
        models: what bounds the queue of each model served.
        dead: where entries go that make the model fail.
        tally: counts retries.
        clock: monotonic seconds, of the same pace as the event loop's.
        dice: uniform in [0, 1).
    """

    def __init__(
        self,
        models: dict[str, QueueLimits],
        dead: DeadLetters,
        tally: Tally,
        clock: Callable[[], float],
        dice: Callable[[], float],
    ) -> None:
        self._queues = {model: ModelQueue(limits) for model, limits in models.items()}
        self._bells = {model: _Bell() for model in models}
        self._mailboxes: dict[str, _Mailbox] = {}
        self._entries: dict[tuple[str, str], Queued] = {}
        self._running: dict[int, _Running] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._fences = itertools.count(1)
        self._dead = dead
        self._tally = tally
        self._clock = clock
        self._dice = dice

    @property
    def gather(self) -> float:
        """See Broker."""
        return GATHER

    @property
    def epoch(self) -> str:
        """See Broker. What is lost with the process is lost with all who could ask."""
        return "process"

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """See Broker."""
        now = self._clock()
        known = self._entries
        answers: list[Failure | None] = []
        for entry in entries:
            key = (entry.tenant, entry.id)
            before = known.get(key)
            if before is not None and before.entry.gateway == entry.gateway:
                answers.append(None)
                continue
            if before is not None and before.state != GONE:
                answers.append(verdicts.conflict())
                continue
            offered = self._queues[entry.model].offer(entry, now)
            if isinstance(offered, Refused):
                answers.append(verdicts.refusal(offered.wait, offered.tier_only))
            else:
                known[key] = offered
                answers.append(None)
        for model in {entry.model for entry in entries}:
            self._ring(model, now)
        return answers

    async def claim(self, slot: Slot, policy: Policy) -> Lease | Wait:
        """See Broker."""
        now = self._clock()
        queue = self._queues[slot.model]
        self._bells[slot.model].coming.discard(slot.worker)
        self._expire(slot.model, now)
        departure = queue.depart(slot.worker, slot.max_batch, policy, now)
        if isinstance(departure, Hold):
            self._ring(slot.model, now)
            return Wait(None if math.isinf(departure.until) else departure.until)
        self._send_late(queue, departure.late, now)
        lease = Lease(
            fence=next(self._fences),
            slot=slot,
            entries=entries_of(departure.members),
            reason=departure.reason,
            granted_at=now,
            expires_at=now + LEASE_SECONDS,
            patience=min(member.due for member in departure.members) - now,
        )
        self._running[lease.fence] = _Running(lease, departure, lease.expires_at)
        self._ring(slot.model, now)
        return lease

    async def listen(self, slot: Slot, until: float | None) -> None:
        """See Broker. The bell keeps its own timer, so `until` is not needed here."""
        bell = self._bells[slot.model]
        sleeper = asyncio.get_running_loop().create_future()
        bell.idle[slot.worker] = sleeper
        bell.coming.discard(slot.worker)
        self._ring(slot.model, self._clock())
        try:
            await sleeper
        except asyncio.CancelledError:
            if bell.idle.get(slot.worker) is sleeper:
                del bell.idle[slot.worker]
            bell.coming.discard(slot.worker)  # It may have been woken; it will not claim, so another should.
            self._ring(slot.model, self._clock())
            raise

    async def complete(self, lease: Lease, items: Sequence[Item]) -> Settled:
        """See Broker."""
        if len(items) != len(lease.entries):
            raise ValueError(f"{len(items)} items for a lease of {len(lease.entries)} entries: one each, in order")
        now = self._clock()
        running = self._running.pop(lease.fence, None)
        if running is None:
            return Settled(0, 0, fenced=True)
        departure = running.departure
        ran = Ran(lease.slot.worker, len(departure.members), now - departure.left_at, departure.left_at)
        wanted = self._queues[lease.slot.model].finish(departure, now)
        letters = []
        replies = []
        chosen = set(map(id, wanted)) if len(wanted) != len(departure.members) else None
        for member, item in zip(departure.members, items, strict=True):
            if chosen is not None and id(member) not in chosen:
                continue
            failure = None
            if item.output is None:
                failure = verdicts.item_failure(item)
                letters.append(_letter(member, item.error or "", "item", lease.slot.worker))
            replies.append(_reply(member, departure.left_at, item.output, failure, ran))
        self._deliver(departure.members, replies)
        for letter in letters:
            await self._dead.add(letter)
        return Settled(len(wanted), len(departure.members) - len(wanted))

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """See Broker."""
        now = self._clock()
        running = self._running.pop(lease.fence, None)
        if running is None:
            return False
        if failure is None:
            self._queues[lease.slot.model].hand_back(running.departure, now)
        else:
            await self._fail(running, failure, now)
        self._ring(lease.slot.model, now)
        return True

    async def extend(self, lease: Lease) -> bool:
        """See Broker."""
        running = self._running.get(lease.fence)
        if running is None:
            return False
        running.expires_at = self._clock() + LEASE_SECONDS
        return True

    async def cancel(self, tenant_ids: Sequence[tuple[str, str]]) -> None:
        """See Broker."""
        for key in tenant_ids:
            queued = self._entries.get(key)
            if queued is not None and queued.state != GONE:  # What is replied to stays known until that is read.
                del self._entries[key]
                self._queues[queued.entry.model].remove(queued)

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        """See Broker."""
        box = self._mailbox(gateway)
        for reply in box.acknowledge(after):
            answered = self._entries.get((reply.tenant, reply.id))
            if answered is not None and answered.state == GONE:  # It may have been asked anew.
                del self._entries[reply.tenant, reply.id]
        while not box.replies:
            box.arrival.clear()
            await box.arrival.wait()
        return list(box.replies), box.acknowledged + len(box.replies)

    async def stage(self, tenant: str, id: str) -> Stage | None:
        """See Broker."""
        queued = self._entries.get((tenant, id))
        if queued is None or queued.state == GONE:
            return None
        return Stage.PROCESSING if queued.state == RUNNING else Stage.QUEUED

    async def beat(self, worker: WorkerInfo) -> None:
        """See Broker."""
        now = self._clock()
        self._workers[worker.worker_id] = _stamped(worker, now)
        self._count_slots(worker.model, now)

    async def workers(self) -> Sequence[WorkerInfo]:
        """See Broker."""
        now = self._clock()
        return [believed(worker, now) for worker in self._workers.values()]

    async def depths(self) -> Sequence[TierDepth]:
        """See Broker."""
        now = self._clock()
        return [
            TierDepth(model, tier, depth, oldest)
            for model, queue in self._queues.items()
            for tier, (depth, oldest) in enumerate(queue.depths(now))
        ]

    async def loads(self) -> Mapping[str, Load]:
        """See Broker."""
        now = self._clock()
        return {model: queue.load(now) for model, queue in self._queues.items()}

    async def reap(self) -> float:
        """See Broker."""
        now = self._clock()
        due = now + REAP_EVERY
        for fence, running in list(self._running.items()):
            if running.expires_at <= now:
                del self._running[fence]
                message = f"worker {running.lease.slot.worker} did not report within {LEASE_SECONDS:g} s"
                lost = BatchFailure(Cause.LEASE_LOST, message, running.lease.slot.worker)
                await self._fail(running, lost, now)
            else:
                due = min(due, running.expires_at)
        for model, queue in self._queues.items():
            self._expire(model, now)
            self._count_slots(model, now)
            self._bells[model].coming.clear()  # A worker that was woken and died must not keep others asleep.
            self._ring(model, now)
            due = min(due, queue.next_due())
        return max(due - now, BELL_GRAIN)

    async def _fail(self, running: _Running, failure: BatchFailure, now: float) -> None:
        queue = self._queues[running.lease.slot.model]
        left_at = running.departure.left_at
        after = queue.fail(running.departure, now, self._dice)
        self._tally.retries[failure.cause.value] += after.again
        ran = Ran(failure.worker, len(running.departure.members), now - left_at, left_at)
        self._deliver(after.dead, [_reply(m, left_at, None, verdicts.death(failure), ran) for m in after.dead])
        spent = verdicts.spent(failure, len(running.departure.members))
        self._deliver(after.spent, [_reply(m, left_at, None, spent, ran) for m in after.spent])
        self._send_late(queue, after.late, now)
        for member in after.dead:
            await self._dead.add(_letter(member, failure.message, failure.cause.value, failure.worker))

    def _expire(self, model: str, now: float) -> None:
        queue = self._queues[model]
        self._send_late(queue, queue.expire(now), now)

    def _send_late(self, queue: ModelQueue, late: list[Queued], now: float) -> None:
        if late:
            self._deliver(late, [_reply(m, now, None, _lateness(m, queue.slots, now), None) for m in late])

    def _deliver(self, members: Sequence[Queued], replies: Sequence[Reply]) -> None:
        """Put replies into their gateways' mailboxes; `members` are of the same batch, and may be more."""
        if not replies:
            return
        gateways = {member.entry.gateway for member in members}
        if len(gateways) == 1:
            self._mailbox(gateways.pop()).put(replies)
            return
        owners = {(member.entry.tenant, member.entry.id): member.entry.gateway for member in members}
        for gateway in gateways:
            self._mailbox(gateway).put([reply for reply in replies if owners[reply.tenant, reply.id] == gateway])

    def _mailbox(self, gateway: str) -> _Mailbox:
        box = self._mailboxes.get(gateway)
        if box is None:
            box = self._mailboxes[gateway] = _Mailbox()
        return box

    def _ring(self, model: str, now: float) -> None:
        """Wake an idle worker if there is something to claim, else set the timer for when there may be."""
        bell = self._bells[model]
        if not bell.idle or bell.coming:
            return
        found = self._queues[model].wake(bell.idle, now)
        if isinstance(found, str):
            bell.wake(found)
        else:
            bell.arm(found, now, lambda: self._ring(model, self._clock()))

    def _count_slots(self, model: str, now: float) -> None:
        healthy = sum(
            worker.model == model and believed(worker, now).status is WorkerStatus.HEALTHY
            for worker in self._workers.values()
        )
        queue = self._queues[model]
        if healthy != queue.slots:
            queue.set_slots(healthy)
            self._ring(model, now)


class DeadLetterBox:
    """Dead letters in memory, the oldest go first.

    Arguments:
        capacity: most letters.
        capacity_bytes: most bytes of input, parameters and error in all of them together.
    """

    def __init__(self, capacity: int = 10_000, capacity_bytes: int = 64 << 20) -> None:
        self._letters: dict[str, DeadLetter] = {}
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0

    async def add(self, letter: DeadLetter) -> None:
        """See DeadLetters."""
        await self.remove(letter.entry.id)
        self._letters[letter.entry.id] = letter
        self._bytes += _letter_bytes(letter)
        while len(self._letters) > self._capacity or self._bytes > self._capacity_bytes:
            await self.remove(next(iter(self._letters)))

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """See DeadLetters."""
        return list(itertools.islice(reversed(self._letters.values()), limit))

    async def get(self, id: str) -> DeadLetter | None:
        """See DeadLetters."""
        return self._letters.get(id)

    async def remove(self, id: str) -> bool:
        """See DeadLetters."""
        letter = self._letters.pop(id, None)
        self._bytes -= _letter_bytes(letter) if letter is not None else 0
        return letter is not None

    async def count(self) -> int:
        """See DeadLetters."""
        return len(self._letters)


def _reply(member: Queued, left_at: float, output: str | None, failure: Failure | None, ran: Ran | None) -> Reply:
    entry = member.entry
    return Reply(entry.id, entry.tenant, output, failure, ran, left_at - member.arrived, member.attempts)


def _lateness(member: Queued, slots: int, now: float) -> Failure:
    return verdicts.lateness(now - member.arrived, member.attempts, slots, now >= member.queue_due)


def _letter_bytes(letter: DeadLetter) -> int:
    """About what a letter takes: text counts four bytes a character, the most that Python needs."""
    return 4 * (len(letter.entry.input) + len(letter.error)) + len(letter.entry.parameters)


def _letter(member: Queued, error: str, cause: str, worker: str) -> DeadLetter:
    return DeadLetter(
        entry=member.entry, error=error, cause=cause, attempts=member.attempts, worker=worker, died_at=time.time()
    )


def _stamped(worker: WorkerInfo, now: float) -> WorkerInfo:
    return msgspec.structs.replace(worker, last_heartbeat=now)
