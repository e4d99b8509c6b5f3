"""The search for bad inputs: entries of a queue in `Suspects`, lines of bulk jobs in `LineSuspects`.

A batch that failed holds a culprit. Hwang's generalised binary splitting finds it (Hwang, "A method for detecting all defective
members in a population by group testing", JASA 67, 1972): one *half* runs while the *rest* waits.

    cut ──▶ half ──clean──▶ the rest holds the culprit, and is halved without a run of its own
              └──fails──▶ the half holds the culprit, and is halved; the rest may be good or bad again

Entries that may be good or bad go back to their caller's *quarantine* and run there together, along with fresh entries of a
caller that rides apart. A batch with several callers is cut between two of them, those with most entries first, so that innocent
callers are answered before anything is halved. An entry is never given up by inference, as each runs alone before that.

Quarantines and halves share the GPUs with the tier queues. They get whatever the tier queues leave and, while these have a batch, a
tenant's fair share for each caller with a quarantine, or part of it if that caller had culprits of late. Among themselves they take
turns by GPU time.

Lines of bulk jobs are searched by the process that sent them (`headway.bulk.seat_runner`), so that they never make anybody else's
entry suspect:

    a batch failed ──▶ the lines of each tenant: whole once more, then in halves, then alone ──▶ to blame, or answered

Both halves run at once, as nobody waits for the result. A tenant with a bad line rides apart until CLEAN lines of it have
succeeded, and twice as many after each further bad one, since each bad line of a million would otherwise cost others a batch. So
does a tenant with large outputs, since all entries of its batch wait while they are copied. After a batch that killed its worker
the model must load again, so all lines of its tenant rest before any of them runs.

Culprits, inputs that made the model fail, are not run again for a while, and their callers ride apart. A caller is a tenant and the
user on whose behalf it asks or, without keys, a client's address. A caller rides apart, in batches of its own, from the failure of
one of its inputs alone until APART_SECONDS have passed without another. The more often its inputs fail, the smaller these batches
are. A caller also rides apart if its output was left out of a batch because the outputs were too large together, as all callers
that ride along would wait for their transfer. Its batches are as large as the outputs allow."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, count, islice
from typing import Protocol, TypeVar

import msgspec

from headway.core.fair_queue import RETRYING, QueuedEntry
from headway.core.retry import BLAMED, FATAL, NEVER_SPLIT, backoff, is_over, stays_whole
from headway.core.values import octets
from headway.model import MOST_OUTPUT, Cause, Entry

CallerKey = tuple[str, str]  # Tenant, and user or address on whose behalf it asks.

APART_SECONDS = 30.0  # Seconds since its last culprit for which a caller rides apart.
MOST_APART = 16  # Limit on callers that ride apart. The one whose last culprit is longest ago is the first to return.
KNOWN_SECONDS = 180.0  # Seconds for which an input that failed alone is answered without a run.
MOST_KNOWN = 256  # Limit on known inputs of one tenant. The oldest are forgotten first.
MOST_TENANTS = 1000  # Limit on tenants with known inputs.
ALL_GENERATIONS = -1  # Generation of an input that stays known even if workers change.
GENERATION_STEP = 1e-6  # Shortest time in seconds between generations, which are numbered by their first instants.
SAME_INSTANT = 1e-3  # Seconds by which a batch may seem to have left before a generation that it belongs to.
ERROR_BYTES = 400  # Bytes kept of a known input's first error.
PRIOR = 32.0  # Successful inputs that a caller is credited with before its first culprit.
LONE_ROOM = 4 * MOST_OUTPUT  # Limit in bytes on outputs of a caller's own batch while nobody else asks.
MEMORY = 1024.0  # Inputs of a caller after which its counts are halved, so that later inputs weigh more.


def caller_of(entry: Entry) -> CallerKey:
    """Return the caller to whom an entry's failures are charged."""
    return entry.tenant, entry.caller


def digest(entry: Entry) -> bytes:
    """Return the digest of an input, within its model's queue, under which its failure is remembered."""
    hashed = hashlib.sha256(len(entry.parameters).to_bytes(8, "big"))
    hashed.update(entry.parameters)
    hashed.update(octets(entry.input) if isinstance(entry.input, str) else b"\0" + octets(entry.input))
    return hashed.digest()


def best_group(share: float, each: float) -> float:
    """Return the number of inputs to run together at which a good answer costs the least GPU time, if a `share` of inputs is bad.

    A batch of n takes α + βn. One that fails, as about n·share of them do, is halved: log₂ n + 1 runs more, of 2n inputs together.
    So an input costs α/n + β + share·(α·(1 + log₂ n) + 2βn), which is least at this n. `share` is above 0 and at most 1; `each` is
    β/α."""
    searched = share / math.log(2.0)
    return 2.0 / (searched + math.sqrt(searched * searched + 8.0 * share * each))


class _Caller(msgspec.Struct):
    until: float
    ran: float = PRIOR
    bad: float = 0.0
    largest: int = 0


_Known = tuple[float, float, str]
_UNKNOWN: _Known = (-math.inf, 0.0, "")
_PAST = -2  # A past generation.


class Culprits:
    """Known callers and inputs of one queue."""

    __slots__ = ("_callers", "_generation", "_known", "active")

    def __init__(self) -> None:
        self._callers: dict[CallerKey, _Caller] = {}  # Callers, the one whose last culprit is longest ago first.
        # Known inputs by tenant: until when each is known, in which generation, and its error; the oldest first.
        self._known: dict[str, dict[bytes, _Known]] = {}
        self._generation = 0.0
        self.active = False  # True if there are any. It is a plain attribute, as it is read for each entry.

    def found(self, entry: Entry, now: float, killed: bool = False, error: str = "", left_at: float = math.inf) -> None:
        """Note an input that failed alone, with the error for its sender. If `killed`, it killed its worker in several runs. The
        workers may have changed since its last run began, at `left_at`."""
        self._set_apart(caller_of(entry), now)
        inputs = self._known.pop(entry.tenant, {})
        asked = digest(entry)
        inputs.pop(asked, None)
        # An exception from before the workers changed says nothing about those here now.
        generation = self._generation if left_at >= self._generation - SAME_INSTANT else _PAST
        kept = error.encode(errors="replace")[:ERROR_BYTES].decode(errors="ignore")
        inputs[asked] = now + KNOWN_SECONDS, ALL_GENERATIONS if killed else generation, kept
        self._known[entry.tenant] = inputs
        if len(inputs) > MOST_KNOWN:
            del inputs[next(iter(inputs))]
        if len(self._known) > MOST_TENANTS:
            del self._known[next(iter(self._known))]

    def left_out(self, key: CallerKey, size: int, now: float) -> None:
        caller = self._set_apart(key, now)
        caller.largest = max(caller.largest, size)

    def sends_large(self, key: CallerKey, now: float) -> bool:
        caller = self._callers.get(key)
        return caller is not None and caller.until > now and caller.largest > 0

    def _set_apart(self, key: CallerKey, now: float) -> _Caller:
        caller = self._callers.pop(key, None)
        if caller is None and len(self._callers) >= MOST_APART:
            del self._callers[next(iter(self._callers))]
        if caller is None or caller.until <= now:
            caller = _Caller(now)
        caller.until = now + APART_SECONDS
        self._callers[key] = caller
        self.active = True
        return caller

    def ran(self, key: CallerKey, count: int, clean: bool) -> None:
        """Note a run of `count` inputs of a caller that weren't suspect before."""
        caller = self._callers.get(key)
        if caller is not None:
            caller.ran += count
            caller.bad += not clean
            if caller.ran > MEMORY:
                caller.ran, caller.bad = caller.ran / 2.0, caller.bad / 2.0

    def rides_apart(self, key: CallerKey, now: float) -> bool:
        """Return True if a caller had culprits, or an output left out, in the last APART_SECONDS."""
        caller = self._callers.get(key)
        if caller is None:
            return False
        if caller.until <= now:
            del self._callers[key]
            self.active = bool(self._callers or self._known)
            return False
        return True

    def group_size(self, key: CallerKey, limit: int, each: float = 0.0, room: int = MOST_OUTPUT) -> int:
        """Return the number of a caller's inputs to run together, with `room` bytes for large outputs; see `best_group`."""
        caller = self._callers.get(key)
        if caller is None:
            return limit
        if caller.largest:
            limit = min(limit, room // caller.largest)
        return max(1, min(limit, int(best_group(max(caller.bad, 1.0) / caller.ran, each) + 0.5)))

    def knows(self, entry: Entry, now: float) -> str | None:
        """Return the first error of an equal input of the entry's tenant that failed alone in the last KNOWN_SECONDS, else None."""
        inputs = self._known.get(entry.tenant)
        if not inputs or not entry.caller:
            return None
        until, generation, error = inputs.get(digest(entry), _UNKNOWN)
        if until <= now:
            self._tidy(entry.tenant, inputs, now)
            return None
        return error if generation in (self._generation, ALL_GENERATIONS) else None

    def renew(self, now: float = 0.0) -> None:
        """Begin a generation, as a worker came or left, or has another backend or other code. Inputs that only raised are
        forgotten, as their worker or old code may have been at fault."""
        self._generation = max(now, self._generation + GENERATION_STEP)

    def _tidy(self, tenant: str, inputs: dict[bytes, _Known], now: float) -> None:
        for asked in [asked for asked, (until, *_) in inputs.items() if until <= now]:
            del inputs[asked]
        if not inputs:
            del self._known[tenant]
        self.active = bool(self._callers or self._known)


# Kinds of groups: runs ahead of all others; half of a batch with a culprit; perhaps clean; waits for a half's outcome.
FIRST, HALF, QUARANTINE, REST = 0, 1, 2, 3
# Runs that count for all entries of a quarantine once an entry of it has run, because a quarantine may never be empty.
QUARANTINED_ATTEMPTS = 1
# Shortest run, in seconds, for the accounts below, as runs would cost nothing before the first measurement.
LEAST_COST = 0.001
# Price of a GPU second to a caller with recent culprits while others wait, so that it gets a quarter of its fair share.
APART_PRICE = 4.0
# Seconds that quarantines get for each second of halves while both wait, so that many searches don't crowd out fresh work.
SEARCH_PRICE = 3.0
MOST_CREDIT = 2.0  # Full batches of GPU time that groups may save up while the tier queues go first.
CLEAN = 64  # Lines of a tenant that must succeed after its first bad one before its lines ride beside others again.
MOST_DOUBLINGS = 16  # Doublings of CLEAN, one for each further bad line.
# Rest of a tenant whose batch has killed its worker: at least so many seconds, or so many times the run of that batch.
LEAST_REST, RESTS = 15.0, 20.0
MOST_REST_DOUBLINGS = 4  # Doublings of that rest, one for each line of the tenant that was found to kill its worker.
MOST_SENDERS = 10_000  # Tenants whose lines are remembered as bad or large.
LONGEST_PAUSE = 30.0  # Longest pause, in seconds, before lines run again on a remote API that is in trouble.
SHAPES = 1 << 39  # Range from which a process draws its first shape, so that the shapes of several processes differ.


class Group(msgspec.Struct, eq=False):
    """Entries that wait to run together, in order."""

    members: list[QueuedEntry]
    ready_at: float  # Instant before which they don't run.
    kind: int  # FIRST, HALF, QUARANTINE or REST.
    failures: int = 0  # Times that the entries failed together, or in a larger batch.
    attempts: int = 0  # Runs of each of them.
    alone: int = 0  # Number of attempts in which the only member ran alone.
    caller: CallerKey | None = None  # Caller whose quarantine it is.
    rest: Group | None = None  # For a half, the group that holds the culprit if the half doesn't.
    avoid: str = ""  # Worker on which they failed.
    avoid_until: float = -math.inf  # Instant until which they wait for another worker.
    hung: bool = False  # True if their last run was ended at the GPU deadline.

    def open_at(self, worker: str, others: bool) -> float:
        """Return the instant from which `worker` may take the entries. The instant is later if the
        entries failed at this worker and there are `others`."""
        return self.avoid_until if others and worker == self.avoid else self.ready_at


class Choice(msgspec.Struct):
    """What a free worker takes: a group ahead of all others, a group in turn, and the instant to look again."""

    first: Group | None = None
    turn: Group | None = None
    again: float = math.inf


class Suspects:
    """The groups of one queue, in the order in which they came, and the account of the GPU time that they may take."""

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self.of: dict[QueuedEntry, Group] = {}
        self.due = math.inf  # Instant before which no member is overdue.
        self.credit = 0.0  # GPU seconds that groups may take while the tier queues have a batch.
        self._lean = 0.0  # GPU seconds of halves, at their price, minus the GPU seconds of quarantines.
        self._quarantines: dict[CallerKey, Group] = {}

    def quarantine(self, caller: CallerKey) -> Group | None:
        return self._quarantines.get(caller)

    @property
    def callers(self) -> int:
        """Number of callers that share the GPUs with the tier queues, at least one."""
        return len(self._quarantines) or 1

    def beside(self, caller: CallerKey) -> int:
        return len(self._quarantines) - (caller in self._quarantines)

    def add(self, group: Group) -> None:
        self.groups[group] = None
        self._place(group, group.members)

    def join(self, caller: CallerKey, members: Sequence[QueuedEntry], like: Group, full: int) -> None:
        """Add entries to their caller's quarantine. The quarantine is ready no later than `like`. It is ready at once
        if it now has `full` members."""
        quarantine = self._quarantines.get(caller)
        if quarantine is None:
            quarantine = self._quarantines[caller] = Group([], like.ready_at, QUARANTINE, caller=caller)
            self.groups[quarantine] = None
        quarantine.ready_at = min(quarantine.ready_at, like.ready_at)
        quarantine.failures = max(quarantine.failures, like.failures)
        if min(like.attempts, QUARANTINED_ATTEMPTS) > quarantine.attempts:
            quarantine.attempts = QUARANTINED_ATTEMPTS
            for member in quarantine.members:
                member.attempts = quarantine.attempts
        quarantine.members += members
        if len(quarantine.members) >= full:
            quarantine.ready_at = -math.inf
        self._place(quarantine, members)

    def unknown(self, members: list[QueuedEntry], like: Group, size: Callable[[CallerKey], int]) -> None:
        """Put entries that may be good or bad into their callers' quarantines."""
        if not members:
            return
        callers = {caller_of(member.entry) for member in members}
        if len(callers) == 1:
            [caller] = callers
            self.join(caller, members, like, size(caller))
        else:
            self.add(Group(members, like.ready_at, QUARANTINE, like.failures, like.attempts))

    def halve(self, members: list[QueuedEntry], like: Group) -> None:
        """Search entries that include a culprit. One half of them runs next, or the only entry."""
        rest, alone = None, like.alone
        if len(members) > 1:
            alone, (members, cut) = 0, _cut(members)
            rest = Group(members[cut:], math.inf, REST, like.failures, like.attempts, hung=like.hung)
            members = members[:cut]
            self.add(rest)
        half = Group(members, like.ready_at, HALF, like.failures, like.attempts, alone, rest=rest, hung=like.hung)
        half.avoid, half.avoid_until = like.avoid, like.avoid_until
        self.add(half)

    def let_go(self, rest: Group | None) -> list[QueuedEntry]:
        """Take out the entries that waited for the outcome of a half."""
        if rest is None or rest not in self.groups:
            return []
        members, rest.members = rest.members, []
        for member in members:
            del self.of[member]
        del self.groups[rest]
        return members

    def take(self, group: Group, limit: int, weight: float = math.inf) -> list[QueuedEntry]:
        """Take members of a group for one run: as many of the first member's shape as the slot takes, by number and weight."""
        members = group.members
        shape = members[0].entry.shape
        others = [member for member in members if member.entry.shape != shape]
        members = [member for member in members if member.entry.shape == shape] if others else members
        if weight < math.inf:
            weights = accumulate(member.weight for member in members)
            limit = min(limit, max(1, sum(together <= weight for together in weights)))
        taken, left = members[:limit], members[limit:] + others
        for member in taken:
            del self.of[member]
        if left and group.rest is not None and group.rest in self.groups:
            group.rest.members[:0] = left
            for member in left:
                self.of[member] = group.rest
            left = []
        group.members = left
        if not left:
            self._drop(group)
        elif group.kind == QUARANTINE:  # Other groups go before what is left of it.
            del self.groups[group]
            self.groups[group] = None
        return taken

    def remove(self, queued: QueuedEntry, size: Callable[[CallerKey], int]) -> None:
        group = self.of.pop(queued)
        group.members.remove(queued)
        if not group.members:
            self._drop(group)
            if group.rest is not None:  # The culprit may be gone.
                self.unknown(self.let_go(group.rest), group, size)

    def overdue(self, now: float) -> list[QueuedEntry]:
        if self.due > now:
            return []
        late = [member for member in self.of if last_moment(member) <= now]
        self.due = min((due for member in self.of if (due := last_moment(member)) > now), default=math.inf)
        return late

    def choose(self, worker: str, others: bool, now: float) -> Choice:
        choice = Choice()
        half = quarantine = None
        for group in self.groups:
            opens = group.open_at(worker, others)
            if opens > now:
                choice.again = min(choice.again, opens)
            elif group.kind == FIRST:
                choice.first = group
                return choice
            elif group.kind == HALF:
                half = half or group
            else:
                quarantine = quarantine or group
        choice.turn = quarantine if half is None or (quarantine is not None and self._lean > 0.0) else half
        return choice

    def wake(self, idle: Collection[str], others: bool, now: float) -> str | float:
        """Return an idle worker that may take a group now, else the instant to look again."""
        again = math.inf
        for group in self.groups:
            for worker in islice(idle, 2):  # A group avoids one worker at most.
                opens = group.open_at(worker, others)
                if opens <= now:
                    return worker
                again = min(again, opens)
        return again

    def earn(self, seconds: float, tenants: int, full: float) -> None:
        share = max(seconds, LEAST_COST) * self.callers / max(tenants, 1)
        self.credit = min(self.credit + share, MOST_CREDIT * max(full, LEAST_COST))

    def pay(self, group: Group, seconds: float, full: float, price: float) -> None:
        cost = max(seconds, LEAST_COST)
        self.credit -= cost * price
        most = MOST_CREDIT * max(full, LEAST_COST)
        self._lean = max(-most, min(most, self._lean + (-cost if group.kind == QUARANTINE else cost * SEARCH_PRICE)))

    def overrun(self, seconds: float) -> None:
        """Charge for a run that took `seconds` longer than expected."""
        self.credit -= max(seconds, 0.0) * APART_PRICE

    def _place(self, group: Group, members: Sequence[QueuedEntry]) -> None:
        for member in members:
            member.state = RETRYING
            member.attempts, member.hung = group.attempts, group.hung
            self.of[member] = group
            self.due = min(self.due, last_moment(member))

    def _drop(self, group: Group) -> None:
        del self.groups[group]
        if group.caller is not None:
            del self._quarantines[group.caller]


class SuspectLine(Protocol):
    """A bulk line. `failures` counts its failed runs. `alone` counts the failed runs in which the line was the whole
    batch."""

    failures: int
    alone: int


Line = TypeVar("Line", bound=SuspectLine)


class _Sender(msgspec.Struct):
    """Tenant whose bulk lines were bad or large."""

    shape: int  # Shape of the tenant's lines while they ride apart.
    bad: int = 0  # Lines that were to blame so far.
    deadly: int = 0  # Blamed lines that killed their worker.
    owed: int = 0  # Lines that must succeed before the tenant rides beside others again.
    suspects: int = 0  # Lines that are being searched.
    largest: int = 0  # Size in bytes of its largest output, if its lines ride apart because of it; else 0.
    room: int = 0  # Further lines of this shape whose outputs still fit in a batch.
    rests_until: float = 0.0  # Instant before which none of its lines runs.


class LineSuspects:
    """Suspected bulk lines of one process, and the tenants that ride apart. `rng` draws the first shape, uniformly in [0, 1)."""

    def __init__(self, rng: Callable[[], float]) -> None:
        self.new_shape = count(int(rng() * SHAPES) + 1).__next__  # Returns a shape that no other lines have.
        self._senders: dict[str, _Sender] = {}

    def shape(self, tenant: str) -> int:
        """Return the shape for the next line of a tenant; 0 lets it ride beside others."""
        sender = self._senders.get(tenant)
        if sender is None or not (sender.owed or sender.suspects):
            return 0
        if sender.largest:
            sender.room -= 1
            if sender.room < 0:
                sender.shape, sender.room = self.new_shape(), MOST_OUTPUT // sender.largest - 1
        return sender.shape

    def rest_left(self, tenant: str, now: float) -> float:
        """Return the seconds for which a tenant's lines still rest."""
        sender = self._senders.get(tenant)
        return 0.0 if sender is None else max(sender.rests_until - now, 0.0)

    def succeeded(self, tenant: str, size: int, batch: int) -> bool:
        """Note a line's output of `size` bytes. True if its tenant now rides apart, as a batch has no room for `batch` of them."""
        sender = self._senders.get(tenant)
        if size * batch > MOST_OUTPUT:
            sender = self._sender(tenant)
            begins = not sender.largest
            sender.largest, sender.owed = max(sender.largest, size), max(sender.owed - 1, CLEAN)
            return begins
        if sender is not None and sender.owed:
            sender.owed -= 1
            if not sender.owed:
                sender.largest = 0
        return False

    def failed(self, tenant: str, lines: Sequence[Line], cause: Cause, size: int) -> list[Sequence[Line]]:
        """Note that a batch of `size` entries failed with a tenant's lines. Returns the groups in which the lines run again."""
        first, sender = lines[0], self._sender(tenant)
        for line in lines:
            sender.suspects += line.failures == 0
            line.failures += 1
            line.alone += size == 1
        if size == 1 and cause not in NEVER_SPLIT and is_over(cause, 1, first.failures, first.alone):
            if cause in BLAMED:
                sender.owed, sender.bad = CLEAN * 2 ** min(sender.bad, MOST_DOUBLINGS), sender.bad + 1
                sender.deadly += cause in FATAL
            return []
        if len(lines) == 1 or stays_whole(cause, len(lines), first.failures):
            return [lines]
        half = len(lines) // 2
        return [lines[:half], lines[half:]]

    def ended(self, tenant: str, line: SuspectLine) -> None:
        """Note that a line has its outcome, or was withdrawn."""
        if line.failures:
            self._senders[tenant].suspects -= 1

    def rest(self, tenant: str, groups: int, ran: float, now: float) -> list[float]:
        """Let a tenant rest after a batch of `ran` seconds killed its worker. Returns the seconds to
        wait before each of the tenant's groups."""
        sender = self._sender(tenant)
        seconds = max(LEAST_REST, RESTS * ran) * 2.0 ** min(sender.deadly, MOST_REST_DOUBLINGS)
        first = max(sender.rests_until - now, 0.0) + seconds
        sender.rests_until = now + first + groups * seconds
        return [first + place * seconds for place in range(groups)]

    def _sender(self, tenant: str) -> _Sender:
        sender = self._senders.get(tenant)
        if sender is None:
            if len(self._senders) >= MOST_SENDERS:
                unsuspected = next((name for name, known in self._senders.items() if not known.suspects), "")
                self._senders.pop(unsuspected, None)
            sender = self._senders[tenant] = _Sender(self.new_shape())
        return sender


def line_pause(groups: Sequence[Sequence[SuspectLine]], cause: Cause, rng: float) -> float:
    """Return the seconds to wait before groups of lines run again. A single group waits longer after each further
    failure, and longest if a remote API fails."""
    failures = groups[0][0].failures if len(groups) == 1 else 1
    pause = backoff(failures, rng)
    return min(pause * 2.0 ** min(failures, 10), LONGEST_PAUSE) if cause in NEVER_SPLIT else pause


def last_moment(suspect: QueuedEntry) -> float:
    """Return the instant at which a waiting entry expires. Its queue deadline applies only until its first run."""
    return suspect.due if suspect.attempts else suspect.queue_due


def _cut(members: list[QueuedEntry]) -> tuple[list[QueuedEntry], int]:
    """Return a failed batch, callers with most entries first, and the place to cut it, between two callers if there are several."""
    counts = Counter(caller_of(member.entry) for member in members)
    if len(counts) == 1:
        return members, len(members) // 2
    ranks = {caller: rank for rank, (caller, _) in enumerate(counts.most_common())}
    members = sorted(members, key=lambda member: ranks[caller_of(member.entry)])
    best, at = 0, 0
    for _, number in counts.most_common():
        at += number
        if at < len(members) and (best == 0 or abs(2 * at - len(members)) < abs(2 * best - len(members))):
            best = at
    return members, best
