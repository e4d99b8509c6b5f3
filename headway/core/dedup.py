"""One answer for several requests of a tenant: tasks, idempotency keys, identical requests.

Pure: no clock. `headway.model.DedupKey` says what a dedup key means. A *flight* is what is known under one:

                    ┌── join ──▶ followers
    (none) ─lead─▶ in flight ──end──▶ kept ─────▶ (none)
                    └── end, nothing to keep ───▶ (none)

The leader of a flight may itself follow another: the first entry under an idempotency key may join an identical
request. So outcomes run along chains. A leader that nobody waits for any more runs on while it has followers. Under an
idempotency key it runs on in any case, as its client may ask again.

When a leader is too late, its followers, who came later, are not: they are offered anew, and so are those that follow
them, in the order in which they joined, so that the first of them leads. A follower that waits for a task gets the
task's failure.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headway.core import failures
from headway.core.fair_queue import QueuedEntry
from headway.core.parameters import canonical
from headway.core.retention import KeptLimits, Retention, weight
from headway.errors import REJECTED_BY_MODEL
from headway.model import DedupKey, DedupKind, Entry, Failure, Reply, RequestOptions, Subscription

FlightKey = tuple[str, DedupKind, str]
"""Tenant, kind and key."""

STALE = 64
"""Former followers that may be remembered before they are swept."""


def digest(model: str, version: str, input: str, parameters: bytes) -> bytes:
    """SHA-256 of what is asked. Parameters that mean the same have the same digest, however they are written."""
    written = canonical(parameters)
    hashed = hashlib.sha256()
    for part in (model.encode(), version.encode(), input.encode("utf-8", "surrogatepass"), written):
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()


class KeepTimes(Protocol):
    """Settings of how long outcomes are kept, and for whom."""

    @property
    def result_ttl_s(self) -> float:
        """Seconds for which the outcome of a task, or of an idempotency key, is kept."""
        ...

    @property
    def cache(self) -> bool:
        """Whether outputs are kept for identical requests that come later."""
        ...

    @property
    def cache_ttl_s(self) -> float:
        """Seconds for which outputs are kept for them."""
        ...

    @property
    def collapse(self) -> bool:
        """Whether identical requests at the same time run once."""
        ...


def shares_of(settings: KeepTimes, id: str, asked: bytes, options: RequestOptions) -> tuple[DedupKey, ...]:
    """Dedup keys of a request.

    Arguments:
        settings: whether identical requests share answers, and for how long outcomes are kept.
        id: id of the request.
        asked: digest of what it asks.
        options: whether it is a task, has an idempotency key, or needs an answer of its own.
    """
    shares = []
    if options.task:
        shares.append(DedupKey(DedupKind.TASK, id, asked, settings.result_ttl_s))
    if options.key:
        shares.append(DedupKey(DedupKind.KEY, options.key, asked, settings.result_ttl_s))
    if (settings.cache or settings.collapse) and not options.fresh:
        keep = settings.cache_ttl_s if settings.cache else 0.0
        shares.append(DedupKey(DedupKind.SAME, asked.hex(), b"", keep, settings.collapse))
    return tuple(shares)


def keeps(kind: DedupKind, reply: Reply) -> bool:
    """Whether an outcome is kept for later requests under a dedup key of this kind."""
    if kind is DedupKind.TASK or reply.output is not None:
        return True
    return kind is DedupKind.KEY and reply.failure is not None and reply.failure.code == REJECTED_BY_MODEL


def unkept(entry: Entry, reply: Reply, limits: KeptLimits) -> bool:
    """Whether an outcome that a client may ask for later is too large to be kept."""
    return not limits.keeps(reply) and any(share.kind is not DedupKind.SAME and share.keep for share in entry.shares)


def is_task(entry: Entry) -> bool:
    """Whether the outcome of an entry may be fetched by its id. An entry that only waits for a task is none."""
    return any(share.kind is DedupKind.TASK and share.key == entry.id for share in entry.shares)


def follower(subscription: Subscription) -> Entry:
    """Entry that stands for a subscription inside a broker: it follows the task's flight, and never runs."""
    return Entry(
        id=subscription.id,
        model=subscription.model,
        input="",
        tier=0,
        tenant=subscription.tenant,
        gateway=subscription.gateway,
        queue_timeout=subscription.timeout,
        timeout=subscription.timeout,
        shares=(DedupKey(DedupKind.TASK, subscription.task),),
        nonce=subscription.nonce,
    )


def passed_on(reply: Reply, to: QueuedEntry, kind: DedupKind, kept: bool) -> Reply:
    """Outcome of another entry, addressed to `to`."""
    entry = to.entry
    return Reply(
        entry.id,
        entry.tenant,
        reply.output,
        reply.failure,
        reply.ran,
        reply.queued,
        reply.attempts,
        kind,
        kept,
        entry.nonce,
    )


@dataclass(slots=True, eq=False)
class _Flight:
    share: DedupKey
    key: FlightKey
    leader: QueuedEntry | None
    followers: dict[QueuedEntry, None] = field(default_factory=dict)
    reply: Reply | None = None
    until: float = 0.0


@dataclass(slots=True)
class Ripple:
    """Consequences of one event for other entries.

    Attributes:
        replies: outcomes of other entries.
        anew: former followers that are to be offered again, in this order.
        idle: leaders that nobody waits for any more; they need not run.
    """

    replies: list[tuple[QueuedEntry, Reply]] = field(default_factory=list)
    anew: list[QueuedEntry] = field(default_factory=list)
    idle: list[QueuedEntry] = field(default_factory=list)


class Dedup:
    """The flights of one broker.

    Arguments:
        limits: budgets of kept outcomes, see `headway.core.retention`.
    """

    def __init__(self, limits: KeptLimits) -> None:
        self._flights: dict[FlightKey, _Flight] = {}
        self._led: dict[QueuedEntry, list[_Flight]] = {}
        self._followed: dict[QueuedEntry, _Flight] = {}
        self._unwanted: set[QueuedEntry] = set()
        self.limits = limits
        self._kept: Retention[_Flight] = Retention(limits)
        self._due: list[tuple[float, int, QueuedEntry]] = []
        """Followers by their deadlines. Former followers are dropped when there are many."""
        self._numbers = itertools.count()

    @property
    def active(self) -> bool:
        """Whether any entry leads or follows."""
        return bool(self._led)

    def follows(self, queued: QueuedEntry) -> bool:
        """Whether an entry waits for the outcome of another."""
        return queued in self._followed

    def leader_of(self, queued: QueuedEntry) -> QueuedEntry:
        """The entry that runs for another, or the entry itself."""
        while (flight := self._followed.get(queued)) is not None and flight.leader is not None:
            queued = flight.leader
        return queued

    def unwanted(self, queued: QueuedEntry) -> bool:
        """Whether an entry runs for its followers alone: it gets no reply itself."""
        return queued in self._unwanted

    def join(self, queued: QueuedEntry, now: float) -> Failure | Ripple | None:
        """Look for an answer in common with others. None: there is none yet, so the entry has to run.

        Returns:
            A failure: the entry is refused. A ripple: it has joined, or has its outcome, which is among the replies.
        """
        found = None
        for share in queued.entry.shares:
            flight = self._flight(queued, share, now)
            waits = share.kind is DedupKind.TASK and not _own(queued, share)
            if flight is None:
                if waits:
                    return failures.no_task()
                continue
            if flight.share.digest != share.digest and not waits:
                return failures.misuse()
            if flight.reply is not None or share.joins:
                found = flight
                break
        if found is None:
            return None
        self.lead(queued, now)
        kind = found.share.kind
        if found.reply is not None:
            reply = passed_on(found.reply, queued, kind, kept=True)
            ripple = self.end(queued, reply, now)
            ripple.replies.insert(0, (queued, reply))
            return ripple
        found.followers[queued] = None
        self._followed[queued] = found
        self._led.setdefault(queued, [])
        heapq.heappush(self._due, (queued.due, next(self._numbers), queued))
        return Ripple()

    def lead(self, queued: QueuedEntry, now: float) -> None:
        """Let an entry that runs, or joins, lead the flights of all its dedup keys that have none yet."""
        led = [
            _Flight(share, _key(queued, share), queued)
            for share in queued.entry.shares
            if self._flight(queued, share, now) is None
            and (share.kind is not DedupKind.TASK or (_own(queued, share) and share.keep > 0.0))
        ]
        for flight in led:
            self._flights[flight.key] = flight
        if led:
            self._led[queued] = led

    def end(self, queued: QueuedEntry, reply: Reply, now: float, *, late: bool = False) -> Ripple:
        """Note the outcome of an entry. `late`: the entry failed only because its own time is over."""
        ripple, ended = Ripple(), [(queued, reply)]
        for leader, outcome in ended:
            self._unwanted.discard(leader)
            leader.place = None
            self._unfollow(leader)
            for flight in self._led.pop(leader, ()):
                if late and flight.share.kind is not DedupKind.TASK:
                    self._scatter(flight, ripple)
                for follower in self._freed(flight):
                    passed = passed_on(outcome, follower, flight.share.kind, kept=False)
                    ended.append((follower, passed))
                    if follower not in self._unwanted:
                        ripple.replies.append((follower, passed))
                self._keep(flight, outcome, now)
        return ripple

    def cancel(self, queued: QueuedEntry, *, deleted: bool = False) -> Ripple:
        """Stop waiting for an entry. If no other entry waits for it, it is among the idle of the ripple.

        Arguments:
            queued: an entry that leads or follows.
            deleted: whether its outcome is unwanted, too. Otherwise the first entry under an idempotency key runs on.
        """
        ripple = Ripple()
        for flight in list(self._led.get(queued, ())):
            kind = flight.share.kind
            if kind is DedupKind.TASK or (deleted and kind is DedupKind.KEY and not flight.followers):
                self._led[queued].remove(flight)
                del self._flights[flight.key]
                for follower in self._freed(flight):
                    self._forget_led(follower)
                    entry = follower.entry
                    failed = Reply(entry.id, entry.tenant, None, failures.no_task(), nonce=entry.nonce)
                    ripple.replies.append((follower, failed))
        self._unwanted.add(queued)
        self._release(queued, ripple)
        return ripple

    def with_id(self, entry: Entry, now: float) -> Entry:
        """Give an entry whose id the client chose the dedup key of a kept task of that id. Another body misuses the id."""
        if isinstance(self.outcome(entry.tenant, entry.id, now), Reply):
            shares = (DedupKey(DedupKind.TASK, entry.id, entry.digest), *entry.shares)
            return msgspec.structs.replace(entry, shares=shares)
        return entry

    def outcome(self, tenant: str, id: str, now: float) -> Reply | QueuedEntry | None:
        """Outcome of a task, or the entry that leads it; None when there is no such task."""
        flight = self._flights.get((tenant, DedupKind.TASK, id))
        if flight is None or (flight.reply is not None and flight.until <= now):
            return None
        return flight.reply or flight.leader

    def forget(self, tenant: str, id: str) -> None:
        """Forget the outcome of a task."""
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

    def leave(self, queued: QueuedEntry) -> Ripple:
        """Note that a follower has its own outcome, and waits for its leader's no longer."""
        flight = self._unfollow(queued)
        ripple = Ripple()
        if flight is not None and flight.leader is not None:
            self._release(flight.leader, ripple)
        return ripple

    def _flight(self, queued: QueuedEntry, share: DedupKey, now: float) -> _Flight | None:
        flight = self._flights.get(_key(queued, share))
        if flight is not None and flight.reply is not None and flight.until <= now:
            self._discard(flight)
            return None
        return flight

    def _unfollow(self, queued: QueuedEntry) -> _Flight | None:
        flight = self._followed.pop(queued, None)
        if flight is not None:
            del flight.followers[queued]
            self._tidy()
        return flight

    def _freed(self, flight: _Flight) -> dict[QueuedEntry, None]:
        """Followers of a flight, which cease to follow."""
        followers, flight.followers = flight.followers, {}
        for follower in followers:
            del self._followed[follower]
        self._tidy()
        return followers

    def _scatter(self, flight: _Flight, ripple: Ripple) -> None:
        """Offer all followers anew, each before its own followers."""
        loose = [flight]
        for each in loose:
            for follower in self._freed(each):
                loose += self._forget_led(follower)
                if follower in self._unwanted:
                    self._unwanted.discard(follower)
                    follower.place = None
                else:
                    ripple.anew.append(follower)

    def _tidy(self) -> None:
        if len(self._due) > 2 * len(self._followed) + STALE:
            self._due = [one for one in self._due if one[2] in self._followed]
            heapq.heapify(self._due)

    def _release(self, queued: QueuedEntry, ripple: Ripple) -> None:
        """Let go of an entry that nobody waits for, and of those that only ran for it."""
        while queued in self._unwanted and not any(map(_is_awaited, self._led.get(queued, ()))):
            self._unwanted.discard(queued)
            queued.place = None
            self._forget_led(queued)
            flight = self._unfollow(queued)
            if flight is None or flight.leader is None:
                ripple.idle.append(queued)
                return
            queued = flight.leader

    def _forget_led(self, queued: QueuedEntry) -> list[_Flight]:
        led = self._led.pop(queued, [])
        for flight in led:
            del self._flights[flight.key]
        return led

    def _keep(self, flight: _Flight, reply: Reply, now: float) -> None:
        share = flight.share
        useful = share.keep > 0.0 and keeps(share.kind, reply)
        if useful and not self._kept.limits.keeps(reply):
            useful = share.kind is DedupKind.TASK  # Who asks for the task is told why its output is not there.
            failure = failures.too_large(weight(reply.output))
            reply = Reply(reply.id, reply.tenant, None, failure, shared=reply.shared, kept=reply.kept)
        if not useful:
            del self._flights[flight.key]
            return
        self._forget_ended(now)
        flight.leader, flight.reply, flight.until = None, reply, now + share.keep
        spare = share.kind is DedupKind.SAME
        for gone in self._kept.add(flight, flight.key[0], weight(reply.output), flight.until, spare=spare):
            del self._flights[gone.key]

    def _forget_ended(self, now: float) -> None:
        for gone in self._kept.overdue(now):
            del self._flights[gone.key]

    def _discard(self, flight: _Flight) -> None:
        self._kept.remove(flight)
        del self._flights[flight.key]


def _is_awaited(flight: _Flight) -> bool:
    """Whether the leader of a flight runs though it is unwanted itself, as its client may ask again under the key."""
    return bool(flight.followers) or flight.share.kind is DedupKind.KEY


def _own(queued: QueuedEntry, share: DedupKey) -> bool:
    """Whether an entry is the task itself, and does not only wait for it."""
    return share.key == queued.entry.id


def _key(queued: QueuedEntry, share: DedupKey) -> FlightKey:
    return queued.entry.tenant, share.kind, share.key
