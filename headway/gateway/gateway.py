"""The gateway. It handles the client's side of requests, from submission to answer.

A request costs one small record and two dictionary operations, but no separate task, future or timer. The record holds the sink
for the answer, so that whatever produces the answer can write it.

Requests are sent over a `BrokerSession` to the fleet's shared broker. During an outage, a gateway with a fallback sends them over
another session to its own broker; a gateway without one refuses them. A request ends exactly once, in `_finish`, because the first
answer removes its record."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.dedup import digest_of, follower, named, unkept
from headway.core.ratelimit import all_counting_as
from headway.core.rollout import bucket_of
from headway.core.tensors import rows_of
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import Admitted, BrokerSession, Down, EntryRefused, Replied, SessionEvent, Up
from headway.gateway.client_quotas import Quotas
from headway.gateway.deadlines import DEADLINE_GRAIN, Deadlines, LateTasks
from headway.gateway.direct_mode import DirectMode, Fallback
from headway.gateway.limiter import CHARGED, Limiter
from headway.gateway.pending import (
    ANY_KEY,
    NOBODY,
    Ending,
    FutureSink,
    Judgement,
    Lane,
    Observer,
    PendingRequest,
    PendingTable,
    ReplySink,
    SeveralInputs,
    asks_nothing_rare,
    finish,
    tell,
)
from headway.gateway.request_log import RecentRequests, waiting
from headway.gateway.request_traces import RequestTraces
from headway.gateway.served_models import ServedModels
from headway.model import (
    BatchRun,
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
    Rollout,
    Tensors,
    Value,
    VersionCounts,
    WorkerInfo,
)
from headway.ports import RequestQueue
from headway.runtime.counters import GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.gateway.input_gate import InputGate, Screening

log = get_logger(__name__)


_WEIGHT = attrgetter("entry.weight")
_SINCE, _QUEUED, _TIER = attrgetter("since"), attrgetter("reply.queued"), attrgetter("entry.tier")
MOST_WORKERS = 10_000  # Maximum number of workers whose last batch is remembered. Beyond it, all are forgotten.
MOST_TENANTS = 100  # Maximum number of tenants with separate token counts. Others are counted as OTHER.
OTHER = "other"
MOST_ASKING = (
    256  # Maximum number of tenants with separate counts. Beyond it, the one that asked longest ago is dropped.
)
_COUNTED = (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT)  # Endings that say something about the version.


def outcome_of(failure: Failure) -> str:
    """Return the outcome label for a failure: the error code that the client gets, in lower case."""
    return errors.SHOWN.get(failure.code, failure.code).lower()


class _Answers(msgspec.Struct):
    latencies: list[float] = msgspec.field(default_factory=list)
    waits: list[float] = msgspec.field(default_factory=list)
    failed: int = 0
    failed_seconds: float = 0.0


class OutcomeCounts:
    """Observer that updates counters. `models` are the served models; others don't get a time series."""

    def __init__(self, counters: GatewayCounts, tiers: Sequence[str], models: Container[str]) -> None:
        self._counters, self._tiers, self._models = counters, tiers, models
        self._last_runs: dict[str, float] = {}  # When the last counted batch was claimed, by worker.
        self._rows = Counter[tuple[str, float]]()  # Rows beyond the first of each request, by worker and time of claim.

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        if ending is Ending.ANSWERED:  # They used lanes, where tensors have a single row.
            self._count_batch(requests, now)
            return
        if ending is not Ending.REPLIED:
            for request in requests:
                self._count_other(request, ending, now)
            return
        by_label: dict[tuple[str, int], _Answers] = {}
        sampled: BatchRun | None = None
        model, tier, answers, rows = "", -1, _Answers(), False
        add_latency, add_wait = answers.latencies.append, answers.waits.append
        for request in requests:
            entry, reply, latency = request.entry, request.reply, now - request.since
            if entry.tier != tier or entry.model != model:
                model, tier = entry.model, entry.tier
                answers = by_label.setdefault((model, tier), _Answers())
                add_latency, add_wait = answers.latencies.append, answers.waits.append
                if not rows and isinstance(entry.input, Tensors):  # Checked once for each model and tier.
                    rows = True
                    if max(map(_WEIGHT, requests)) > 1:
                        self._count_rows(requests)
            add_latency(latency)
            add_wait(0.0 if reply.kept else reply.queued)
            if reply.failure is not None:
                answers.failed += 1
                answers.failed_seconds += latency
                self._count(entry, outcome_of(reply.failure))
            if reply.tokens is not None:
                self._count_tokens(entry, reply.tokens.used, "shared" if reply.shared is not None else "run")
            if reply.shared is not None:
                self._counters.shared[model, reply.shared.value, "kept" if reply.kept else "joined"] += 1
            elif reply.ran is not sampled and reply.ran is not None:
                sampled = reply.ran
                self._count_run(model, sampled, now)
                self._counters.overhead_seconds.observe(max(0.0, latency - reply.queued - sampled.seconds))
        for (model, tier), answers in by_label.items():
            self._count_answers(model, self._tiers[tier], answers)

    def _count_rows(self, requests: Sequence[PendingRequest]) -> None:
        """Count the additional tensor rows that ran: all but the first of each request."""
        self._rows.clear()
        for request in requests:
            entry, reply = request.entry, request.reply
            if reply.ran is not None and reply.shared is None and (more := rows_of(entry.input) - 1):
                self._rows[reply.ran.worker, reply.ran.claimed_at] += more
                if reply.failure is None:
                    self._counters.more_rows[entry.model] += more

    def _count_batch(self, requests: Sequence[PendingRequest], now: float) -> None:
        first = requests[0]
        model, ran, tiers = first.entry.model, first.reply.ran, set(map(_TIER, requests))
        for tier in tiers:
            own = requests if len(tiers) == 1 else [request for request in requests if request.entry.tier == tier]
            answers = _Answers([now - since for since in map(_SINCE, own)], list(map(_QUEUED, own)))
            self._count_answers(model, self._tiers[tier], answers)
        if ran is not None:
            self._count_run(model, ran, now)
            self._counters.overhead_seconds.observe(max(0.0, now - first.since - first.reply.queued - ran.seconds))

    def _count_tokens(self, entry: Entry, used: int, how: str) -> None:
        """Count tokens, by tenant for the first MOST_TENANTS tenants that use any."""
        tenants, tenant = self._counters.token_tenants, entry.tenant
        if tenant not in tenants:
            if len(tenants) >= MOST_TENANTS:
                tenant = OTHER
            else:
                tenants.add(tenant)
        self._counters.tokens[entry.model, tenant, how] += used

    def _count_run(self, model: str, run: BatchRun, now: float) -> None:
        """Count a batch once, even if its replies arrive in several calls."""
        self._counters.last_answer[model] = now
        if self._last_runs.get(run.worker) == run.claimed_at:
            return
        if len(self._last_runs) >= MOST_WORKERS:
            self._last_runs.clear()
        self._last_runs[run.worker] = run.claimed_at
        total = self._counters.runs[model, run.size + self._rows.pop((run.worker, run.claimed_at), 0)]
        total.count += 1
        total.seconds += run.seconds

    def _count_answers(self, model: str, tier: str, answers: _Answers) -> None:
        counters = self._counters
        counters.request_seconds[model, tier].observe_all(answers.latencies)
        counters.queue_seconds[model, tier].observe_all(answers.waits)
        if answers.failed:
            counters.failed_seconds[model] += answers.failed_seconds
        counters.requests[model, tier, "ok"] += len(answers.latencies) - answers.failed

    def _count_other(self, request: PendingRequest, ending: Ending, now: float) -> None:
        """Count a request without a reply. Skip latencies of refusals, which would drown out all others during an overload."""
        entry, failure = request.entry, request.reply.failure
        if ending is Ending.LEFT:
            self._count(entry, "cancelled")
        elif failure is not None:
            self._count(entry, outcome_of(failure))
            tier = self._tiers[entry.tier]
            if ending is Ending.TIMED_OUT:
                self._counters.request_seconds[entry.model, tier].observe(now - request.since)
                self._counters.failed_seconds[entry.model] += now - request.since
            elif failure.reason:
                self._counters.refusals[failure.reason, tier, self._known(entry)] += 1

    def _count(self, entry: Entry, outcome: str) -> None:
        self._counters.requests[self._known(entry), self._tiers[entry.tier], outcome] += 1

    def _known(self, entry: Entry) -> str:
        """Return the model of an entry; empty if it isn't served, because clients could make up any number of names."""
        return entry.model if entry.model in self._models else ""


class TenantCounts:
    """Observer that counts requests of the tenants that ask for counts. `begin` registers it when the first tenant asks."""

    def __init__(self, tiers: Sequence[str], models: Container[str], begin: Callable[[TenantCounts], None]) -> None:
        self._tiers, self._models, self._begin = tiers, models, begin
        self._counts: dict[
            str, tuple[GatewayCounts, OutcomeCounts]
        ] = {}  # Counts by tenant. The tenant that asked last comes last.

    def of(self, tenant: str) -> GatewayCounts:
        """Return the counts of a tenant's requests. Counting begins when the tenant first asks."""
        if not self._counts:
            self._begin(self)
        counts = self._counts.pop(tenant, None)
        if counts is None:
            counters = GatewayCounts()
            counts = counters, OutcomeCounts(counters, self._tiers, self._models)
            if len(self._counts) >= MOST_ASKING:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = counts
        return counts[0]

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        of_tenants: dict[str, list[PendingRequest]] = {}
        for request in requests:
            if request.entry.tenant in self._counts:
                of_tenants.setdefault(request.entry.tenant, []).append(request)
        for tenant, own in of_tenants.items():
            self._counts[tenant][1].finished(own, ending, now)

    def forget(self, model: str) -> None:
        """Drop the counts of a model that is no longer served."""
        for counters, _ in self._counts.values():
            counters.forget(model)


class _Sums(msgspec.Struct):
    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = msgspec.field(default_factory=dict)


class RolloutCounts:
    """Observer that counts requests by version during rollouts. `observe(self, True)` registers it, and False removes it."""

    def __init__(self, observe: Callable[[RolloutCounts, bool], None]) -> None:
        self._observe = observe
        self._of_models: dict[str, dict[str, _Sums]] = {}

    def follow(self, rollouts: Sequence[Rollout]) -> None:
        """From now on count for these rollouts only."""
        wanted = {rollout.model: {rollout.version, rollout.beside} for rollout in rollouts if rollout.running}
        before, self._of_models = self._of_models, {
            model: own if (own := self._of_models.get(model, {})).keys() == versions else {each: _Sums() for each in versions}
            for model, versions in wanted.items()
        }  # fmt: skip
        if bool(before) is not bool(self._of_models):
            self._observe(self, bool(self._of_models))

    @property
    def active(self) -> bool:
        return bool(self._of_models)

    @property
    def counts(self) -> dict[str, dict[str, VersionCounts]]:
        """Requests that have ended since the rollout began, by model and version."""
        return {
            model: {
                version: VersionCounts(sums.answered, sums.failed, dict(sums.latencies))
                for version, sums in own.items()
            }
            for model, own in self._of_models.items()
        }

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count requests by the version chosen for them. Shared answers don't count, and neither do requests that name a
        version: otherwise a client could cause a rollback by sending bad inputs to a version."""
        if ending not in _COUNTED:
            return
        for request in requests:
            entry, reply = request.entry, request.reply
            sums = self._of_models.get(entry.model, {}).get(entry.version)
            if sums is None or reply.shared is not None or entry.pinned:
                continue
            if reply.failure is not None:
                sums.failed += 1
                continue
            sums.answered += 1
            bucket = bucket_of(now - request.since)
            sums.latencies[bucket] = sums.latencies.get(bucket, 0) + 1


AT_ONCE = 64  # Maximum number of inputs that get their outputs in one turn of the event loop.


class EqualInputs:
    """Copies an input's output to identical ones of its request. Tenants take `turns`. `finish` ends requests with a reply."""

    def __init__(
        self,
        pending: PendingTable,
        turns: FairTurns,
        limiter: Limiter,
        finish: Callable[[Sequence[PendingRequest]], None],
    ) -> None:
        self._pending, self._turns, self._limiter, self._finish = pending, turns, limiter, finish

    def follows(self, pending: PendingRequest) -> bool:
        """Add a new input. Returns True if its request has an identical earlier input. The new input mustn't be submitted
        then."""
        several, key = pending.several, _shared_key(pending.entry)
        if several is None or not key:
            return False
        inputs = several.equal.setdefault(key, [])
        inputs.append(pending)
        if len(inputs) == 2 and inputs[0].ended:
            self._wait(inputs)
        return len(inputs) > 1

    def pass_on(self, first: PendingRequest) -> None:
        inputs = self._equal_to(first)
        if len(inputs) > 1 and inputs[0] is first:
            self._wait(inputs)

    def is_later(self, pending: PendingRequest) -> bool:
        """Return True if an input will get the output of an earlier one."""
        inputs = self._equal_to(pending)
        return bool(inputs) and inputs[0] is not pending

    def _equal_to(self, pending: PendingRequest) -> list[PendingRequest]:
        several = pending.several
        return several.equal.get(_shared_key(pending.entry), []) if several is not None and several.equal else []

    def _wait(self, inputs: list[PendingRequest]) -> None:
        self._turns.wait(inputs[0].entry.tenant, partial(self._give, inputs))

    def _give(self, inputs: list[PendingRequest]) -> None:
        """Copy the first input's output to the next AT_ONCE inputs."""
        reply = inputs[0].reply
        shared = DedupKind.SAME if reply.shared is None else reply.shared
        ended = [pending for pending in inputs[1 : AT_ONCE + 1] if self._pending.of(pending.entry) is pending]
        del inputs[1 : AT_ONCE + 1]
        for pending in ended:
            entry = pending.entry
            pending.reply = msgspec.structs.replace(reply, id=entry.id, nonce=entry.nonce, shared=shared)
            del self._pending[entry.tenant, entry.id]
            self._limiter.not_run(entry)
        if len(inputs) > 1:  # Do this before `finish`, which may end the whole request.
            self._wait(inputs)
        self._finish(ended)


def _shared_key(entry: Entry) -> str:
    """Return the key by which an entry would join an identical one; empty if it can't. An entry with an idempotency key can't,
    because the broker must keep an outcome for each part."""
    keys = entry.dedup_keys
    if keys and keys[0].kind is not DedupKind.SAME:
        return ""
    return next((dedup_key.key for dedup_key in keys if dedup_key.joins), "")


_KEY, _SESSION, _DEADLINE = attrgetter("key"), attrgetter("session"), attrgetter("deadline")
WOKEN_EVERY = 0.5  # Minimum seconds between messages to the controller about demand for models at zero.
MOST_LANES = 10_000  # Maximum number of cached lanes, which connections share.


class Gateway:
    """The gateway of a process. It passes requests to the broker, and each answer to its sink.

    Arguments:
        direct: fallback for use during an outage of `broker`; None to refuse requests then.
        woken: called to tell the controller about demand for a model at zero.
        in_doubt: returns True if there may be models and versions that this process doesn't know yet.

    Attributes:
        broker: broker for new requests. In direct mode, it is the gateway's own.
        held: pending requests. Only the gateway changes this table.
        facts: token that is replaced whenever cached lanes become stale. Compare it by identity.
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
            from headway.gateway.input_gate import Screening

            self._screening = Screening(gate, self.served, self.limiter, self._hand_on, self._answer)
        self._next_nonce = itertools.count(1).__next__
        self._deadlines = Deadlines(clock, self._pending, settings.request_timeout_ms / 1000, self._overdue)
        self._recent = RecentRequests(clock)
        self._late = LateTasks(clock, lambda tasks: self._finish(tasks, Ending.TIMED_OUT))
        counts = OutcomeCounts(counters, self._tiers, self.served)
        traced = () if traces is None else (traces,)
        self._observers: tuple[Observer, ...] = (counts, self._recent, *observers, *traced)
        self.tenant_counts = TenantCounts(self._tiers, self.served, self._observe)
        self.rollout_counts = RolloutCounts(self._observe)
        self._emptied = asyncio.Event()
        make_session = partial(
            BrokerSession, gateway=self.name, pending=self._pending, on_event=self.on_event, room=settings.max_queue,
            down_after=settings.broker_timeout_ms / 1000, clock=clock, rng=rng,
        )  # fmt: skip
        self._shared = make_session(broker)
        self._direct_mode = DirectMode(make_session(direct.broker), direct.models) if direct else None
        self._direct = self._direct_mode.session if self._direct_mode is not None else None
        self._session, self.broker = self._shared, broker
        self.facts: object = None
        self._woken, self._woken_at = woken, -math.inf
        self._lanes: dict[
            tuple[int, RequestOptions, str | None], Lane
        ] = {}  # Lanes by the asker's identity, options and model.
        self.learn()

    def start(self, supervisor: Supervisor) -> None:
        self._shared.start(supervisor, "gateway")
        if self._direct is not None:
            self._direct.start(supervisor, "gateway direct")

    @property
    def pending(self) -> int:
        """Number of pending requests, including task followers."""
        return len(self._pending)

    @property
    def holding(self) -> bool:
        """True while new requests are sent to the shared broker, or wait because it is expected to be back soon."""
        return not self._shared.away

    def note_silence(self, began: float, error: BrokerUnavailable) -> None:
        """Record that a call to the shared broker failed elsewhere in this process."""
        self._shared.note_silence(began, error)

    @property
    def requests_per_second(self) -> float:
        """Requests sent to brokers per second, averaged over about a second."""
        return sum(session.rate(self._clock()) for session in (self._shared, self._direct) if session is not None)

    def submit(self, sink: ReplySink, request: InferenceRequest, several: SeveralInputs | None = None) -> bool:
        """Submit a request. Returns False if it is refused. Either way, the sink gets the reply in a later turn of the event loop."""
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
            session = direct  # The client chose this id during an outage, so the fallback has its outcome.
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
        """Apply the input policy. Returns the changed request and the verdict to wait for, if any; None if it is refused."""
        principal, model = request.principal, request.model
        if model not in self.served or (principal.models and model not in principal.models):
            return request, None  # `submit` refuses it because of its model, without revealing the policy.
        principal = principal.asking(model)
        limits = self.counted(principal.limits)
        request, failure, judgement = screening.inspect(request, several, limits, self._session.broker)
        if failure is not None:
            self._refuse(sink, principal, unqueued(request, limits), failure, several)
            return None
        return request, judgement

    def _hand_on(self, pending: PendingRequest) -> None:
        """Offer a request to the broker after a verdict has let it in."""
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
        """True while all new requests are refused."""
        return self._closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._closed = closed
        self.learn()

    def learn(self, workers: Sequence[WorkerInfo] = ()) -> None:
        """Close all lanes if the facts that they are based on have changed, for example because of workers' reports."""
        served = self.served
        of_each = [
            (name, model, model.versions.sole, model.traces is None, model.settings, model.takes, model.is_plain, model.takes_rows)
            for name, model in served.items()
        ]  # fmt: skip
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
        """Return the lane for a principal's requests with these options. `asked`: the model that they name; None for the default."""
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
        # Lanes for unknown models aren't cached, because clients could make the table grow.
        if lane.open or lane.rows or lane.keeps:
            lane.throttle, lane.throttled = self.limiter.throttles[model], self.limiter.holds_up(lane.pattern.tier)
            if len(self._lanes) >= MOST_LANES:
                self._lanes.clear()
            # The lane keeps its asker alive, so no other object can get the same identity.
            self._lanes[id(lane.asker), options, asked] = lane
        return lane

    def enter(
        self, sink: ReplySink, lane: Lane, id: str, input: Value, parameters: bytes,
        pattern: Entry | None = None, several: SeveralInputs | None = None,
    ) -> Entry | None:  # fmt: skip
        """Fast path: submit a new request on an open lane. Returns None if it is refused. `pattern` replaces the lane's own; check
        `lets_in` before passing it."""
        session, entry = self._session, pattern or lane.pattern
        now = self._clock()
        near = session.near
        if near is None or session.waits or (entry.limits and self.limiter.debts):
            near = None
            if pattern is None and (
                session.full(1) or (entry.limits and self.limiter.excess(entry.limits, session.broker))
            ):
                # `submit` refuses it and gives the reason.
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
        """Return True if this gateway sees no reason to refuse `count` requests together on a lane."""
        session, limits = self._session, lane.pattern.limits
        if session.near is not None and not (session.waits or (limits and self.limiter.debts)):
            return True
        limits = all_counting_as(limits, count)
        return not (session.full(count) or (limits and self.limiter.excess(limits, session.broker)))

    def take_in(
        self, sink: ReplySink, lane: Lane, options: RequestOptions, id: str, input: Value, parameters: bytes
    ) -> None:
        """Submit a request whose lane isn't open: on the lane if that keeps outcomes and lets the request in, otherwise with
        `submit`."""
        if not (lane.keeps and self.lets_in(lane, 1)):
            self.submit(sink, InferenceRequest(lane.asker, id, options, lane.model, input, parameters))
            return
        kind, key = (DedupKind.KEY, options.key) if options.key else (DedupKind.TASK, id)
        dedup_key = DedupKey(kind, key, digest_of(lane.named, input, parameters), lane.keep)
        pattern = replace(lane.pattern, dedup_keys=(dedup_key,))
        if self.enter(sink, lane, id, input, parameters, pattern) is not None and options.task:
            pending = self._pending[pattern.tenant, id]
            pending.unadmitted = True
            if not self._session.waits:  # Otherwise the session reports when the broker has accepted it.
                asyncio.get_running_loop().call_soon(self._admitted, pending)

    def _enter_refused(self, pending: PendingRequest, failure: Failure) -> None:
        entry = pending.entry
        throttle = self.limiter.throttles[entry.model]
        if entry.count > 1 and entry.timeout >= throttle.least_seconds:
            # The first input is refused on behalf of its list, but only this input was counted.
            throttle.higher += entry.count - 1
        self._note_refused(pending, failure)
        ending = Ending.TURNED_AWAY if failure.code == errors.RATE_LIMITED else Ending.REFUSED
        self._refuse(pending.sink, pending.principal, entry, failure, pending.several, ending)

    def _note_refused(self, pending: PendingRequest, failure: Failure) -> None:
        """Release the capacity reserved for a refused entry. If the entry pays for all inputs of its request, their capacity is
        released too."""
        self.limiter.refused(pending.entry, failure)
        if pending.several is not None and pending.entry.count > 1:
            pending.several.payer = 0

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Return the limits that apply now. In direct mode, these are this gateway's shares."""
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
        """Stop waiting for a task. The task keeps running."""
        if (pending := self._pending.get((tenant, id))) is not None:
            pending.sink = NOBODY
            if self.served.traces is not None:
                self.served.traces.detached(pending.entry)

    def abandon(self, sink: ReplySink, tenant: str, id: str) -> None:
        """Drop a request because its client has left. The broker decides whether the entry still runs."""
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
        """Submit a request, and wait for its reply. Cancelling the call abandons the request."""
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
        """Return the outcome or state of a task; None if there is no such task. Raises BrokerUnavailable during an outage."""
        pending = self._pending.get((tenant, id))
        if pending is not None and pending.task:
            if (session := pending.session) is None:  # It is waiting for the input policy.
                return EntryState.QUEUED
            unadmitted = pending.unadmitted
            outcome = await session.outcome(tenant, id)
            if outcome is None and unadmitted:
                return EntryState.QUEUED
            if outcome is None and not session.in_sync:  # Lost and about to be resubmitted, or cancelled elsewhere.
                raise BrokerUnavailable("the broker has lost its state, and requests are being resubmitted")
            return outcome
        if self._direct is not None and (outcome := await self._direct.outcome(tenant, id)) is not None:
            return outcome
        outcome = await self._shared.outcome(tenant, id)
        if outcome is None and not self._shared.settled:
            raise BrokerUnavailable("the broker has lost its state, and another gateway may hold the task")
        return outcome

    async def follow(self, tenant: str, id: str, seconds: float) -> Reply | None:
        """Wait up to `seconds` for the outcome of a task. Returns None if it takes longer."""
        task = self._pending.get((tenant, id))
        session = (task.session if task is not None else None) or self._session
        model, version = (task.entry.model, task.entry.version) if task is not None else ("", "")
        entry = follower(new_id(), id, tenant, self.name, seconds, self._next_nonce(), model, version)
        sink, taken = FutureSink(), session.taken
        session.followers += 1
        try:
            self._hold(sink, Principal("", tenant, 0), entry, unadmitted=False, several=None, session=session)
            session.taken = taken  # Followers aren't included in the rate.
            async with asyncio.timeout(seconds):
                reply = await self._reply(sink, tenant, entry.id)
        except TimeoutError:
            return None
        finally:
            session.followers -= 1
        return reply if reply.shared is not None else None

    async def cancel(self, tenant: str, id: str) -> None:
        """Forget a task and its outcome. It won't run unless it is already on a GPU. Raises BrokerUnavailable if it may still exist."""
        pending = self._pending.get((tenant, id))
        task = pending if pending is not None and pending.task else None
        is_certain = task is not None and (task.unadmitted or task.session is not self._shared)
        if task is not None and is_certain:  # The entry may be on its way to the broker.
            (task.session or self._shared).cancel_later(tenant, id)
        sessions = await self._sessions_with(tenant, id, pending)
        try:
            for session in sessions:
                await session.cancel_task(tenant, id)
            is_certain = True
        finally:
            # Only now, because a client that knows that its task is gone must not find it by polling.
            if task is not None and is_certain and self._pending.of(task.entry) is task:
                self._leave(task, Reply(id, tenant, None, failures.no_task()))
        # After a state loss, another gateway that holds the task resubmits it.
        if pending is None and self._shared in sessions and not self._shared.settled:
            raise BrokerUnavailable("the broker had lost its state, so another gateway may resubmit the task")

    async def _sessions_with(self, tenant: str, id: str, pending: PendingRequest | None) -> list[BrokerSession]:
        """Return the sessions whose brokers may have a task. `pending`: the pending request with the task's id."""
        direct, shared = self._direct, self._shared
        if pending is not None:
            return [] if pending.session is None else [pending.session]
        if direct is None or await direct.outcome(tenant, id) is None:
            return [shared]
        return [direct] if shared.away else [direct, shared]

    def out_of_reach(self) -> Failure:
        """Return the failure that clients get when `outcome` or `cancel` raises BrokerUnavailable."""
        return self._shared.out_of_reach()

    async def emptied(self) -> None:
        while self._pending:
            self._emptied.clear()
            await self._emptied.wait()
        self._late.end_all()

    def refuse_all(self, failure: Failure) -> None:
        """Answer every pending request with `failure` because the shutdown has run out of time."""
        for pending in list(self._pending.values()):
            self._answer(pending, failure, Ending.TIMED_OUT)
        self._late.end_all()

    async def status(self, id: str, tenant: str | None = None) -> RequestStatus | None:
        """Return the status of the newest request with this id, of one tenant or of any; None if there is none."""
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
        """Return why a request is refused immediately; None if it may be sent to the broker."""
        model = entry.model
        if self.closed:
            return Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining")
        if entry.limits and (over := self.limiter.excess(entry.limits, session.broker)) is not None:
            return self.limiter.never(principal.limits, entry.limits[0].counting) or over
        if (failure := self.absence(principal, model)) is not None:
            return failure
        if model not in self._unchecked:
            if failure := self.served.check(model, entry.input, principal.models):
                return failure
            if entry.limits and (failure := self.limiter.never(principal.limits, entry.limits[0].counting)):
                return failure
        if self._direct_mode is not None and self._session is self._direct:
            failure = self._direct_mode.refusal(model, options.version, self.out_of_reach())
        elif options.version and options.count:  # All parts of a list but the first have a count of 0.
            failure = self.served.refusal(model, options.version)
        if failure is not None:
            return failure
        if self.served.unready and session is self._shared and (failure := self._unready(entry, options)):
            return failure
        if (entry.tenant, entry.id) in self._pending:
            return failures.conflict()
        if session.full(options.count or 1):
            return session.no_room()
        return self.limiter.check(entry, session is self._direct, options.count)

    def _unready(self, entry: Entry, options: RequestOptions) -> Failure | None:
        """Return the failure for a request whose model won't be ready in time, or None. Reports demand for models at zero."""
        model, now = entry.model, self._clock()
        if model not in self.served.at_zero:
            return self.served.not_loaded(entry)
        failure = self.served.not_started(entry)
        if failure is not None:  # A refused request is demand, too. Requests that wait are counted by `_check`.
            failure = self.limiter.check(entry, alone=False, count=options.count) or failure
        self.limiter.throttles[model].count(now)
        if now - self._woken_at >= WOKEN_EVERY:
            self._woken_at = now
            self._woken()
        return failure

    def absence(self, principal: Principal, model: str) -> Failure | None:
        """Return the failure for a request for a model that isn't served or that the principal may not use; otherwise None."""
        if principal.models and model and model not in principal.models:  # Don't reveal whether it is served.
            return failures.no_model_for(model, principal.models)
        return None if model in self.served else self.served.absence(model, principal.models)

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
        """Count and record a request that was refused before `submit`. Returns its reply."""
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
                    if session is self._shared and not pending.follows:  # The throttle applies to the shared broker.
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
        if pending.unadmitted:
            pending.unadmitted = False
            pending.sink.admitted()

    def _go_down(self, session: BrokerSession) -> None:
        """Switch to direct mode or, if there is no fallback, refuse new requests until the broker is back."""
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
        """Fast path: end all requests of a batch. Returns False if any has ended, moved or expired; then call `_take`."""
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
        """End the pending requests that these replies are for. Drops replies to requests that have already ended."""
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
                    self._withdraw(
                        pending
                    )  # It may have been offered again, after the cancellation and before this reply.
                    self._leave(pending, reply)
                    continue
                if failure.code == errors.NO_WORKERS:
                    failure = self.served.in_time(entry.model, failure)
                    pending.reply = replace(reply, failure=failure)
            if reply.shared is not None:  # The id may belong to a task that only the broker still knew.
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
            log.debug("replies without a pending request", count=strays)

    def _fits(self, pending: PendingRequest, reply: Reply, overdue: float) -> bool:
        """Return True if a late reply, or one from a previous session, may end its request."""
        if pending.deadline < overdue:  # This process was stalled, and the client has given up.
            self._expire(pending)
            return False
        if reply.failure is not None:  # The request has moved to another session, where it may still succeed.
            return False
        self._withdraw(pending)
        return True

    def _answer(self, pending: PendingRequest, failure: Failure, ending: Ending) -> None:
        entry = pending.entry
        if self._pending.of(entry) is pending:
            pending.reply = Reply(entry.id, entry.tenant, None, failure)
            if pending.follows:
                self._end_follower(pending, pending.reply)
                return
            del self._pending[entry.tenant, entry.id]
            self._finish([pending], ending)

    def _end_follower(self, pending: PendingRequest, reply: Reply) -> None:
        """End a follower with the task's reply, or with the reason why there is none."""
        entry = pending.entry
        del self._pending[entry.tenant, entry.id]
        tell(pending.sink, reply)
        if not self._pending:
            self._emptied.set()

    def _leave(self, pending: PendingRequest, reply: Reply | None = None) -> None:
        """End a request whose client has left or deleted it. If `reply` is passed, it is sent to the sink."""
        entry, sink = pending.entry, pending.sink
        pending.sink = NOBODY
        del self._pending[entry.tenant, entry.id]
        if not entry.payer or pending.several is None or pending.several.payer:
            self.limiter.left(entry, self._clock() - pending.since)
        pending.reply = Reply(entry.id, entry.tenant, None, failures.left())
        self._finish([pending], Ending.LEFT)
        if reply is not None:
            tell(sink, reply)

    def _finish(self, ended: Sequence[PendingRequest], ending: Ending) -> None:
        finish(self._observers, ended, ending, self._clock())
        if not self._pending:
            self._emptied.set()

    def _observe(self, observer: Observer, add: bool = True) -> None:
        others = tuple(other for other in self._observers if other is not observer)
        self._observers = (*others, observer) if add else others

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
        runs_on = pending.task and not pending.unadmitted  # The broker keeps the task's outcome for polls.
        if runs_on and pending.sink is NOBODY:
            del self._pending[pending.entry.tenant, pending.entry.id]
            self._late.hold(pending, failure)
            if not self._pending:
                self._emptied.set()
            return
        self._answer(pending, failure, Ending.TIMED_OUT)
        if not runs_on:
            self._withdraw(pending)


def unqueued(request: InferenceRequest, limits: tuple[Limit, ...] = ()) -> Entry:
    """Return an entry for a request that is refused before it gets one, so that the refusal can be counted and recorded."""
    principal, options = request.principal, request.options
    tier = max(principal.tier, options.tier)
    return Entry(
        request.id, request.model, request.input, tier, principal.tenant, "", 0.0, 0.0, request.parameters, limits=limits
    )  # fmt: skip
