"""Session of a gateway with one broker: what goes out, what comes back, and what is done while the broker is away.

    submit ──▶ outbox ──intake──▶ enqueue          replies ──returns──▶ events
                 ▲                   │ no answer
                 └───────────────────┘ offered again, with what is left of the time

Large entries go out beside the outbox, where they take longer than others, so that nobody waits for the bytes of another's.

Entries that gathered while the last call was under way go as one call, or as several short ones in which tenants take turns. A call that was not answered may have been done;
its entries are offered again under the same ids until that is known. While the broker is out of reach the intake probes
it, with pauses that grow. `down_after` says for how long that may last before it is an event.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import msgspec

from headway import errors
from headway.core.dedup import is_task, task_followed
from headway.core.retry import backoff
from headway.core.service_model import ArrivalRate
from headway.errors import BrokerUnavailable
from headway.gateway.outbox import LargeEntries, Outbox
from headway.gateway.outcome_reader import OutcomeReader, Recalled
from headway.gateway.resubmitter import CHUNK, Resubmitter
from headway.model import Entry, Failure, Reply, Submission
from headway.ports import RequestQueue
from headway.runtime.availability import Availability
from headway.runtime.supervisor import Supervisor
from headway.runtime.ticks import until_tick

LARGE = 1 << 16
"""Bytes of an output from which its reply has a turn of the event loop of its own: to write it holds the loop for about a millisecond."""
_OUTPUT = attrgetter("output")
RETRY_AFTER = (1.0, 30.0)
"""Least and most seconds after which a client should try again while the broker is away: as long as that has lasted."""
WORTH_GATHERING = 2.0
"""Least arrivals between two calls to the broker for which entries gather; a lone entry goes at once."""
MOST_OFFERED = 64
"""Most entries in one call, as the broker does nothing else meanwhile, and all its verdicts are dealt with in one turn of the loop."""
PROBE_AFTER = 0.5
"""Seconds without an answered call after which a broker that holds requests is probed, as it may have lost them unseen.
"""
SECOND_CHANCE = 0.1
"""Least seconds between the first call that fails and the verdict that the broker is away, as one call may be lost."""
TRIES = 3
"""Times that a call that a client waits for may fail while others are answered."""
TAKEOVER = 5.0
"""Most seconds for which requests are held for a broker that takes reads only: a takeover on purpose takes one or two."""
AFTERMATH = 5.0
"""Seconds after an outage in which the refusal of an entry that is offered again is put down to the outage."""
SETTLING = 2.0
"""Seconds after the broker was found to have lost what it had, by which all gateways have offered again what they hold."""
SCARCE = "memory"
"""Reason of a refusal that an entry may get although the broker has it: without memory the broker cannot even look."""
MOST_REPLIES = 64
"""Most replies of one turn of the event loop. To answer one takes some 50 µs, and hundreds may have joined the same outcome."""
T = TypeVar("T")


def in_turns(replies: Sequence[Reply]) -> Sequence[Sequence[Reply]]:
    """Split replies by turns of the loop: the small ones, MOST_REPLIES at most in each, then the large ones, one in each."""
    if len(replies) <= MOST_REPLIES and sum(map(len, filter(None, map(_OUTPUT, replies)))) < LARGE:  # Mostly.
        return [replies]
    large = [reply for reply in replies if reply.output is not None and len(reply.output) >= LARGE]
    small = [reply for reply in replies if reply.output is None or len(reply.output) < LARGE] if large else replies
    turns = [small[at : at + MOST_REPLIES] for at in range(0, len(small), MOST_REPLIES)]
    return [*turns, *([reply] for reply in large)]


class Admitted(msgspec.Struct, frozen=True):
    """Event: the broker has an entry with dedup keys, with a trace, or for several inputs: queued, joined to another's answer, or answered already."""

    entry: Entry


class EntryRefused(msgspec.Struct, frozen=True):
    """Event: the broker refuses an entry."""

    entry: Entry
    failure: Failure


class Replied(msgspec.Struct, frozen=True):
    """Event: replies came. `held`: the pending requests that they are for, if they are outputs of a whole batch and nothing beside."""

    replies: Sequence[Reply]
    held: Sequence[Any] = ()


class Down(msgspec.Struct, frozen=True):
    """Event: the broker has been out of reach for longer than `down_after`."""


class Up(msgspec.Struct, frozen=True):
    """Event after `Down`: the broker answers again."""


class Waiting(Protocol):
    """Pending request, as its session needs it."""

    entry: Entry
    unadmitted: bool

    @property
    def left(self) -> bool:
        """Whether its client has left."""


class WaitingTable(Protocol):
    """Table of the pending requests, as a session needs it."""

    def __len__(self) -> int:
        """Their number."""

    def of(self, entry: Entry) -> Waiting | None:
        """Pending request of an entry, unless another submission has its id by now."""

    def on(self, session: BrokerSession) -> Sequence[Waiting]:
        """All requests that wait for an answer over a session."""

    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Entries that still wait for an answer over a session, with what is left of their time."""


SessionEvent = Admitted | EntryRefused | Replied | Down | Up


class BrokerSession:
    """Session of one gateway with one broker.

    Arguments:
        broker: the broker.
        gateway: id of the gateway, to which replies are addressed.
        pending: requests that the gateway holds, on all its sessions; read only.
        on_event: takes the events of entries and of the broker, in order.
        room: most entries in the outbox.
        down_after: seconds for which the broker may be out of reach until it counts as down.
        clock: monotonic seconds.
        rng: uniform in [0, 1).

    Attributes:
        room: most entries in the outbox; the gateway's to set.
        near: the broker's way without a wait; None where it is in another process.
        waits: whether something has to reach the broker before an entry that comes now.
        taken: entries that a near broker has had, and that the rate does not count yet.
        followers: followers of tasks that wait on this session; the gateway's to count. They take no room of requests, go behind them, and
            are none in the rate.
        outcome: reads a task's outcome from the broker; see RequestQueue.
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
        self._outbox = Outbox()
        """Entries not handed to the broker yet, or handed to it in a call that was not answered."""
        self._on_their_way: list[Sequence[Entry]] = []
        """Entries of calls under way. To offer one beside its call could end in another way than that does."""
        self._large = LargeEntries(lambda entries: self._offer_again(entries, late=False))
        self._rate, self.taken = ArrivalRate(), 0
        self._outcomes = OutcomeReader(broker, lambda: self.unreachable_seconds > 0.0)
        self._gateway = gateway
        self._pending = pending
        self._on_event = on_event
        self._down_after = down_after
        self._clock = clock
        self._rng = rng
        self._work = asyncio.Event()
        self._called = -math.inf
        """Instant of the last call with entries."""
        self._doubtful = False
        """Whether entries of the outbox may have been offered before, or have lost time in it."""
        self._departed: list[Submission] = []
        self._departed_ids = Counter[tuple[str, str]]()
        """Tenants and ids of these. There may be many of them, so nothing looks through all."""
        self._cancelled: list[tuple[str, str]] = []
        self._cursor = 0
        self._reading: asyncio.Timeout | None = None
        self._epoch, self._settled_at = broker.epoch, -math.inf
        self._answered = clock()
        self._probe_due = False
        self._availability = Availability("gateway", clock)
        self._back_at = -math.inf
        self._is_down = False
        self._verdict: asyncio.Task[None] | None = None
        self._resubmitter = Resubmitter(self._handed_over, partial(self._offer_again, admitted=True), rng)

    def start(self, supervisor: Supervisor, name: str) -> None:
        """Start the loops: what goes to the broker, what comes back, and what is offered again."""
        supervisor.start(f"{name} intake", self._intake)
        supervisor.start(f"{name} large intake", self._large.run)
        supervisor.start(f"{name} resubmitter", self._resubmitter.run)
        if self.near is not None:
            self.near.attach(self._gateway, self._delivered)
        else:
            supervisor.start(f"{name} returns", self._returns)
            supervisor.start(f"{name} watch", self._watch)

    @property
    def unreachable_seconds(self) -> float:
        """Seconds for which the broker has been out of reach; 0 while it answers."""
        since = self._availability.since
        return 0.0 if since is None else self._clock() - since

    @property
    def away(self) -> bool:
        """Whether the broker has been out of reach for longer than `down_after`."""
        return self._is_down

    @property
    def in_sync(self) -> bool:
        """Whether the broker has all that it took and has not ended, as far as is known.

        It has then lost nothing that is not offered again yet.
        """
        return (
            not (self._doubtful or self._resubmitter.open or self._availability.since)
            and self.broker.epoch == self._epoch
        )

    @property
    def settled(self) -> bool:
        """Whether the broker has lately lost nothing that another gateway may be about to offer again, as far as is known."""
        lost = self._epoch and self.broker.epoch != self._epoch
        return not lost and self._clock() >= self._settled_at

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """See Broker. What shows that the broker has lost its state is noted at once."""
        known = self.broker.epoch
        found = await self._made_again(lambda: self._outcomes.outcome(tenant, id))
        if known and self.broker.epoch != known:
            self._settled_at = self._clock() + SETTLING
        return found

    async def cancel_task(self, tenant: str, id: str) -> None:
        """See RequestQueue."""
        await self._made_again(lambda: self.broker.cancel_task(tenant, id))

    async def _made_again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Answer to a call that a client waits for: it is made again while the broker may be back soon."""
        failures, alone = 0, 0
        while True:
            began = self._clock()
            try:
                return await call()
            except BrokerUnavailable as error:
                self.note_silence(began, error)
                failures += 1
                alone += self._availability.since is None  # Other calls are answered.
                if self._is_down or alone >= TRIES:
                    raise
                await asyncio.sleep(backoff(failures, self._rng()))

    @property
    def _late(self) -> bool:
        """Whether entries that are offered again may have been held while the broker was out of reach."""
        return self._clock() - self._back_at < AFTERMATH

    def note_silence(self, began: float, error: BrokerUnavailable) -> None:
        """Note that another call of this process, begun at instant `began`, was not answered, unless one of this session was since.

        A session that rests waits for replies only, and would hear of a broker that stands still seconds later.
        """
        if self._answered < began:
            self._lost(began, error)

    def no_room(self) -> Failure:
        """Refusal of a request that there is no room for. An outage is expected to last as long again as it has."""
        if self.unreachable_seconds > 0.0:
            return self.out_of_reach()
        message = "more requests wait than can be handed on"
        return Failure(errors.SERVICE_OVERLOADED, message, RETRY_AFTER[0], "overloaded")

    def out_of_reach(self) -> Failure:
        """Failure for a broker that does not answer. It does not name the broker's address, since clients read it."""
        least, most = RETRY_AFTER
        wait = min(max(self.unreachable_seconds, least), most)
        return Failure(errors.SERVICE_OVERLOADED, "the queue is out of reach; try again later", wait, "broker")

    def full(self, count: int) -> bool:
        """Whether the outbox has no room for `count` further requests."""
        outbox = self._outbox
        return len(outbox.fresh) + outbox.later + self._large.waiting.count + count > self.room + self.followers

    def rate(self, now: float) -> float:
        """Entries handed over per second, averaged over about a second."""
        if self.taken:
            self._rate.observe(self.taken, now)
            self.taken = 0
        return self._rate.at(now)

    def offer(self, entry: Entry) -> None:
        """Offer an entry to the broker: at once where that is near, unless something has to go before it, else with the next call."""
        # The inputs of a list go together, so that none is in before the one that pays for all.
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
        """Take entries in that have waited elsewhere."""
        self._outbox.fresh.update((entry.nonce, entry) for entry in entries)
        self._doubtful = self.waits = bool(self._outbox)
        self._work.set()

    def give_up(self) -> None:
        """Drop the entries that another session has taken over."""
        mine = {one.entry.submission for one in self._pending.on(self)}
        self._outbox.keep(lambda entry: entry.submission in mine)
        self._doubtful = self._doubtful and bool(self._outbox)
        self._large.waiting.keep(lambda entry: entry.submission in mine)

    def withdraw(self, submission: Submission) -> None:
        """Withdraw a submission: at once if it was never offered, else as soon as the broker can be told."""
        if not self._doubtful and self._outbox.drop(submission):
            return
        self._departed.append(submission)
        self._departed_ids[submission[:2]] += 1
        self.waits = True
        self._work.set()

    def cancel_later(self, tenant: str, id: str) -> None:
        """Cancel a task that may be on its way, once it has arrived."""
        self._cancelled.append((tenant, id))
        self.waits = True
        self._work.set()

    async def _intake(self) -> None:
        failures = 0
        while True:
            await self._work.wait()
            if len(self._outbox) < MOST_OFFERED and not self._cancelled:  # Else it goes at once.
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
        """Withdraw submissions whose clients have left, cancel tasks, and then offer what gathered.

        A submission that is withdrawn is not offered. Of many withdrawals only one call goes before the next entries: otherwise
        these would wait for all that the clients of one tenant leave behind.
        """
        probe = bool(self._cancelled) or self._probe_due or self._availability.since is not None
        if probe or self._departed:
            self._probe_due = False
            await self._let_go(whole=probe or self._doubtful)
        if self._outbox:
            await self._hand_over(probe)
        if self._departed:
            self._work.set()
        self.waits = bool(self._outbox or self._departed or self._cancelled)

    async def _hand_over(self, probe: bool) -> None:
        """Offer what gathered, as far as one call takes it."""
        again = probe or self._doubtful
        entries = self._outbox.take(MOST_OFFERED)
        if not self._doubtful:  # What is left of a probe's entries is doubtful from now on.
            counted = [*entries, *self._outbox] if again else entries
            self._rate.observe(len(_followers_last(counted)[0] if self.followers else counted), self._clock())
        if self._outbox:
            self._work.set()
        if again:
            self._doubtful = bool(self._outbox)
            await self._offer_again(entries)
            return
        if (
            departed := self._departed_ids
        ):  # The broker would take an entry for the one of its id that is not withdrawn yet.
            self._outbox.put_back([entry for entry in entries if (entry.tenant, entry.id) in departed])
            entries = [entry for entry in entries if (entry.tenant, entry.id) not in departed]
        if self.broker.apart_from < math.inf:
            entries, later = self._large.split(entries, self.broker.apart_from)
            if later:
                self._outbox.put_back(later)
                self._work.set()
        if entries:
            await self._offer(entries)

    async def _let_go(self, whole: bool) -> None:
        """Withdraw what has departed, cancel the tasks that may have been on their way, and probe where there is neither.

        Arguments:
            whole: whether all of it has to go; if not, as much goes as one call takes.
        """
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
            if not whole:
                break
        while self._cancelled:
            tenant, id = self._cancelled[0]
            await self._ask(self.broker.cancel_task(tenant, id))
            del self._cancelled[0]

    async def _offer(self, entries: list[Entry], admitted: bool = False, again: bool = False) -> None:
        """Offer entries: requests in one call, followers in one behind it, as the broker may have to look for their tasks."""
        self._on_their_way.append(entries)
        parts = [part for part in _followers_last(entries) if part] if self.followers else [entries]
        try:
            for part in parts:
                self._heed(part, await self._ask(self.broker.enqueue(part)), admitted, again)
        except (BrokerUnavailable, asyncio.CancelledError):
            if not admitted:  # Else it is offered again when the broker is back.
                left = parts[parts.index(part) :]
                self._outbox.put_back(list(itertools.chain.from_iterable(left)))
                self._doubtful = True
                self._work.set()
            raise
        finally:
            self._on_their_way.remove(entries)

    def _heed(self, entries: list[Entry], verdicts: Sequence[Failure | None], admitted: bool, again: bool) -> None:
        """Tell what became of entries that were offered."""
        for entry, failure in zip(entries, verdicts, strict=True):
            if failure is not None:
                # Without memory the broker cannot even look whether it has the entry. A task may be offered again after its followers.
                if admitted and (failure.reason == SCARCE or task_followed(entry)):
                    continue
                self._on_event(self, EntryRefused(entry, _too_late(failure) if again and self._late else failure))
            elif entry.dedup_keys or entry.trace or entry.count > 1:
                self._on_event(self, Admitted(entry))

    async def _offer_again(self, entries: Sequence[Entry], admitted: bool = False, late: bool = True) -> None:
        """Offer entries again that still wait.

        An entry that is answered meanwhile may have been taken for new. It is withdrawn, unless later requests can use
        its outcome. A task that is cancelled or refused meanwhile is withdrawn, too: the broker may have forgotten the one by then, and
        have heard of the other by another call.

        Arguments:
            entries: entries to offer.
            admitted: whether they were admitted once, and are most likely still there.
            late: whether they may have been offered before, or have waited for a broker that was away.
        """
        offered = self._pending.refreshed(self, entries, self._clock())
        if not offered:
            return
        if admitted:  # They have been charged.
            offered = [msgspec.structs.replace(entry, limits=()) if entry.limits else entry for entry in offered]
        held = [self._pending.of(entry) for entry in offered]
        try:
            await self._offer(offered, admitted, again=late)
        finally:  # A call without an answer may have been done.
            wanted = {entry.submission for entry in self._pending.refreshed(self, offered, self._clock())}
            for entry, pending in zip(offered, held, strict=True):
                unwanted = pending is not None and (pending.left or pending.unadmitted)
                if entry.submission not in wanted and (unwanted or not is_task(entry)):
                    self.withdraw(entry.submission)

    def _handed_over(self) -> list[Entry]:
        """Entries that were handed over and still wait."""
        under_way = itertools.chain.from_iterable(self._on_their_way)
        outside = {entry.submission for entry in (*self._outbox, *self._large.waiting, *under_way)}
        held = [one.entry for one in self._pending.on(self)]
        return [entry for entry in held if entry.submission not in outside]

    async def _returns(self) -> None:
        failures = 0
        while True:
            try:
                replies = await self._read()
            except BrokerUnavailable as error:
                failures += 1
                self._lost(self._clock(), error)
                await asyncio.sleep(backoff(failures, self._rng()))
                continue
            failures = 0
            if replies is not None:
                self._found()
                await self._pass_on(replies)
            replies = None  # Else the last outputs would be there until the next ones come.

    async def _pass_on(self, replies: Sequence[Reply]) -> None:
        first, *later = in_turns(replies)
        self._on_event(self, Replied(first))
        for some in later:
            await asyncio.sleep(0)
            self._on_event(self, Replied(some))

    def _delivered(self, replies: Sequence[Reply], held: Sequence[Any]) -> None:
        """Take replies that a near broker hands over; see `NearQueue.attach`."""
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
        """Read the next replies; None when a new epoch began meanwhile."""
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
        """Make one call, and note whether it is answered."""
        began = self._clock()
        try:
            answer = await call
        except BrokerUnavailable as error:
            self._lost(began, error)
            raise
        self._found()
        return answer

    def _lost(self, began: float, error: BrokerUnavailable) -> None:
        """Note that a call was not answered. The intake finds out when the broker is back."""
        self._availability.failed(began, error)
        if self._verdict is None and not self._is_down:
            pause = max(began + self._down_after - self._clock(), SECOND_CHANCE)
            self._verdict = asyncio.get_running_loop().create_task(self._give_up(pause))
        self._work.set()

    async def _give_up(self, pause: float) -> None:
        """Count the broker as down after a pause. While a replica takes over, wait on for a while, also for an address that moves."""
        verdict, read_at = asyncio.current_task(), -math.inf
        await asyncio.sleep(pause)
        while self._verdict is verdict and self.unreachable_seconds < TAKEOVER:
            if await self.broker.takes_reads_only():
                read_at = self._clock()
            elif self._clock() - read_at >= self._down_after:
                break
            await asyncio.sleep(SECOND_CHANCE)
        if self._verdict is verdict:  # Else the broker is back, and a library has swallowed the cancellation.
            self._verdict, self._is_down = None, True
            self._on_event(self, Down())

    def _found(self) -> None:
        """Note that a call was answered.

        If it is the first since one was not, or if it shows that the broker has lost its state, everything is offered
        again.
        """
        self._answered = self._clock()
        if self.broker.epoch != self._epoch:
            known, self._epoch = self._epoch, self.broker.epoch
            if known:
                self._settled_at = self._answered + SETTLING
                self._rewind()
                self._resubmitter.ask()
        if not self._availability.over():
            return
        self._back_at = self._answered
        if self._verdict is not None:
            self._verdict.cancel()
            self._verdict = None
        if self._is_down:
            self._is_down = False
            self._on_event(self, Up())
        self._resubmitter.ask()

    def _rewind(self) -> None:
        """Read replies from the first one on; a reader that waits for those after an old cursor would miss them."""
        self._cursor = 0
        if self._reading is not None:
            self._reading.reschedule(0.0)
            self._reading = None


def _too_late(failure: Failure) -> Failure:
    """Failure of an entry that was held during an outage, and is refused when offered at last.

    No client is shed for a load that was not there when its request came.
    """
    if failure.code not in (errors.SHED, errors.SCARCE):
        return failure
    message = "the queue was out of reach, and can no longer answer in time"
    return Failure(errors.SERVICE_OVERLOADED, message, failure.retry_after, "broker")


def _followers_last(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Entries that follow no task, and those that do."""
    parts: tuple[list[Entry], list[Entry]] = [], []
    for entry in entries:
        parts[bool(task_followed(entry))].append(entry)
    return parts
