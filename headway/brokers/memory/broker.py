"""The broker for a single process: `core.queue` plus leases, wake-ups, and a mailbox for each gateway.

Methods don't suspend midway, so each of them is atomic. The entries are lost when the process ends, but so is the only gateway that
could ask for them."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headway.brokers.reap_timer import ReapTimer
from headway.core import batch_cost, failures, rows
from headway.core.admission import Refused
from headway.core.batch_cost import is_news
from headway.core.dedup import Consequences, Dedup, task_followed
from headway.core.departure import Departure, Hold, Load, Policy
from headway.core.fair_queue import FOLLOWS, GONE, RUNNING, QueuedEntry, entries_of, queued_at
from headway.core.health import believed, degraded_at
from headway.core.locality import Contender, contender
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QUEUE_BYTES, ROOM_WAIT, SMALL, QueueLimits, Reservation, Room
from headway.core.ratelimit import Over, RateDebts, charge
from headway.core.retention import KEPT, KeptLimits
from headway.model import (
    BatchFailure,
    BatchRun,
    BulkDepth,
    Cause,
    Completion,
    CostLine,
    DeadLetter,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    QueueName,
    Reply,
    Slot,
    Submission,
    TierDepth,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker, DeadLetters, Held, NearQueue
from headway.runtime.counters import BrokerCounts
from headway.runtime.periodic import ending_at_tick

TIMER_GRAIN = 0.001  # Minimum delay of a timer in seconds, because event loops count in milliseconds.


class Wakeups:
    """Idle workers of one queue, in the order in which they became idle, and the timer that wakes the next one. A worker that was
    woken is in `coming` until it claims. If work is left after its claim, the next worker is woken."""

    def __init__(self) -> None:
        self.idle: dict[str, asyncio.Future[None]] = {}
        self.coming: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.looks_at = math.inf
        self.looks_soon = False

    def wake(self, worker: str) -> None:
        sleeper = self.idle.pop(worker, None)
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)
            self.coming.add(worker)

    def arm(self, at: float, now: float, look: Callable[[], None]) -> None:
        """Call `look` at the time `at`. A timer that is due earlier isn't changed, because its `look` sets the next timer."""
        if at < self.looks_at:
            if self.timer is not None:
                self.timer.cancel()
            self.looks_at = at
            self.timer = asyncio.get_running_loop().call_later(max(at - now, TIMER_GRAIN), self._look, look)

    def look_soon(self, look: Callable[[], None]) -> None:
        """Call `look` in a later turn of the event loop. `looks_soon` is True until then."""
        self.looks_soon = True
        asyncio.get_running_loop().call_soon(self._look_now, look)

    def _look_now(self, look: Callable[[], None]) -> None:
        self.looks_soon = False
        look()

    def _look(self, look: Callable[[], None]) -> None:
        self.timer, self.looks_at = None, math.inf
        look()


class Queues(dict[QueueName, ModelQueue]):
    """Queues by name. Each model has a queue for any version, and a queue for each known version.

    Attributes:
        for_any: each model's queue for any version, and its wake-ups.
        rows: models whose entries have rows or shapes. See `core.rows.counted`.
    """

    def __init__(self, models: Mapping[str, QueueLimits]) -> None:
        super().__init__()
        self.limits: dict[str, QueueLimits] = {}
        self.wakeups: dict[QueueName, Wakeups] = {}
        self.for_any: dict[str, tuple[ModelQueue, Wakeups]] = {}
        self.rows: set[str] = set()
        self.padded: dict[str, CostLine | None] = {}
        self.know(models)

    def know(self, models: Mapping[str, QueueLimits]) -> None:
        """Add queues for these models. Existing queues keep their limits."""
        for model in models.keys() - self.limits.keys():
            self.limits[model] = models[model]
            self.for_any[model] = self._add(QueueName(model), models[model])

    def count_rows(self, counted: Mapping[str, bool]) -> None:
        """Learn which known models have entries with rows or shapes, which matter for weights and for sharing a batch."""
        for model, counts in counted.items():
            if model in self.limits and counts is not (model in self.rows):
                (self.rows.add if counts else self.rows.discard)(model)
                for name, queue in self.items():
                    if name.model == model:
                        queue.bound(self._bounds(model))

    def fill_up(self, lines: Mapping[str, CostLine]) -> None:
        """Learn the cost of models that pad their inputs. Their batches then consist of entries of similar weight."""
        for model in self.limits:
            line = lines.get(model)
            if is_news(line, self.padded.get(model)):
                self.padded[model] = line
                for name, queue in self.items():
                    if name.model == model:
                        queue.bound(self._bounds(model))

    def _bounds(self, model: str) -> QueueLimits:
        limits = self.limits[model].filling_up(self.padded.get(model))
        return limits.counting_rows() if model in self.rows else limits

    def has(self, name: QueueName) -> bool:
        """Return True if there is a queue with this name. A queue for another version of a known model is created if needed."""
        if name in self:
            return True
        limits = self.limits.get(name.model)
        if limits is not None:
            self._add(name, self._bounds(name.model))
        return limits is not None

    def _add(self, name: QueueName, limits: QueueLimits) -> tuple[ModelQueue, Wakeups]:
        self[name], self.wakeups[name] = made = ModelQueue(limits), Wakeups()
        return made


class Running(msgspec.Struct):
    """Running batch, and the time at which its lease expires unless it is extended."""

    lease: Lease
    departure: Departure
    expires_at: float


class Mailbox:
    """Replies to one gateway, kept until it asks for later ones. But if `deliver` is set, it is called with the replies, and
    none are kept (see NearQueue)."""

    def __init__(self) -> None:
        self.deliver: Callable[[Sequence[Reply], Sequence[Any]], None] | None = None
        self.replies: list[Reply] = []
        self.acknowledged = 0
        self.arrival = asyncio.Event()

    def put(self, replies: Iterable[Reply]) -> None:
        if self.deliver is None:
            self.arrival.set()
        elif not self.replies:
            asyncio.get_running_loop().call_soon(self._hand_over, self.deliver)
        self.replies += replies

    def _hand_over(self, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        replies, self.replies = self.replies, []
        self.acknowledged += len(replies)
        deliver(replies, ())

    def acknowledge(self, cursor: int) -> Sequence[Reply]:
        """Drop the replies up to `cursor` and return them."""
        read = max(0, cursor - self.acknowledged)
        gone = self.replies[:read]
        del self.replies[:read]
        self.acknowledged += len(gone)
        return gone


def reply_to(member: QueuedEntry, left_at: float, failure: Failure, ran: BatchRun | None) -> Reply:
    """Return a reply that has no output, for an entry that waited until the time `left_at`."""
    entry = member.entry
    waited = left_at - member.arrived
    return Reply(entry.id, entry.tenant, None, failure, ran, waited, member.attempts, entry.nonce)


def lateness_of(member: QueuedEntry, slots: int, now: float) -> Failure:
    """Return the failure of an entry that is overdue at the time `now` while `slots` GPUs are serving."""
    return failures.lateness(now - member.arrived, member.attempts, slots, now >= member.queue_due, member.hung)


def letter_of(member: QueuedEntry, error: str, cause: str, ran: BatchRun) -> DeadLetter:
    """Return the dead letter of an entry that failed for the last time in this run."""
    return DeadLetter(
        entry=member.entry,
        error=error,
        cause=cause,
        attempts=member.attempts,
        worker=ran.worker,
        died_at=time.time(),
        version=ran.version,
        batch_id=ran.batch_id,
    )


def run_of(lease: Lease, departure: Departure, worker: str, now: float) -> BatchRun:
    """Return the run of a batch that ended on `worker` at the time `now`."""
    left_at, runs = departure.left_at, lease.slot.runs
    return BatchRun(worker, len(departure.members), now - left_at, left_at, runs.version, runs.target)


def forget_read(entries: dict[tuple[str, str], QueuedEntry], gateway: str, read: Iterable[Reply]) -> None:
    """Forget the entries whose replies a gateway has read, unless they were submitted again."""
    for reply in read:
        key = reply.tenant, reply.id
        answered = entries.get(key)
        if answered is not None and answered.state == GONE:
            entry = answered.entry
            if entry.nonce == reply.nonce and entry.gateway == gateway:
                del entries[key]


_OUTPUT, _TOKENS, _QUEUE = attrgetter("output"), attrgetter("tokens"), attrgetter("queue")
_LEFT_OUT = attrgetter("left_out")
_DUE, _HELD, _KEY, _GATEWAY = attrgetter("due"), attrgetter("held"), attrgetter("held.key"), attrgetter("entry.gateway")
_MODEL = attrgetter("model")

LEASE_SECONDS = 10.0
REAP_EVERY = 0.05  # Maximum seconds between two calls to `reap` without a rest, and maximum delay of an expiry.
REST_SECONDS = 1.0  # Maximum seconds between two calls to `reap` with a rest.
LOOK_AGAIN = 0.05  # Seconds until entries that are held back from an idle worker are checked again.
COMING_SECONDS = 0.05  # Seconds within which a woken worker must claim. After that, another one is woken.
LINGER = 0.001


class MemoryBroker(Broker, NearQueue):
    """Broker for one process. Its methods and guarantees are in `headway.ports.Broker`. `clock` must advance like the event
    loop's clock. `queue_bytes` limits the total size of entries that have no outcome yet."""

    def __init__(
        self,
        models: dict[str, QueueLimits],
        dead: DeadLetters,
        counters: BrokerCounts,
        clock: Callable[[], float],
        rng: Callable[[], float],
        kept: KeptLimits = KEPT,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._queues = Queues(models)
        self._wakeups = self._queues.wakeups
        self._mailboxes = defaultdict[str, Mailbox](Mailbox)
        self._entries: dict[tuple[str, str], QueuedEntry] = {}
        self._rate_debts = RateDebts()
        self._room = Room(queue_bytes)
        self._dedup = Dedup(kept)
        self._running: dict[int, Running] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._fences = itertools.count(1)
        self._dead = dead
        self._counters = counters
        self._clock = clock
        self._rng = rng
        self._reaping = ReapTimer(self._reap)

    @property
    def linger(self) -> float:
        return LINGER

    @property
    def epoch(self) -> str:
        """See Broker. Constant, because the state is only lost when the process ends, and its gateway ends too."""
        return "process"

    @property
    def memory_pressure(self) -> bool:
        """See Broker. Always False, because the limit for each tenant leaves room for other tenants."""
        return False

    @property
    def near(self) -> MemoryBroker:
        return self

    @property
    def apart_from(self) -> float:
        """See Broker. Infinite, because values aren't sent to another process."""
        return math.inf

    @property
    def kept(self) -> KeptLimits:
        return self._dedup.limits

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        now, answers, turned_away = self._clock(), list[Failure | None](), dict[int, Failure]()
        if not all(map(_MODEL, entries)):
            entries = list(map(self._placed, entries))
        for entry in entries:
            before = self._entries.get((entry.tenant, entry.id))
            if before is not None and (before.state != GONE or _is_of(before, entry)):
                answers.append(None if _is_of(before, entry) else failures.conflict())
            elif turned_away and entry.payer in turned_away:
                answers.append(turned_away[entry.payer])
            else:
                answers.append(failure := self._admit(entry, now))
                if failure is not None and entry.count > 1:
                    turned_away[entry.nonce] = failure
        for name in set(map(_QUEUE, entries)) & self._queues.keys():
            self._wake_idle(name, now)
            self._reaping.move_up(self._queues[name].next_due(), now)
        return answers

    async def enqueue_bulk(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        now = self._clock()
        answers = [self._admit_bulk(entry, now) for entry in entries]
        for name in set(map(_QUEUE, entries)) & self._queues.keys():
            self._look_soon(name)
        return answers

    def _admit_bulk(self, entry: Entry, now: float) -> Failure | None:
        key = entry.tenant, entry.id
        before = self._entries.get(key)
        if before is not None and (before.state != GONE or _is_of(before, entry)):
            return None if _is_of(before, entry) else failures.conflict()
        if not self._queues.has(entry.queue):
            return failures.not_here(entry.model)
        queued = self._queues[entry.queue].offer_bulk(entry, now)
        if queued is None:
            return failures.enough_bulk()
        self._entries[key] = queued
        return None

    def take(self, entry: Entry) -> Failure | None:
        before = self._entries.get((entry.tenant, entry.id))
        if before is not None and (before.state != GONE or _is_of(before, entry)):
            return None if _is_of(before, entry) else failures.conflict()
        return self._take_rarely(self._placed(entry), self._clock())

    def enter(self, held: Held, now: float) -> Failure | None:
        entry = held.entry
        places = self._queues.for_any.get(entry.model)
        size = len(entry.input)
        if places is None or size > SMALL or (entry.parameters and size + len(entry.parameters) > SMALL):
            return self._take_rarely(entry, now, held)
        queue, wakeups = places
        limits = entry.limits
        if limits:
            judged = charge(limits, self._rate_debts.tats, now)
            if isinstance(judged, Over):
                return failures.over(judged)
            charged = judged
        if entry.dedup_keys and not (flights := self._dedup.new_flights(entry)):
            return self._take_rarely(entry, now, held)
        offered = queue.offer_small(entry, now, held)
        if offered is None:
            return self._take_rarely(entry, now, held)
        self._entries[held.key] = offered
        if offered.queue_due < self._reaping.at:
            self._reaping.move_up(offered.queue_due, now)
        if entry.dedup_keys:
            self._dedup.start(offered, flights)
        if limits:
            tats = self._rate_debts.tats
            for limit, tat in zip(limits, charged):  # noqa: B905 - a check of the lengths would double the time
                tats[limit.id] = tat
        if wakeups.idle and not (wakeups.coming or wakeups.looks_soon):
            self._look_soon(entry.queue)
        return None

    def _take_rarely(self, entry: Entry, now: float, held: Held | None = None) -> Failure | None:
        """Slow path of `enter`, for an entry that may be refused, is large, or may share an answer."""
        failure = self._admit(entry, now)
        if failure is None:
            # An entry that already has its outcome isn't in `_entries` any more.
            if held is not None and (queued := self._entries.get(held.key)) is not None:
                queued.held = held
            self._reaping.move_up(self._queues[entry.queue].next_due(), now)
            self._look_soon(entry.queue)
        return failure

    def _placed(self, entry: Entry) -> Entry:
        """Return the entry with a model. A follower without one gets any model, because all queues know the same tasks."""
        if entry.model or not task_followed(entry):
            return entry
        return msgspec.structs.replace(entry, model=next(iter(self._queues)).model)

    def _look_soon(self, name: QueueName) -> None:
        """Wake an idle worker in a later turn of the event loop. This is done once for all entries that arrive by then."""
        wakeups = self._wakeups[name]
        if wakeups.idle and not (wakeups.coming or wakeups.looks_soon):
            wakeups.look_soon(lambda: self._wake_idle(name, self._clock()))

    def knows(self, tenant: str, id: str) -> bool:
        return self._dedup.outcome(tenant, id, self._clock()) is not None

    def attach(self, gateway: str, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        self._mailboxes[gateway].deliver = deliver

    def rate_limit_debt(self, limit: Limit) -> float:
        tat = self._rate_debts.tats.get(limit.id)
        if tat is None:
            return 0.0
        owed = tat - self._clock()
        return owed if owed > 0.0 else 0.0

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        now, name = self._clock(), slot.queue
        if not self._queues.has(name):
            return NoWork(None)
        queue = self._queues[name]
        self._wakeups[name].coming.discard(slot.worker)
        self._send_late(queue, queue.expire(now), now)
        departure = queue.depart(slot.worker, slot.max_batch, policy, now)
        if isinstance(departure, Hold):
            self._wake_idle(name, now)
            return NoWork(None if math.isinf(departure.until) else departure.until)
        self._send_late(queue, departure.late, now)
        time_left = min(map(_DUE, departure.members)) - now
        lease = Lease(
            fence=next(self._fences),
            slot=slot,
            entries=entries_of(departure.members),
            reason=departure.reason,
            granted_at=now,
            expires_at=now + LEASE_SECONDS,
            time_left=time_left,
            attempt=departure.attempts,
        )
        self._running[lease.fence] = Running(lease, departure, lease.expires_at)
        self._wake_idle(name, now)
        return lease

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        """See Broker. `until` is ignored, because the wake-ups have their own timer."""
        wakeups, name = self._wakeups[slot.queue], slot.queue
        wakeups.idle[slot.worker] = sleeper = asyncio.get_running_loop().create_future()
        wakeups.coming.discard(slot.worker)
        self._wake_idle(name, self._clock())
        try:
            await sleeper
        except asyncio.CancelledError:
            if wakeups.idle.get(slot.worker) is sleeper:
                del wakeups.idle[slot.worker]
            wakeups.coming.discard(slot.worker)
            self._wake_idle(name, self._clock())  # This worker may have been woken, but won't claim.
            raise

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        return [contender(slot.model, self._queues[slot.queue], self._clock()) for slot in slots]

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        if len(items) != len(lease.entries):
            raise ValueError(f"{len(items)} items for {len(lease.entries)} entries; pass one item per entry, in order")
        now = self._clock()
        running = self._running.pop(lease.fence, None)
        if running is None:
            return Completion(0, 0, fenced=True)
        departure = running.departure
        ran = run_of(lease, departure, lease.slot.worker, now)
        wanted = self._queues[lease.slot.queue].finish(departure, now, learns=not any(map(_LEFT_OUT, items)))
        if not departure.bulk and self._settle(departure, wanted, items, ran):
            return Completion(len(wanted), 0)
        members, results = self._unsettled(departure, wanted, items, ran)
        again = [(member, item.left_out) for member, item in zip(members, results, strict=True) if item.left_out]
        if again:
            kept = [(member, item) for member, item in zip(members, results, strict=True) if not item.left_out]
            members, results = [member for member, _ in kept], [item for _, item in kept]
            self._queues[lease.slot.queue].leave_out(departure, again, now)
            self._wake_idle(lease.slot.queue, now)
        await self._answer_each(departure, members, results, ran, now)
        if again or departure.rest is not None:
            self._reaping.move_up(self._queues[lease.slot.queue].next_due(), now)
        return Completion(len(wanted) - len(again), len(departure.members) - len(wanted))

    def _unsettled(
        self, departure: Departure, wanted: Sequence[QueuedEntry], items: Sequence[ItemResult], ran: BatchRun
    ) -> tuple[Sequence[QueuedEntry], Sequence[ItemResult]]:
        """If the batch has bulk entries, settle all others by the fast path if possible. Return the entries that still need
        replies, with their items."""
        if len(wanted) != len(items):
            chosen = set(map(id, wanted))
            return wanted, [item for member, item in zip(departure.members, items, strict=True) if id(member) in chosen]
        others = len(items) - departure.bulk
        if departure.bulk and self._settle(departure, wanted[:others], items[:others], ran):
            return wanted[others:], items[others:]
        return wanted, items

    async def _answer_each(
        self,
        departure: Departure,
        members: Sequence[QueuedEntry],
        items: Sequence[ItemResult],
        ran: BatchRun,
        now: float,
    ) -> None:
        """Reply to each entry. Add a dead letter for each entry that failed individually, except bulk entries."""
        letters, replies, left_at, attempts = [], [], departure.left_at, departure.attempts
        bulk = set(map(id, departure.members[-departure.bulk :])) if departure.bulk else frozenset[int]()
        for member, item in zip(members, items, strict=True):
            entry, failure, member.held = member.entry, None, None
            if item.output is None:
                failure = failures.item_failure(item)
                if not (item.elsewhere or id(member) in bulk):
                    letters.append(letter_of(member, item.error or "", "item", ran))
            waited = left_at - member.arrived
            replies.append(Reply(
                entry.id, entry.tenant, item.output, failure, ran, waited, attempts, entry.nonce, tokens=item.tokens
            ))  # fmt: skip
        self._deliver(members, replies, now)
        for letter in letters:
            await self._dead.add(letter)

    def _settle(
        self, departure: Departure, wanted: Sequence[QueuedEntry], items: Sequence[ItemResult], ran: BatchRun
    ) -> bool:
        """Fast path for plain outputs: settle the entries and return True if they are all from one gateway in this process.
        Return False if they need the slow path."""
        outputs, held = list(map(_OUTPUT, items)), list(map(_HELD, wanted))
        beside = departure.rest is not None or any(map(_TOKENS, items))
        gateways = set(map(_GATEWAY, wanted))
        if beside or len(wanted) != len(items) or None in held or None in outputs or len(gateways) != 1:
            return False
        deliver = self._mailboxes[gateways.pop()].deliver
        shared = [member for member in wanted if member.entry.dedup_keys] if self._dedup.active else ()
        if deliver is None or (shared and not self._dedup.answers_alone(shared, max(map(len, outputs)))):
            return False
        left_at, attempts = departure.left_at, departure.attempts
        replies = [
            Reply((entry := member.entry).id, entry.tenant, output, None, ran, left_at - member.arrived, attempts, entry.nonce)
            for member, output in zip(wanted, outputs, strict=True)
        ]  # fmt: skip
        for member in map(self._entries.pop, map(_KEY, wanted)):
            member.held = None  # The queue may remember the entry, and must not keep its output.
        if self._room.in_use:
            for member in wanted:
                member.reservation = None
        asyncio.get_running_loop().call_soon(deliver, replies, held)
        if shared:
            ended = [(member, reply) for member, reply in zip(wanted, replies, strict=True) if member.entry.dedup_keys]
            self._dedup.end_all(ended, self._clock())
        return True

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        now = self._clock()
        running = self._running.pop(lease.fence, None)
        if running is None:
            return False
        if failure is None:
            self._queues[lease.slot.queue].hand_back(running.departure, now)
        else:
            await self._fail(running, failure, now)
        self._wake_idle(lease.slot.queue, now)
        self._reaping.move_up(self._queues[lease.slot.queue].next_due(), now)
        return True

    async def extend(self, lease: Lease) -> bool:
        if running := self._running.get(lease.fence):
            running.expires_at = self._clock() + LEASE_SECONDS
        return running is not None

    async def withdraw(self, submissions: Sequence[Submission], gateway: str) -> None:
        for tenant, id, nonce in submissions:
            queued = self._entries.get((tenant, id))
            if queued is None or queued.state == GONE:
                continue  # An answered entry stays known until its reply is read.
            if queued.entry.nonce == nonce and queued.entry.gateway == gateway:
                self._let_go(queued)

    async def probe(self, gateway: str) -> None:
        """See Broker. A broker in this process is always reachable."""

    async def takes_reads_only(self) -> bool:
        return False

    async def cancel_task(self, tenant: str, id: str) -> None:
        now = self._clock()
        known = self._dedup.outcome(tenant, id, now)
        if isinstance(known, QueuedEntry):
            self._let_go(known, deleted=True)
            entry = known.entry
            reply = Reply(id, tenant, None, failures.cancelled(), queued=now - known.arrived, nonce=entry.nonce)
            ended = self._entries[tenant, id] = queued_at(entry, now)  # Until the gateway has read the reply.
            self._post([(ended, reply)])
        else:
            self._dedup.forget(tenant, id)

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        box = self._mailboxes[gateway]
        forget_read(self._entries, gateway, box.acknowledge(after))
        while not box.replies:
            box.arrival.clear()
            await box.arrival.wait()
        return list(box.replies), box.acknowledged + len(box.replies)

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        owner = tenant or next((owner for owner, known in self._entries if known == id), "")
        queued = self._entries.get((owner if tenant is None else tenant, id))
        return None if queued is None or queued.state == GONE else self._state(queued)

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        known = self._dedup.outcome(tenant, id, self._clock())
        return self._state(known) if isinstance(known, QueuedEntry) else known

    async def heartbeat(self, worker: WorkerInfo) -> None:
        now, before = self._clock(), self._workers.get(worker.worker_id)
        self._workers[worker.worker_id] = msgspec.structs.replace(worker, last_heartbeat=now)
        self._queues.count_rows(rows.counted(self._workers.values()))
        if worker.cost is not None or self._queues.padded:
            self._queues.fill_up(batch_cost.padded(self._workers.values()))
        if self._queues.has(worker.queue):
            if before is not None and before.backend != worker.backend:
                self._queues[worker.queue].culprits.renew(now)
            self._queues[worker.queue].service.warm_up(worker.warm_up)
            self._count_slots(worker.queue, now)

    async def workers(self) -> Sequence[WorkerInfo]:
        now = self._clock()
        return [believed(worker, now) for worker in self._workers.values()]

    async def depths(self) -> Sequence[TierDepth]:
        now = self._clock()
        return [
            TierDepth(name.model, tier, depth, oldest, name.version)
            for name, queue in self._queues.items()
            for tier, (depth, oldest) in enumerate(queue.depths(now))
        ]

    async def bulk_queues(self) -> Sequence[BulkDepth]:
        now = self._clock()
        return [
            BulkDepth(name.model, bulk.depth, bulk.delayed, name.version, bulk.busy, queue.bulk_held(now))
            for name, queue in self._queues.items()
            if (bulk := queue.bulk) is not None
        ]

    async def loads(self) -> Mapping[QueueName, Load]:
        now = self._clock()
        return {name: queue.load(now) for name, queue in self._queues.items()}

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        """See Broker. Existing queues keep their bounds, because their workers are in this process."""
        self._queues.know(models)

    async def reap(self, rest: float = 0.0) -> float:
        """See Broker. It only matters whether `rest` is 0, because nobody else reaps."""
        due, now = await self._reap()
        if not rest:
            return max(min(due - now, REAP_EVERY), TIMER_GRAIN)
        pause = ending_at_tick(max(due - now, TIMER_GRAIN))
        self._reaping.tell(now + pause)
        return pause

    async def _reap(self) -> tuple[float, float]:
        """Reap. Returns the time at which the next call is due, and the current time."""
        now = self._clock()
        self._rate_debts.tidy(now)
        due = now + REST_SECONDS
        for fence, running in list(self._running.items()):
            if running.expires_at <= now:
                del self._running[fence]
                message = f"worker {running.lease.slot.worker} did not report within {LEASE_SECONDS:g} s"
                lost = BatchFailure(Cause.LEASE_LOST, message, running.lease.slot.worker)
                await self._fail(running, lost, now)
            else:
                due = min(due, running.expires_at)
        for queued in self._dedup.overdue(now):
            if queued in self._dedup.followers:  # An earlier entry of this loop may have dropped it.
                left = self._dedup.leave(queued)
                self._end([(queued, reply_to(queued, now, lateness_of(queued, 1, now), None))], now, late=True)
                self._follow_up(left, now)
        for name, queue in self._queues.items():
            self._send_late(queue, queue.expire(now), now)
            self._count_slots(name, now)
            self._wakeups[name].coming.clear()  # If a woken worker has died, others must be woken nevertheless.
            self._wake_idle(name, now)
            due = min(due, queue.next_due())
        silent = map(degraded_at, self._workers.values())
        return min(due, self._dedup.followers.next_due(), *(at for at in silent if at > now)), now

    def _admit(self, entry: Entry, now: float) -> Failure | None:
        if not self._queues.has(entry.queue):
            return failures.not_here(entry.model)
        if entry.digest:
            entry = self._dedup.with_id(entry, now)
        limits = entry.limits
        charged = charge(limits, self._rate_debts.tats, now) if limits else ()
        if isinstance(charged, Over):
            return failures.over(charged)
        reservation = None
        if len(entry.input) + len(entry.parameters) > SMALL and (reservation := self._room.take(entry)) is None:
            return failures.scarcity(ROOM_WAIT)
        refusal = self._join(entry, now) if entry.dedup_keys else self._offer(entry, now)
        if limits and (refusal is None or refusal.reason == failures.CULPRIT):
            tats = self._rate_debts.tats
            for limit, tat in zip(limits, charged):  # noqa: B905 - as in `enter`
                tats[limit.id] = tat
        if reservation is not None and refusal is None:
            self._give(reservation, entry)
        return refusal

    def _give(self, reservation: Reservation, entry: Entry) -> None:
        """Assign a reservation to an admitted entry, unless the entry already has its outcome."""
        if (queued := self._entries.get((entry.tenant, entry.id))) is not None:
            reservation.give_to(queued)

    def _offer(self, entry: Entry, now: float) -> Failure | None:
        queue = self._queues[entry.queue]
        if queue.culprits.active and (error := queue.culprits.knows(entry, now)) is not None:
            return failures.known_culprit(error)
        offered = queue.offer(entry, now)
        if isinstance(offered, Refused):
            return failures.refusal(offered)
        self._entries[entry.tenant, entry.id] = offered
        if entry.dedup_keys:
            self._dedup.begin(offered, now)
        return None

    def _join(self, entry: Entry, now: float) -> Failure | None:
        queued = queued_at(entry, now)
        joined = self._dedup.join(queued, now)
        if joined is None:
            return self._offer(entry, now)
        if isinstance(joined, Failure):
            return joined
        queued.state = FOLLOWS
        self._entries[entry.tenant, entry.id] = queued
        self._reaping.move_up(queued.due, now)
        self._follow_up(joined, now)
        return None

    def _let_go(self, queued: QueuedEntry, *, deleted: bool = False) -> None:
        """Drop an entry that nobody is waiting for any more. If it was `deleted`, its outcome isn't kept either."""
        entry = queued.entry
        del self._entries[entry.tenant, entry.id]
        if self._dedup.active and entry.dedup_keys:
            self._follow_up(self._dedup.cancel(queued, deleted=deleted), self._clock())
        else:
            self._queues[entry.queue].remove(queued)
            queued.reservation = None

    def _follow_up(self, consequences: Consequences, now: float) -> None:
        for queued in consequences.idle:
            self._queues[queued.entry.queue].remove(queued)
        if consequences.replies:
            self._post(consequences.replies)
        for queued in consequences.reoffered:
            self._offer_anew(queued, now)

    def _offer_anew(self, queued: QueuedEntry, now: float) -> None:
        """Offer a follower again, with its remaining time, because its original timed out."""
        entry, left = queued.entry, queued.due - now
        refusal = None
        reservation, queued.reservation = queued.reservation, None  # The new entry takes it over.
        if left > 0.0:
            wait = min(entry.queue_timeout, left)
            refusal = self._join(msgspec.structs.replace(entry, timeout=left, queue_timeout=wait), now)
            if refusal is None and isinstance(reservation, Reservation):
                self._give(reservation, entry)
        else:
            refusal = lateness_of(queued, 1, now)
        if refusal is not None:
            self._dedup.begin(queued, now)  # If it is a task, the refusal is its outcome.
            self._end([(queued, reply_to(queued, now, refusal, None))], now)
        self._wake_idle(entry.queue, now)
        self._reaping.move_up(self._queues[entry.queue].next_due(), now)

    def _state(self, queued: QueuedEntry) -> EntryState:
        return EntryState.PROCESSING if self._dedup.original_of(queued).state == RUNNING else EntryState.QUEUED

    async def _fail(self, running: Running, failure: BatchFailure, now: float) -> None:
        queue = self._queues[running.lease.slot.queue]
        left_at = running.departure.left_at
        after = queue.fail(running.departure, failure.cause, now, self._rng, failures.shown(failure), failure.places)
        self._counters.retries[failure.cause.value] += after.again
        ran = run_of(running.lease, running.departure, failure.worker, now)
        death, spent = failures.death(failure), failures.spent(failure, len(running.departure.members))
        for members, why in (after.dead, death), (after.spent, spent), (after.bulk, death):
            self._deliver(members, [reply_to(member, left_at, why, ran) for member in members], now)
        self._send_late(queue, after.late, now)
        for member in after.dead:
            await self._dead.add(letter_of(member, failure.message, failure.cause.value, ran))

    def _send_late(self, queue: ModelQueue, late: list[QueuedEntry], now: float) -> None:
        replies = [reply_to(m, now, lateness_of(m, queue.slots, now), None) for m in late]
        self._deliver(late, replies, now, late=True)

    def _deliver(
        self, members: Sequence[QueuedEntry], replies: Sequence[Reply], now: float, *, late: bool = False
    ) -> None:
        """Put the members' replies into their gateways' mailboxes. `late` means that the replies report timeouts."""
        if not replies:
            return
        if self._dedup.active:
            self._end(list(zip(members, replies, strict=True)), now, late=late)
            return
        if self._room.in_use:
            for member in members:
                member.reservation = None
        gateways = {member.entry.gateway for member in members}
        if len(gateways) == 1:
            box, entries = self._mailboxes[gateways.pop()], self._entries
            if box.deliver is not None:
                for reply in replies:
                    entries.pop((reply.tenant, reply.id), None)
            box.put(replies)
            return
        for gateway in gateways:
            owned = [reply for member, reply in zip(members, replies, strict=True) if member.entry.gateway == gateway]
            if self._mailboxes[gateway].deliver is not None:
                forget_read(self._entries, gateway, owned)
            self._mailboxes[gateway].put(owned)

    def _end(self, ended: Sequence[tuple[QueuedEntry, Reply]], now: float, *, late: bool = False) -> None:
        """End entries and their followers in order, because a follower may run again, and the next follower may join it."""
        for queued, reply in ended:
            wanted = not self._dedup.unwanted(queued)
            consequences = self._dedup.end(queued, reply, now, late=late)
            if wanted:
                consequences.replies.insert(0, (queued, reply))
            self._follow_up(consequences, now)

    def _post(self, replies: Sequence[tuple[QueuedEntry, Reply]]) -> None:
        for queued, reply in replies:
            queued.state, queued.reservation = GONE, None
            box = self._mailboxes[queued.entry.gateway]
            if box.deliver is not None:
                forget_read(self._entries, queued.entry.gateway, (reply,))
            box.put((reply,))

    def _wake_idle(self, name: QueueName, now: float) -> None:
        """Wake an idle worker if there is work. Otherwise set a timer for the next time at which there may be work."""
        if not (wakeups := self._wakeups[name]).idle or wakeups.coming:
            return
        next_look = self._queues[name].wake(wakeups.idle, now)
        if isinstance(next_look, str):
            wakeups.wake(next_look)
            self._reaping.move_up(now + COMING_SECONDS, now)  # The worker may never claim.
        else:
            again = next_look if math.isinf(next_look) else min(next_look, now + LOOK_AGAIN)
            wakeups.arm(again, now, lambda: self._wake_idle(name, self._clock()))

    def _count_slots(self, name: QueueName, now: float) -> None:
        own = [believed(worker, now) for worker in self._workers.values() if worker.queue == name]
        cold = [worker.runs.target for worker in own if worker.status is WorkerStatus.COLD]
        own = [worker for worker in own if worker.status is WorkerStatus.HEALTHY]
        healthy = {worker.worker_id: worker.share for worker in own}
        queue, whole = self._queues[name], math.fsum(healthy.values())
        self._dedup.serve(name, [worker.runs.target for worker in own], cold)
        if healthy.keys() != queue.factors.workers or (healthy and whole != queue.whole_slots):
            queue.set_slots(len(healthy), healthy, whole, now)
            self._wake_idle(name, now)


def _is_of(queued: QueuedEntry, entry: Entry) -> bool:
    """Return True if `entry` is the same submission as the queued entry."""
    return queued.entry.nonce == entry.nonce and queued.entry.gateway == entry.gateway
