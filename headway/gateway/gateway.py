"""The gateway holds the client's side: who waits for what, until when.

Per request there is one small record and two dictionary operations; no task, no future, no timer of its own. The
record carries the way back, so that the answer is written by whoever brings it.

Requests go over a `BrokerSession` to the broker that the fleet shares. While that is away, they go over the direct line to
one of the gateway's own, if there is one, and are refused otherwise. A request is answered once whatever its lines
bring: the answer that comes first takes the record away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Sequence

import msgspec
import structlog

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.dedup import digest, shares_of, unkept
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import BrokerSession
from headway.gateway.limiter import CHARGED, Limiter
from headway.gateway.pending import NOBODY, FutureSink, Journal, Note, PendingRequest, ReplySink
from headway.gateway.recent_requests import RecentRequests, waiting
from headway.model import (
    DedupKey,
    DedupKind,
    Entry,
    EntryState,
    Failure,
    Limit,
    Principal,
    Reply,
    RequestOptions,
    RequestStatus,
)
from headway.ports import RequestQueue
from headway.runtime.counters import Answers, Counters
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.runtime.timing_wheel import DEADLINE_GRAIN, TimingWheel

log = structlog.get_logger(__name__)


class Gateway:
    """Takes requests in, hands them to the broker, and brings each answer to its sink.

    Arguments:
        settings: for time-outs, bounds and tier names.
        models: names that are served.
        broker: where entries go.
        counters: counts outcomes.
        clock: monotonic seconds.
        direct: where they go while `broker` is away; without it they are refused then.
        journal: told of every outcome, if anybody is.
        rng: uniform in [0, 1), for pauses.

    Attributes:
        closed: every further request is refused.
        limiter: refuses what goes over a limit or the fleet's capacity.
        broker: where requests that come now go: the shared one or, in direct mode, the gateway's own.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        broker: RequestQueue,
        counters: Counters,
        clock: Callable[[], float],
        *,
        direct: RequestQueue | None = None,
        journal: Journal | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.counters = counters
        self.closed = False
        self.limiter = Limiter(len(settings.tier_names), clock)
        self.name = f"{settings.name or 'gateway'}-{new_id()}"
        self._models = frozenset(models)
        self._clock = clock
        self._tiers = settings.tier_names
        self._queue_timeout = settings.queue_timeout_ms / 1000
        self._sharing = settings.cache or settings.collapse
        self._journal = journal
        self._held: dict[tuple[str, str], PendingRequest] = {}
        self._submissions = itertools.count(1)
        self._deadlines = TimingWheel(clock, self._overdue)
        self._answered = RecentRequests(clock)
        self._emptied = asyncio.Event()
        rest = self.name, self, settings.max_queue, settings.broker_timeout_ms / 1000, clock, rng
        self._shared = BrokerSession(broker, *rest)
        self._direct = BrokerSession(direct, *rest) if direct else None
        self._line = self._shared
        """The line that new requests go over."""
        self.broker = broker

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops: what goes to the brokers, and what comes back."""
        self._shared.start(supervisor, "gateway")
        if self._direct is not None:
            self._direct.start(supervisor, "gateway direct")

    @property
    def pending(self) -> int:
        """Requests held now."""
        return len(self._held)

    @property
    def holding(self) -> bool:
        """Whether requests that come now are held for the shared broker, whether it answers now or not."""
        return not self._shared.away

    @property
    def requests_per_second(self) -> float:
        """Requests handed on, averaged over about a second."""
        return sum(line.rate.at(self._clock()) for line in (self._shared, self._direct) if line is not None)

    def submit(
        self,
        sink: ReplySink,
        principal: Principal,
        id: str,
        options: RequestOptions,
        model: str,
        input: str,
        parameters: bytes,
    ) -> None:
        """Take a request in; its answer, also a refusal, goes to `sink` on a later turn of the loop.

        Arguments:
            sink: gets the reply, exactly once unless the request is abandoned.
            principal: who asks; limits are per principal.
            id: UUIDv7 text, unique within the tenant while the request is held.
            options: how the request is to be served.
            model: must be one that is served.
            input: the text for the model.
            parameters: text of a JSON object, or empty.
        """
        tier = principal.tier if principal.tier > options.tier else options.tier
        timeout, origin = options.timeout, options.origin
        shares: tuple[DedupKey, ...] = ()
        known = b""
        if self._sharing or options.key or options.chosen or options.task:
            asked = digest(model, self.settings.model_version, input, parameters)
            shares = shares_of(self.settings, id, asked, options)
            known = asked if options.chosen and not options.task else b""
        limits = principal.limits
        if limits and self._line is not self._shared:
            limits = self.limiter.parts(limits)
        entry = Entry(
            id, model, input, tier, principal.tenant, self.name, timeout if options.task else self._queue_timeout, timeout,
            parameters, limits, shares, next(self._submissions), known, principal.user if origin is None else origin,
        )  # fmt: skip
        failure = self._objection(principal, entry)
        if failure is not None:
            self._refuse(sink, principal, entry, failure)
        else:
            self._hold(sink, principal, entry, self._line, options.task)

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Limits as they are counted now: whole by the broker that all share, in part while this gateway is alone."""
        return limits if self._line is self._shared else self.limiter.parts(limits)

    def _hold(
        self,
        sink: ReplySink,
        principal: Principal | None,
        entry: Entry,
        line: BrokerSession,
        unadmitted: bool = False,
    ) -> None:
        now = self._clock()
        key = (entry.tenant, entry.id)
        held = PendingRequest(sink, principal, entry, now, now + entry.timeout, line, unadmitted)
        self._held[key] = held
        self._deadlines.watch(key, held.deadline)
        outbox = line.outbox
        if not outbox:
            line.wake()
        outbox.append(entry)

    def detach(self, tenant: str, id: str) -> None:
        """Nobody waits for a task any more; it goes on."""
        if (held := self._held.get((tenant, id))) is not None:
            held.sink = NOBODY

    def abandon(self, sink: ReplySink, tenant: str, id: str) -> None:
        """The client left: its sink hears nothing more, and the broker decides what becomes of the entry. A task that was
        not handed over is none."""
        held = self._held.get((tenant, id))
        if held is None or held.sink is not sink:
            return
        self._let_go(held)
        held.line.withdraw(held.entry.submission)

    async def ask(
        self, principal: Principal, id: str, options: RequestOptions, model: str, input: str, parameters: bytes
    ) -> Reply:
        """`submit` for coroutines. A cancelled call abandons the request."""
        sink = FutureSink()
        self.submit(sink, principal, id, options, model, input, parameters)
        return await self._outcome(sink, principal.tenant, id)

    async def _outcome(self, sink: FutureSink, tenant: str, id: str) -> Reply:
        try:
            return await sink.reply
        except asyncio.CancelledError:
            self.abandon(sink, tenant, id)
            raise

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """The outcome of a task, or where it stands; None when it is unknown, forgotten, or no task of the tenant's.

        Raises:
            BrokerUnavailable: that cannot be told now.
        """
        held = self._held.get((tenant, id))
        if held is not None and held.task:
            line, told = held.line, not held.unadmitted
            found = await line.outcome(tenant, id)
            if found is None and not told:
                return EntryState.QUEUED
            if found is None and not line.in_sync:  # It may be lost and offered again soon, or cancelled elsewhere.
                raise BrokerUnavailable("what the broker has lost is being offered again")
            return found
        if self._direct is not None and (found := await self._direct.outcome(tenant, id)) is not None:
            return found
        return await self._shared.outcome(tenant, id)

    async def follow(self, tenant: str, id: str, seconds: float) -> Reply | None:
        """The outcome of a task, waited for as long as it takes but at most so many seconds; None when it is not known
        by then."""
        entry = Entry(
            new_id(), self.settings.model, "", 0, tenant, self.name, seconds, seconds,
            shares=(DedupKey(DedupKind.TASK, id),), nonce=next(self._submissions),
        )  # fmt: skip
        sink, task = FutureSink(), self._held.get((tenant, id))
        self._hold(sink, None, entry, task.line if task is not None else self._line)
        reply = await self._outcome(sink, tenant, entry.id)
        return reply if reply.shared is not None else None

    async def cancel(self, tenant: str, id: str) -> None:
        """Forget a task and its outcome; if it is not on a GPU yet, it never gets there.

        Raises:
            BrokerUnavailable: it may not have been forgotten.
        """
        held = self._held.get((tenant, id))
        if held is not None and held.task:
            self._let_go(held)
            if held.unadmitted or held.line is not self._shared:
                for one in {held.line, self._shared}:
                    one.cancel_later(tenant, id)
            self._tell(held.sink, Reply(id, tenant, None, failures.no_task()))
        for line in (self._direct, self._shared):
            if line is not None and (held is None or held.line is line):
                await line.broker.cancel_task(tenant, id)

    def out_of_reach(self) -> Failure:
        """What a client hears when `recall` or `cancel` could not reach the broker."""
        return self._shared.out_of_reach()

    async def emptied(self) -> None:
        """Return as soon as no request is held."""
        while self._held:
            self._emptied.clear()
            await self._emptied.wait()

    def refuse_all(self, failure: Failure) -> None:
        """Answer every held request with `failure`; for a shutdown that may not wait."""
        for held in list(self._held.values()):
            self._settle(held, failure)

    async def status(self, id: str, tenant: str | None = None) -> RequestStatus | None:
        """What is known of request `id`, of the newest where several tenants have one and none is named; None when it
        is not held and not among the last ones answered."""
        for held in reversed(self._held.values()):
            if held.entry.id == id and tenant in (None, held.entry.tenant):
                stage = None
                with contextlib.suppress(BrokerUnavailable):
                    stage = await held.line.broker.state(held.entry.tenant, id)
                return waiting(held, stage, self._clock())
        return self._answered.find(id, tenant)

    def _objection(self, principal: Principal, entry: Entry) -> Failure | None:
        model, line = entry.model, self._line
        if self.closed:
            return Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining")
        if entry.limits and (over := self.limiter.excess(entry.limits, line.broker)) is not None:
            return over
        if model not in self._models:
            return failures.no_model(model, self._models)
        if principal.models and model not in principal.models:
            return failures.no_model_for(model, principal.models)
        if (entry.tenant, entry.id) in self._held:
            return failures.conflict()
        if len(line.outbox) >= line.room:
            return line.no_room()
        return self.limiter.check(entry, line is self._direct)

    def _refuse(self, sink: ReplySink, principal: Principal, entry: Entry, failure: Failure) -> None:
        if failure.code in CHARGED:
            self.limiter.charge(entry.limits)
        self.note_refusal(principal, entry, failure)
        reply = Reply(entry.id, entry.tenant, None, failure)
        asyncio.get_running_loop().call_soon(sink.answer, reply)

    def note_refusal(self, principal: Principal, entry: Entry, failure: Failure) -> None:
        """Count and record a request that was refused here, or at the door for its principal's limits."""
        label, tier = entry.model if entry.model in self._models else "", self._tiers[entry.tier]
        self.counters.requests[label, tier, failure.code.lower()] += 1
        if failure.reason:
            self.counters.refusals[failure.reason, tier] += 1
        if self._journal is not None:
            self._journal.add([(principal, entry, 0.0, Reply(entry.id, entry.tenant, None, failure))])

    def admitted(self, line: BrokerSession, entry: Entry) -> None:
        """See Holder."""
        if (held := self._found(entry)) is not None and held.unadmitted:
            held.unadmitted = False
            held.sink.admitted()

    def renewed(self, line: BrokerSession, entries: Sequence[Entry]) -> list[Entry]:
        """See Holder. What the broker was away for counts as time, but not as time in the queue."""
        now, fresh = self._clock(), []
        for entry in entries:
            held = self._found(entry)
            if held is not None and held.line is line and held.deadline > now:
                fresh.append(held.renewed(now))
        return fresh

    def held_on(self, line: BrokerSession) -> list[Entry]:
        """See Holder."""
        return [held.entry for held in self._held.values() if held.line is line]

    def refused(self, line: BrokerSession, entry: Entry, failure: Failure) -> None:
        """See Holder."""
        held = self._found(entry)
        if held is not None and held.line is line:
            if failure.reason and held.principal is not None:
                self.counters.refusals[failure.reason, self._tiers[entry.tier]] += 1
            self._settle(held, failure, admitted=False)

    def away(self, line: BrokerSession) -> None:
        """See Holder. What is held goes direct at once, or waits on for the broker."""
        if line is not self._shared:
            return
        if self._direct is None:
            line.room = 0
            log.warning("requests are refused until the broker is back", held=len(self._held))
            return
        self._line, self.broker = self._direct, self._direct.broker
        log.warning("direct mode until the broker is back", held=len(self._held))
        moved = [held for held in self._held.values() if held.line is line]
        for held in moved:
            held.line = self._direct
            if held.entry.limits:  # It may have been charged; a burst that was let in is not refused now.
                held.entry = msgspec.structs.replace(held.entry, limits=())
            if not held.task:  # A task may be asked for at any gateway; so may a key, which the broker sees to.
                line.withdraw(held.entry.submission)
        line.outbox.clear()
        self._direct.take_over([held.entry for held in moved])

    def back(self, line: BrokerSession) -> None:
        """See Holder. What went direct is answered there."""
        if line is self._shared:
            line.room = self.settings.max_queue
            self._line, self.broker = line, line.broker

    def brought(self, line: BrokerSession, replies: Sequence[Reply]) -> None:
        """See Holder. Tells each sink; what is counted is counted for all of them together."""
        now = self._clock()
        overdue = now - DEADLINE_GRAIN
        told, notes = dict[tuple[str, int], Answers](), list[Note]()
        sampled, strays = None, 0
        for reply in replies:
            key = reply.tenant, reply.id
            held = self._held.pop(key, None)
            if held is None or (entry := held.entry).nonce != reply.nonce:
                strays += 1  # Answered by its deadline or by another line, the client left, or the id is used again.
                if held is not None:
                    self._held[key] = held
                continue
            if (held.line is not line or held.deadline < overdue) and not self._fits(held, reply, overdue):
                continue
            latency, principal, failure, ran = now - held.since, held.principal, reply.failure, reply.ran
            if principal is None or (failure is not None and failure.reason == failures.CANCELLED):
                self._note_cancelled(held)
                self._tell(held.sink, reply)
                continue
            if self._journal is not None:
                notes.append((principal, entry, latency, reply))
            if reply.shared is not None:
                self.counters.shared[entry.model, reply.shared.value, "kept" if reply.kept else "joined"] += 1
                self.limiter.not_run(entry)
            series = told.get((entry.model, entry.tier))
            if series is None:
                series = told[entry.model, entry.tier] = Answers([], [])
            series.latencies.append(latency)
            series.waits.append(0.0 if reply.kept else reply.queued)
            if failure is not None:
                series.failed += 1
                self._count(held, failure.code.lower())
            if ran is not sampled and ran is not None and reply.shared is None:
                sampled = ran
                self.counters.overhead_seconds.observe(max(0.0, latency - reply.queued - sampled.seconds))
            self._answered.add(principal, entry, now, latency, reply)
            answer = reply
            if entry.shares and unkept(entry, reply, line.broker.kept):
                answer = msgspec.structs.replace(reply, unkept=True)
            self._tell(held.sink, answer)
        for (model, tier), series in told.items():
            self.counters.answered(model, self._tiers[tier], series, line is self._direct)
        if notes and self._journal is not None:
            self._journal.add(notes)
        if strays:
            log.debug("replies that nobody waits for", count=strays)
        if not self._held:
            self._emptied.set()

    def _fits(self, held: PendingRequest, reply: Reply, overdue: float) -> bool:
        """Whether a reply that is not what was expected will do; if not, its request is held on or gets its 504."""
        self._held[held.entry.tenant, held.entry.id] = held
        if held.deadline < overdue:  # This process stood still; its client has long given up.
            self._expire(held)
            return False
        if reply.failure is not None:  # It comes by the line that the request has left; the other may do better.
            return False
        del self._held[held.entry.tenant, held.entry.id]
        held.line.withdraw(held.entry.submission)
        return True

    def _settle(self, held: PendingRequest, failure: Failure, admitted: bool = True) -> None:
        """Answer a held request on the gateway's own account. A refusal at the door is no latency: it takes no
        time, and in an overload there are so many that they would hide how slow the others are."""
        entry = held.entry
        if self._held.pop((entry.tenant, entry.id), None) is None:
            return
        latency = self._clock() - held.since
        reply = Reply(entry.id, entry.tenant, None, failure)
        self._count(held, failure.code.lower())
        if held.principal is not None:
            self._answered.add(held.principal, entry, held.since + latency, latency, reply)
            if admitted:
                self.counters.request_seconds[entry.model, self._tiers[entry.tier]].observe(latency)
            if self._journal is not None:
                self._journal.add([(held.principal, entry, latency, reply)])
        self._tell(held.sink, reply)
        if not self._held:
            self._emptied.set()

    def _tell(self, sink: ReplySink, reply: Reply) -> None:
        try:
            sink.answer(reply)
        except Exception:
            log.exception("an answer could not be written", request_id=reply.id)

    def _count(self, held: PendingRequest, outcome: str) -> None:
        if held.principal is not None:
            self.counters.requests[held.entry.model, self._tiers[held.entry.tier], outcome] += 1

    def _note_cancelled(self, held: PendingRequest) -> None:
        self._count(held, "cancelled")
        if self._journal is not None and held.principal is not None:
            left = Reply(held.entry.id, held.entry.tenant, None, Failure(errors.CANCELLED, "the client left"))
            self._journal.add([(held.principal, held.entry, self._clock() - held.since, left)])

    def _found(self, entry: Entry) -> PendingRequest | None:
        """The record of an entry that is held."""
        held = self._held.get((entry.tenant, entry.id))
        return held if held is not None and held.entry.nonce == entry.nonce else None

    def _let_go(self, held: PendingRequest) -> None:
        """Its client waits no longer."""
        del self._held[held.entry.tenant, held.entry.id]
        self._note_cancelled(held)
        if not self._held:
            self._emptied.set()

    def _overdue(self, keys: Sequence[tuple[str, str]]) -> None:
        now = self._clock()
        for held in filter(None, map(self._held.get, keys)):
            if held.deadline <= now:
                self._expire(held)

    def _expire(self, held: PendingRequest) -> None:
        message = f"the total deadline of {held.entry.timeout * 1000:.0f} ms passed"
        self._settle(held, Failure(errors.DEADLINE_EXCEEDED, message, None, "total"))
        if held.unadmitted or not held.task:  # Of a task that was admitted the broker tells who asks later.
            held.line.withdraw(held.entry.submission)
