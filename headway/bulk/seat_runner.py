"""Bulk line runner: sends lines to the broker as bulk entries, which run in empty seats, and reruns the lines of failed batches.

    offered ──▶ queued in the broker ──▶ runs ──▶ output, or its own failure
                   ▲                              │ its batch failed
                   └── apart: all together, ◀─────┘
                       then in halves, then alone

Lines are first checked against the input policy. Its functions also judge requests, so they are given only a few lines at a
time. While the broker has no room for more bulk entries, lines wait here. `core.suspects.LineSuspects` decides which lines
rerun together, and which tenants' lines run apart from others."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import msgspec

from headway import errors
from headway.core.bulk import QUIET
from headway.core.failures import CROWDED
from headway.core.retry import FATAL
from headway.core.suspects import LineSuspects, line_pause
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import BrokerSession, EntryRefused, Replied, SessionEvent
from headway.gateway.input_gate import InputGate, Inspection
from headway.gateway.pending import NOBODY, Judgement, PendingRequest, PendingTable
from headway.gateway.served_models import ServedModels
from headway.model import (
    BulkDepth,
    Cause,
    Entry,
    Failure,
    InferenceRequest,
    Principal,
    Reply,
    RequestOptions,
    Submission,
    WorkerInfo,
    WorkerStatus,
)
from headway.model.bulk import BulkLine
from headway.ports import Broker, BulkRunner, RequestQueue
from headway.runtime.logger import get_logger
from headway.runtime.periodic import BareResource
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

FIRST_BATCHES, MOST_BATCHES = 2, 64  # Initial and maximum number of full batches of a model in flight.
MOST_BYTES = 64 << 20  # Approximate bound on input bytes in flight. A tenant may use at most as many as remain free.
LATER = 0.2  # Seconds before lines are sent again to a broker that had no room for them.
LIFE = 7 * 86_400.0  # Timeout of an entry in seconds. Its job expires long before that.
_OPTIONS = RequestOptions(LIFE)
_AGAIN = frozenset((errors.SHED, errors.SCARCE, errors.SERVICE_OVERLOADED, errors.NO_WORKERS, errors.DEADLINE_EXCEEDED))
"""Codes of failures that aren't caused by the line."""
_CAUSES = frozenset(cause.value for cause in Cause)
STILL = 1.0  # If none of a model's lines has had an outcome for this many seconds, the broker is asked why they wait.
_NOBODYS = Principal("", "", 0)
JUDGED_AT_ONCE = 8  # Lines that the input policy's functions judge at a time. A request may have to wait for them.
OF_BULK = "\0bulk"  # User name under which lines are judged, so that they don't count against a real user.

Done = Callable[[BulkLine, Reply], None]
_RESTS = "lines have brought down a worker of the model; the others wait before they run"


def _why_they_wait(depths: Sequence[BulkDepth], now: float) -> tuple[str, float] | None:
    """Return why a model's queued lines are waiting, and when they will run at the latest. Return None if no lines
    are queued, or some are running."""
    queues = [queue for queue in depths if queue.waiting]
    if not queues or any(queue.busy for queue in queues):
        return None
    held = min(queue.held for queue in queues)
    if held == math.inf:
        return "the lines are waiting for empty seats next to requests, because models share the GPU", held
    if held > 0.0:
        return (
            f"there were requests recently: the lines are waiting for empty seats next to them, or for {QUIET:g} seconds without requests",
            now + held,
        )
    return "the GPUs are busy with requests; the lines run in the seats that these leave empty", math.inf


class _PendingLine(PendingRequest):
    """A line that has no outcome yet. `asked` is the line as it was before the input policy changed it. For `failures` and
    `alone`, see `SuspectLine`. A line that `rests` isn't in flight."""

    line: BulkLine = cast(BulkLine, None)
    asked: BulkLine = cast(BulkLine, None)
    done: Done = cast(Done, None)
    failures: int = 0
    alone: int = 0
    rests: bool = False


class _BulkSide:
    """Broker that enqueues the entries of a `BrokerSession` as bulk entries, not as requests."""

    near = None

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.enqueue = broker.enqueue_bulk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def _entry_of(line: BulkLine, served: ServedModels, id: str, tiers: int, sender: str) -> Entry:
    model, version = served[line.model], line.version
    if not (version or model.versions.any):
        version = model.versions.version(line.tenant, id, RequestOptions(LIFE), None)
    return Entry(
        id, line.model, line.input, tiers, line.tenant, sender, LIFE, LIFE, line.parameters, 0,
        line.job, model.weigh(line.input), version, bool(line.version),
    )  # fmt: skip


def _starts_on_demand(model: str, served: ServedModels) -> bool:
    """Return True if the model starts on demand: it gets workers, or is loaded by workers that several models share."""
    return model in served.at_zero or (len(served.models) > 1 and served.has_worker(model))


class _LinesInFlight:
    """Lines that have no outcome yet, and bounds on how many may be in flight. Lines that rest aren't in flight. `changed`
    is set when there may be room for more."""

    def __init__(self, served: ServedModels, clock: Callable[[], float]) -> None:
        self._served, self._clock = served, clock
        self._lines: dict[_PendingLine, None] = {}
        self._windows: dict[str, float] = {}  # Maximum number of lines in flight, by model.
        self._counts: defaultdict[str, int] = defaultdict(int)  # Number of lines in flight, by model.
        self._bytes = Counter[str]()  # Input bytes in flight, by tenant.
        self._progress_at: dict[str, float] = {}  # When each model last had an outcome or a first line in flight.
        self.changed = asyncio.Event()

    def __contains__(self, pending: _PendingLine) -> bool:
        return pending in self._lines

    def __iter__(self) -> Iterator[_PendingLine]:
        return iter(self._lines)

    def clear(self) -> None:
        """Forget all lines, so that timers that are still running do nothing."""
        self._lines.clear()

    def add(self, pending: _PendingLine) -> None:
        self._lines[pending] = None
        self._count(pending)

    def remove(self, pending: _PendingLine) -> None:
        del self._lines[pending]
        if not pending.rests:
            self._discount(pending)
        self.changed.set()

    def rest(self, pending: _PendingLine) -> None:
        pending.rests = True
        self._discount(pending)
        self.changed.set()

    def resume(self, pending: _PendingLine) -> None:
        if pending.rests:
            pending.rests = False
            self._count(pending)

    def _count(self, pending: _PendingLine) -> None:
        model = pending.line.model
        if not self._counts[model]:
            self.progressed(model)
        self._counts[model] += 1
        self._bytes[pending.line.tenant] += len(pending.line.input)

    def _discount(self, pending: _PendingLine) -> None:
        self._counts[pending.line.model] -= 1
        self._bytes[pending.line.tenant] -= len(pending.line.input)
        if not self._bytes[pending.line.tenant]:
            del self._bytes[pending.line.tenant]

    def progressed(self, model: str) -> None:
        self._progress_at[model] = self._clock()

    def stuck(self, now: float) -> list[str]:
        """Return the models that have lines in flight, but have had no outcome for STILL seconds."""
        return [model for model, count in self._counts.items() if count and now - self._progress_at[model] >= STILL]

    def full_batch(self, model: str) -> int:
        return self._served[model].settings.max_batch_size

    def room(self, model: str) -> int:
        return int(self._window(model)) - self._counts[model]

    def widen(self, model: str) -> None:
        """Allow more lines in flight, after one had an outcome."""
        self._windows[model] = min(self._window(model) + 0.5, MOST_BATCHES * self.full_batch(model))

    def narrow(self, model: str) -> None:
        """Allow fewer lines in flight, after the broker had no room for one."""
        self._windows[model] = max(self._window(model) / 2, FIRST_BATCHES * self.full_batch(model))

    def _window(self, model: str) -> float:
        return self._windows.get(model) or FIRST_BATCHES * self.full_batch(model)

    def full(self, tenant: str) -> bool:
        used = self._bytes[tenant]
        return used > 0 and used >= MOST_BYTES - self._bytes.total()


class _LineGate:
    """Applies the input policy to lines. Its functions judge a few lines at a time. `decided` is called with each verdict."""

    def __init__(
        self, gate: InputGate, served: ServedModels, tier: int, lines: _LinesInFlight,
        send: Callable[[_PendingLine], None], decided: Callable[[_PendingLine, Failure | None], None],
    ) -> None:  # fmt: skip
        self._gate, self._served, self._tier, self._lines = gate, served, tier, lines
        self._send, self._decided = send, decided
        self._waiting: deque[tuple[_PendingLine, Judgement]] = deque()
        self._judged: set[_PendingLine] = set()  # Lines that a function is judging.

    def inspect(self, line: BulkLine) -> Inspection:
        tenant = Principal("", line.tenant, self._tier)
        request = InferenceRequest(tenant, "", _OPTIONS, line.model, line.input, line.parameters)
        return self._gate.inspect((line.tenant, OF_BULK), request, self._served, self._on_verdict)

    def judge(self, pending: _PendingLine, judgement: Judgement) -> None:
        self._waiting.append((pending, judgement))
        self._judge_next()

    def drop(self, pending: _PendingLine) -> None:
        self._judged.discard(pending)

    def _judge_next(self) -> None:
        while self._waiting and len(self._judged) < JUDGED_AT_ONCE:
            pending, judgement = self._waiting.popleft()
            if pending not in self._lines:
                continue
            if self._gate.hold(judgement, pending):
                self._judged.add(pending)
            else:
                self._send(pending)

    def _on_verdict(self, requests: Sequence[PendingRequest], failure: Failure | None) -> None:
        for pending in cast(Sequence[_PendingLine], requests):
            self._judged.discard(pending)
            if pending in self._lines:
                self._decided(pending, failure)
        self._judge_next()


class _SentLines:
    """Lines that are in the broker. `table` is shared with the `session`."""

    def __init__(self, session: BrokerSession, table: PendingTable, suspects: LineSuspects) -> None:
        self._session, self._table, self._suspects = session, table, suspects
        self._nonce = 0

    def clear(self) -> list[Submission]:
        """Forget all lines, and return their submissions."""
        submissions = [pending.entry.submission for pending in self._table.values()]
        self._table.clear()
        return submissions

    def send(self, pending: _PendingLine, shape: int = 0) -> None:
        """Send a line. It shares batches only with lines of the same shape, by default its tenant's shape."""
        self._nonce += 1
        shape = shape or self._suspects.shape(pending.line.tenant)
        pending.entry = entry = msgspec.structs.replace(pending.entry, nonce=self._nonce, shape=shape)
        self._table[entry.tenant, entry.id] = pending
        self._session.offer(entry)

    def recall(self, chosen: Callable[[_PendingLine], bool]) -> list[_PendingLine]:
        lines = [pending for pending in cast(Collection[_PendingLine], self._table.values()) if chosen(pending)]
        for pending in lines:
            del self._table[pending.entry.tenant, pending.entry.id]
            self._session.withdraw(pending.entry.submission)
        return lines

    def pop(self, tenant: str, id: str, nonce: int) -> _PendingLine | None:
        """Remove and return the line that an event refers to. Return None if it has since been withdrawn or sent again."""
        pending = self._table.get((tenant, id))
        if pending is None or pending.entry.nonce != nonce:
            return None
        del self._table[tenant, id]
        return cast(_PendingLine, pending)


class SeatRunner(BareResource, BulkRunner):
    """Bulk line runner of one process. Replies are addressed to `name`, which must differ from all gateway names."""

    def __init__(
        self,
        broker: Broker,
        served: ServedModels,
        name: str,
        tiers: int,
        gate: InputGate | None,
        clock: Callable[[], float],
        rng: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._broker, self._served, self._name, self._tiers = broker, served, name, tiers
        self._clock, self._rng, self._new_id = clock, rng, new_id
        self._lines = _LinesInFlight(served, clock)
        self._suspects = LineSuspects(rng)
        table, side = PendingTable(), cast(RequestQueue, _BulkSide(broker))
        self._session = BrokerSession(side, name, table, self._heard, 1 << 30, 0.0, clock, rng)
        self._sent = _SentLines(self._session, table, self._suspects)
        self._gate: _LineGate | None = None
        if gate is not None:  # For the policy, lines belong to the lowest tier.
            self._gate = _LineGate(gate, served, tiers - 1, self._lines, self._sent.send, self._judged)
        self._refused_lines: defaultdict[str, list[_PendingLine]] = defaultdict(list)  # The broker had no room.
        self._ready: frozenset[str] | None = None
        self._drained: frozenset[str] = frozenset()
        self._waits: dict[str, tuple[str, float]] = {}  # Why a model's lines wait, and when they run at the latest.
        self._looked_at = -math.inf

    def start(self, supervisor: Supervisor) -> None:
        self._session.start(supervisor, "bulk lines")

    async def close(self) -> None:
        self._lines.clear()
        submissions = self._sent.clear()
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.withdraw(submissions, self._name)

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        up = (WorkerStatus.HEALTHY, WorkerStatus.COLD)
        self._ready = frozenset(worker.model for worker in workers if worker.status in up)
        self._drained = frozenset(worker.model for worker in workers if worker.status is WorkerStatus.DRAINED)
        self._lines.changed.set()

    async def room(self, model: str) -> int:
        changed = self._lines.changed
        while self.paused(model) or self._refused_lines[model] or (room := self._lines.room(model)) <= 0:
            changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATER):
                    await changed.wait()
        return room

    def full(self, tenant: str) -> bool:
        return self._lines.full(tenant)

    def paused(self, model: str, tenant: str = "") -> str:
        if self._suspects.rest_left(tenant, self._clock()) > 0.0:
            return _RESTS
        if self._session.unreachable_seconds > 0.0:
            return "the queue is unreachable"
        if self._ready is None or model in self._ready or _starts_on_demand(model, self._served):
            return ""
        return "the workers of the model are drained" if model in self._drained else "no worker of the model is up"

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        now = self._clock()
        if (rest := self._suspects.rest_left(tenant, now)) > 0.0:
            return _RESTS, rest
        if model not in self._waits:
            return None
        why, until = self._waits[model]
        return why, max(until - now, 0.0)

    async def look(self) -> None:
        now = self._clock()
        stuck = self._lines.stuck(now)
        if not stuck or self._session.unreachable_seconds > 0.0:
            self._waits.clear()
            return
        if now - self._looked_at < STILL:
            return
        self._looked_at = now
        depths: dict[str, list[BulkDepth]] = {model: [] for model in stuck}
        for depth in await self._broker.bulk_queues():
            if depth.model in depths:
                depths[depth.model].append(depth)
        self._waits = {
            model: why for model, queues in depths.items() if (why := _why_they_wait(queues, now)) is not None
        }

    def offer(self, lines: Sequence[BulkLine], done: Done) -> None:
        for line in lines:
            self._take(line, done)

    def _take(self, asked: BulkLine, done: Done) -> None:
        """Send a line to the broker, unless the input policy refuses it or must judge it first."""
        failure, line, judgement = self._served.check(asked.model, asked.input), asked, None
        if failure is None and self._gate is not None:
            inspection = self._gate.inspect(asked)
            failure, judgement = inspection.failure, inspection.judgement
            line = msgspec.structs.replace(asked, input=inspection.input, parameters=inspection.parameters)
        if failure is not None:
            asyncio.get_running_loop().call_soon(done, asked, Reply("", asked.tenant, None, failure))
            return
        entry, now = _entry_of(line, self._served, self._new_id(), self._tiers, self._name), self._clock()
        pending = _PendingLine(
            NOBODY, _NOBODYS, entry, now, now + LIFE, self._session, line=line, asked=asked, done=done
        )
        self._lines.add(pending)
        if self._gate is None or judgement is None:
            self._sent.send(pending)
        else:
            self._gate.judge(pending, judgement)

    def _judged(self, pending: _PendingLine, failure: Failure | None) -> None:
        """Act on a verdict. Lines that no function had time to judge are judged again later."""
        if failure is None:
            self._send_rested(pending)
        elif failure.code in _AGAIN:
            asyncio.get_running_loop().call_later(LATER, self._judge_again, pending)
        else:
            self._end(pending, Reply(pending.entry.id, pending.entry.tenant, None, failure))

    def _judge_again(self, pending: _PendingLine) -> None:
        if pending in self._lines:
            self._left(pending)
            self._take(pending.asked, pending.done)

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        def chosen(pending: _PendingLine) -> bool:
            return pending.line.job == job and (not numbers or pending.line.number in numbers)

        self._sent.recall(chosen)
        for pending in [*filter(chosen, self._lines)]:
            if self._gate is not None:
                self._gate.drop(pending)
            self._left(pending)

    def _left(self, pending: _PendingLine) -> None:
        self._lines.remove(pending)
        self._suspects.ended(pending.line.tenant, pending)

    def _heard(self, session: BrokerSession, event: SessionEvent) -> None:
        if isinstance(event, EntryRefused):
            pending = self._sent.pop(event.entry.tenant, event.entry.id, event.entry.nonce)
            if pending is not None:
                self._refused(pending, event.failure)
        elif isinstance(event, Replied):
            self._replied(event.replies)
        self._lines.changed.set()

    def _refused(self, pending: _PendingLine, failure: Failure) -> None:
        """Keep a line for later if the broker had no room for it, and end it after any other refusal."""
        if failure.code not in _AGAIN:
            self._end(pending, Reply(pending.entry.id, pending.entry.tenant, None, failure))
            return
        model = pending.line.model
        if not self._refused_lines[model]:
            self._lines.narrow(model)
            asyncio.get_running_loop().call_later(LATER, self._send_refused, model)
        self._refused_lines[model].append(pending)

    def _send_refused(self, model: str) -> None:
        for pending in self._refused_lines.pop(model):
            self._send_rested(pending, pending.entry.shape)

    def _replied(self, replies: Sequence[Reply]) -> None:
        failed: dict[tuple[str, float, str], list[tuple[_PendingLine, Reply]]] = defaultdict(list)
        large = set[str]()
        for reply in replies:
            pending = self._sent.pop(reply.tenant, reply.id, reply.nonce)
            if pending is None:
                continue
            failure, tenant = reply.failure, pending.line.tenant
            if failure is not None and reply.ran is not None and failure.reason in _CAUSES:
                failed[reply.ran.worker, reply.ran.claimed_at, tenant].append((pending, reply))
            elif failure is not None and failure.reason == CROWDED:
                self._sent.send(pending, self._suspects.new_shape())
            elif failure is not None and failure.code in _AGAIN:
                self._refused(pending, failure)
            else:
                model = pending.line.model
                self._lines.widen(model)
                full_batch = self._lines.full_batch(model)
                if reply.output is not None and self._suspects.succeeded(tenant, len(reply.output), full_batch):
                    large.add(tenant)
                self._end(pending, reply)
        for outcomes in failed.values():
            self._search([pending for pending, _ in outcomes], outcomes[0][1])
        if large:
            self._take_apart(large)

    def _take_apart(self, tenants: Collection[str]) -> None:
        """Resend the queued lines of these tenants, so that they run apart from the lines of others."""
        for pending in self._sent.recall(lambda pending: pending.line.tenant in tenants and not pending.entry.shape):
            # The broker may still know the old id.
            pending.entry = msgspec.structs.replace(pending.entry, id=self._new_id())
            self._sent.send(pending)

    def _end(self, pending: _PendingLine, reply: Reply) -> None:
        self._left(pending)
        self._lines.progressed(pending.line.model)
        self._waits.pop(pending.line.model, None)
        try:
            pending.done(pending.line, reply)
        except Exception:
            log.exception(
                "failed to process the outcome of a bulk line", job=pending.line.job, line=pending.line.number
            )

    def _search(self, lines: Sequence[_PendingLine], reply: Reply) -> None:
        """Rerun the lines that a tenant had in a failed batch, or end the line that is to blame."""
        if reply.failure is None or reply.ran is None:
            return
        cause, ran, first = Cause(reply.failure.reason), reply.ran, lines[0]
        groups = self._suspects.failed(first.line.tenant, lines, cause, ran.size)
        if cause in FATAL and (first.entry.shape or ran.size == len(lines)):
            self._rest(first.line.tenant, groups, ran.seconds)
        elif groups:
            pause = line_pause(groups, cause, self._rng())
            for group in groups:
                self._run_later(group, pause)
        if not groups:
            self._end(first, reply)

    def _rest(self, tenant: str, groups: list[Sequence[_PendingLine]], ran: float) -> None:
        """Let all lines of a tenant rest, including those in the broker. Then run them group by group."""
        if recalled := self._sent.recall(lambda pending: pending.line.tenant == tenant):
            groups = [*groups, recalled]
        pauses = self._suspects.rest(tenant, len(groups), ran, self._clock())
        for group, pause in zip(groups, pauses, strict=True):
            for pending in group:
                self._lines.rest(pending)
            self._run_later(group, pause)

    def _send_rested(self, pending: _PendingLine, shape: int = 0) -> None:
        """Send a line that isn't in the broker, once its tenant's rest is over. Until then it takes no room from others."""
        if pending not in self._lines:
            return
        self._lines.resume(pending)
        if (rest := self._suspects.rest_left(pending.line.tenant, self._clock())) > 0.0:
            self._lines.rest(pending)
            asyncio.get_running_loop().call_later(rest, self._send_rested, pending, self._suspects.new_shape())
        else:
            self._sent.send(pending, shape)

    def _run_later(self, group: Sequence[_PendingLine], pause: float) -> None:
        asyncio.get_running_loop().call_later(pause, self._resume, group, self._suspects.new_shape())

    def _resume(self, group: Sequence[_PendingLine], shape: int) -> None:
        for pending in filter(self._lines.__contains__, group):
            self._lines.resume(pending)
            self._sent.send(pending, shape)
