"""Departure: when a batch leaves.

A policy turns the measured load into a `Rule`, which is a few numbers, and `decide` applies the rule to the waiting entries. So a
policy is a few lines of arithmetic, its rule can be applied in another process, and each departure has a reason:

    full      as many entries are waiting as the rule's batch size
    deadline  the most urgent member would be too late if it waited longer
    window    the oldest member has waited as long as the rule allows
    headway   the slot's gap since the last departure is over
    early     waiting wouldn't change the batch, because less than one more arrival is expected

If slots differ, a rule may let only the fastest take turns, each with its own gap. The other slots help out: they take entries
beyond the next batch of the fast slots, and entries for which the fast slots are late.

`Past` keeps the recent arrivals of a queue, recorded when their batch leaves, and estimates how many clients are waiting for their
answers. If a fixed number of clients send a new request as soon as they are answered, two things differ from an open load. When a
batch finishes, the number of waiting or running entries nearly always equals the number of clients; with Poisson arrivals its
variance is as large as its mean. And arrivals follow soon after a batch, rather than at any time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import exp
from typing import Protocol

import msgspec

from headway.core.fair_queue import QueuedEntry
from headway.core.suspects import CallerKey, Group

FULL, DEADLINE, WINDOW, HEADWAY, EARLY = "full", "deadline", "window", "headway", "early"
RETRY, APART, BULK = "retry", "apart", "bulk"  # Other reasons: the batch ran before, runs apart, or is bulk.
REASONS = (FULL, DEADLINE, WINDOW, HEADWAY, EARLY, RETRY, APART, BULK)

HELPED_FROM = 2  # Full batches that must be waiting before a helping slot takes one. The first is for the other slots.
MEASURE_AFTER = 100  # After this many departures a helping slot takes a batch, to show whether it is still slow.
OVER = 1.25  # A batch is cut if it exceeds this many even shares of everything that is waiting or running.
OVER_UNLIKE = 2.0  # The same if slots differ, because a part may go to a slow one.
LONE_FROM = 4  # Fewest GPUs with which each entry gets its own. With fewer, Poisson arrivals often look like clients.
LONE_ARRIVALS = 1.5  # If more arrivals are expected in a gap, entries don't get a GPU each. Clients can't cause more.
LONE_FACTOR = 2.2  # Largest factor of a slot that may take a single entry; see `_each_has_its_own`.
LEEWAY = 0.005  # A batch leaves this many seconds early, to allow for timers and the way back.


class Load(msgspec.Struct, frozen=True):
    """Load of a model at a point in time, as input for every policy. If slots differ, α and β are for a slot of average speed."""

    rate: float  # Arrivals in entries per second (λ).
    alpha: float  # Fixed part of a batch's time in seconds (α); 0 until a batch has been measured.
    beta: float  # Seconds per unit of a batch's size (β); for sizes, see `QueueLimits.size`.
    slots: int  # Live GPUs (k).
    max_batch: int  # Limit on the entries of a batch, and the size of a full one.
    depth: int = 0  # Waiting entries.
    utilisation: float = 0.0  # Busy share of the slots, 0 to 1.
    wait: float = 0.0  # How long the oldest member of recent batches waited, in seconds.
    departures: int = 0  # Batches that have left so far.
    deviation: float = 0.0  # Standard deviation in seconds of a batch's time from what α and β predict.
    largest: float = 0.0  # About the largest recently measured batch; 0 if unknown.
    entry_size: float = 1.0  # Mean size of an entry; 1 unless entries are weighed.
    paces: tuple[int, ...] = ()  # Number of slots with each of `slot_factors.FACTORS`, if slots differ.
    past: Past | None = None  # Recent arrivals; None if not kept.

    @property
    def size_rate(self) -> float:
        """Size that arrives per second, which is the load on the GPUs. `rate` says how soon the next entry comes."""
        return self.rate * self.entry_size

    def in_entries(self) -> Load:
        each = self.entry_size
        if each == 1.0:
            return self
        most = max(int(self.max_batch / each), 1)
        return msgspec.structs.replace(
            self, beta=self.beta * each, max_batch=most, largest=self.largest / each, entry_size=1.0
        )

    def batch_seconds(self, size: int) -> float:
        """Return the expected run time of a batch in seconds: ℓ(n) = α + βn."""
        return self.alpha + self.beta * size


class Rule(msgspec.Struct, frozen=True):
    """Numbers that decide when the next batch leaves. If `company` isn't 0, only a batch of at least that size leaves after a
    silence (`quiet`), which starts at the last arrival or the end of the last batch, whichever is later."""

    size: int  # Size at which a batch leaves immediately.
    headway: float | None = None  # Shortest time in seconds between departures; None if the policy doesn't space them.
    gap_each: float = 0.0  # Seconds added to the headway for each unit of size of the largest running batch.
    split: float = 0.0  # Square of the number of batches that a unit of size is best cut into; 0 for no cuts.
    window: float = math.inf  # Longest wait of the oldest member in seconds.
    rate: float = 0.0  # Expected arrivals per second, for the early test.
    service: float = 0.0  # Expected run time of the batch in seconds, for the deadline test.
    pace: float = 0.0  # Seconds by which each departure moves the schedule on.
    tolerance: float = math.inf  # Seconds that a full batch may leave ahead of schedule; infinite if not spaced.
    gather: float = 0.0  # Seconds for which entries may still join the oldest member after the headway is over.
    quiet: float = 0.0  # Seconds without an arrival after which the batch stops waiting.
    company: float = 0.0  # Smallest size at which a batch leaves after a silence; 0 for any.
    team: float = 0.0  # Number of slots that take turns; 0 if all slots are alike.
    speed: float = 0.0  # Batches that all of them run in the time in which a slot of factor 1 runs one.
    slowest: float = math.inf  # Factor above which a slot only helps out.
    batch: float = 0.0  # Expected run time in seconds of a batch of the usual size on a slot of factor 1.

    def gap(self, running: float) -> float:
        """Return the shortest time in seconds between departures, or 0 if they aren't spaced. `running` is the size of the
        largest running batch."""
        return self.headway + self.gap_each * running if self.headway else 0.0

    def part(self, factor: float) -> float:
        """Return the gap before a slot of this factor runs a batch, as a multiple of the mean gap. Slower slots have shorter
        gaps, so that gap plus run time is the same for all. The mean over all departures is 1."""
        return max(self.team + 1.0 - factor * self.speed, 0.0) if self.team else 1.0

    def share(self, depth: float, busy: int = 0, slots: int = 1, running: float = 0.0) -> float:
        """Return the size of the batch that leaves. It is less than `depth` if `depth` is well over an even share per GPU. Of `slots` live
        GPUs, `busy` are running batches, the largest of size `running`."""
        everything = depth + busy * running
        if not self.split or depth * slots <= (OVER_UNLIKE if self.team else OVER) * everything:
            return depth
        batches = int(math.sqrt(self.split * depth + 0.25) + 0.5)
        return min(depth, math.ceil(max(depth / max(batches, 1), everything / slots)))


class QueueSnapshot(msgspec.Struct, frozen=True, gc=False):
    """State of a queue on which a departure depends."""

    depth: float  # Size of all waiting entries, which is their number unless they are weighed.
    oldest: float  # Arrival time of the oldest entry.
    due: float  # Earliest deadline.
    last_departure: float  # Time of the last departure.
    schedule: float = -math.inf  # Time of the next departure if all so far had kept the rule's pace.
    newest: float = -math.inf  # Latest arrival. For a rule with `company`, the latest end of a batch, if that is later.
    running: float = 0.0  # Size of the largest running batch; 0 if all GPUs are idle.
    factor: float = 1.0  # Factor of the slot that would run the batch; see `core.slot_factors`.
    unseen: float = 0.0  # Departures since a batch of that slot came back.
    busy: int = 0  # GPUs that are running a batch.
    slots: int = 1  # Live GPUs.


class Dispatch(msgspec.Struct, frozen=True):
    """Decision to leave now, with the reason and the size limit."""

    reason: str
    most: float = math.inf


class Hold(msgspec.Struct, frozen=True):
    """Decision to wait until a time or, if it is infinite, for the next arrival."""

    until: float


class Policy(Protocol):
    """Turns a load into a rule. It may keep state, but doesn't read a clock."""

    def rule(self, load: Load) -> Rule: ...


def decide(rule: Rule, view: QueueSnapshot, now: float) -> Dispatch | Hold:
    """Apply a rule to the waiting entries, with a GPU free at time `now`."""
    if view.depth == 0:
        return Hold(math.inf)
    helps = view.factor > rule.slowest
    if helps and view.unseen >= MEASURE_AFTER:
        return Dispatch(HEADWAY)
    share = rule.share(view.depth, view.busy, view.slots, view.running)
    full_from = view.schedule - rule.tolerance if share >= rule.size * (HELPED_FROM if helps else 1) else math.inf
    if now >= full_from:
        return Dispatch(FULL)
    leave_by = view.due - rule.service - LEEWAY
    if now >= leave_by:
        return Dispatch(DEADLINE)
    window_ends = view.oldest + rule.window
    if now >= window_ends:
        return Dispatch(WINDOW)
    until = min(leave_by, window_ends, full_from)
    if rule.headway is not None:
        if rule.headway <= 0.0 and not helps:
            return Dispatch(EARLY)
        if _each_has_its_own(rule, view):
            return Dispatch(EARLY)
        spaced = _spaced(rule, view, helps)
        if now >= spaced:
            return Dispatch(HEADWAY, share) if share < view.depth else Dispatch(HEADWAY)
        until = min(until, spaced)
    elif rule.rate * (until - now) < 1.0:
        return Dispatch(EARLY)
    return Hold(until)


def _each_has_its_own(rule: Rule, view: QueueSnapshot) -> bool:
    """Return True if every running or waiting entry can have its own GPU, with at most one GPU to spare. This happens if there
    are about as many waiting clients as GPUs. Returns False if all GPUs are idle, because the entry may be the first of a
    burst."""
    fits = view.slots >= LONE_FROM and view.slots - 1 <= view.depth + view.busy <= view.slots
    if rule.company or not fits or rule.rate * (rule.headway or 0.0) > LONE_ARRIVALS:
        return False
    return 0.0 < view.running <= 1.0 and view.factor <= LONE_FACTOR


def _spaced(rule: Rule, view: QueueSnapshot, helps: bool) -> float:
    """Return the time at which the gap before the next departure ends. A helping slot waits until all others are late."""
    if helps:
        return view.last_departure + rule.batch * view.factor
    part = rule.part(view.factor)
    gathered = view.oldest + rule.gather * part
    if view.depth >= rule.company:
        gathered = min(gathered, view.newest + rule.quiet)
    return max(view.last_departure + rule.gap(view.running) * part, gathered)


FEWEST = 1000  # Minimum number of arrivals in a record.
MOST = 6000  # Limit on arrivals in a record.
DECAY = 0.9  # Factor by which past observations fade at each observed end of a batch, when estimating clients.
ENOUGH = 24  # Number of batches before clients can be recognised.
EVERY = 4  # To save time, only one end of a batch out of this many is observed.
REGULAR = 0.06  # The number of waiting or running entries is constant if its variance is below this share of its mean.
SOON = 0.3  # Clients ask again within this share of the time between two ends of batches.
STILL_SOON = 0.6  # The same once clients are recognised, because batches of several slots may end close together.


class Past:
    """Arrivals of the last few seconds, and the number of clients."""

    __slots__ = (
        "_arrived", "_ends", "_from", "_gaps", "_soon", "_squares", "_sum", "_weight", "clients", "each", "last_end", "long", "tells",
    )  # fmt: skip

    def __init__(self) -> None:
        self._arrived: list[float] = []
        self._from = -math.inf  # Time from which arrivals are recorded.
        self._ends = 0
        self.last_end = 0.0  # Time at which a batch last came back.
        self._weight = self._sum = self._squares = self._gaps = self._soon = 0.0
        self.clients = 0  # Number of clients that are waiting for their answers; 0 for an open load.
        self.each = 1.0  # Mean size of an entry, which converts a batch's size into entries; 1 unless they have rows.
        self.long = False  # True if enough arrivals are recorded.
        self.tells = False  # True once a look-ahead can learn from it: after a long record, or if there are clients.

    def left(self, arrived: Sequence[float], now: float) -> None:
        noted = self._arrived
        if now >= self._from and len(noted) < MOST:
            noted += arrived
            if len(noted) >= FEWEST:
                self.long = self.tells = True

    def ended(self, waiting: int, running: RunningBatches, newest: float, now: float) -> None:
        """Record that a batch, which is still among `running`, has finished. `newest` is the time of the latest arrival."""
        self._ends += 1
        if self._ends % EVERY:
            self.last_end = now
            return
        together = waiting + running.size / self.each
        self._weight = self._weight * DECAY + 1.0
        self._sum = self._sum * DECAY + together
        self._squares = self._squares * DECAY + together * together
        if newest >= self.last_end:  # Equal if answers take no time.
            self._gaps = self._gaps * DECAY + now - self.last_end
            self._soon = self._soon * DECAY + newest - self.last_end
        self.last_end = now
        mean = self._sum / self._weight
        constant = self._squares / self._weight - mean * mean < REGULAR * mean
        soon = self._soon < (STILL_SOON if self.clients else SOON) * self._gaps
        closed = self._ends >= ENOUGH and constant and soon
        self.clients = round(mean) if closed else 0
        self.tells = self.tells or closed

    def take(self, seconds: float) -> list[float]:
        """If the record spans `seconds` or is full, clear and return it, sorted. Else return []. `resume` starts a new one."""
        arrived = self._arrived
        if not self.long or (len(arrived) < MOST and arrived[-1] - arrived[0] < seconds):
            return []
        self.resume(math.inf)
        arrived.sort()
        return arrived

    def resume(self, at: float = -math.inf) -> None:
        """Start a new record with batches that leave at time `at` or later."""
        self._arrived = []
        self._from = at
        self.long = False


class Departure(msgspec.Struct):
    """A batch that has departed. The `late` entries, which could no longer be answered in time, aren't in it. The last `bulk`
    members are bulk entries. For `failures`, `alone` and `rest`, see `core.suspects.Group`. `attempts` includes this run."""

    worker: str
    members: list[QueuedEntry]
    reason: str
    left_at: float
    late: list[QueuedEntry] = msgspec.field(default_factory=list)
    failures: int = 0
    attempts: int = 1
    alone: int = 0
    rest: Group | None = None
    quarantine: CallerKey | None = None
    size: float = 0.0  # See `QueueLimits.size`.
    bulk: int = 0
    parted: bool = False  # See `core.packing.Packed`.

    @property
    def whole(self) -> bool:
        """True if it consists of bulk entries only; see `core.bulk`."""
        return self.bulk > 0 and self.bulk == len(self.members)


class FailureOutcome(msgspec.Struct):
    """Result of a failed batch: how many entries run again, and which ones don't."""

    again: int = 0
    dead: list[QueuedEntry] = msgspec.field(default_factory=list)
    spent: list[QueuedEntry] = msgspec.field(default_factory=list)  # Out of retries.
    late: list[QueuedEntry] = msgspec.field(default_factory=list)  # Too late to run again.
    bulk: list[QueuedEntry] = msgspec.field(default_factory=list)  # Retried by their sender.


BUSY_TIME = 5.0  # Time constant of the busy share, in seconds.


class RunningBatches:
    """The batches that are running on GPUs."""

    __slots__ = ("_since", "_sizes", "utilisation")

    def __init__(self) -> None:
        self.utilisation = 0.0  # Busy share of the slots over the last few seconds, 0 to 1, as of the last call.
        self._sizes: list[float] = []
        self._since = 0.0

    @property
    def busy(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> float:
        """Size of the largest batch, or 0 if none is running."""
        return max(self._sizes, default=0.0)

    @property
    def size(self) -> float:
        return sum(self._sizes)

    def left(self, size: float, slots: int, now: float) -> None:
        self._note(slots, now)
        self._sizes.append(size)

    def back(self, size: float, slots: int, now: float) -> None:
        self._note(slots, now)
        self._sizes.remove(size)

    def _note(self, slots: int, now: float) -> None:
        share = min(1.0, len(self._sizes) / slots) if slots else 0.0
        weight = 1.0 - exp(-max(0.0, now - self._since) / BUSY_TIME)
        self.utilisation += (share - self.utilisation) * weight
        self._since = now
