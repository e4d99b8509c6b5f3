"""One answer for several requests of a tenant: tasks, idempotency keys, identical requests.

`headway.model.DedupKey` says what a dedup key means. A *flight* is the state of a dedup key:

                    ┌── join ──▶ followers
    (none) ─begin─▶ in flight ──end──▶ kept ─────▶ (none)
                    └── end, nothing to keep ───▶ (none)

The original of a flight may itself follow another: the first entry under an idempotency key may join an identical request. So
outcomes pass along chains. An original that nobody waits for any more runs on while it has followers. Under an idempotency key it
always runs on, as its client may ask again.

A flight of identical requests belongs to the code that was newest when the flight began. Only outputs of that code are kept. So
answers and runs of older code don't count for requests that come once a worker with other code is there.

If an original is too late, its followers may be in time, as they came later. They and their own followers are offered again in the
order in which they joined, so that the first of them is the next original. A follower that waits for a task gets the task's
failure."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import struct
from collections.abc import Iterable, Sequence

import msgspec

from headway.core import failures, values
from headway.core.fair_queue import QueuedEntry
from headway.core.parameters import canonical
from headway.core.retention import FAILURE_BYTES, OVERHEAD, KeptLimits, Retention, weight
from headway.errors import REJECTED_BY_MODEL
from headway.model import DedupKey, DedupKind, Entry, Failure, QueueName, Reply, Value

# Tenant, kind and key. A key for a single model starts with the model. The key of identical requests ends with the code.
FlightKey = tuple[str, DedupKind, str]

STALE = 64  # Limit on former followers before they are swept.


def digest(model: str, version: str, input: Value, parameters: bytes) -> bytes:
    """Return the SHA-256 of a request, which is the same for inputs and parameters that mean the same. `version` is the version
    that the client asks for; empty for any."""
    return digest_of(named(model, version), input, parameters)


def named(model: str, version: str) -> bytes:
    """Return the beginning of the hashed text of a request for a model; see `digest`."""
    return b"".join([_size(len(name)) + name for name in (model.encode(), version.encode())])


def digest_of(named: bytes, input: Value, parameters: bytes) -> bytes:
    """Return the `digest` of a request, given what `named` returned."""
    text, written = values.canonical(input), canonical(parameters)
    hashed = hashlib.sha256(named + _size(len(text)))
    hashed.update(text)
    hashed.update(_size(len(written)) + written)
    return hashed.digest()


_size = struct.Struct(">Q").pack


def keeps(dedup_key: DedupKey, reply: Reply, code: str = "") -> bool:
    """Return True if an outcome is kept for later requests under a dedup key. For identical requests, it must be an output of this
    code and of a version that they ask for, as a worker of another version may have helped out."""
    kind = dedup_key.kind
    if kind is DedupKind.SAME:
        ran, by = ("", "") if reply.ran is None else (reply.ran.version, reply.ran.target)
        versions = dedup_key.key.rpartition("@")[2]
        return reply.output is not None and by == code and (not ran or f",{ran}," in f",{versions},")
    if kind is DedupKind.TASK or reply.output is not None:
        return True
    return reply.failure is not None and reply.failure.code == REJECTED_BY_MODEL


def unkept(entry: Entry, reply: Reply, limits: KeptLimits) -> bool:
    """Return True if an outcome that a client may ask for later is too large to be kept."""
    return not limits.keeps(reply) and any(
        dedup_key.kind is not DedupKind.SAME and dedup_key.keep for dedup_key in entry.dedup_keys
    )


def is_task(entry: Entry) -> bool:
    """Return True if an entry is a task, whose outcome can be fetched by its id. An entry that only
    waits for a task is not a task."""
    return any(dedup_key.kind is DedupKind.TASK and dedup_key.key == entry.id for dedup_key in entry.dedup_keys)


def follower(
    id: str, task: str, tenant: str, gateway: str, seconds: float, nonce: int = 0, model: str = "", version: str = ""
) -> Entry:
    """Make an entry that never runs, but waits up to `seconds` for the outcome of the task with the id `task`. The task
    may have been submitted at any gateway. `model` and `version` name the task's queue; they are empty if it is
    unknown."""
    keys = (DedupKey(DedupKind.TASK, task),)
    return Entry(id, model, "", 0, tenant, gateway, seconds, seconds, dedup_keys=keys, nonce=nonce, version=version)


def task_followed(entry: Entry) -> str:
    """Return the id of the task that an entry follows; empty if it follows none."""
    return next((key.key for key in entry.dedup_keys if key.kind is DedupKind.TASK and key.key != entry.id), "")


def passed_on(reply: Reply, to: QueuedEntry, kind: DedupKind, kept: bool) -> Reply:
    """Return another entry's outcome, addressed to `to`."""
    entry = to.entry
    return msgspec.structs.replace(
        reply, id=entry.id, tenant=entry.tenant, nonce=entry.nonce, shared=kind, kept=kept, unkept=False
    )


class _Flight(msgspec.Struct, eq=False):
    dedup_key: DedupKey
    key: FlightKey
    original: QueuedEntry | None
    version: str
    code: str
    followers: dict[QueuedEntry, None] = msgspec.field(default_factory=dict)
    reply: Reply | None = None
    until: float = 0.0


class Consequences(msgspec.Struct):
    """Consequences of one event for other entries."""

    replies: list[tuple[QueuedEntry, Reply]] = msgspec.field(default_factory=list)  # Outcomes of other entries.
    reoffered: list[QueuedEntry] = msgspec.field(default_factory=list)  # Former followers to offer again, in order.
    idle: list[QueuedEntry] = msgspec.field(default_factory=list)  # Originals that nobody waits for any more.


class Dedup:
    """The flights of one broker, with budgets of kept outcomes."""

    def __init__(self, limits: KeptLimits) -> None:
        self._flights: dict[FlightKey, _Flight] = {}
        self._begun: dict[QueuedEntry, list[_Flight]] = {}
        self._followed: dict[QueuedEntry, _Flight] = {}
        self._unwanted: set[QueuedEntry] = set()
        self._codes: dict[QueueName, list[str]] = {}  # Codes of the workers of each queue, the newest first.
        self.limits = limits
        self._kept: Retention[_Flight] = Retention(limits)
        self._due: list[tuple[float, int, QueuedEntry]] = []  # Heap of present and former followers, by deadline.
        self._numbers = itertools.count()

    @property
    def active(self) -> bool:
        return bool(self._begun)

    def serve(self, queue: QueueName, codes: Iterable[str], cold: Iterable[str] = ()) -> None:
        """Note the codes of a queue's healthy workers. A new code becomes the newest. The codes in `cold`, of workers
        whose model isn't loaded, come after those of healthy workers. If there are no codes at all, the last codes
        stay."""
        healthy, known = set(codes), self._codes.get(queue, [])
        there = healthy.union(cold)
        if there:
            current = [*sorted(there.difference(known)), *(code for code in known if code in there)]
            self._codes[queue] = sorted(current, key=lambda code: code not in healthy)

    def follows(self, queued: QueuedEntry) -> bool:
        return queued in self._followed

    def original_of(self, queued: QueuedEntry) -> QueuedEntry:
        """Return the entry that runs for an entry, which may be the entry itself."""
        while (flight := self._followed.get(queued)) is not None and flight.original is not None:
            queued = flight.original
        return queued

    def unwanted(self, queued: QueuedEntry) -> bool:
        """Return True if an entry runs only for its followers and gets no reply itself."""
        return queued in self._unwanted

    def join(self, queued: QueuedEntry, now: float) -> Failure | Consequences | None:
        """Look for a shared answer. Returns None if the entry must run, and a failure if it is refused. Otherwise the entry has
        joined a flight, or its outcome is among the replies."""
        flight_to_join = None
        for dedup_key in queued.entry.dedup_keys:
            flight = self._flight(queued, dedup_key, now)
            waits = dedup_key.kind is DedupKind.TASK and not _own(queued, dedup_key)
            if flight is None:
                if waits:
                    return failures.no_task()
                continue
            if flight.dedup_key.digest != dedup_key.digest and not waits:
                return failures.misuse()
            if flight.reply is not None or dedup_key.joins:
                flight_to_join = flight
                break
        if flight_to_join is None:
            return None
        kind = flight_to_join.dedup_key.kind
        self.begin(queued, now, flight_to_join.version)
        if flight_to_join.reply is not None:
            reply = passed_on(flight_to_join.reply, queued, kind, kept=True)
            consequences = self.end(queued, reply, now)
            consequences.replies.insert(0, (queued, reply))
            return consequences
        flight_to_join.followers[queued] = None
        self._followed[queued] = flight_to_join
        self._begun.setdefault(queued, [])
        heapq.heappush(self._due, (queued.due, next(self._numbers), queued))
        return Consequences()

    def begun_anew(self, entry: Entry) -> list[_Flight]:
        """Return new flights for `start`, if all dedup keys of an entry are new. Returns an empty list if the entry
        must `join`."""
        flights = []
        for dedup_key in entry.dedup_keys:
            flight = self._new_flight(entry, dedup_key)
            if flight.key in self._flights or dedup_key.keep <= 0.0:
                return []
            flights.append(flight)
        return flights

    def _new_flight(self, entry: Entry, dedup_key: DedupKey) -> _Flight:
        code = self._code(entry) if dedup_key.kind is DedupKind.SAME else ""
        return _Flight(dedup_key, self._key(entry, dedup_key), None, entry.version, code)

    def start(self, queued: QueuedEntry, flights: list[_Flight]) -> None:
        for flight in flights:
            flight.original = queued
            self._flights[flight.key] = flight
        if flights:
            self._begun[queued] = flights

    def begin(self, queued: QueuedEntry, now: float, version: str | None = None) -> None:
        """Begin flights for the dedup keys of an entry that have none yet. The entry runs, or joins a flight of `version`.
        Identical requests get answers of their own version."""
        own = version in (None, queued.entry.version)
        begun = [
            self._new_flight(queued.entry, dedup_key)
            for dedup_key in queued.entry.dedup_keys
            if self._flight(queued, dedup_key, now) is None
            and (own or dedup_key.kind is not DedupKind.SAME)
            and (dedup_key.kind is not DedupKind.TASK or (_own(queued, dedup_key) and dedup_key.keep > 0.0))
        ]
        self.start(queued, begun)

    def end(self, queued: QueuedEntry, reply: Reply, now: float, *, late: bool = False) -> Consequences:
        """Note the outcome of an entry. If `late`, it failed only because its own time is over."""
        return self.end_all([(queued, reply)], now, late=late)

    def answers_alone(self, members: Sequence[QueuedEntry], longest: int) -> bool:
        """Return True if outputs of at most `longest` characters are for these entries only, and small enough to be kept."""
        if self._followed and any(flight.followers for member in members for flight in self._begun.get(member, ())):
            return False
        return self._unwanted.isdisjoint(members) and OVERHEAD + 4 * longest <= self.limits.largest

    def end_all(self, ended: list[tuple[QueuedEntry, Reply]], now: float, *, late: bool = False) -> Consequences:
        """Note the outcomes of entries; see `end`. Adds their followers' outcomes to `ended`."""
        consequences = Consequences()
        for original, outcome in ended:
            self._unwanted.discard(original)
            original.reservation = None
            if self._followed:
                self._unfollow(original)
            for flight in self._begun.pop(original, ()):
                if flight.followers:
                    if late and flight.dedup_key.kind is not DedupKind.TASK:
                        self._scatter(flight, consequences)
                    for follower in self._freed(flight):
                        passed = passed_on(outcome, follower, flight.dedup_key.kind, kept=False)
                        ended.append((follower, passed))
                        if follower not in self._unwanted:
                            consequences.replies.append((follower, passed))
                self._keep(flight, outcome, now)
        return consequences

    def cancel(self, queued: QueuedEntry, *, deleted: bool = False) -> Consequences:
        """Stop waiting for an entry. An original that nobody waits for any more is in `Consequences.idle`. Unless its outcome is
        `deleted`, the first entry under an idempotency key runs on."""
        consequences = Consequences()
        for flight in list(self._begun.get(queued, ())):
            kind = flight.dedup_key.kind
            if kind is DedupKind.TASK or (deleted and kind is DedupKind.KEY and not flight.followers):
                self._begun[queued].remove(flight)
                del self._flights[flight.key]
                for follower in self._freed(flight):
                    self._forget_begun(follower)
                    entry = follower.entry
                    failed = Reply(entry.id, entry.tenant, None, failures.no_task(), nonce=entry.nonce)
                    consequences.replies.append((follower, failed))
        self._unwanted.add(queued)
        self._release(queued, consequences)
        return consequences

    def with_id(self, entry: Entry, now: float) -> Entry:
        """Return the entry with the dedup key of the kept task with its id, if any. Another body counts as misuse of the id."""
        if isinstance(self.outcome(entry.tenant, entry.id, now), Reply):
            dedup_keys = (DedupKey(DedupKind.TASK, entry.id, entry.digest), *entry.dedup_keys)
            return msgspec.structs.replace(entry, dedup_keys=dedup_keys)
        return entry

    def outcome(self, tenant: str, id: str, now: float) -> Reply | QueuedEntry | None:
        """Return the outcome of a task, or its original; None if there is no such task."""
        flight = self._flights.get((tenant, DedupKind.TASK, id))
        if flight is None or (flight.reply is not None and flight.until <= now):
            return None
        return flight.reply or flight.original

    def forget(self, tenant: str, id: str) -> None:
        flight = self._flights.get((tenant, DedupKind.TASK, id))
        if flight is not None and flight.reply is not None:
            self._discard(flight)

    def overdue(self, now: float) -> list[QueuedEntry]:
        """Take out followers whose own time is over, and forget outcomes that were kept long enough."""
        self._forget_ended(now)
        late = []
        while self._due and (self._due[0][0] <= now or self._due[0][2] not in self._followed):
            queued = heapq.heappop(self._due)[2]
            if queued in self._followed:
                late.append(queued)
        return late

    def next_due(self) -> float:
        """Return the instant at which the first follower is or was due; infinite if there is none."""
        return self._due[0][0] if self._due else math.inf

    def leave(self, queued: QueuedEntry) -> Consequences:
        """Note that a follower has its own outcome, and no longer waits for the outcome of its original."""
        flight = self._unfollow(queued)
        consequences = Consequences()
        if flight is not None and flight.original is not None:
            self._release(flight.original, consequences)
        return consequences

    def _flight(self, queued: QueuedEntry, dedup_key: DedupKey, now: float) -> _Flight | None:
        flight = self._flights.get(self._key(queued.entry, dedup_key))
        if flight is not None and flight.reply is not None and (flight.until <= now or dedup_key.renews):
            self._discard(flight)
            return None
        return flight

    def _key(self, entry: Entry, dedup_key: DedupKey) -> FlightKey:
        """Return the key of a flight. The same idempotency key means different flights for different models. A task's
        id means one flight, whatever the model."""
        kind, key = dedup_key.kind, dedup_key.key
        if kind is DedupKind.KEY:
            key = f"{entry.model}\0{key}"
        elif kind is DedupKind.SAME:
            key = f"{key}#{self._code(entry)}"
        return entry.tenant, kind, key

    def _code(self, entry: Entry) -> str:
        """Return the newest code that answers an entry; empty if unknown."""
        codes = self._codes.get(entry.queue)
        return codes[0] if codes else ""

    def _unfollow(self, queued: QueuedEntry) -> _Flight | None:
        flight = self._followed.pop(queued, None)
        if flight is not None:
            del flight.followers[queued]
            self._tidy()
        return flight

    def _freed(self, flight: _Flight) -> dict[QueuedEntry, None]:
        """Detach and return the followers of a flight."""
        followers, flight.followers = flight.followers, {}
        for follower in followers:
            del self._followed[follower]
        self._tidy()
        return followers

    def _scatter(self, flight: _Flight, consequences: Consequences) -> None:
        loose = [flight]
        for each in loose:
            for follower in self._freed(each):
                loose += self._forget_begun(follower)
                if follower in self._unwanted:
                    self._unwanted.discard(follower)
                    follower.reservation = None
                else:
                    consequences.reoffered.append(follower)

    def _tidy(self) -> None:
        if len(self._due) > 2 * len(self._followed) + STALE:
            self._due = [due for due in self._due if due[2] in self._followed]
            heapq.heapify(self._due)

    def _release(self, queued: QueuedEntry, consequences: Consequences) -> None:
        """Drop an entry that nobody waits for, and the originals that only ran for it."""
        while queued in self._unwanted and not any(map(_is_awaited, self._begun.get(queued, ()))):
            self._unwanted.discard(queued)
            queued.reservation = None
            self._forget_begun(queued)
            flight = self._unfollow(queued)
            if flight is None or flight.original is None:
                consequences.idle.append(queued)
                return
            queued = flight.original

    def _forget_begun(self, queued: QueuedEntry) -> list[_Flight]:
        begun = self._begun.pop(queued, [])
        for flight in begun:
            del self._flights[flight.key]
        return begun

    def _keep(self, flight: _Flight, reply: Reply, now: float) -> None:
        dedup_key = flight.dedup_key
        useful = dedup_key.keep > 0.0 and keeps(dedup_key, reply, flight.code)
        size = weight(reply.output)
        if useful and reply.output is not None and size > self.limits.largest:
            useful = dedup_key.kind is DedupKind.TASK  # So that a poll learns why there is no output.
            failure, size = failures.too_large(size), FAILURE_BYTES
            reply = Reply(reply.id, reply.tenant, None, failure, shared=reply.shared, kept=reply.kept)
        if not useful:
            del self._flights[flight.key]
            return
        self._forget_ended(now)
        flight.original, flight.reply, flight.until = None, reply, now + dedup_key.keep
        spare = dedup_key.kind is DedupKind.SAME
        for gone in self._kept.add(flight, flight.key[0], size, flight.until, spare=spare):
            del self._flights[gone.key]

    def _forget_ended(self, now: float) -> None:
        for gone in self._kept.overdue(now):
            del self._flights[gone.key]

    def _discard(self, flight: _Flight) -> None:
        self._kept.remove(flight)
        del self._flights[flight.key]


def _is_awaited(flight: _Flight) -> bool:
    """Return True if the original of a flight runs although unwanted, as its client may ask again under the key."""
    return bool(flight.followers) or flight.dedup_key.kind is DedupKind.KEY


def _own(queued: QueuedEntry, dedup_key: DedupKey) -> bool:
    """Return True if an entry is the task itself rather than waiting for it."""
    return dedup_key.key == queued.entry.id
