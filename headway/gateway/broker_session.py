"""A gateway's session with one broker. It sends entries, receives replies, and bridges outages.

    submit ──▶ outbox ──intake──▶ enqueue          replies ──returns──▶ events
                 ▲                   │ no answer
                 └───────────────────┘ offered again with the remaining time

Entries that arrive during a call are sent together in the next one. If there are too many for one call, tenants take turns. Large
entries are sent in separate calls, so that small entries don't have to wait for them.

A call that got no answer may have succeeded, so its entries are offered again under the same ids until the broker answers. While
the broker is unreachable, the intake probes it with growing pauses. After `down_after` seconds the session reports `Down`."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import msgspec

from headway import errors
from headway.core.dedup import is_task, task_followed
from headway.core.retry import backoff
from headway.core.service_model import ArrivalRate
from headway.core.tenant_turns import TenantTurns
from headway.errors import BrokerUnavailable
from headway.model import Entry, EntryState, Failure, Reply, Submission
from headway.ports import RequestQueue
from headway.runtime.availability import Availability
from headway.runtime.fair_turns import FairSlots
from headway.runtime.periodic import until_tick
from headway.runtime.supervisor import Supervisor

AT_ONCE = 8  # Maximum number of large entries in one call.
MOST_BYTES = 8 << 20  # Maximum bytes in a call with large entries. The broker stores all of them before it admits any.
MOST_COPIED = 1 << 19  # Maximum bytes of inputs and parameters in a call with small entries.
SPREAD = 0.25  # Maximum random delay of a resubmission in seconds, because all gateways resubmit at the same time.
REST = 1.0  # Minimum seconds between resubmissions, in case the broker comes and goes.
CHUNK = 64  # Maximum number of entries in one call that resubmits or withdraws.
_INPUT, _PARAMETERS = attrgetter("input"), attrgetter("parameters")


class Outbox:
    """Waiting entries by nonce. Each tenant's entries stay in order."""

    __slots__ = ("_lines", "fresh", "later")

    def __init__(self) -> None:
        self.fresh: dict[int, Entry] = {}  # Entries added since the last `take`, by nonce. Callers add them here.
        self.later = 0  # Number of entries that the last `take` left.
        self._lines: dict[str, OrderedDict[int, Entry]] = {}  # What the last `take` left. The first tenant is next.

    def __len__(self) -> int:
        return len(self.fresh) + self.later

    def __iter__(self) -> Iterator[Entry]:
        return chain(*(line.values() for line in self._lines.values()), self.fresh.values())

    def take(self, most: int) -> list[Entry]:
        """Remove and return up to `most` entries for the next call, one from each tenant in turn."""
        if not self.later and len(self.fresh) <= most:  # The common case.
            taken, self.fresh = list(self.fresh.values()), {}
            return taken
        for entry in self.fresh.values():
            self._line(entry.tenant)[entry.nonce] = entry
        self.later += len(self.fresh)
        taken, self.fresh = [], {}
        while self._lines and len(taken) < most:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            taken.append(line.popitem(last=False)[1])
            if line:
                self._lines[tenant] = line  # behind the other tenants
        self.later -= len(taken)
        return taken

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Put entries back, ahead of their tenants' other entries."""
        for entry in reversed(entries):
            line = self._line(entry.tenant)
            self.later += entry.nonce not in line
            line[entry.nonce] = entry
            line.move_to_end(entry.nonce, last=False)

    def drop(self, submission: Submission) -> bool:
        """Drop a submission's entry. Returns False if it isn't in the outbox."""
        tenant, _, nonce = submission
        if self.fresh.pop(nonce, None) is not None:
            return True
        line = self._lines.get(tenant)
        if line is None or line.pop(nonce, None) is None:
            return False
        if not line:
            del self._lines[tenant]
        self.later -= 1
        return True

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        remaining = list(filter(wanted, self))
        self.fresh, self._lines, self.later = {}, {}, 0
        self.put_back(remaining)

    def _line(self, tenant: str) -> OrderedDict[int, Entry]:
        return self._lines.setdefault(tenant, OrderedDict())


class LargeEntries:
    """Large entries, and the loop that sends them with `offer`. If `offer` fails, it puts them back into the outbox."""

    def __init__(self, offer: Callable[[Sequence[Entry]], Awaitable[None]]) -> None:
        self.waiting = TenantTurns[Entry]()
        self._offer = offer
        self._work = asyncio.Event()
        self._offering: list[Entry] = []

    def split(self, entries: list[Entry], most: float) -> tuple[list[Entry], list[Entry]]:
        """Take over large entries, and the followers of their tasks. Return two lists of the other entries: those for the next
        call, and those for later."""
        together = sum(map(len, map(_INPUT, entries))) + sum(map(len, map(_PARAMETERS, entries)))
        if together <= min(most, MOST_COPIED) and not (self.waiting or self._offering):  # The common case.
            return entries, []
        others = []
        for entry in entries:
            if len(entry.input) + len(entry.parameters) > most or self._has(entry.tenant, task_followed(entry)):
                self.waiting.add(entry.tenant, entry)
                self._work.set()
            else:
                others.append(entry)
        entries = others
        if len(entries) * most > MOST_COPIED:
            room = MOST_COPIED
            for position, entry in enumerate(entries):
                if room <= 0:
                    return entries[:position], entries[position:]
                room -= len(entry.input) + len(entry.parameters)
        return entries, []

    def _has(self, tenant: str, id: str) -> bool:
        waiting = (*self._offering, *self.waiting)
        return bool(id) and any(entry.id == id and entry.tenant == tenant for entry in waiting)

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._offering = self._next()
            if not self.waiting:
                self._work.clear()
            try:
                await self._offer(self._offering)
            except BrokerUnavailable:
                pass
            finally:
                self._offering = []

    def _next(self) -> list[Entry]:
        chosen, size = list[Entry](), 0
        while self.waiting and len(chosen) < AT_ONCE and size < MOST_BYTES:
            entry = self.waiting.take()
            chosen.append(entry)
            size += len(entry.input) + len(entry.parameters)
        return chosen


class Resubmitter:
    """Offers pending entries again after the broker may have lost them. Offering is idempotent by (tenant, id), so entries
    that the broker still has don't change. `held` returns the offered entries that haven't been answered. `open` is True
    from `ask` until all of them have been offered again."""

    def __init__(
        self,
        held: Callable[[], Sequence[Entry]],
        offer: Callable[[Sequence[Entry]], Awaitable[None]],
        rng: Callable[[], float],
    ) -> None:
        self._held, self._offer, self._rng = held, offer, rng
        self._due = asyncio.Event()
        self.open = False

    def ask(self) -> None:
        """Request that all entries are offered again soon."""
        self.open = True
        self._due.set()

    async def run(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(self._rng() * SPREAD)
            self._due.clear()
            held = self._held()
            for start in range(0, len(held), CHUNK):
                try:
                    await self._offer(held[start : start + CHUNK])
                except BrokerUnavailable:
                    break  # The session asks again when the broker is back.
            else:
                self.open = self._due.is_set()
            await asyncio.sleep(REST)


LARGE = 1 << 16  # Bytes of an output that gets its own turn of the event loop. Writing it takes about 1 ms.
_OUTPUT = attrgetter("output")
RETRY_AFTER = (1.0, 30.0)  # Limits of Retry-After during an outage, in seconds. It is the outage's duration so far.
WORTH_GATHERING = 2.0  # Calls wait for more entries only if at least this many arrive between two calls.
MOST_OFFERED = 64  # Maximum entries per call. A call blocks the broker, and the gateway handles its result in one turn.
PROBE_AFTER = 0.5  # If requests are pending, the broker is probed after this many seconds without an answer.
SECOND_CHANCE = 0.1  # Minimum seconds before the broker counts as down, because a single call may get lost.
TRIES = 3  # After this many failures, a client's call is given up if other calls succeed.
TAKEOVER = 5.0  # Maximum seconds to wait while the broker is read-only. A planned takeover takes one or two.
AFTERMATH = 5.0  # If a resubmitted entry is refused within this many seconds after an outage, the outage is blamed.
SETTLING = 2.0  # Seconds that all gateways need to resubmit their requests after the broker has lost its state.
SCARCE = "memory"  # Refusal reason of a broker that is short of memory and can't check if it has the entry.
MOST_REPLIES = 64  # Maximum number of replies in one turn of the event loop. A reply takes about 50 µs.
MOST_READS = 4  # Maximum number of outcomes to read at once.
Recalled = Reply | EntryState | None
Asking = asyncio.Future[Recalled]
T = TypeVar("T")


def in_turns(replies: Sequence[Reply]) -> Sequence[Sequence[Reply]]:
    """Split replies into parts for separate turns of the event loop: up to MOST_REPLIES small replies, or one large reply."""
    if len(replies) <= MOST_REPLIES and sum(map(len, filter(None, map(_OUTPUT, replies)))) < LARGE:  # The common case.
        return [replies]
    large = [reply for reply in replies if reply.output is not None and len(reply.output) >= LARGE]
    small = [reply for reply in replies if reply.output is None or len(reply.output) < LARGE] if large else replies
    turns = [small[at : at + MOST_REPLIES] for at in range(0, len(small), MOST_REPLIES)]
    return [*turns, *([reply] for reply in large)]


class Admitted(msgspec.Struct, frozen=True):
    """Event: the broker has accepted an entry that has dedup keys, a trace, or several inputs. The entry is queued, shares the
    run of an identical entry, or already has an answer."""

    entry: Entry


class EntryRefused(msgspec.Struct, frozen=True):
    """Event: the broker has refused an entry."""

    entry: Entry
    failure: Failure


class Replied(msgspec.Struct, frozen=True):
    """Event: replies have arrived."""

    replies: Sequence[Reply]
    held: Sequence[Any] = ()  # Pending requests for the replies, if these are the plain outputs of one complete batch.


class Down(msgspec.Struct, frozen=True):
    """Event: the broker has been unreachable for `down_after` seconds."""


class Up(msgspec.Struct, frozen=True):
    """Event that follows `Down`: the broker answers again."""


class Waiting(Protocol):
    """The part of a `PendingRequest` that a session uses."""

    entry: Entry
    unadmitted: bool

    @property
    def left(self) -> bool: ...


class WaitingTable(Protocol):
    """The part of the `PendingTable` that a session uses."""

    def __len__(self) -> int: ...
    def of(self, entry: Entry) -> Waiting | None: ...
    def on(self, session: BrokerSession) -> Sequence[Waiting]: ...
    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]: ...


SessionEvent = Admitted | EntryRefused | Replied | Down | Up


class OutcomeReader:
    """Reads the outcomes that a broker keeps. While `out_of_reach` returns True, a failed call fails all waiting reads.

    An outcome may be 16 MiB long, and the broker can't send anything else while it sends one. So only a few calls run at
    a time, and tenants take turns. Reads that arrive during a call for the same outcome share the next call, whose result
    is up to date for all of them."""

    def __init__(self, broker: RequestQueue, out_of_reach: Callable[[], bool]) -> None:
        self._broker, self._out_of_reach = broker, out_of_reach
        self._calls = FairSlots(MOST_READS)
        self._waiting: dict[tuple[str, str], list[Asking]] = {}  # Reads that wait for a call, by tenant and id.
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """Read a task's outcome; see RequestQueue."""
        loop, key = asyncio.get_running_loop(), (tenant, id)
        asking: Asking = loop.create_future()
        self._waiting.setdefault(key, []).append(asking)
        if key not in self._reading:
            self._reading[key] = loop.create_task(self._read(key))
        return await asking

    async def _read(self, key: tuple[str, str]) -> None:
        while key in self._waiting:
            async with self._calls.of(key[0]):
                asking = [read for read in self._waiting.pop(key, ()) if not read.done()]
                if asking:
                    await self._call(key, asking)
        del self._reading[key]

    async def _call(self, key: tuple[str, str], asking: list[Asking]) -> None:
        failure: Exception | None = None
        outcome: Recalled = None
        try:
            outcome = await self._broker.outcome(*key)
        except Exception as error:
            failure = error
            if isinstance(error, BrokerUnavailable) and self._out_of_reach():
                asking += itertools.chain.from_iterable(self._waiting.values())
                self._waiting.clear()
        for read in asking:
            if not read.done():
                read.set_result(outcome) if failure is None else read.set_exception(failure)


class BrokerSession:
    """A gateway's session with one broker.

    Arguments:
        gateway: id of the gateway, to which replies are addressed.
        pending: requests of all the gateway's sessions. A session only reads this table.
        down_after: seconds after which an unreachable broker counts as down.

    Attributes:
        away: True once the broker has been unreachable for `down_after` seconds.
        room: maximum number of entries in the outbox. The gateway may change it.
        near: synchronous interface of a broker in this process; None for a remote broker.
        waits: True if something must reach the broker before the next entry.
        taken: number of entries handed to a near broker that the rate doesn't include yet.
        followers: number of task followers on this session, as counted by the gateway. They don't use up room, are sent after
            requests, and aren't included in the rate.
    """

    def __init__(
        self,
        broker: RequestQueue,
        gateway: str,
        pending: WaitingTable,
        on_event: Callable[[BrokerSession, SessionEvent], None],
        room: int,
        down_after: float,
        clock: Callable[[], float],
        rng: Callable[[], float],
    ) -> None:
        self.broker, self.near, self.waits = broker, broker.near, False
        self.room, self.followers = room, 0
        self._outbox = Outbox()  # Entries that haven't been sent yet, or whose call got no answer.
        self._on_their_way: list[Sequence[Entry]] = []  # In running calls. Another offer might end differently.
        self._large = LargeEntries(lambda entries: self._offer_again(entries, late=False))
        self._rate, self.taken = ArrivalRate(), 0
        self._outcomes = OutcomeReader(broker, lambda: self.unreachable_seconds > 0.0)
        self._gateway, self._pending, self._on_event, self._down_after = gateway, pending, on_event, down_after
        self._clock, self._rng = clock, rng
        self._work = asyncio.Event()
        self._called = -math.inf  # When the last call with entries was made.
        self._doubtful = (
            False  # True if entries in the outbox may have been offered before, or have waited during an outage.
        )
        self._departed: list[Submission] = []  # Submissions to withdraw.
        self._departed_ids = Counter[tuple[str, str]]()  # Their tenants and ids, for fast lookups.
        self._cancelled: list[tuple[str, str]] = []
        self._cursor = 0
        self._reading: asyncio.Timeout | None = None
        self._epoch, self._settled_at = broker.epoch, -math.inf
        self._answered = clock()
        self._probe_due = False
        self._availability = Availability("gateway", clock)
        self._back_at = -math.inf
        self.away = False
        self._verdict: asyncio.Task[None] | None = None
        self._resubmitter = Resubmitter(self._handed_over, partial(self._offer_again, admitted=True), rng)

    def start(self, supervisor: Supervisor, name: str) -> None:
        supervisor.start(f"{name} intake", self._intake)
        supervisor.start(f"{name} large intake", self._large.run)
        supervisor.start(f"{name} resubmitter", self._resubmitter.run)
        if self.near is not None:
            self.near.attach(self._gateway, self._delivered)
        else:
            supervisor.start(f"{name} returns", self._read_replies)
            supervisor.start(f"{name} watch", self._watch)

    @property
    def unreachable_seconds(self) -> float:
        """Seconds since the broker became unreachable; 0 while it answers."""
        since = self._availability.since
        return 0.0 if since is None else self._clock() - since

    @property
    def in_sync(self) -> bool:
        """False while the broker may have lost entries that this session hasn't resubmitted yet."""
        return (
            not (self._doubtful or self._resubmitter.open or self._availability.since)
            and self.broker.epoch == self._epoch
        )

    @property
    def settled(self) -> bool:
        """True once other gateways have had time to resubmit after the broker lost its state."""
        lost = self._epoch and self.broker.epoch != self._epoch
        return not lost and self._clock() >= self._settled_at

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """Read a task's outcome; see RequestQueue. Retries while the broker may be back soon."""
        return await self._retry(lambda: self._outcomes.outcome(tenant, id))

    async def cancel_task(self, tenant: str, id: str) -> None:
        """Cancel a task; see RequestQueue. Retries while the broker may be back soon."""
        await self._retry(lambda: self.broker.cancel_task(tenant, id))

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the broker, and record if its answer shows that it has lost its state."""
        known, failures, alone = self.broker.epoch, 0, 0
        while True:
            began = self._clock()
            try:
                result = await call()
                if known and self.broker.epoch != known:
                    self._settled_at = self._clock() + SETTLING
                return result
            except BrokerUnavailable as error:
                self.note_silence(began, error)
                failures += 1
                alone += self._availability.since is None  # The broker answers other calls.
                if self.away or alone >= TRIES:
                    raise
                await asyncio.sleep(backoff(failures, self._rng()))

    @property
    def _late(self) -> bool:
        """True if entries that are offered again may have been waiting for the broker to come back."""
        return self._clock() - self._back_at < AFTERMATH

    def note_silence(self, began: float, error: BrokerUnavailable) -> None:
        """Record that a call that started at `began` failed elsewhere in this process, unless the broker has answered this
        session since. Without this, an idle session, which only waits for replies, would notice a stall seconds later."""
        if self._answered < began:
            self._call_failed(began, error)

    def no_room(self) -> Failure:
        """Return the failure for a request that doesn't fit into the outbox."""
        if self.unreachable_seconds > 0.0:
            return self.out_of_reach()
        message = "too many requests are waiting to be queued"
        return Failure(errors.SERVICE_OVERLOADED, message, RETRY_AFTER[0], "overloaded")

    def out_of_reach(self) -> Failure:
        """Return the failure that clients get during an outage. It doesn't reveal the broker's address."""
        least, most = RETRY_AFTER  # Expect the outage to last as long again as it has so far.
        wait = min(max(self.unreachable_seconds, least), most)
        return Failure(errors.SERVICE_OVERLOADED, "the queue is unreachable; try again later", wait, "broker")

    def full(self, count: int) -> bool:
        """Return True if the outbox has no room for `count` more requests."""
        outbox = self._outbox
        return len(outbox.fresh) + outbox.later + self._large.waiting.count + count > self.room + self.followers

    def rate(self, now: float) -> float:
        """Return the number of entries sent per second, averaged over about a second."""
        if self.taken:
            self._rate.observe(self.taken, now)
            self.taken = 0
        return self._rate.at(now)

    def offer(self, entry: Entry) -> None:
        """Offer an entry: immediately if the broker is near and nothing else must be sent first, otherwise in the next call."""
        # The inputs of a list are sent in one call, because the input that pays for the list must be let in first.
        if self.near is not None and not self.waits and not entry.payer and entry.count == 1:
            self.taken += 1
            failure = self.near.take(entry)
            if failure is not None:
                asyncio.get_running_loop().call_soon(self._on_event, self, EntryRefused(entry, failure))
            elif entry.dedup_keys or entry.trace:
                asyncio.get_running_loop().call_soon(self._on_event, self, Admitted(entry))
            return
        if not self._outbox.fresh:
            self._work.set()
        self.waits = True
        self._outbox.fresh[entry.nonce] = entry

    def take_over(self, entries: Sequence[Entry]) -> None:
        """Offer entries that have so far belonged to another session."""
        self._outbox.fresh.update((entry.nonce, entry) for entry in entries)
        self._doubtful = self.waits = bool(self._outbox)
        self._work.set()

    def give_up(self) -> None:
        """Drop the entries that another session has taken over."""
        mine = {pending.entry.submission for pending in self._pending.on(self)}
        self._outbox.keep(lambda entry: entry.submission in mine)
        self._doubtful = self._doubtful and bool(self._outbox)
        self._large.waiting.keep(lambda entry: entry.submission in mine)

    def withdraw(self, submission: Submission) -> None:
        """Withdraw a submission. If the broker may have it, a later call soon withdraws it there."""
        if not self._doubtful and self._outbox.drop(submission):
            return
        self._departed.append(submission)
        self._departed_ids[submission[:2]] += 1
        self.waits = True
        self._work.set()

    def cancel_later(self, tenant: str, id: str) -> None:
        """Cancel a task once the broker has it."""
        self._cancelled.append((tenant, id))
        self.waits = True
        self._work.set()

    async def _intake(self) -> None:
        failures = 0
        while True:
            await self._work.wait()
            if len(self._outbox) < MOST_OFFERED and not self._cancelled:
                now, linger = self._clock(), self.broker.linger
                if now < self._called + linger and self.rate(now) * linger >= WORTH_GATHERING:
                    await asyncio.sleep(linger)
            self._called = self._clock()
            self._work.clear()
            try:
                await self._flush()
                failures = 0
            except BrokerUnavailable:
                failures += 1
                await asyncio.sleep(backoff(failures, self._rng()))

    async def _flush(self) -> None:
        probe = bool(self._cancelled) or self._probe_due or self._availability.since is not None
        if probe or self._departed:
            self._probe_due = False
            # Usually only one call, because a tenant may cause many withdrawals, and entries mustn't wait for all of them.
            await self._withdraw_departed(all_calls=probe or self._doubtful)
        if self._outbox:
            await self._hand_over(probe)
        if self._departed:
            self._work.set()
        self.waits = bool(self._outbox or self._departed or self._cancelled)

    async def _hand_over(self, probe: bool) -> None:
        again = probe or self._doubtful
        entries = self._outbox.take(MOST_OFFERED)
        if not self._doubtful:  # After a probe the whole outbox becomes doubtful, so it is counted now.
            counted = [*entries, *self._outbox] if again else entries
            self._rate.observe(len(_followers_last(counted)[0] if self.followers else counted), self._clock())
        if self._outbox:
            self._work.set()
        if again:
            self._doubtful = bool(self._outbox)
            await self._offer_again(entries)
            return
        if departed := self._departed_ids:
            # The broker would mistake an entry for an earlier one with the same id that hasn't been withdrawn yet.
            self._outbox.put_back([entry for entry in entries if (entry.tenant, entry.id) in departed])
            entries = [entry for entry in entries if (entry.tenant, entry.id) not in departed]
        if self.broker.apart_from < math.inf:
            entries, later = self._large.split(entries, self.broker.apart_from)
            if later:
                self._outbox.put_back(later)
                self._work.set()
        if entries:
            await self._offer(entries)

    async def _withdraw_departed(self, all_calls: bool) -> None:
        """Withdraw submissions and cancel tasks, if any; else probe the broker. Unless `all_calls`, withdraw in one call."""
        if not self._departed and not self._cancelled:
            await self._ask(self.broker.probe(self._gateway))
        while self._departed:
            departed = self._departed[:CHUNK]
            await self._ask(self.broker.withdraw(departed, self._gateway))
            del self._departed[: len(departed)]
            for submission in departed:
                self._departed_ids[submission[:2]] -= 1
                if not self._departed_ids[submission[:2]]:
                    del self._departed_ids[submission[:2]]
            if not all_calls:
                break
        while self._cancelled:
            tenant, id = self._cancelled[0]
            await self._ask(self.broker.cancel_task(tenant, id))
            del self._cancelled[0]

    async def _offer(self, entries: list[Entry], admitted: bool = False, again: bool = False) -> None:
        """Offer requests in one call, then followers in another, because the broker must know the tasks that they follow."""
        self._on_their_way.append(entries)
        parts = [part for part in _followers_last(entries) if part] if self.followers else [entries]
        try:
            for part in parts:
                self._report(part, await self._ask(self.broker.enqueue(part)), admitted, again)
        except (BrokerUnavailable, asyncio.CancelledError):
            if not admitted:  # Admitted entries are resubmitted when the broker is back.
                unsent = parts[parts.index(part) :]
                self._outbox.put_back(list(itertools.chain.from_iterable(unsent)))
                self._doubtful = True
                self._work.set()
            raise
        finally:
            self._on_their_way.remove(entries)

    def _report(self, entries: list[Entry], verdicts: Sequence[Failure | None], admitted: bool, again: bool) -> None:
        for entry, failure in zip(entries, verdicts, strict=True):
            if failure is not None:
                # These refusals aren't final: a broker without memory can't look for the entry, and a task may be resubmitted after
                # its follower.
                if admitted and (failure.reason == SCARCE or task_followed(entry)):
                    continue
                self._on_event(self, EntryRefused(entry, _too_late(failure) if again and self._late else failure))
            elif entry.dedup_keys or entry.trace or entry.count > 1:
                self._on_event(self, Admitted(entry))

    async def _offer_again(self, entries: Sequence[Entry], admitted: bool = False, late: bool = True) -> None:
        """Offer entries again if they are still waiting. If an entry ends during the call, the broker may mistake it for a
        new entry, so the entry is withdrawn. A task is withdrawn only if it was cancelled or refused, because clients can
        fetch its outcome later.

        `admitted`: the broker had admitted the entries, and most likely still has them. `late`: they may have been offered
        before, or have waited during an outage."""
        offered = self._pending.refreshed(self, entries, self._clock())
        if not offered:
            return
        if admitted:  # The rate limits have already been charged.
            offered = [msgspec.structs.replace(entry, limits=()) if entry.limits else entry for entry in offered]
        held = [self._pending.of(entry) for entry in offered]
        try:
            await self._offer(offered, admitted, again=late)
        finally:  # A call that got no answer may have succeeded.
            wanted = {entry.submission for entry in self._pending.refreshed(self, offered, self._clock())}
            for entry, pending in zip(offered, held, strict=True):
                unwanted = pending is not None and (pending.left or pending.unadmitted)
                if entry.submission not in wanted and (unwanted or not is_task(entry)):
                    self.withdraw(entry.submission)

    def _handed_over(self) -> list[Entry]:
        """Return the entries that the broker should have."""
        in_progress = itertools.chain.from_iterable(self._on_their_way)
        outside = {entry.submission for entry in (*self._outbox, *self._large.waiting, *in_progress)}
        held = [pending.entry for pending in self._pending.on(self)]
        return [entry for entry in held if entry.submission not in outside]

    async def _read_replies(self) -> None:
        failures = 0
        while True:
            try:
                replies = await self._read()
            except BrokerUnavailable as error:
                failures += 1
                self._call_failed(self._clock(), error)
                await asyncio.sleep(backoff(failures, self._rng()))
                continue
            failures = 0
            if replies is not None:
                self._call_succeeded()
                await self._pass_on(replies)
            replies = None  # Otherwise the outputs stay in memory until the next replies.

    async def _pass_on(self, replies: Sequence[Reply]) -> None:
        first, *later = in_turns(replies)
        self._on_event(self, Replied(first))
        for turn in later:
            await asyncio.sleep(0)
            self._on_event(self, Replied(turn))

    def _delivered(self, replies: Sequence[Reply], held: Sequence[Any]) -> None:
        """Take replies from a near broker; see `NearQueue.attach`."""
        self.rate(self._clock())
        if held and sum(map(len, filter(None, map(_OUTPUT, replies)))) < LARGE:
            self._on_event(self, Replied(replies, held))
        else:
            self._deliver_turns(in_turns(replies))

    def _deliver_turns(self, turns: Sequence[Sequence[Reply]]) -> None:
        first, *later = turns
        self._on_event(self, Replied(first))
        if later:
            asyncio.get_running_loop().call_soon(self._deliver_turns, later)

    async def _read(self) -> Sequence[Reply] | None:
        """Return the next replies; None if the broker has started a new epoch."""
        try:
            async with asyncio.timeout(None) as reading:
                self._reading = reading
                replies, cursor = await self.broker.replies(self._gateway, self._cursor)
            if self._reading is reading:
                self._cursor = cursor
        except TimeoutError:
            if self._reading is reading:
                raise
            return None
        finally:
            self._reading = None
        return replies

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(until_tick(PROBE_AFTER))
            if self._pending and self._clock() - self._answered >= PROBE_AFTER:
                self._probe_due = True
                self._work.set()

    async def _ask(self, call: Awaitable[T]) -> T:
        """Await a call, and record whether the broker answered it."""
        began = self._clock()
        try:
            answer = await call
        except BrokerUnavailable as error:
            self._call_failed(began, error)
            raise
        self._call_succeeded()
        return answer

    def _call_failed(self, began: float, error: BrokerUnavailable) -> None:
        self._availability.failed(began, error)
        if self._verdict is None and not self.away:
            pause = max(began + self._down_after - self._clock(), SECOND_CHANCE)
            self._verdict = asyncio.get_running_loop().create_task(self._give_up(pause))
        self._work.set()

    async def _give_up(self, pause: float) -> None:
        """Count the broker as down after a pause, or later if a replica is taking over or an address is moving."""
        verdict, read_at = asyncio.current_task(), -math.inf
        await asyncio.sleep(pause)
        while self._verdict is verdict and self.unreachable_seconds < TAKEOVER:
            if await self.broker.takes_reads_only():
                read_at = self._clock()
            elif self._clock() - read_at >= self._down_after:
                break
            await asyncio.sleep(SECOND_CHANCE)
        if self._verdict is verdict:  # Otherwise the broker is back, and a library swallowed the cancellation.
            self._verdict, self.away = None, True
            self._on_event(self, Down())

    def _call_succeeded(self) -> None:
        """Record that a call succeeded. If this ends an outage, or the broker has lost its state, resubmit everything."""
        self._answered = self._clock()
        if self.broker.epoch != self._epoch:
            known, self._epoch = self._epoch, self.broker.epoch
            if known:
                self._settled_at = self._answered + SETTLING
                self._cursor = 0  # A cursor of the old epoch is meaningless in the new one.
                if self._reading is not None:
                    self._reading.reschedule(0.0)
                    self._reading = None
                self._resubmitter.ask()
        if not self._availability.over():
            return
        self._back_at = self._answered
        if self._verdict is not None:
            self._verdict.cancel()
            self._verdict = None
        if self.away:
            self.away = False
            self._on_event(self, Up())
        self._resubmitter.ask()


def _too_late(failure: Failure) -> Failure:
    """Return the failure. If it is due to load, blame the outage instead, because the load arrived after the entry."""
    if failure.code not in (errors.SHED, errors.SCARCE):
        return failure
    message = "the queue was unreachable, so the request can no longer be answered in time"
    return Failure(errors.SERVICE_OVERLOADED, message, failure.retry_after, "broker")


def _followers_last(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    parts: tuple[list[Entry], list[Entry]] = [], []
    for entry in entries:
        parts[bool(task_followed(entry))].append(entry)
    return parts
