"""Runner of bulk lines in empty seats: hands lines to the broker as bulk entries, and runs the lines of failed batches again.

    offered ──▶ queued in the broker ──▶ runs ──▶ output, or a failure of its own
                   ▲                      │ its batch failed
                   └── apart: whole, ◀────┘
                       then in halves, then alone

`core.suspects.LineSuspects` decides which lines run again together, and which tenants' lines run apart. While the broker has no
room for more bulk entries, lines wait here. Lines pass the input policy first. Its functions also judge requests, so only a
few lines are with them at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from headway import errors
from headway.core.bulk import QUIET
from headway.core.failures import CROWDED
from headway.core.retry import FATAL
from headway.core.suspects import LineSuspects, line_pause
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import BrokerSession, EntryRefused, Replied, SessionEvent
from headway.gateway.input_gate import InputGate
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
    WorkerInfo,
    WorkerStatus,
)
from headway.model.bulk import BulkLine
from headway.ports import Broker, BulkRunner, RequestQueue
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

FIRST_BATCHES, MOST_BATCHES = 2, 64  # Number of full batches of a model in flight, at first and at most.
MOST_BYTES = 64 << 20
"""Approximate bound on the input bytes in flight. A tenant may hold at most as many bytes as remain free."""
LATER = 0.2  # Seconds before lines are offered again to a broker that had no room.
LIFE = 7 * 86_400.0  # Time-out of an entry in seconds. Its job ends long before.
_OPTIONS = RequestOptions(LIFE)
_AGAIN = frozenset((errors.SHED, errors.SCARCE, errors.SERVICE_OVERLOADED, errors.NO_WORKERS, errors.DEADLINE_EXCEEDED))
"""Codes of failures that aren't the line's fault."""
_CAUSES = frozenset(cause.value for cause in Cause)
STILL = 1.0  # Seconds without an outcome of a model's lines before the broker is asked why they wait.
_NOBODYS = Principal("", "", 0)
JUDGED_AT_ONCE = 8
"""Lines to give the input policy's functions at once. A request may have to wait for a call with that many texts."""
OF_BULK = "\0bulk"  # User name under which lines are judged, so that no real user is held responsible for them.

Done = Callable[[BulkLine, Reply], None]
_RESTS = "lines have ended a worker of the model; the others wait before they run"


def _why_they_wait(depths: Sequence[BulkDepth], now: float) -> tuple[str, float] | None:
    """Return why a model's queued lines wait, and by when they run at the latest. Return None if some run already."""
    queues = [queue for queue in depths if queue.waiting]
    if not queues or any(queue.busy for queue in queues):
        return None
    held = min(queue.held for queue in queues)
    if held == math.inf:
        return "the lines wait for empty seats beside requests, as models share the GPU", held
    if held > 0.0:
        return (
            f"requests came of late: the lines wait for empty seats beside them, or for {QUIET:g} seconds without a request",
            now + held,
        )
    return "the GPUs are busy with requests; the lines run in seats that these leave empty", math.inf


class _PendingLine(PendingRequest):
    """A line without an outcome. `asked` is the line before the input policy changed it. `SuspectLine` describes `failures` and
    `alone`. While a line `rests` with all lines of its tenant, it isn't in flight."""

    line: BulkLine = cast(BulkLine, None)
    asked: BulkLine = cast(BulkLine, None)
    done: Done = cast(Done, None)
    failures: int = 0
    alone: int = 0
    rests: bool = False


class _BulkSide:
    """Broker whose `enqueue` takes bulk entries, for a `BrokerSession` that knows only requests."""

    near = None

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.enqueue = broker.enqueue_bulk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


class SeatRunner(BulkRunner):
    """Runner of one process. Replies are addressed to `name`, which must not be a gateway's name."""

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
        self._gate, self._clock, self._rng, self._new_id = gate, clock, rng, new_id
        self._pending: dict[_PendingLine, None] = {}
        self._sent = PendingTable()  # Lines in the broker.
        side = cast(RequestQueue, _BulkSide(broker))
        self._session = BrokerSession(side, name, self._sent, self._heard, 1 << 30, 0.0, clock, rng)
        self._suspects = LineSuspects(rng)
        # Lines that wait for a function of the input policy.
        self._unjudged: deque[tuple[_PendingLine, Judgement]] = deque()
        self._judged: set[_PendingLine] = set()  # Lines that such a function is judging.
        # Lines that the broker had no room for, by model.
        self._held: defaultdict[str, list[_PendingLine]] = defaultdict(list)
        self._windows: dict[str, float] = {}  # Bound on the lines in flight, by model.
        self._on_their_way: dict[str, int] = defaultdict(int)
        self._bytes = Counter[str]()  # Bytes of inputs in flight, by tenant.
        self._nonce = 0
        self._ready: frozenset[str] | None = None
        self._drained: frozenset[str] = frozenset()
        self._moved = asyncio.Event()
        # Instant of the last outcome for each model, or of its first line in flight if that is later.
        self._moved_at: dict[str, float] = {}
        # Why the lines of a model wait, and the latest instant at which they run.
        self._waits: dict[str, tuple[str, float]] = {}
        self._looked_at = -math.inf
        self._timers: set[asyncio.TimerHandle] = set()

    async def open(self) -> None: ...

    def start(self, supervisor: Supervisor) -> None:
        self._session.start(supervisor, "bulk lines")

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        submissions = [pending.entry.submission for pending in self._sent.values()]
        self._sent.clear()
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.withdraw(submissions, self._name)

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        up = (WorkerStatus.HEALTHY, WorkerStatus.COLD)
        self._ready = frozenset(worker.model for worker in workers if worker.status in up)
        self._drained = frozenset(worker.model for worker in workers if worker.status is WorkerStatus.DRAINED)
        self._moved.set()

    async def room(self, model: str) -> int:
        while (room := self._room(model)) <= 0:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATER):
                    await self._moved.wait()
        return room

    def _room(self, model: str) -> int:
        if self.paused(model) or self._held[model]:
            return 0
        return int(self._window(model)) - self._on_their_way[model]

    def _largest(self, model: str) -> int:
        return self._served[model].settings.max_batch_size

    def _window(self, model: str) -> float:
        return self._windows.get(model) or FIRST_BATCHES * self._largest(model)

    def full(self, tenant: str) -> bool:
        held = self._bytes[tenant]
        return held > 0 and held >= MOST_BYTES - self._bytes.total()

    def paused(self, model: str, tenant: str = "") -> str:
        if self._suspects.rest_left(tenant, self._clock()) > 0.0:
            return _RESTS
        if self._session.unreachable_seconds > 0.0:
            return "the queue is out of reach"
        if self._ready is None or self._has_worker(model, self._ready):
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
        still = [model for model, count in self._on_their_way.items() if count and now - self._moved_at[model] >= STILL]
        if not still or self._session.unreachable_seconds > 0.0:
            self._waits.clear()
            return
        if now - self._looked_at < STILL:
            return
        self._looked_at = now
        depths: dict[str, list[BulkDepth]] = {model: [] for model in still}
        for depth in await self._broker.bulk_queues():
            if depth.model in depths:
                depths[depth.model].append(depth)
        self._waits = {
            model: why for model, queues in depths.items() if (why := _why_they_wait(queues, now)) is not None
        }

    def _has_worker(self, model: str, ready: frozenset[str]) -> bool:
        """Return True if a worker of the model is up, or if the model is loaded, or its workers are started, on
        demand."""
        served = self._served
        return model in ready or model in served.at_zero or (len(served.models) > 1 and served.has_worker(model))

    def offer(self, lines: Sequence[BulkLine], done: Done) -> None:
        for line in lines:
            self._take(line, done)

    def _take(self, asked: BulkLine, done: Done) -> None:
        """Send a line to the broker, unless the input policy refuses it or must judge it first."""
        failure, line, judgement = self._served.check(asked.model, asked.input), asked, None
        if failure is None and self._gate is not None:
            tenant = Principal("", asked.tenant, self._tiers - 1)  # The policy counts lines to the lowest tier.
            request = InferenceRequest(tenant, "", _OPTIONS, asked.model, asked.input, asked.parameters)
            inspection = self._gate.inspect((asked.tenant, OF_BULK), request, self._served, self._decided)
            failure, judgement = inspection.failure, inspection.judgement
            line = msgspec.structs.replace(asked, input=inspection.input, parameters=inspection.parameters)
        if failure is not None:
            asyncio.get_running_loop().call_soon(done, asked, Reply("", asked.tenant, None, failure))
            return
        pending = self._begin(line, asked, done)
        self._pending[pending] = None
        self._came(pending)
        if judgement is None:
            self._send(pending)
            return
        self._unjudged.append((pending, judgement))
        self._have_judged()

    def _begin(self, line: BulkLine, asked: BulkLine, done: Done) -> _PendingLine:
        served, id = self._served[line.model], self._new_id()
        version = line.version
        if not (version or served.versions.any):
            version = served.versions.version(line.tenant, id, RequestOptions(LIFE), None)
        entry = Entry(
            id, line.model, line.input, self._tiers, line.tenant, self._name, LIFE, LIFE, line.parameters, 0,
            line.job, served.weigh(line.input), version, bool(line.version),
        )  # fmt: skip
        now = self._clock()
        return _PendingLine(NOBODY, _NOBODYS, entry, now, now + LIFE, self._session, line=line, asked=asked, done=done)

    def _have_judged(self) -> None:
        while self._gate is not None and self._unjudged and len(self._judged) < JUDGED_AT_ONCE:
            pending, judgement = self._unjudged.popleft()
            if pending not in self._pending:
                continue
            if self._gate.hold(judgement, pending):
                self._judged.add(pending)
            else:
                self._send(pending)

    def _decided(self, requests: Sequence[PendingRequest], failure: Failure | None) -> None:
        """Act on a verdict. Lines that no function had time to judge are judged again later."""
        for pending in cast(Sequence[_PendingLine], requests):
            self._judged.discard(pending)
            if pending not in self._pending:
                continue
            rest = self._suspects.rest_left(pending.line.tenant, self._clock())
            if failure is None and rest > 0.0:
                self._run_later([pending], rest)
            elif failure is None:
                self._send(pending)
            elif failure.code in _AGAIN:
                self._later(LATER, partial(self._judge_again, pending))
            else:
                self._end(pending, Reply(pending.entry.id, pending.entry.tenant, None, failure))
        self._have_judged()

    def _judge_again(self, pending: _PendingLine) -> None:
        if pending in self._pending:
            self._left(pending)
            self._take(pending.asked, pending.done)

    def _send(self, pending: _PendingLine, shape: int = 0) -> None:
        """Send a line to the broker. The line only shares batches with lines of the same shape. By
        default, that is the shape of its tenant."""
        self._nonce += 1
        shape = shape or self._suspects.shape(pending.line.tenant)
        pending.entry = entry = msgspec.structs.replace(pending.entry, nonce=self._nonce, shape=shape)
        self._sent[entry.tenant, entry.id] = pending
        self._session.offer(entry)

    def _recall(self, chosen: Callable[[_PendingLine], bool]) -> list[_PendingLine]:
        sent = [pending for pending in cast(Collection[_PendingLine], self._sent.values()) if chosen(pending)]
        for pending in sent:
            del self._sent[pending.entry.tenant, pending.entry.id]
            self._session.withdraw(pending.entry.submission)
        return sent

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        def chosen(pending: _PendingLine) -> bool:
            return pending.line.job == job and (not numbers or pending.line.number in numbers)

        self._recall(chosen)
        for pending in [*filter(chosen, self._pending)]:
            self._judged.discard(pending)
            self._left(pending)

    def _came(self, pending: _PendingLine) -> None:
        model = pending.line.model
        if not self._on_their_way[model]:
            self._moved_at[model] = self._clock()
        self._on_their_way[model] += 1
        self._bytes[pending.line.tenant] += len(pending.line.input)

    def _went(self, pending: _PendingLine) -> None:
        self._on_their_way[pending.line.model] -= 1
        self._bytes[pending.line.tenant] -= len(pending.line.input)
        if not self._bytes[pending.line.tenant]:
            del self._bytes[pending.line.tenant]

    def _left(self, pending: _PendingLine) -> None:
        del self._pending[pending]
        if not pending.rests:
            self._went(pending)
        self._suspects.ended(pending.line.tenant, pending)
        self._moved.set()

    def _heard(self, session: BrokerSession, event: SessionEvent) -> None:
        if isinstance(event, EntryRefused):
            pending = self._pop(event.entry.tenant, event.entry.id, event.entry.nonce)
            if pending is not None:
                self._refused(pending, event.failure)
        elif isinstance(event, Replied):
            self._replied(event.replies)
        self._moved.set()

    def _pop(self, tenant: str, id: str, nonce: int) -> _PendingLine | None:
        pending = self._sent.get((tenant, id))
        if pending is None or pending.entry.nonce != nonce:
            return None
        del self._sent[tenant, id]
        return cast(_PendingLine, pending)

    def _refused(self, pending: _PendingLine, failure: Failure) -> None:
        """Keep a line for later if the broker has no room for it. End it after any other refusal."""
        if failure.code not in _AGAIN:
            self._end(pending, Reply(pending.entry.id, pending.entry.tenant, None, failure))
            return
        model = pending.line.model
        if not self._held[model]:
            self._windows[model] = max(self._window(model) / 2, FIRST_BATCHES * self._largest(model))
            self._later(LATER, lambda: self._send_held(model))
        self._held[model].append(pending)

    def _send_held(self, model: str) -> None:
        for pending in self._held.pop(model):
            if pending in self._pending:
                self._send(pending, pending.entry.shape)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            act()

        timer = asyncio.get_running_loop().call_later(seconds, fire)
        self._timers.add(timer)

    def _replied(self, replies: Sequence[Reply]) -> None:
        failed: dict[tuple[str, float, str], list[tuple[_PendingLine, Reply]]] = defaultdict(list)
        large = set[str]()
        for reply in replies:
            pending = self._pop(reply.tenant, reply.id, reply.nonce)
            if pending is None:
                continue
            failure, tenant = reply.failure, pending.line.tenant
            if failure is not None and reply.ran is not None and failure.reason in _CAUSES:
                failed[reply.ran.worker, reply.ran.claimed_at, tenant].append((pending, reply))
            elif failure is not None and failure.reason == CROWDED:
                self._send(pending, self._suspects.new_shape())
            elif failure is not None and failure.code in _AGAIN:
                self._refused(pending, failure)
            else:
                model = pending.line.model
                largest = self._largest(model)
                self._windows[model] = min(self._window(model) + 0.5, MOST_BATCHES * largest)
                if reply.output is not None and self._suspects.succeeded(tenant, len(reply.output), largest):
                    large.add(tenant)
                self._end(pending, reply)
        for outcomes in failed.values():
            self._search([pending for pending, _ in outcomes], outcomes[0][1])
        if large:
            self._take_apart(large)

    def _take_apart(self, tenants: Collection[str]) -> None:
        """Send the queued lines of these tenants again, so that they run apart from lines of other tenants."""
        for pending in self._recall(lambda pending: pending.line.tenant in tenants and not pending.entry.shape):
            # The broker may still know the old id.
            pending.entry = msgspec.structs.replace(pending.entry, id=self._new_id())
            self._send(pending)

    def _end(self, pending: _PendingLine, reply: Reply) -> None:
        self._left(pending)
        self._moved_at[pending.line.model] = self._clock()
        self._waits.pop(pending.line.model, None)
        try:
            pending.done(pending.line, reply)
        except Exception:
            log.exception(
                "the outcome of a bulk line could not be processed", job=pending.line.job, line=pending.line.number
            )

    def _search(self, lines: Sequence[_PendingLine], reply: Reply) -> None:
        """Run a tenant's lines of a failed batch again, or end the line that is to blame."""
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
        """Have all lines of a tenant rest, including those in the broker. Then run them group by group."""
        if recalled := self._recall(lambda pending: pending.line.tenant == tenant):
            groups = [*groups, recalled]
        pauses = self._suspects.rest(tenant, len(groups), ran, self._clock())
        for group, pause in zip(groups, pauses, strict=True):
            for pending in group:
                pending.rests = True
                self._went(pending)
            self._run_later(group, pause)
        self._moved.set()

    def _run_later(self, group: Sequence[_PendingLine], pause: float) -> None:
        self._later(pause, partial(self._resume, group, self._suspects.new_shape()))

    def _resume(self, group: Sequence[_PendingLine], shape: int) -> None:
        for pending in filter(self._pending.__contains__, group):
            if pending.rests:
                pending.rests = False
                self._came(pending)
            self._send(pending, shape)
