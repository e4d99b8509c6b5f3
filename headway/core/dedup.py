"""Answers shared by several requests of a tenant: polls of a task, retries with an idempotency key, and identical requests.

For what a dedup key means, see `headway.model.DedupKey`. A *flight* is the state of a dedup key:

                    ┌── join ──▶ followers
    (none) ─begin─▶ in flight ──end──▶ kept ─────▶ (none)
                    └── end, nothing to keep ───▶ (none)

The original of a flight may itself follow another: the first entry under an idempotency key may join an identical request. So
outcomes are passed along chains. An original that nobody awaits any more still runs if it has followers or an idempotency key,
which its client may send again.

A flight of identical requests belongs to the code (the digest of a worker's target) that was newest when it began. Only outputs of
that code are kept. So once a worker with other code is up, new requests don't share the answers or runs of older code.

If an original is too late, its followers may still be in time, because they came later. They and their own followers are offered
again in the order in which they joined. A follower of a task gets the task's failure instead."""

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

FlightKey = tuple[str, DedupKind, str]  # Tenant, kind and key. The key may begin with the model, or end with the code.

_UNKNOWN = ("",)  # Codes of a queue whose workers haven't been seen yet.
STALE = 64  # The heap may contain this many former followers before it is swept.


def digest(model: str, version: str, input: Value, parameters: bytes) -> bytes:
    """Return the SHA-256 of a request. Equivalent inputs and parameters give the same digest. `version` is the version that the
    client requests, or empty for any."""
    return digest_of(named(model, version), input, parameters)


def named(model: str, version: str) -> bytes:
    """Return the beginning of the data to hash for a request to a model; see `digest`."""
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
    """Return True if an outcome is kept for later requests under a dedup key. For identical requests, it must be an output of
    this code, and of a version that they accept, because a worker of another version may have run the entry."""
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
    """Return True if an entry is a task: its outcome can be fetched by its id. An entry that only waits for a task is not one."""
    return any(dedup_key.kind is DedupKind.TASK and dedup_key.key == entry.id for dedup_key in entry.dedup_keys)


def follower(
    id: str, task: str, tenant: str, gateway: str, seconds: float, nonce: int = 0, model: str = "", version: str = ""
) -> Entry:
    """Return an entry that never runs, but waits up to `seconds` for a task's outcome. An empty `model` or `version` is unknown."""
    keys = (DedupKey(DedupKind.TASK, task),)
    return Entry(id, model, "", 0, tenant, gateway, seconds, seconds, dedup_keys=keys, nonce=nonce, version=version)


def task_followed(entry: Entry) -> str:
    """Return the id of the task that an entry follows, or an empty string if it follows none."""
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
    """Consequences of an event for other entries."""

    replies: list[tuple[QueuedEntry, Reply]] = msgspec.field(default_factory=list)  # Outcomes of other entries.
    reoffered: list[QueuedEntry] = msgspec.field(default_factory=list)  # Former followers to offer again, in order.
    idle: list[QueuedEntry] = msgspec.field(default_factory=list)  # Originals that nobody is waiting for any more.


class Followers:
    """The entries that follow a flight."""

    def __init__(self) -> None:
        self.flights: dict[QueuedEntry, _Flight] = {}  # The flight that each entry follows.
        self._due: list[tuple[float, int, QueuedEntry]] = []  # Heap of current and former followers, by deadline.
        self._numbers = itertools.count()

    def __contains__(self, queued: QueuedEntry) -> bool:
        return queued in self.flights

    def add(self, queued: QueuedEntry, flight: _Flight) -> None:
        flight.followers[queued] = None
        self.flights[queued] = flight
        heapq.heappush(self._due, (queued.due, next(self._numbers), queued))

    def remove(self, queued: QueuedEntry) -> _Flight | None:
        """Remove an entry. Returns the flight that it followed, or None if it followed none."""
        flight = self.flights.pop(queued, None)
        if flight is not None:
            del flight.followers[queued]
            self._tidy()
        return flight

    def detach(self, flight: _Flight) -> dict[QueuedEntry, None]:
        followers, flight.followers = flight.followers, {}
        for follower in followers:
            del self.flights[follower]
        self._tidy()
        return followers

    def overdue(self, now: float) -> list[QueuedEntry]:
        """Return the followers whose deadline has passed. None of them is returned again."""
        late = []
        while self._due and (self._due[0][0] <= now or self._due[0][2] not in self.flights):
            queued = heapq.heappop(self._due)[2]
            if queued in self.flights:
                late.append(queued)
        return late

    def next_due(self) -> float:
        """Return the deadline of the next follower, which may have passed; infinite if there is none."""
        return self._due[0][0] if self._due else math.inf

    def _tidy(self) -> None:
        if len(self._due) > 2 * len(self.flights) + STALE:
            self._due = [due for due in self._due if due[2] in self.flights]
            heapq.heapify(self._due)


class _KeptFlights:
    """The flights whose outcomes are kept. If an outcome expires or exceeds a budget, its flight is removed from `flights`."""

    def __init__(self, flights: dict[FlightKey, _Flight], limits: KeptLimits) -> None:
        self._flights, self._largest = flights, limits.largest
        self._retention: Retention[_Flight] = Retention(limits)

    def keep(self, flight: _Flight, reply: Reply, now: float) -> None:
        """Keep the outcome of a flight if it is useful to later requests; otherwise drop the flight."""
        dedup_key = flight.dedup_key
        useful = dedup_key.keep > 0.0 and keeps(dedup_key, reply, flight.code)
        size = weight(reply.output)
        if useful and reply.output is not None and size > self._largest:
            useful = dedup_key.kind is DedupKind.TASK  # A poll must be able to say why there is no output.
            failure, size = failures.too_large(size), FAILURE_BYTES
            reply = Reply(reply.id, reply.tenant, None, failure, shared=reply.shared, kept=reply.kept)
        if not useful:
            del self._flights[flight.key]
            return
        self.expire(now)
        flight.original, flight.reply, flight.until = None, reply, now + dedup_key.keep
        spare = dedup_key.kind is DedupKind.SAME
        for dropped in self._retention.add(flight, flight.key[0], size, flight.until, spare=spare):
            del self._flights[dropped.key]

    def expire(self, now: float) -> None:
        for expired in self._retention.overdue(now):
            del self._flights[expired.key]

    def drop(self, flight: _Flight) -> None:
        self._retention.remove(flight)
        del self._flights[flight.key]


class Dedup:
    """The flights of one broker. `limits` are the budgets for kept outcomes."""

    def __init__(self, limits: KeptLimits) -> None:
        self._flights: dict[FlightKey, _Flight] = {}
        self._begun: dict[QueuedEntry, list[_Flight]] = {}
        self.followers = Followers()
        self._unwanted: set[QueuedEntry] = set()
        self._codes: dict[QueueName, list[str]] = {}  # Codes of each queue's workers, newest first.
        self.limits = limits
        self._kept = _KeptFlights(self._flights, limits)

    @property
    def active(self) -> bool:
        return bool(self._begun)

    def serve(self, queue: QueueName, codes: Iterable[str], cold: Iterable[str] = ()) -> None:
        """Record the codes of a queue's healthy workers. A code that wasn't known becomes the newest. `cold` has the codes of
        workers whose model isn't loaded; they come after the others. If no code is given, the previous ones are kept."""
        healthy, known = set(codes), self._codes.get(queue, [])
        there = healthy.union(cold)
        if there:
            current = [*sorted(there.difference(known)), *(code for code in known if code in there)]
            self._codes[queue] = sorted(current, key=lambda code: code not in healthy)

    def original_of(self, queued: QueuedEntry) -> QueuedEntry:
        """Return the entry whose run answers an entry. It may be the entry itself."""
        while (flight := self.followers.flights.get(queued)) is not None and flight.original is not None:
            queued = flight.original
        return queued

    def unwanted(self, queued: QueuedEntry) -> bool:
        """Return True if an entry runs only for its followers and gets no reply itself."""
        return queued in self._unwanted

    def join(self, queued: QueuedEntry, now: float) -> Failure | Consequences | None:
        """Look for a shared answer. Returns None if the entry must run, and a failure if it is refused. Otherwise the entry has
        joined a flight, or its outcome is among the returned replies."""
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
        self.followers.add(queued, flight_to_join)
        self._begun.setdefault(queued, [])
        return Consequences()

    def new_flights(self, entry: Entry) -> list[_Flight]:
        """Return new flights for `start` if all dedup keys of an entry are new, or an empty list if the entry must `join`."""
        flights = []
        for dedup_key in entry.dedup_keys:
            flight = self._new_flight(entry, dedup_key)
            if flight.key in self._flights or dedup_key.keep <= 0.0:
                return []
            flights.append(flight)
        return flights

    def _new_flight(self, entry: Entry, dedup_key: DedupKey) -> _Flight:
        code = self._codes.get(entry.queue, _UNKNOWN)[0] if dedup_key.kind is DedupKind.SAME else ""
        return _Flight(dedup_key, self._key(entry, dedup_key), None, entry.version, code)

    def start(self, queued: QueuedEntry, flights: list[_Flight]) -> None:
        for flight in flights:
            flight.original = queued
            self._flights[flight.key] = flight
        if flights:
            self._begun[queued] = flights

    def begin(self, queued: QueuedEntry, now: float, version: str | None = None) -> None:
        """Begin a flight for each of an entry's dedup keys that has none yet. If the entry joins a flight instead of running,
        `version` is the version of that flight. If the entry has another version, its answer isn't shared with identical
        requests, so no flight begins for these."""
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
        """Record the outcome of an entry. If `late`, it failed only because its own deadline passed."""
        return self.end_all([(queued, reply)], now, late=late)

    def answers_alone(self, members: Sequence[QueuedEntry], longest: int) -> bool:
        """Return True if only these entries are waiting for their outputs, and outputs of up to `longest` characters can be kept."""
        if self.followers.flights and any(
            flight.followers for member in members for flight in self._begun.get(member, ())
        ):
            return False
        return self._unwanted.isdisjoint(members) and OVERHEAD + 4 * longest <= self.limits.largest

    def end_all(self, ended: list[tuple[QueuedEntry, Reply]], now: float, *, late: bool = False) -> Consequences:
        """Record the outcomes of entries; see `end`. Adds their followers' outcomes to `ended`."""
        consequences = Consequences()
        for original, outcome in ended:
            self._unwanted.discard(original)
            original.reservation = None
            if self.followers.flights:
                self.followers.remove(original)
            for flight in self._begun.pop(original, ()):
                if flight.followers:
                    if late and flight.dedup_key.kind is not DedupKind.TASK:
                        self._scatter(flight, consequences)
                    for follower in self.followers.detach(flight):
                        passed = passed_on(outcome, follower, flight.dedup_key.kind, kept=False)
                        ended.append((follower, passed))
                        if follower not in self._unwanted:
                            consequences.replies.append((follower, passed))
                self._kept.keep(flight, outcome, now)
        return consequences

    def cancel(self, queued: QueuedEntry, *, deleted: bool = False) -> Consequences:
        """Stop waiting for an entry. If nobody is waiting for an original any more, it is added to `Consequences.idle`. The first
        entry under an idempotency key still runs, unless its outcome is `deleted`."""
        consequences = Consequences()
        for flight in list(self._begun.get(queued, ())):
            kind = flight.dedup_key.kind
            if kind is DedupKind.TASK or (deleted and kind is DedupKind.KEY and not flight.followers):
                self._begun[queued].remove(flight)
                del self._flights[flight.key]
                for follower in self.followers.detach(flight):
                    self._forget_begun(follower)
                    entry = follower.entry
                    failed = Reply(entry.id, entry.tenant, None, failures.no_task(), nonce=entry.nonce)
                    consequences.replies.append((follower, failed))
        self._unwanted.add(queued)
        self._release(queued, consequences)
        return consequences

    def with_id(self, entry: Entry, now: float) -> Entry:
        """Add a dedup key to an entry if a kept task has the entry's id. So an entry with another body is refused."""
        if isinstance(self.outcome(entry.tenant, entry.id, now), Reply):
            dedup_keys = (DedupKey(DedupKind.TASK, entry.id, entry.digest), *entry.dedup_keys)
            return msgspec.structs.replace(entry, dedup_keys=dedup_keys)
        return entry

    def outcome(self, tenant: str, id: str, now: float) -> Reply | QueuedEntry | None:
        """Return the outcome of a task, or its original if it has no outcome yet. Returns None if there is no such task."""
        flight = self._flights.get((tenant, DedupKind.TASK, id))
        if flight is None or (flight.reply is not None and flight.until <= now):
            return None
        return flight.reply or flight.original

    def forget(self, tenant: str, id: str) -> None:
        flight = self._flights.get((tenant, DedupKind.TASK, id))
        if flight is not None and flight.reply is not None:
            self._kept.drop(flight)

    def overdue(self, now: float) -> list[QueuedEntry]:
        """Remove expired outcomes, and return the followers whose own deadline has passed."""
        self._kept.expire(now)
        return self.followers.overdue(now)

    def leave(self, queued: QueuedEntry) -> Consequences:
        """Record that a follower has its own outcome, and no longer waits for the outcome of its original."""
        flight = self.followers.remove(queued)
        consequences = Consequences()
        if flight is not None and flight.original is not None:
            self._release(flight.original, consequences)
        return consequences

    def _flight(self, queued: QueuedEntry, dedup_key: DedupKey, now: float) -> _Flight | None:
        flight = self._flights.get(self._key(queued.entry, dedup_key))
        if flight is not None and flight.reply is not None and (flight.until <= now or dedup_key.renews):
            self._kept.drop(flight)
            return None
        return flight

    def _key(self, entry: Entry, dedup_key: DedupKey) -> FlightKey:
        """Return the key of a flight. An idempotency key has one flight per model; a task's id has only one flight."""
        kind, key = dedup_key.kind, dedup_key.key
        if kind is DedupKind.KEY:
            key = f"{entry.model}\0{key}"
        elif kind is DedupKind.SAME:
            key = f"{key}#{self._codes.get(entry.queue, _UNKNOWN)[0]}"
        return entry.tenant, kind, key

    def _scatter(self, flight: _Flight, consequences: Consequences) -> None:
        loose = [flight]
        for each in loose:
            for follower in self.followers.detach(each):
                loose += self._forget_begun(follower)
                if follower in self._unwanted:
                    self._unwanted.discard(follower)
                    follower.reservation = None
                else:
                    consequences.reoffered.append(follower)

    def _release(self, queued: QueuedEntry, consequences: Consequences) -> None:
        """Drop an entry that nobody is waiting for, and the originals that ran only for it."""
        while queued in self._unwanted and not any(map(_is_awaited, self._begun.get(queued, ()))):
            self._unwanted.discard(queued)
            queued.reservation = None
            self._forget_begun(queued)
            flight = self.followers.remove(queued)
            if flight is None or flight.original is None:
                consequences.idle.append(queued)
                return
            queued = flight.original

    def _forget_begun(self, queued: QueuedEntry) -> list[_Flight]:
        begun = self._begun.pop(queued, [])
        for flight in begun:
            del self._flights[flight.key]
        return begun


def _is_awaited(flight: _Flight) -> bool:
    """Return True if a flight's original must run even if unwanted: it has followers, or its client may repeat the key."""
    return bool(flight.followers) or flight.dedup_key.kind is DedupKind.KEY


def _own(queued: QueuedEntry, dedup_key: DedupKey) -> bool:
    """Return True if an entry is the task itself, rather than waiting for it."""
    return dedup_key.key == queued.entry.id
