"""Runner of bulk lines in empty seats: hands them to the broker as bulk entries, and searches those whose batch has failed.

    offered ──▶ waits in the broker ──▶ rides ──▶ output, or a failure of its own
                   ▲                      │ its batch failed
                   └── apart: whole, ◀────┘
                       then in halves, then alone

Whatever becomes of a batch, its other members are not this runner's, and never suspected for it. So the search for a bad line is
here, by the rules of `core.retry`, and what is suspected rides apart. A tenant that has sent a bad line rides apart with all it sends, until
CLEAN lines of it have been answered, and twice as many after each further one: else each bad line of a million would cost a batch of others.

An output is copied on its way, and all that ride with it wait for that. So the outputs of the lines of a batch have a bound of their own, and a
line whose output goes beyond runs again alone. A tenant whose lines have outputs of more than their share of it rides apart until CLEAN smaller
ones have come, in batches of as many lines as have room.

A batch that ended its worker costs more than seats: nobody has that worker until it has loaded again. So all lines of its tenant rest
before any of them runs again, many times as long as that batch ran, and what is searched then runs one part after the other.

While the broker is full of bulk entries, lines are offered again when others have ended.

The input policy goes before all of that. Its functions judge requests that wait, so a few lines at most are with them at a time.
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
from headway.core.retry import BLAMED, NEVER_SPLIT, backoff, is_over, stays_whole
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import BrokerSession, EntryRefused, Replied, SessionEvent
from headway.gateway.input_gate import InputGate
from headway.gateway.pending import NOBODY, Judgement, PendingRequest, PendingTable
from headway.gateway.served_models import ServedModels
from headway.model import (
    MOST_OUTPUT,
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

CLEAN = 64
"""Lines of a tenant that are answered before it takes seats beside others again, since it has sent its first bad one."""
MOST_DOUBLINGS = 16
"""Doublings of that, one for each further bad line."""
LEAST_REST, RESTS = 15.0, 20.0
"""Seconds for which a tenant's lines rest after a batch of them that has ended its worker: at least, and in multiples of its run."""
MOST_REST_DOUBLINGS = 4
"""Doublings of that, one for each bad line that the tenant has sent before."""
MOST_TENANTS = 10_000
"""Most tenants whose bad lines are remembered."""
FIRST_BATCHES, MOST_BATCHES = 2, 64
"""Full batches of a model that are on their way at first, and at most."""
MOST_OUTPUTS = MOST_OUTPUT
"""Bytes of outputs of lines that have room in a batch; a backend leaves out what goes beyond."""
MOST_BYTES = 64 << 20
"""Bytes of inputs on their way, about. A tenant may have as many as it leaves free, so that there is room for whoever comes next."""
LATER = 0.2
"""Seconds after which lines are offered again that the broker had no room for."""
LONGEST_PAUSE = 30.0
"""Most seconds before a batch runs again of which a remote API failed by its own fault."""
LIFE = 7 * 86_400.0
"""Seconds after which an entry ends of itself. A job ends long before."""
_OPTIONS = RequestOptions(LIFE)
SHAPES = 1 << 39
"""Shapes that are drawn from, so that those of several processes differ."""
_AGAIN = frozenset((errors.SHED, errors.SCARCE, errors.SERVICE_OVERLOADED, errors.NO_WORKERS, errors.DEADLINE_EXCEEDED))
"""Codes of failures that say nothing of the line."""
_CAUSES = frozenset(cause.value for cause in Cause)
STILL = 1.0
"""Seconds without an outcome of a model's lines after which it is asked why they wait."""
_FATAL = frozenset((Cause.CRASHED, Cause.TIMEOUT))
"""Causes for which a worker ends with its batch."""
_NOBODYS = Principal("", "", 0)
JUDGED_AT_ONCE = 8
"""Lines that the functions of the input policy have at once: a request that comes to one waits for a call of so many texts at most."""
OF_BULK = "\0bulk"
"""User in whose name they judge lines: what a line does to one is held against no user."""

Done = Callable[[BulkLine, Reply], None]
_RESTS = "lines have ended a worker of the model; the others wait before they run"


def _why_they_wait(queues: Sequence[BulkDepth], now: float) -> tuple[str, float] | None:
    """Why the lines of a model wait, and the instant until which they do at most, by its queues at the instant `now`; None: they run."""
    queues = [one for one in queues if one.waiting]
    if not queues or any(one.busy for one in queues):
        return None
    held = min(one.held for one in queues)
    if held == math.inf:
        return "the lines wait for empty seats beside requests, as models share the GPU", held
    if held > 0.0:
        return (
            f"requests came of late: the lines wait for empty seats beside them, or for {QUIET:g} seconds without a request",
            now + held,
        )
    return "the GPUs are busy with requests; the lines run in seats that these leave empty", math.inf


class _Riding(PendingRequest):
    """A line on its way, with what became of its runs so far."""

    line: BulkLine = cast(BulkLine, None)
    done: Done = cast(Done, None)
    attempts: int = 0
    alone: int = 0
    failures: int = 0
    suspect: bool = False
    rests: bool = False
    asked: BulkLine = cast(BulkLine, None)
    """The line as it was before the input policy changed it."""


class _Record(msgspec.Struct):
    """A tenant's record: its bad lines, the good ones that it owes, those that are suspected, and the shape in which it rides apart.

    All its lines rest until `rests_until`, an instant of the clock. `largest` is its largest output since it rides apart for that; 0: it does not.
    `room` is the number of further lines of its shape for whose outputs there is room then.
    """

    shape: int
    largest: int = 0
    room: int = 0
    bad: int = 0
    owes: int = 0
    suspects: int = 0
    rests_until: float = 0.0


class _BulkSide:
    """A broker whose `enqueue` takes bulk entries, for a session that knows nothing of them."""

    near = None

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.enqueue = broker.enqueue_bulk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


class SeatRunner(BulkRunner):
    """Runner of one process; see `headway.ports.BulkRunner`.

    Arguments:
        broker: the broker.
        served: models that the process serves.
        name: name under which replies come to the runner; no gateway has it.
        tiers: number of tiers.
        gate: gate of the input policy; None where there is none.
        clock: monotonic seconds.
        rng: uniform in [0, 1).
        new_id: makes the text of a fresh UUIDv7.
    """

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
        self._riding = PendingTable()
        side = cast(RequestQueue, _BulkSide(broker))
        self._session = BrokerSession(side, name, self._riding, self._heard, 1 << 30, 0.0, clock, rng)
        self._resting: dict[tuple[str, str], _Riding] = {}
        """Lines that run, or are judged, again after a pause."""
        self._unjudged: dict[tuple[str, str], tuple[_Riding, Judgement]] = {}
        """Lines that wait for a function of the input policy, in order."""
        self._judged: dict[tuple[str, str], _Riding] = {}
        """Lines that such a function has."""
        self._held: defaultdict[str, deque[_Riding]] = defaultdict(deque)
        """Lines that the broker had no room for, by model."""
        self._windows: dict[str, float] = {}
        self._on_their_way: dict[str, int] = defaultdict(int)
        self._bytes = Counter[str]()
        """Bytes of inputs on their way, by tenant."""
        self._nonce = 0
        self._shape = int(rng() * (SHAPES - 1)) + 1
        self._records: dict[str, _Record] = {}
        self._ready: frozenset[str] | None = None
        self._drained: frozenset[str] = frozenset()
        self._moved = asyncio.Event()
        self._moved_at: dict[str, float] = {}
        """Instant at which a line of a model began to wait while no other did, or had its outcome last, by model."""
        self._waits: dict[str, tuple[str, float]] = {}
        """Why the lines of a model wait, and the instant until which they do at most, by model."""
        self._looked_at = -math.inf
        self._timers: set[asyncio.TimerHandle] = set()

    async def open(self) -> None:
        """Open nothing; see `headway.app.lifecycle.Resource`."""

    def start(self, supervisor: Supervisor) -> None:
        """Start the session with the broker."""
        self._session.start(supervisor, "bulk lines")

    async def close(self) -> None:
        """Let go of all lines."""
        for timer in self._timers:
            timer.cancel()
        submissions = [one.entry.submission for one in self._riding.values()]
        self._riding.clear()
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.withdraw(submissions, self._name)

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""
        self._ready = frozenset(one.model for one in workers if one.status in (WorkerStatus.HEALTHY, WorkerStatus.COLD))
        self._drained = frozenset(one.model for one in workers if one.status is WorkerStatus.DRAINED)
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

    def _window(self, model: str) -> float:
        return self._windows.get(model) or FIRST_BATCHES * self._served[model].settings.max_batch_size

    def full(self, tenant: str) -> bool:
        held = self._bytes[tenant]
        return held > 0 and held >= MOST_BYTES - self._bytes.total()

    def paused(self, model: str, tenant: str = "") -> str:
        record = self._records.get(tenant)
        if record is not None and record.rests_until > self._clock():
            return _RESTS
        if self._session.unreachable_seconds > 0.0:
            return "the queue is out of reach"
        if self._ready is None or self._has_worker(model, self._ready):
            return ""
        return "the workers of the model are drained" if model in self._drained else "no worker of the model is up"

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        now, record = self._clock(), self._records.get(tenant)
        if record is not None and record.rests_until > now:
            return _RESTS, record.rests_until - now
        if model not in self._waits:
            return None
        why, until = self._waits[model]
        return why, max(until - now, 0.0)

    async def look(self) -> None:
        now = self._clock()
        still = [one for one, count in self._on_their_way.items() if count and now - self._moved_at[one] >= STILL]
        if not still or self._session.unreachable_seconds > 0.0:
            self._waits.clear()
            return
        if now - self._looked_at < STILL:
            return
        self._looked_at = now
        found: dict[str, list[BulkDepth]] = {model: [] for model in still}
        for one in await self._broker.bulk_queues():
            if one.model in found:
                found[one.model].append(one)
        self._waits = {
            model: why for model, queues in found.items() if (why := _why_they_wait(queues, now)) is not None
        }

    def _has_worker(self, model: str, ready: frozenset[str]) -> bool:
        """Whether a worker of a model is up, or is loaded or started when it is asked for."""
        served = self._served
        return model in ready or model in served.at_zero or (len(served.models) > 1 and served.has_worker(model))

    def offer(self, lines: Sequence[BulkLine], done: Done) -> None:
        for line in lines:
            self._take(line, done)

    def _take(self, asked: BulkLine, done: Done) -> None:
        """Have a line wait in the broker, unless the input policy refuses it or has to judge it first."""
        failure, line, judgement = self._served.check(asked.model, asked.input), asked, None
        if failure is None and self._gate is not None:
            tenant = Principal("", asked.tenant, self._tiers - 1)  # To the input policy lines are of the lowest tier.
            request = InferenceRequest(tenant, "", _OPTIONS, asked.model, asked.input, asked.parameters)
            found = self._gate.inspect((asked.tenant, OF_BULK), request, self._served)
            failure, judgement = found.failure, found.judgement
            line = msgspec.structs.replace(asked, input=found.input, parameters=found.parameters)
        if failure is not None:
            asyncio.get_running_loop().call_soon(done, asked, Reply("", asked.tenant, None, failure))
            return
        riding = self._begin(line, done)
        riding.asked = asked
        self._came(riding)
        if judgement is None:
            self._send(riding)
            return
        judgement.tell = self._decided
        self._unjudged[riding.entry.tenant, riding.entry.id] = riding, judgement
        self._have_judged()

    def _have_judged(self) -> None:
        """Give the next lines to the functions of the input policy."""
        while self._gate is not None and self._unjudged and len(self._judged) < JUDGED_AT_ONCE:
            key = next(iter(self._unjudged))
            riding, judgement = self._unjudged.pop(key)
            if self._gate.hold(judgement, riding):
                self._judged[key] = riding
            else:
                self._send(riding)

    def _decided(self, pending: Sequence[PendingRequest], failure: Failure | None) -> None:
        """Take a verdict. A line that no function had time for is judged later."""
        for one in pending:
            riding = self._judged.pop((one.entry.tenant, one.entry.id), None)
            if riding is None:  # It was withdrawn.
                continue
            record = self._records.get(riding.line.tenant)
            if failure is None and record is not None and record.rests_until > (now := self._clock()):
                self._run_later([riding], record.rests_until - now)
            elif failure is None:
                self._send(riding)
            elif failure.code in _AGAIN:
                self._resting[riding.entry.tenant, riding.entry.id] = riding
                self._later(LATER, partial(self._judge_again, riding))
            else:
                self._end(riding, Reply(riding.entry.id, riding.entry.tenant, None, failure))
        self._have_judged()

    def _judge_again(self, riding: _Riding) -> None:
        if self._resting.pop((riding.entry.tenant, riding.entry.id), None) is not None:
            self._left(riding)
            self._take(riding.asked, riding.done)

    def _begin(self, line: BulkLine, done: Done) -> _Riding:
        served, id = self._served[line.model], self._new_id()
        version = line.version
        if not (version or served.versions.any):
            version = served.versions.version(line.tenant, id, RequestOptions(LIFE), None)
        entry = Entry(
            id, line.model, line.input, self._tiers, line.tenant, self._name, LIFE, LIFE, line.parameters, 0,
            line.job, served.weigh(line.input), version, bool(line.version),
        )  # fmt: skip
        now = self._clock()
        return _Riding(NOBODY, _NOBODYS, entry, now, now + LIFE, self._session, line=line, done=done)

    def _send(self, riding: _Riding, shape: int = 0) -> None:
        """Have a line wait in the broker: with those of a shape alone, or wherever its tenant may ride."""
        record = self._records.get(riding.line.tenant)
        if not shape and record is not None and (record.owes or record.suspects):
            shape = self._shape_apart(record)
        self._nonce += 1
        riding.entry = entry = msgspec.structs.replace(riding.entry, nonce=self._nonce, shape=shape)
        self._riding[entry.tenant, entry.id] = riding
        self._session.offer(entry)

    def _shape_apart(self, record: _Record) -> int:
        """Shape of the next line of a tenant that rides apart."""
        if record.largest:
            record.room -= 1
            if record.room < 0:
                record.shape, record.room = self._new_shape(), MOST_OUTPUTS // record.largest - 1
        return record.shape

    def _new_shape(self) -> int:
        self._shape = self._shape % SHAPES + 1
        return self._shape

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        def meant(riding: _Riding) -> bool:
            return riding.line.job == job and (not numbers or riding.line.number in numbers)

        for key, one in list(self._riding.items()):
            if meant(cast(_Riding, one)):
                del self._riding[key]
                self._session.withdraw(one.entry.submission)
                self._left(cast(_Riding, one))
        for held in self._held.values():
            for riding in filter(meant, [*held]):
                held.remove(riding)
                self._left(riding)
        for key, (riding, _) in list(self._unjudged.items()):
            if meant(riding):
                del self._unjudged[key]
                self._left(riding)
        for table in (self._judged, self._resting):
            for key, riding in list(table.items()):
                if meant(riding):
                    del table[key]
                    self._left(riding)

    def _came(self, riding: _Riding) -> None:
        """Note that a line is on its way."""
        if not self._on_their_way[riding.line.model]:
            self._moved_at[riding.line.model] = self._clock()
        self._on_their_way[riding.line.model] += 1
        self._bytes[riding.line.tenant] += len(riding.line.input)

    def _went(self, riding: _Riding) -> None:
        self._on_their_way[riding.line.model] -= 1
        self._bytes[riding.line.tenant] -= len(riding.line.input)
        if not self._bytes[riding.line.tenant]:
            del self._bytes[riding.line.tenant]

    def _left(self, riding: _Riding) -> None:
        """Note that a line is on its way no more."""
        if not riding.rests:
            self._went(riding)
        if riding.suspect:
            self._records[riding.line.tenant].suspects -= 1
        riding.suspect = False
        self._moved.set()

    def _heard(self, session: BrokerSession, event: SessionEvent) -> None:
        if isinstance(event, EntryRefused):
            riding = self._pop(event.entry.tenant, event.entry.id, event.entry.nonce)
            if riding is not None:
                self._refused(riding, event.failure)
        elif isinstance(event, Replied):
            self._replied(event.replies)
        self._moved.set()

    def _pop(self, tenant: str, id: str, nonce: int) -> _Riding | None:
        found = self._riding.get((tenant, id))
        if found is None or found.entry.nonce != nonce:
            return None
        del self._riding[tenant, id]
        return cast(_Riding, found)

    def _refused(self, riding: _Riding, failure: Failure) -> None:
        """Hold a line back that the broker has no room for; another refusal is its outcome."""
        if failure.code not in _AGAIN:
            self._end(riding, Reply(riding.entry.id, riding.entry.tenant, None, failure))
            return
        model, largest = riding.line.model, self._served[riding.line.model].settings.max_batch_size
        if not self._held[model]:
            self._windows[model] = max(self._window(model) / 2, FIRST_BATCHES * largest)
            self._later(LATER, lambda: self._send_held(model))
        self._held[model].append(riding)

    def _send_held(self, model: str) -> None:
        held, self._held[model] = self._held[model], deque()
        for riding in held:
            self._send(riding, riding.entry.shape)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        def now() -> None:
            self._timers.discard(timer)
            act()

        timer = asyncio.get_running_loop().call_later(seconds, now)
        self._timers.add(timer)

    def _replied(self, replies: Sequence[Reply]) -> None:
        failed: dict[tuple[str, float, str], list[tuple[_Riding, Reply]]] = defaultdict(list)
        large = set[str]()
        for reply in replies:
            riding = self._pop(reply.tenant, reply.id, reply.nonce)
            if riding is None:
                continue
            failure = reply.failure
            if failure is not None and reply.ran is not None and failure.reason in _CAUSES:
                failed[reply.ran.worker, reply.ran.claimed_at, riding.line.tenant].append((riding, reply))
            elif failure is not None and failure.reason == CROWDED:
                self._send(riding, self._new_shape())
            elif failure is not None and failure.code in _AGAIN:
                self._refused(riding, failure)
            else:
                if self._note_size(riding, len(reply.output or "")):
                    large.add(riding.line.tenant)
                self._answered(riding, reply)
        for together in failed.values():
            self._search(together)
        for tenant in large:
            self._take_apart(tenant)

    def _note_size(self, riding: _Riding, size: int) -> bool:
        """Note the size of an output. Returns whether its tenant rides apart from now on for it, and did not before."""
        largest = self._served[riding.line.model].settings.max_batch_size
        if size * largest <= MOST_OUTPUTS:
            return False
        record = self._record(riding.line.tenant)
        begins = not record.largest
        record.largest, record.owes = max(record.largest, size), max(record.owes, CLEAN + 1)  # This one is none.
        return begins

    def _take_apart(self, tenant: str) -> None:
        """Have the lines of a tenant that wait in the broker wait there anew, apart."""
        for key, one in [*self._riding.items()]:
            riding = cast(_Riding, one)
            if key[0] == tenant and not riding.entry.shape:
                del self._riding[key]
                self._session.withdraw(riding.entry.submission)
                riding.entry = msgspec.structs.replace(riding.entry, id=self._new_id())  # The old id may be in use yet.
                self._send(riding)

    def _answered(self, riding: _Riding, reply: Reply) -> None:
        model, record = riding.line.model, self._records.get(riding.line.tenant)
        largest = self._served[model].settings.max_batch_size
        self._windows[model] = min(self._window(model) + 0.5, MOST_BATCHES * largest)
        if record is not None and record.owes and reply.output is not None:
            record.owes -= 1
            if not record.owes:
                record.largest = 0
        self._end(riding, reply)

    def _end(self, riding: _Riding, reply: Reply) -> None:
        self._left(riding)
        self._moved_at[riding.line.model] = self._clock()
        self._waits.pop(riding.line.model, None)
        try:
            riding.done(riding.line, reply)
        except Exception:
            log.exception("the outcome of a bulk line could not be taken", job=riding.line.job, line=riding.line.number)

    def _search(self, together: Sequence[tuple[_Riding, Reply]]) -> None:
        """Have lines of one tenant run again that were in a batch that failed, or end the one whose fault it is."""
        reply = together[0][1]
        if reply.failure is None or reply.ran is None:
            return
        cause, lines = Cause(reply.failure.reason), [riding for riding, _ in together]
        first, alone = lines[0], reply.ran.size == 1
        for riding in lines:
            riding.attempts, riding.failures, riding.alone = (
                riding.attempts + 1,
                riding.failures + 1,
                riding.alone + alone,
            )
        count, groups = first.failures, [lines]
        if cause not in NEVER_SPLIT and alone and is_over(cause, 1, first.attempts, first.alone):
            if cause in BLAMED:
                self._blame(first.line.tenant)
            groups = []
        elif not (len(lines) == 1 or stays_whole(cause, len(lines), first.failures)):
            half = len(lines) // 2
            count, groups = 1, [lines[:half], lines[half:]]
        for riding in lines if groups else ():
            self._suspect(riding)
        if cause in _FATAL and (first.entry.shape or reply.ran.size == len(lines)):
            self._rest(first.line.tenant, groups, max(LEAST_REST, RESTS * reply.ran.seconds))
        else:
            self._again(groups, cause, count)
        if not groups:
            self._end(first, reply)

    def _again(self, groups: Sequence[Sequence[_Riding]], cause: Cause, count: int) -> None:
        pause = backoff(count, self._rng())
        if cause in NEVER_SPLIT:
            pause = min(pause * 2.0 ** min(count, 10), LONGEST_PAUSE)
        for group in groups:
            self._run_later(group, pause)

    def _rest(self, tenant: str, groups: Sequence[Sequence[_Riding]], seconds: float) -> None:
        """Have all lines of a tenant rest, and those that wait in the broker too; groups of them then run one after another."""
        record, now = self._record(tenant), self._clock()
        back = [cast(_Riding, one) for (of, _), one in self._riding.items() if of == tenant]
        for riding in back:
            del self._riding[tenant, riding.entry.id]
            self._session.withdraw(riding.entry.submission)
        seconds *= 2.0 ** min(record.bad, MOST_REST_DOUBLINGS)
        record.rests_until = max(now, record.rests_until) + seconds
        for group in filter(None, (*groups, back)):
            for riding in group:
                riding.rests = True
                self._went(riding)
            self._run_later(group, record.rests_until - now)
            record.rests_until += seconds
        self._moved.set()

    def _run_later(self, group: Sequence[_Riding], pause: float) -> None:
        shape = self._new_shape()
        self._resting.update({(riding.entry.tenant, riding.entry.id): riding for riding in group})
        self._later(pause, lambda: self._resume(group, shape))

    def _resume(self, group: Sequence[_Riding], shape: int) -> None:
        for riding in group:
            if self._resting.pop((riding.entry.tenant, riding.entry.id), None) is not None:
                if riding.rests:
                    riding.rests = False
                    self._came(riding)
                self._send(riding, shape)

    def _record(self, tenant: str) -> _Record:
        record = self._records.get(tenant)
        if record is None:
            if len(self._records) >= MOST_TENANTS:
                clean = next((one for one, its in self._records.items() if not its.suspects), None)
                self._records.pop(clean or "", None)
            record = self._records[tenant] = _Record(self._new_shape())
        return record

    def _suspect(self, riding: _Riding) -> None:
        if not riding.suspect:
            riding.suspect = True
            self._record(riding.line.tenant).suspects += 1

    def _blame(self, tenant: str) -> None:
        """Note a bad line of a tenant."""
        record = self._record(tenant)
        record.owes = CLEAN * 2 ** min(record.bad, MOST_DOUBLINGS)
        record.bad += 1
