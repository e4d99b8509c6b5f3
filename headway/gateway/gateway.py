"""The gateway: the client's side of requests, from submission to answer.

Per request there is one small record and two dictionary operations; no task, no future, no timer of its own. The record
carries the way back, so that the answer is written by whoever brings it.

Requests go over a `BrokerSession` to the broker that the fleet shares. While that is away, they go over another session
to a broker of the gateway's own, if there is one, and are refused otherwise. A request ends once, in `_finish`,
whatever its sessions bring: the first answer takes the record away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.dedup import digest_of, follower, named, unkept
from headway.core.ratelimit import all_counting_as
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import (
    Admitted,
    BrokerSession,
    Down,
    EntryRefused,
    Replied,
    SessionEvent,
    Up,
)
from headway.gateway.client_quotas import Quotas
from headway.gateway.deadlines import Deadlines
from headway.gateway.direct_mode import DirectMode, Fallback
from headway.gateway.equal_inputs import EqualInputs
from headway.gateway.lane import ANY_KEY, Lane, asks_nothing_rare
from headway.gateway.late_tasks import LateTasks
from headway.gateway.limiter import CHARGED, Limiter
from headway.gateway.outcome_counts import OutcomeCounts, RolloutCounts, TenantCounts
from headway.gateway.pending import (
    NOBODY,
    Ending,
    FutureSink,
    Judgement,
    Observer,
    PendingRequest,
    PendingTable,
    ReplySink,
    SeveralInputs,
    finish,
    tell,
)
from headway.gateway.recent_requests import RecentRequests, waiting
from headway.gateway.request_traces import RequestTraces
from headway.gateway.served_models import ServedModels
from headway.model import (
    DedupKey,
    DedupKind,
    Entry,
    EntryState,
    Failure,
    InferenceRequest,
    Limit,
    Principal,
    Reply,
    RequestOptions,
    RequestStatus,
    Value,
    WorkerInfo,
)
from headway.ports import RequestQueue
from headway.runtime.counters import GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.runtime.timing_wheel import DEADLINE_GRAIN

if TYPE_CHECKING:
    from headway.gateway.input_gate import InputGate
    from headway.gateway.screened import Screening

log = get_logger(__name__)

_SESSION, _DEADLINE = attrgetter("session"), attrgetter("deadline")
_KEY = attrgetter("key")

WOKEN_EVERY = 0.5
"""Least seconds between two words to the controller that a model at zero is asked for."""
MOST_LANES = 10_000
"""Most open lanes that are known, so that requests of several connections have one in common."""


class Gateway:
    """Gateway of one process: takes requests in, hands them to the broker, and brings each answer to its sink.

    Arguments:
        settings: settings of time-outs, bounds and tier names.
        models: names of the models that are served.
        broker: broker that entries go to.
        counters: counters of outcomes.
        clock: monotonic seconds.
        direct: fallback that entries go to while `broker` is away; without it they are refused then.
        observers: observers of every request that has ended.
        gate: gate of the input policy that every request goes through first; None: there is no policy.
        traces: traces of the requests; None where none are recorded.
        held: table for the pending requests, to be looked at only by others; None: a new one.
        woken: called when a model at zero is asked for, so that the controller hears of it.
        in_doubt: whether other models and versions may be served, of which this process has not heard.
        rng: uniform in [0, 1), for pauses.

    Attributes:
        closed: whether every further request is refused.
        limiter: refuses requests over a limit or the fleet's capacity.
        quotas: quotas of the clients of the process.
        served: models that are served.
        tenant_counts: counts of tenants that ask for statistics.
        rollout_counts: counts of the versions of models with a rollout under way.
        broker: broker that new requests go to: the shared one or, in direct mode, the gateway's own.
        held: pending requests; to be looked at only.
        equal_inputs: inputs that get the outcome of an equal one of their request.
        facts: facts by which lanes are open, as one object that is compared by identity.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        broker: RequestQueue,
        counters: GatewayCounts,
        clock: Callable[[], float],
        *,
        direct: Fallback | None = None,
        observers: Sequence[Observer] = (),
        gate: InputGate | None = None,
        traces: RequestTraces | None = None,
        held: PendingTable | None = None,
        woken: Callable[[], None] = lambda: None,
        in_doubt: Callable[[], bool] = lambda: False,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.settings, self.counters, self._closed = settings, counters, False
        self.limiter = Limiter(len(settings.tier_names), clock, settings.longest_task_s)
        self.turns, self.quotas = FairTurns(clock), Quotas(settings)
        self.name = f"{settings.name or 'gateway'}-{new_id()}"
        self.served = ServedModels(models, settings, rng, clock, traces, in_doubt)
        self._unchecked = self.served.unchecked
        self._clock, self._tiers = clock, settings.tier_names
        self._pending = self.held = PendingTable() if held is None else held
        self.equal_inputs = EqualInputs(
            self._pending, self.turns, self.limiter, lambda ended: self._finish(ended, Ending.REPLIED)
        )
        self._screening: Screening | None = None
        if gate is not None:
            from headway.gateway.screened import Screening

            self._screening = Screening(gate, self.served, self.limiter, self._hand_on, self._answer)
        self._next_nonce = itertools.count(1).__next__
        self._deadlines = Deadlines(clock, self._pending, settings.request_timeout_ms / 1000, self._overdue)
        self._recent = RecentRequests(clock)
        self._late = LateTasks(clock, lambda tasks: self._finish(tasks, Ending.TIMED_OUT))
        counts = OutcomeCounts(counters, self._tiers, self.served)
        traced = () if traces is None else (traces,)
        self._observers: tuple[Observer, ...] = (counts, self._recent, *observers, *traced)
        self.tenant_counts = TenantCounts(self._tiers, self.served, self._tell_too)
        self.rollout_counts = RolloutCounts(self._tell_too)
        self._emptied = asyncio.Event()
        make_session = partial(
            BrokerSession, gateway=self.name, pending=self._pending, on_event=self.on_event, room=settings.max_queue,
            down_after=settings.broker_timeout_ms / 1000, clock=clock, rng=rng,
        )  # fmt: skip
        self._shared = make_session(broker)
        self._direct_mode = DirectMode(make_session(direct.broker), direct.models) if direct else None
        self._direct = self._direct_mode.session if self._direct_mode is not None else None
        self._session = self._shared
        """Session that new requests go over."""
        self.broker = broker
        self.facts: object = None
        self._woken, self._woken_at = woken, -math.inf
        self._lanes: dict[tuple[int, RequestOptions, str | None], Lane] = {}
        """Open lanes, by the identity of who asks, options and model asked."""
        self.learn()

    def start(self, supervisor: Supervisor) -> None:
        """Start the loops: what goes to the brokers, and what comes back."""
        self._shared.start(supervisor, "gateway")
        if self._direct is not None:
            self._direct.start(supervisor, "gateway direct")

    @property
    def pending(self) -> int:
        """Number of pending requests, and of those who follow tasks."""
        return len(self._pending)

    @property
    def holding(self) -> bool:
        """Whether new requests are held for the shared broker, whether it answers now or not."""
        return not self._shared.away

    def note_silence(self, began: float, error: BrokerUnavailable) -> None:
        """Note that a call of this process to the shared broker was not answered; `began`: its instant."""
        self._shared.note_silence(began, error)

    @property
    def requests_per_second(self) -> float:
        """Requests handed on, averaged over about a second."""
        return sum(session.rate(self._clock()) for session in (self._shared, self._direct) if session is not None)

    def submit(self, sink: ReplySink, request: InferenceRequest, several: SeveralInputs | None = None) -> bool:
        """Take a request in; its answer, also a refusal, goes to `sink` on a later turn of the loop. False: it is refused.

        Arguments:
            sink: gets the reply, exactly once unless the request is abandoned.
            request: the request.
            several: request with several inputs of which this is one.
        """
        judgement = None
        if self._screening is not None:
            screened = self._screened(self._screening, sink, request, several)
            if screened is None:
                return False
            request, judgement = screened
        principal, options, model = request.principal, request.options, request.model
        principal = principal.asking(model) if principal.of_models else principal
        session, direct = self._session, self._direct
        if (
            options.chosen
            and direct is not None
            and direct.near is not None
            and direct.near.knows(principal.tenant, request.id)
        ):
            session = direct  # Its id stands for what came while the other broker was away.
        alone = session is not self._shared
        limits = self.limiter.parts(principal.limits) if alone else principal.limits
        entry = self.served[model].entry(request, limits, self.name, self._next_nonce(), several, alone)
        failure = self._check(principal, entry, options, session)
        if failure is not None:
            self._refuse(sink, principal, entry, failure, several)
        else:
            awaited = options.task or bool(several and several.ahead)
            self._hold(sink, principal, entry, awaited, several, session if judgement is None else None)
            if judgement is not None and self._screening is not None:
                self._screening.hold(judgement, self._pending[entry.tenant, entry.id])
        return failure is None

    def _screened(
        self, screening: Screening, sink: ReplySink, request: InferenceRequest, several: SeveralInputs | None
    ) -> tuple[InferenceRequest, Judgement | None] | None:
        """Request as the input policy leaves it, and the verdict that it waits for. None: the policy has refused it."""
        principal, model = request.principal, request.model
        if model not in self.served or (principal.models and model not in principal.models):
            return request, None  # It is refused for that, and the policy isn't shown.
        principal = principal.asking(model)
        limits = self.counted(principal.limits)
        screened = screening.inspect(request, several, limits, self._session.broker)
        if screened.failure is not None:
            self._refuse(sink, principal, unqueued(screened.request, limits), screened.failure, several)
            return None
        return screened.request, screened.judgement

    def _hand_on(self, pending: PendingRequest) -> None:
        """Hand a request that has waited for a verdict to the broker of new ones, with what is left of its time."""
        if self.equal_inputs.is_later(pending):
            return
        session, entry = self._session, pending.refreshed(self._clock())
        if session.full(1):
            self._answer(pending, session.no_room(), Ending.REFUSED)
            return
        pending.session = session
        pending.entry = replace(entry, limits=self.counted(pending.principal.limits))
        session.offer(pending.entry)

    @property
    def closed(self) -> bool:
        """Whether every further request is refused."""
        return self._closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._closed = closed
        self.learn()

    def learn(self, workers: Sequence[WorkerInfo] = ()) -> None:
        """Close the lanes if what they were decided by has changed, as it may by what workers report."""
        served = self.served
        of_each = [
            (model, one, one.versions.sole, one.traces is None, one.settings, one.takes, one.is_plain, one.takes_rows)
            for model, one in served.items()
        ]
        facts = (
            self._closed,
            self._session,
            served.default,
            served.failed.keys() | (),
            served.at_zero.keys() | (),
            frozenset(served.unchecked),
            of_each,
        )
        if self.facts != facts:
            self.facts = facts
            self._lanes.clear()

    def lane(self, principal: Principal, options: RequestOptions, asked: str | None) -> Lane:
        """Lane of requests of a principal with these options that name model `asked`."""
        known = self._lanes.get((id(principal), options, asked))
        if known is not None and known.facts is self.facts:
            return known
        if options.key not in ("", ANY_KEY):
            return self.lane(principal, replace(options, key=ANY_KEY), asked)
        lane = Lane(self.facts, principal, options, asked)
        model = asked or self.served.default_of(principal.models)
        principal = principal.asking(model)
        rules, session = self.served[model], self._session
        version = rules.versions.sole or ""
        alone, allowed = session is not self._shared, not principal.models or model in principal.models
        plain = (
            asks_nothing_rare(options) and allowed and not (self._closed or alone or self.served.failed or self._screening)
            and model not in self.served.at_zero and (not version or session.near is None)
        )  # fmt: skip
        is_open, kept = plain and model in self._unchecked and rules.is_plain, bool(options.key or options.task)
        lane.open, lane.keeps = is_open and not kept, is_open and kept
        lane.rows = plain and not kept and rules.takes_rows
        lane.keep, lane.named = rules.settings.result_ttl_s, named(model, "")
        timeout = min(options.timeout, rules.longest_task if options.task else rules.longest)
        lane.principal, lane.model, lane.usual = principal, model, timeout == self._deadlines.usual
        lane.pattern = Entry(
            "", model, "", max(principal.tier, options.tier), principal.tenant, self.name,
            timeout if options.task else rules.queue_timeout, timeout, version=version, limits=principal.limits,
            caller=principal.user if options.origin is None else options.origin,
        )  # fmt: skip
        # A lane of an unknown model is not remembered: clients could grow the table.
        if lane.open or lane.rows or lane.keeps:
            lane.throttle, lane.throttled = self.limiter.throttles[model], self.limiter.holds_up(lane.pattern.tier)
            if len(self._lanes) >= MOST_LANES:
                self._lanes.clear()
            self._lanes[id(lane.asker), options, asked] = lane  # It holds its asker, so no other has that identity.
        return lane

    def enter(
        self, sink: ReplySink, lane: Lane, id: str, input: Value, parameters: bytes,
        pattern: Entry | None = None, several: SeveralInputs | None = None,
    ) -> Entry | None:  # fmt: skip
        """Take a request in on a lane that is open for its input, under a fresh id; see `submit`. Returns its entry; None: it is refused.

        A request that has more than its lane's `pattern` brings its own. It asks `lets_in` first.
        """
        session, entry = self._session, pattern or lane.pattern
        now = self._clock()
        near = session.near
        if near is None or session.waits or (entry.limits and self.limiter.debts):
            near = None
            if pattern is None and (
                session.full(1) or (entry.limits and self.limiter.excess(entry.limits, session.broker))
            ):  # It is told why.
                self.submit(sink, InferenceRequest(lane.asker, id, lane.options, lane.model, input, parameters))
                return None
        key = entry.tenant, id
        entry = replace(entry, id=id, input=input, parameters=parameters, nonce=self._next_nonce())
        if lane.throttled:
            if (over := self.limiter.check(entry, alone=False)) is not None:
                self._refuse(sink, lane.principal, entry, over, several)
                return None
        elif entry.timeout >= lane.throttle.least_seconds:
            lane.throttle.higher += 1
        pending = PendingRequest(sink, lane.principal, entry, now, now + entry.timeout, session, key, lane, several)
        if near is None:
            session.offer(entry)
        else:
            session.taken += 1
            if (failure := near.enter(pending, now)) is not None:
                self._enter_refused(pending, failure)
                return None
        self._pending[key] = pending
        if not (lane.usual and self._deadlines.runs):
            self._deadlines.watch(key, pending.deadline, entry.timeout)
        return entry

    def lets_in(self, lane: Lane, count: int) -> bool:
        """Whether so many requests may go in by a lane together, as far as is known here."""
        session, limits = self._session, lane.pattern.limits
        if session.near is not None and not (session.waits or (limits and self.limiter.debts)):
            return True
        limits = all_counting_as(limits, count)
        return not (session.full(count) or (limits and self.limiter.excess(limits, session.broker)))

    def take_in(
        self, sink: ReplySink, lane: Lane, options: RequestOptions, id: str, input: Value, parameters: bytes
    ) -> None:
        """Take a request in whose lane is not open: to be kept, if the lane is for that, else by `submit`."""
        if not (lane.keeps and self.lets_in(lane, 1)):
            self.submit(sink, InferenceRequest(lane.asker, id, options, lane.model, input, parameters))
            return
        kind, key = (DedupKind.KEY, options.key) if options.key else (DedupKind.TASK, id)
        dedup_key = DedupKey(kind, key, digest_of(lane.named, input, parameters), lane.keep)
        pattern = replace(lane.pattern, dedup_keys=(dedup_key,))
        if self.enter(sink, lane, id, input, parameters, pattern) is not None and options.task:
            pending = self._pending[pattern.tenant, id]
            pending.unadmitted = True
            if not self._session.waits:  # Else it is told when the broker has it.
                asyncio.get_running_loop().call_soon(self._admitted, pending)

    def _enter_refused(self, pending: PendingRequest, failure: Failure) -> None:
        """Answer a request that a near broker has refused."""
        entry = pending.entry
        throttle = self.limiter.throttles[entry.model]
        if entry.count > 1 and entry.timeout >= throttle.least_seconds:
            # The first input of a list is refused for all of it, and alone was counted.
            throttle.higher += entry.count - 1
        self._note_refused(pending, failure)
        ending = Ending.TURNED_AWAY if failure.code == errors.RATE_LIMITED else Ending.REFUSED
        self._refuse(pending.sink, pending.principal, entry, failure, pending.several, ending)

    def _note_refused(self, pending: PendingRequest, failure: Failure) -> None:
        """Note that the broker refuses an entry. If that pays for a list, nothing of the list counts any more."""
        self.limiter.refused(pending.entry, failure)
        if pending.several is not None and pending.entry.count > 1:  # It stands for all of them.
            pending.several.payer = 0

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Limits as they are counted now: whole by the broker that all share, in part while this gateway is alone."""
        return limits if self._session is self._shared else self.limiter.parts(limits)

    def _hold(
        self, sink: ReplySink, principal: Principal, entry: Entry, unadmitted: bool, several: SeveralInputs | None,
        session: BrokerSession | None,
    ) -> None:  # fmt: skip
        now, key = self._clock(), (entry.tenant, entry.id)
        deadline = now + entry.timeout
        pending = PendingRequest(sink, principal, entry, now, deadline, session, key, None, several, unadmitted)
        self._pending[key] = pending
        self._deadlines.watch(key, deadline, entry.timeout)
        if several is not None and entry.dedup_keys and self.equal_inputs.follows(pending):
            pending.session = None
        elif session is not None:
            session.offer(entry)

    def detach(self, tenant: str, id: str) -> None:
        """Stop waiting for a task, which goes on."""
        if (pending := self._pending.get((tenant, id))) is not None:
            pending.sink = NOBODY
            if self.served.traces is not None:
                self.served.traces.detached(pending.entry)

    def abandon(self, sink: ReplySink, tenant: str, id: str) -> None:
        """Drop a request whose client left; the broker decides what becomes of the entry. Before the handover it is no
        task.
        """
        pending = self._pending.get((tenant, id))
        if pending is None or pending.sink is not sink:
            return
        pending.sink = NOBODY
        if pending.follows:
            self._end_follower(pending, Reply(id, tenant, None, failures.left()))
        else:
            self._leave(pending)
        self._withdraw(pending)

    async def ask(self, request: InferenceRequest) -> Reply:
        """Submit a request, and wait for its reply. A cancelled call abandons the request."""
        sink = FutureSink()
        self.submit(sink, request)
        return await self._reply(sink, request.principal.tenant, request.id)

    async def _reply(self, sink: FutureSink, tenant: str, id: str) -> Reply:
        try:
            [reply] = await sink.replies
        except asyncio.CancelledError:
            self.abandon(sink, tenant, id)
            raise
        return reply

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """Outcome or state of a task; None when it is unknown, forgotten, or no task of the tenant's.

        Raises:
            BrokerUnavailable: the broker does not answer now.
        """
        pending = self._pending.get((tenant, id))
        if pending is not None and pending.task:
            if (session := pending.session) is None:  # It waits for the input policy.
                return EntryState.QUEUED
            admitted = not pending.unadmitted
            found = await session.outcome(tenant, id)
            if found is None and not admitted:
                return EntryState.QUEUED
            if found is None and not session.in_sync:  # It may be lost and offered again soon, or cancelled elsewhere.
                raise BrokerUnavailable("what the broker has lost is being offered again")
            return found
        if self._direct is not None and (found := await self._direct.outcome(tenant, id)) is not None:
            return found
        found = await self._shared.outcome(tenant, id)
        if found is None and not self._shared.settled:
            raise BrokerUnavailable("the broker has lost what it had, and another gateway may hold the task")
        return found

    async def follow(self, tenant: str, id: str, seconds: float) -> Reply | None:
        """Outcome of a task, waited for at most `seconds` seconds; None when it is not known by then."""
        task = self._pending.get((tenant, id))
        session = (task.session if task is not None else None) or self._session
        model, version = (task.entry.model, task.entry.version) if task is not None else ("", "")
        entry = follower(new_id(), id, tenant, self.name, seconds, self._next_nonce(), model, version)
        sink, taken = FutureSink(), session.taken
        session.followers += 1
        try:
            self._hold(sink, Principal("", tenant, 0), entry, unadmitted=False, several=None, session=session)
            session.taken = taken  # It is no request.
            async with asyncio.timeout(seconds):
                reply = await self._reply(sink, tenant, entry.id)
        except TimeoutError:
            return None
        finally:
            session.followers -= 1
        return reply if reply.shared is not None else None

    async def cancel(self, tenant: str, id: str) -> None:
        """Forget a task and its outcome; if it is not on a GPU yet, it never gets there.

        Raises:
            BrokerUnavailable: the task may not have been forgotten.
        """
        pending = self._pending.get((tenant, id))
        task = pending if pending is not None and pending.task else None
        is_certain = task is not None and (task.unadmitted or task.session is not self._shared)
        if task is not None and is_certain:  # It may be on its way.
            (task.session or self._shared).cancel_later(tenant, id)
        known = self._shared.broker.epoch
        asked = await self._knowing(tenant, id, pending)
        try:
            for session in asked:
                await session.cancel_task(tenant, id)
            is_certain = True
        finally:
            # Before that its client would hear that it is gone, and others that poll would still find it.
            if task is not None and is_certain and self._pending.of(task.entry) is task:
                self._leave(task, Reply(id, tenant, None, failures.no_task()))
        # The gateway that holds it offers it again.
        if pending is None and self._shared in asked and known and self._shared.broker.epoch != known:
            raise BrokerUnavailable("the broker had lost what it had, and the task may be back")

    async def _knowing(self, tenant: str, id: str, pending: PendingRequest | None) -> list[BrokerSession]:
        """Sessions with the brokers that may have a task; `pending`: what has its id here."""
        direct, shared = self._direct, self._shared
        if pending is not None:
            return [] if pending.session is None else [pending.session]
        if direct is None or await direct.outcome(tenant, id) is None:
            return [shared]
        return [direct] if shared.away else [direct, shared]

    def out_of_reach(self) -> Failure:
        """Failure that a client reads when `outcome` or `cancel` could not reach the broker."""
        return self._shared.out_of_reach()

    async def emptied(self) -> None:
        """Return as soon as no request is pending."""
        while self._pending:
            self._emptied.clear()
            await self._emptied.wait()
        self._late.end_all()

    def refuse_all(self, failure: Failure) -> None:
        """Answer every pending request with `failure`; for a shutdown that may not wait."""
        for pending in list(self._pending.values()):
            self._answer(pending, failure, Ending.TIMED_OUT)
        self._late.end_all()

    async def status(self, id: str, tenant: str | None = None) -> RequestStatus | None:
        """Status of request `id`; of several tenants' the newest; None when it is neither pending nor recent."""
        pending, state = self._pending.newest(id, tenant), None
        if pending is None:
            return self._recent.find(id, tenant)
        with contextlib.suppress(BrokerUnavailable):
            if pending.session is not None:
                state = await pending.session.broker.state(pending.entry.tenant, id)
        return waiting(pending, state, self._clock())

    def _check(
        self, principal: Principal, entry: Entry, options: RequestOptions, session: BrokerSession
    ) -> Failure | None:
        """Failure for which a request that goes over a session is refused at once; None when it is not."""
        model = entry.model
        if self.closed:
            return Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining")
        if entry.limits and (over := self.limiter.excess(entry.limits, session.broker)) is not None:
            return self.limiter.never(principal.limits, entry.limits[0].counting) or over
        if (wrong := self.absence(principal, model)) is not None:
            return wrong
        if model not in self._unchecked:
            if wrong := self.served.check(model, entry.input, principal.models):
                return wrong
            if entry.limits and (wrong := self.limiter.never(principal.limits, entry.limits[0].counting)):
                return wrong
        if (wrong := self._check_here(model, options)) is not None:
            return wrong
        if self.served.unready and session is self._shared and (wrong := self._unready(entry, options)):
            return wrong
        if (entry.tenant, entry.id) in self._pending:
            return failures.conflict()
        if session.full(options.count or 1):
            return session.no_room()
        return self.limiter.check(entry, session is self._direct, options.count)

    def _unready(self, entry: Entry, options: RequestOptions) -> Failure | None:
        """Failure of a request where some models are not loaded, or at zero, if its own is one and is not there in time.

        The controller hears at once that a model at zero is asked for, whether the request is held or refused.
        """
        model, now = entry.model, self._clock()
        if model not in self.served.at_zero:
            return self.served.not_loaded(entry)
        wrong = self.served.not_started(entry)
        if wrong is not None:  # It is counted as what was asked for; what is held, further on.
            wrong = self.limiter.check(entry, alone=False, count=options.count) or wrong
        self.limiter.throttles[model].count(now)
        if now - self._woken_at >= WOKEN_EVERY:
            self._woken_at = now
            self._woken()
        return wrong

    def absence(self, principal: Principal, model: str) -> Failure | None:
        """Failure of a request for a model that is not served, or that is not the principal's; None where it may be asked."""
        if principal.models and model and model not in principal.models:  # Whether it is served or not is not told.
            return failures.no_model_for(model, principal.models)
        return None if model in self.served else self.served.absence(model, principal.models)

    def _check_here(self, model: str, options: RequestOptions) -> Failure | None:
        """Failure of a request for a model or version that the broker which new requests go to does not answer for.

        A version is not looked at where the request was let in with another.
        """
        version = options.version
        if self._direct_mode is not None and self._session is self._direct:
            return self._direct_mode.refusal(model, version, self.out_of_reach())
        return self.served.refusal(model, version) if version and options.count else None

    def _refuse(
        self,
        sink: ReplySink,
        principal: Principal,
        entry: Entry,
        failure: Failure,
        several: SeveralInputs | None,
        ending: Ending = Ending.TURNED_AWAY,
    ) -> None:
        if (failure.code in CHARGED or failure.reason == failures.BURST) and ending is Ending.TURNED_AWAY:
            self.limiter.charge(entry.limits, entry.limits[0].counting if entry.limits else 1)
        reply = self._note_refusal(principal, entry, failure, several, ending)
        asyncio.get_running_loop().call_soon(sink.answer, reply)

    def note_refusal(self, request: InferenceRequest, failure: Failure) -> Reply:
        """Count and record a request that is refused before it is submitted; its reply."""
        return self._note_refusal(request.principal, unqueued(request), failure, None, Ending.TURNED_AWAY)

    def _note_refusal(
        self, principal: Principal, entry: Entry, failure: Failure, several: SeveralInputs | None, ending: Ending
    ) -> Reply:
        now = self._clock()
        reply = Reply(entry.id, entry.tenant, None, failure)
        refused = PendingRequest(NOBODY, principal, entry, now, now, None, several=several, reply=reply)
        self._finish([refused], ending)
        return reply

    def on_event(self, session: BrokerSession, event: SessionEvent) -> None:
        """Handle an event of a session."""
        match event:
            case Replied(replies, held):
                if not (held and self._settle(session, held, replies)):
                    self._take(session, replies)
            case Admitted(entry):
                if self.served.traces is not None:
                    self.served.traces.admitted(entry)
                if (pending := self._pending.of(entry)) is not None:
                    self._admitted(pending)
            case EntryRefused(entry, failure):
                pending = self._pending.of(entry)
                if pending is not None and pending.session is session:
                    if session is self._shared and not pending.follows:  # No capacity bounds the other.
                        self._note_refused(pending, failure)
                    self._answer(pending, failure, Ending.REFUSED)
            case Down():
                self._go_down(session)
            case Up():
                if session is self._shared:
                    session.room = self.settings.max_queue
                    self._session, self.broker = session, session.broker
                    self.learn()

    def _admitted(self, pending: PendingRequest) -> None:
        """Note that the broker has a request."""
        if pending.unadmitted:
            pending.unadmitted = False
            pending.sink.admitted()

    def _go_down(self, session: BrokerSession) -> None:
        """Handle an outage: pending requests go direct at once, or wait on for the broker."""
        if session is not self._shared:
            return
        direct = self._direct
        if direct is None or self._direct_mode is None:
            session.room = 0
            log.warning("requests are refused until the broker is back", held=len(self._pending))
            return
        self._session, self.broker = direct, direct.broker
        self.learn()
        log.warning("direct mode until the broker is back", held=len(self._pending))
        self._direct_mode.take_over(session, self._pending)

    def _settle(self, session: BrokerSession, held: Sequence[PendingRequest], replies: Sequence[Reply]) -> bool:
        """End the requests of a whole batch. False: one of them is not as it was held, so they have to be matched one by one."""
        overdue, table = self._clock() - DEADLINE_GRAIN, self._pending
        known = [*map(table.get, map(_KEY, held))]
        if known != held or set(map(_SESSION, held)) != {session} or min(map(_DEADLINE, held)) < overdue:
            return False
        for pending, reply in zip(held, replies, strict=True):
            pending.reply = reply
        list(map(table.pop, map(_KEY, held)))
        self._finish(held, Ending.ANSWERED)
        if session is self._direct:
            self.counters.direct[held[0].entry.model] += len(held)
        return True

    def _take(self, session: BrokerSession, replies: Sequence[Reply]) -> None:
        """Match replies with pending requests. A request that has ended, or whose id is used again, takes none."""
        overdue = self._clock() - DEADLINE_GRAIN
        ended: list[PendingRequest] = []
        strays = 0
        held = self._pending
        for reply in replies:
            key = reply.tenant, reply.id
            pending = held.get(key)
            if pending is None or (entry := pending.entry).nonce != reply.nonce:
                strays += not self._late.take(reply, ended)
                continue
            if (pending.session is not session or pending.deadline < overdue) and not self._fits(
                pending, reply, overdue
            ):
                self._late.take(reply, ended)
                continue
            failure = reply.failure
            pending.reply = reply
            if failure is not None:
                if pending.follows:
                    self._end_follower(pending, reply)
                    continue
                if failure.reason == failures.CANCELLED:
                    self._leave(pending, reply)
                    continue
                if failure.code == errors.NO_WORKERS:
                    failure = self.served.in_time(entry.model, failure)
                    pending.reply = replace(reply, failure=failure)
            if reply.shared is not None:  # Also where the broker alone knew that the id is a kept task's.
                if pending.follows:
                    self._end_follower(pending, reply)
                    continue
                self.limiter.not_run(entry)
            del held[key]
            if entry.dedup_keys and unkept(entry, reply, session.broker.kept):
                pending.reply = replace(reply, unkept=True)
            ended.append(pending)
            if pending.several is not None and failure is None:
                self.equal_inputs.pass_on(pending)
        self._finish(ended, Ending.REPLIED)
        if session is self._direct:
            for pending in ended:
                self.counters.direct[pending.entry.model] += 1
        if strays:
            log.debug("replies that nobody waits for", count=strays)

    def _fits(self, pending: PendingRequest, reply: Reply, overdue: float) -> bool:
        """Whether an unexpected reply will do. If not, its request stays pending or gets its 504."""
        if pending.deadline < overdue:  # This process stood still; its client has long given up.
            self._expire(pending)
            return False
        if reply.failure is not None:  # It comes by the session that the request has left; the other may do better.
            return False
        self._withdraw(pending)
        return True

    def _answer(self, pending: PendingRequest, failure: Failure, ending: Ending) -> None:
        """End a request with a failure of the gateway's own."""
        entry = pending.entry
        if self._pending.of(entry) is pending:
            pending.reply = Reply(entry.id, entry.tenant, None, failure)
            if pending.follows:
                self._end_follower(pending, pending.reply)
                return
            del self._pending[entry.tenant, entry.id]
            self._finish([pending], ending)

    def _end_follower(self, pending: PendingRequest, reply: Reply) -> None:
        """End the wait of one who follows a task; `reply`: that task's, or why there is none."""
        entry = pending.entry
        del self._pending[entry.tenant, entry.id]
        tell(pending.sink, reply)
        if not self._pending:
            self._emptied.set()

    def _leave(self, pending: PendingRequest, told: Reply | None = None) -> None:
        """End a request that nobody wants any more. `told`: reply that its sink still gets."""
        entry, sink = pending.entry, pending.sink
        pending.sink = NOBODY
        del self._pending[entry.tenant, entry.id]
        if not entry.payer or pending.several is None or pending.several.payer:
            self.limiter.left(entry, self._clock() - pending.since)
        pending.reply = Reply(entry.id, entry.tenant, None, failures.left())
        self._finish([pending], Ending.LEFT)
        if told is not None:
            tell(sink, told)

    def _finish(self, ended: Sequence[PendingRequest], ending: Ending) -> None:
        """End requests that have left the table, each once: observers hear of them, and sinks get the answers."""
        finish(self._observers, ended, ending, self._clock())
        if not self._pending:
            self._emptied.set()

    def _tell_too(self, observer: Observer, too: bool = True) -> None:
        others = tuple(one for one in self._observers if one is not observer)
        self._observers = (*others, observer) if too else others

    def _withdraw(self, pending: PendingRequest) -> None:
        if pending.session is not None:
            pending.session.withdraw(pending.entry.submission)

    def _overdue(self, keys: Sequence[tuple[str, str]]) -> None:
        now = self._clock()
        for pending in filter(None, map(self._pending.get, keys)):
            if pending.deadline <= now:
                self._expire(pending)

    def _expire(self, pending: PendingRequest) -> None:
        message = f"the total deadline of {pending.entry.timeout * 1000:.0f} ms passed"
        failure = self.served.still_at_zero(pending.entry) or Failure(errors.DEADLINE_EXCEEDED, message, None, "total")
        told_later = pending.task and not pending.unadmitted  # By the broker, to whoever asks.
        if told_later and pending.sink is NOBODY:
            del self._pending[pending.entry.tenant, pending.entry.id]
            self._late.hold(pending, failure)
            if not self._pending:
                self._emptied.set()
            return
        self._answer(pending, failure, Ending.TIMED_OUT)
        if not told_later:
            self._withdraw(pending)


def unqueued(request: InferenceRequest, limits: tuple[Limit, ...] = ()) -> Entry:
    """Make a stand-in entry for a request that is refused before it has one, for counting and recording. `limits`: those that it counts towards."""
    principal, options = request.principal, request.options
    tier = max(principal.tier, options.tier)
    return Entry(
        request.id, request.model, request.input, tier, principal.tenant, "", 0.0, 0.0, request.parameters, limits=limits
    )  # fmt: skip
