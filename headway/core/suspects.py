"""The search for bad inputs: entries of a queue in `Suspects`, lines of bulk jobs in `LineSuspects`.

A failed batch contains a *culprit*: an input that makes the model fail. Hwang's generalised binary splitting finds it (Hwang, "A
method for detecting all defective members in a population by group testing", JASA 67, 1972): one *half* runs while the *rest* waits.

    cut ──▶ half ──clean──▶ the rest contains the culprit, and is halved without a run of its own
              └──fails──▶ the half contains the culprit, and is halved; the rest may again be good or bad

Entries that may be good or bad go back to their caller's *quarantine*. They run there together, along with new entries if the caller
runs apart. A batch with several callers is cut between two of them, with the callers that have most entries first, so that
innocent callers are answered before anything is halved. An entry is never given up by inference: each runs alone first.

Quarantines and halves get the GPU time that the tier queues leave. While the tier queues have a batch to run, each caller with
a quarantine gets a tenant's fair share, or part of it if it has recently had culprits. Quarantines and halves take turns by GPU
time.

Lines of bulk jobs are searched by the process that sent them (`headway.bulk.seat_runner`), so that they never make anybody else's
entry suspect:

    a batch failed ──▶ the lines of each tenant: whole once more, then in halves, then alone ──▶ to blame, or answered

Both halves run at the same time, because nobody waits for the result. A tenant with a bad line runs apart until CLEAN of its
lines have succeeded. This number doubles with each further bad line, so that not every bad line costs others a batch. A tenant
with large outputs also runs apart, because all entries of a batch wait while its outputs are copied. If a batch has killed its
worker, the lines of its tenants are held back for a while, because the model must load again.

Culprits are not run again for a while, and their callers run apart. A caller is a tenant and the user on whose behalf it sends
requests or, without keys, a client's address. It runs apart, which means in batches of its own, until APART_SECONDS after its
last input that failed alone. The more often its inputs fail, the smaller these batches are. A caller also runs apart if its
output was left out of a batch whose outputs were too large together, so that others needn't wait for their transfer. Its
batches are then as large as the outputs allow."""

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

CallerKey = tuple[str, str]  # Tenant, and the user or address on whose behalf it sends requests.

APART_SECONDS = 30.0  # Seconds after its last culprit for which a caller runs apart.
MOST_APART = 16  # Limit on callers that run apart. The one with the oldest culprit returns first.
KNOWN_SECONDS = 180.0  # Seconds for which an input that failed alone is answered without a run.
MOST_KNOWN = 256  # Limit on the known inputs of one tenant. The oldest are forgotten first.
MOST_TENANTS = 1000  # Limit on tenants with known inputs.
ALL_GENERATIONS = -1  # Generation of an input that stays known even if workers change.
GENERATION_STEP = 1e-6  # Shortest time in seconds between generations, whose numbers are their start times.
SAME_INSTANT = 1e-3  # A batch may seem to have left this many seconds before the generation that it belongs to.
ERROR_BYTES = 400  # Bytes that are kept of a known input's first error.
PRIOR = 32.0  # Successful inputs that a caller is credited with before its first culprit.
LONE_ROOM = 4 * MOST_OUTPUT  # Limit in bytes on the outputs of a caller's own batch while nobody else is waiting.
MEMORY = 1024.0  # Inputs of a caller after which its counts are halved, so that newer inputs weigh more.


def caller_of(entry: Entry) -> CallerKey:
    """Return the caller that an entry's failures are charged to."""
    return entry.tenant, entry.caller


def digest(entry: Entry) -> bytes:
    """Return the digest of an input within its model's queue. Its failure is remembered by this digest."""
    hashed = hashlib.sha256(len(entry.parameters).to_bytes(8, "big"))
    hashed.update(entry.parameters)
    hashed.update(octets(entry.input) if isinstance(entry.input, str) else b"\0" + octets(entry.input))
    return hashed.digest()


def best_group(share: float, each: float) -> float:
    """Return how many inputs to run together so that each answer costs the least GPU time, if a `share` of the inputs is bad.

    A batch of n takes α + βn. About n·share of the batches fail, and are halved: log₂ n + 1 more runs, of 2n inputs in total. So an
    input costs α/n + β + share·(α·(1 + log₂ n) + 2βn), which is smallest at the n returned. 0 < `share` ≤ 1; `each` is β/α."""
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
    """Known culprits of one queue, and the callers that run apart."""

    __slots__ = ("_callers", "_generation", "_known", "active")

    def __init__(self) -> None:
        self._callers: dict[CallerKey, _Caller] = {}  # Callers, starting with the one whose last culprit is oldest.
        self._known: dict[str, dict[bytes, _Known]] = {}  # By tenant and digest, oldest first: end, generation, error.
        self._generation = 0.0
        self.active = False  # True if there are any. A plain attribute, because it is read for each entry.

    def found(self, entry: Entry, now: float, killed: bool = False, error: str = "", left_at: float = math.inf) -> None:
        """Record that an input failed alone, with the error for its sender. `killed` is True if it killed its worker in several
        runs. `left_at` is when its last run started; the workers may have changed since then."""
        self._set_apart(caller_of(entry), now)
        inputs = self._known.pop(entry.tenant, {})
        asked = digest(entry)
        inputs.pop(asked, None)
        # An exception from before the workers changed says nothing about the current ones.
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
        """Record a run of `count` inputs that a caller sent and that weren't suspected before. `clean` is False if the run
        failed."""
        caller = self._callers.get(key)
        if caller is not None:
            caller.ran += count
            caller.bad += not clean
            if caller.ran > MEMORY:
                caller.ran, caller.bad = caller.ran / 2.0, caller.bad / 2.0

    def rides_apart(self, key: CallerKey, now: float) -> bool:
        """Return True if a caller sent a culprit, or had an output left out, in the last APART_SECONDS."""
        caller = self._callers.get(key)
        if caller is None:
            return False
        if caller.until <= now:
            del self._callers[key]
            self.active = bool(self._callers or self._known)
            return False
        return True

    def group_size(self, key: CallerKey, limit: int, each: float = 0.0, room: int = MOST_OUTPUT) -> int:
        """Return how many of a caller's inputs to run together, with `room` bytes for large outputs; see `best_group`."""
        caller = self._callers.get(key)
        if caller is None:
            return limit
        if caller.largest:
            limit = min(limit, room // caller.largest)
        return max(1, min(limit, int(best_group(max(caller.bad, 1.0) / caller.ran, each) + 0.5)))

    def knows(self, entry: Entry, now: float) -> str | None:
        """Return the error of the tenant's identical input that failed alone in the last KNOWN_SECONDS, or None if there was
        none."""
        inputs = self._known.get(entry.tenant)
        if not inputs or not entry.caller:
            return None
        until, generation, error = inputs.get(digest(entry), _UNKNOWN)
        if until <= now:
            self._tidy(entry.tenant, inputs, now)
            return None
        return error if generation in (self._generation, ALL_GENERATIONS) else None

    def renew(self, now: float = 0.0) -> None:
        """Start a new generation. Call this when a worker joins or leaves, or when its backend or code changes. Inputs that merely raised
        an exception are forgotten, since their worker or the old code may have been at fault."""
        self._generation = max(now, self._generation + GENERATION_STEP)

    def _tidy(self, tenant: str, inputs: dict[bytes, _Known], now: float) -> None:
        for asked in [asked for asked, (until, *_) in inputs.items() if until <= now]:
            del inputs[asked]
        if not inputs:
            del self._known[tenant]
        self.active = bool(self._callers or self._known)


# Kinds: FIRST runs before all others, HALF is half of a batch with a culprit, QUARANTINE may be clean, REST waits for a half.
FIRST, HALF, QUARANTINE, REST = 0, 1, 2, 3
QUARANTINED_ATTEMPTS = 1  # Attempts of all entries of a quarantine once one of them has run.
LEAST_COST = 0.001  # Shortest run in seconds for the accounts below, so that unmeasured runs cost something.
APART_PRICE = 4.0  # Price of a GPU second for a caller with recent culprits while others wait: it gets a quarter share.
SEARCH_PRICE = 3.0  # Seconds that quarantines get for each second of halves while both wait, so that new work runs.
MOST_CREDIT = 2.0  # GPU time, in full batches, that groups may save up while the tier queues go first.
CLEAN = 64  # Lines of a tenant that must succeed after its first bad one before its lines run with others again.
MOST_DOUBLINGS = 16  # Limit on the doublings of CLEAN, one for each further bad line.
LEAST_REST, RESTS = 15.0, 20.0  # Rest after a killed worker: at least these seconds, or this many runs of its batch.
MOST_REST_DOUBLINGS = 4  # Limit on the doublings of that rest, one per line found to have killed its worker.
MOST_SENDERS = 10_000  # Limit on tenants whose lines are remembered as bad or large.
LONGEST_PAUSE = 30.0  # Longest pause in seconds before lines are sent again to a remote API that is in trouble.
SHAPES = 1 << 39  # Range from which a process draws its first shape, so that several processes have different shapes.


class Group(msgspec.Struct, eq=False):
    """Entries that wait to run together, in order."""

    members: list[QueuedEntry]
    ready_at: float  # Time before which they don't run.
    kind: int  # FIRST, HALF, QUARANTINE or REST.
    failures: int = 0  # How often the entries failed together, or in a larger batch.
    attempts: int = 0  # Runs of each of them.
    alone: int = 0  # Attempts in which the only member ran alone.
    caller: CallerKey | None = None  # For a quarantine, its caller.
    rest: Group | None = None  # For a half, the group that contains the culprit if the half doesn't.
    avoid: str = ""  # Worker on which they failed.
    avoid_until: float = -math.inf  # Time until which they wait for another worker.
    hung: bool = False  # True if their last run was stopped at the GPU deadline.

    def open_at(self, worker: str, others: bool) -> float:
        """Return when `worker` may take the entries. If they failed on this worker and there are `others`, it may take them
        only later."""
        return self.avoid_until if others and worker == self.avoid else self.ready_at


class Choice(msgspec.Struct):
    """Work for a free worker: a group that goes before all others, a group whose turn it is, and the time to look again."""

    first: Group | None = None
    turn: Group | None = None
    again: float = math.inf


class Suspects:
    """The groups of one queue, in order of arrival, and the account of the GPU time that they may take."""

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self.of: dict[QueuedEntry, Group] = {}
        self.due = math.inf  # Time before which no member is overdue.
        self.credit = 0.0  # GPU seconds that groups may take while the tier queues have a batch.
        self._lean = 0.0  # GPU seconds used by halves, at their price, minus those used by quarantines.
        self._quarantines: dict[CallerKey, Group] = {}

    def quarantine(self, caller: CallerKey) -> Group | None:
        return self._quarantines.get(caller)

    @property
    def callers(self) -> int:
        """Number of callers that share the GPUs with the tier queues; at least one."""
        return len(self._quarantines) or 1

    def beside(self, caller: CallerKey) -> int:
        return len(self._quarantines) - (caller in self._quarantines)

    def add(self, group: Group) -> None:
        self.groups[group] = None
        self._place(group, group.members)

    def join(self, caller: CallerKey, members: Sequence[QueuedEntry], like: Group, full: int) -> None:
        """Add entries to their caller's quarantine. The quarantine is ready no later than `like`, or at once if it now has
        `full` members."""
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
        """Put entries that may be good or bad into their caller's quarantine or, for several callers, into one new group."""
        if not members:
            return
        callers = {caller_of(member.entry) for member in members}
        if len(callers) == 1:
            [caller] = callers
            self.join(caller, members, like, size(caller))
        else:
            self.add(Group(members, like.ready_at, QUARANTINE, like.failures, like.attempts))

    def halve(self, members: list[QueuedEntry], like: Group) -> None:
        """Search entries that include a culprit. One half of them (or the only entry) runs next."""
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
        """Remove and return the entries of `rest`: those set aside until the other half of their split batch had run."""
        if rest is None or rest not in self.groups:
            return []
        members, rest.members = rest.members, []
        for member in members:
            del self.of[member]
        del self.groups[rest]
        return members

    def take(self, group: Group, limit: int, weight: float = math.inf) -> list[QueuedEntry]:
        """Take members of a group for one run: as many of the first one's shape as the slot takes, by number and weight."""
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
        elif group.kind == QUARANTINE:  # Other groups go before what remains of it.
            del self.groups[group]
            self.groups[group] = None
        return taken

    def remove(self, queued: QueuedEntry, size: Callable[[CallerKey], int]) -> None:
        group = self.of.pop(queued)
        group.members.remove(queued)
        if not group.members:
            self._drop(group)
            if group.rest is not None:  # The removed entry may have been the culprit.
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
        """Return an idle worker that may take a group now, or the time to look again."""
        again = math.inf
        for group in self.groups:
            for worker in islice(idle, 2):  # A group avoids at most one worker.
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
    """A bulk line. `failures` counts its failed runs, and `alone` those in which it was the whole batch."""

    failures: int
    alone: int


Line = TypeVar("Line", bound=SuspectLine)


class _Sender(msgspec.Struct):
    """A tenant whose bulk lines were bad or large."""

    shape: int  # Shape of the tenant's lines while they run apart.
    bad: int = 0  # Lines that were to blame so far.
    deadly: int = 0  # Blamed lines that killed their worker.
    owed: int = 0  # Lines that must succeed before the tenant runs with others again.
    suspects: int = 0  # Lines that are being searched.
    largest: int = 0  # Size in bytes of its largest output, if its lines run apart because of it; otherwise 0.
    room: int = 0  # Further lines of this shape whose outputs still fit in a batch.
    rests_until: float = 0.0  # Time before which none of its lines runs.


class LineSuspects:
    """Suspected bulk lines of one process, and the tenants that run apart. `rng` draws the first shape, uniformly in [0, 1)."""

    def __init__(self, rng: Callable[[], float]) -> None:
        self.new_shape = count(int(rng() * SHAPES) + 1).__next__  # Returns a shape that no other lines have.
        self._senders: dict[str, _Sender] = {}

    def shape(self, tenant: str) -> int:
        """Return the shape for a tenant's next line. 0 lets it run with others."""
        sender = self._senders.get(tenant)
        if sender is None or not (sender.owed or sender.suspects):
            return 0
        if sender.largest:
            sender.room -= 1
            if sender.room < 0:
                sender.shape, sender.room = self.new_shape(), MOST_OUTPUT // sender.largest - 1
        return sender.shape

    def rest_left(self, tenant: str, now: float) -> float:
        """Return the remaining seconds for which a tenant's lines are held back."""
        sender = self._senders.get(tenant)
        return 0.0 if sender is None else max(sender.rests_until - now, 0.0)

    def succeeded(self, tenant: str, size: int, batch: int) -> bool:
        """Record a line's output of `size` bytes. Returns True if `batch` such outputs don't fit in a batch; the tenant then runs apart."""
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
        """Record the failure of a batch of `size` entries that contained these lines of a tenant. Returns the groups in which
        the lines run again."""
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
        if line.failures:
            self._senders[tenant].suspects -= 1

    def rest(self, tenant: str, groups: int, ran: float, now: float) -> list[float]:
        """Hold back a tenant's lines, because a batch of `ran` seconds killed its worker. Returns each group's wait in seconds."""
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
    """Return the seconds before groups of lines run again. A single group waits longer after each failure. The wait grows
    fastest if a remote API fails."""
    failures = groups[0][0].failures if len(groups) == 1 else 1
    pause = backoff(failures, rng)
    return min(pause * 2.0 ** min(failures, 10), LONGEST_PAUSE) if cause in NEVER_SPLIT else pause


def last_moment(suspect: QueuedEntry) -> float:
    """Return the time at which a waiting entry expires. Its queue deadline applies only until its first run."""
    return suspect.due if suspect.attempts else suspect.queue_due


def _cut(members: list[QueuedEntry]) -> tuple[list[QueuedEntry], int]:
    """Sort a failed batch by caller, most entries first. Return it and where to cut it: between two callers if possible."""
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
