"""Departure: the moment at which a batch leaves.

A policy turns the measured load into a `Rule`, a handful of numbers, and `decide` applies the rule to the waiting entries. So a
policy is a few lines of arithmetic, its rule can be applied in another process, and each departure has a reason:

    full      as many wait as the rule's batch size
    deadline  the most urgent member would be too late if it waited longer
    window    the oldest member has waited as long as the rule allows
    headway   the slot's gap since the last departure is over
    early     waiting wouldn't change the batch, as less than one more arrival is expected

If slots differ, a rule may let only the fastest take turns, each with its own gap. The others help out: they take entries beyond
the next batch of the fast slots, or those for which the fast slots are late.

`Past` holds the recent arrivals of a queue, and estimates the number of clients that wait for their answers. Arrivals are noted
when their batch leaves, all at once, so that a request costs nothing extra. A fixed number of clients, each of which asks again
once answered, differs from an open load in two ways. At the end of a batch the number of waiting or running entries nearly always
equals the number of clients, whereas with Poisson arrivals it varies as much as its mean. And arrivals follow soon after a batch,
with its answers, whereas other arrivals come at any time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import exp
from typing import Protocol

import msgspec

from headway.core.fair_queue import QueuedEntry
from headway.core.suspects import CallerKey, Group

FULL, DEADLINE, WINDOW, HEADWAY, EARLY = "full", "deadline", "window", "headway", "early"
# Reasons of batches without a rule: entries that ran before, or whose caller rides apart; only bulk entries.
RETRY, APART, BULK = "retry", "apart", "bulk"
REASONS = (FULL, DEADLINE, WINDOW, HEADWAY, EARLY, RETRY, APART, BULK)

# Waiting full batches from which a helping slot takes a batch, as the other slots' next batch takes no more than one.
HELPED_FROM = 2
MEASURE_AFTER = 100  # Departures after which a helping slot takes a batch at once, to show whether it is still slow.
OVER = 1.25  # A batch is cut if it exceeds so many even shares of all that waits and runs.
OVER_UNLIKE = 2.0  # The same if slots differ, as a part may go to a slow one.
# Fewest GPUs for giving each entry its own. With fewer, Poisson arrivals too often look like waiting clients.
LONE_FROM = 4
# Limit on arrivals expected in a gap for giving each entry its own GPU: more can't be clients that wait for their answers.
LONE_ARRIVALS = 1.5
# Largest factor of a slot that takes a single entry while every other entry has a GPU; see `_each_has_its_own`.
LONE_FACTOR = 2.2
# Seconds before its most urgent member's last moment at which a batch leaves, for timers and the way back.
LEEWAY = 0.005


class Load(msgspec.Struct, frozen=True):
    """Load of a model at an instant, the input of every policy. If slots differ, α and β are for a slot of the mean pace."""

    rate: float  # Arrivals in entries per second (λ).
    alpha: float  # Fixed part of a batch's time in seconds (α); 0 until a batch was measured.
    beta: float  # Seconds for each unit of a batch's size (β), as `QueueLimits.size` has it.
    slots: int  # Live GPUs (k).
    max_batch: int  # Limit on the entries of a batch, and the size of a full one.
    depth: int = 0  # Entries waiting.
    utilisation: float = 0.0  # Busy share of the slots, 0 to 1.
    wait: float = 0.0  # Recent wait in seconds of the oldest member at departure.
    departures: int = 0  # Batches that have left so far.
    deviation: float = 0.0  # Standard deviation in seconds of a batch's time around what α and β predict.
    largest: float = 0.0  # About the largest recently measured batch; 0 if unknown.
    entry_size: float = 1.0  # Mean size of an entry; 1 unless entries are weighed.
    paces: tuple[int, ...] = ()  # Number of slots of each of `slot_factors.FACTORS`, if slots differ.
    past: Past | None = None  # Recent arrivals; None if not kept.

    @property
    def size_rate(self) -> float:
        """Arriving size per second, which uses the GPUs. `rate` tells how soon the next entry comes."""
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
    silence (`quiet`). The silence starts at the last arrival or at the last end of a batch, whichever is later."""

    size: int  # Size at which a batch leaves at once.
    headway: float | None = None  # Shortest time in seconds between departures; None if the policy doesn't space them.
    gap_each: float = 0.0  # Seconds that each unit of size of the largest batch on a GPU adds to that.
    split: float = 0.0  # Square of the number of batches that a unit of size is best cut into; 0 to cut none.
    window: float = math.inf  # Limit in seconds on the oldest member's wait; infinite for none.
    rate: float = 0.0  # Expected arrivals per second, for the early test.
    service: float = 0.0  # Expected run time of the batch in seconds, for the deadline test.
    pace: float = 0.0  # Seconds by which each departure moves the schedule on.
    tolerance: float = math.inf  # Seconds that a full batch may leave ahead of schedule; infinite if not spaced.
    gather: float = 0.0  # Seconds for which others may join the oldest member, although the headway is over.
    quiet: float = 0.0  # Seconds without an arrival after which the batch waits no longer.
    company: float = 0.0  # Smallest size at which a batch leaves after a silence; 0 for any.
    team: float = 0.0  # Slots that take turns, if slots differ; else 0.
    speed: float = 0.0  # Batches that these run together in the time of one on a slot of factor 1.
    slowest: float = math.inf  # Factor above which a slot only helps out.
    batch: float = 0.0  # Expected run time in seconds of a batch of the usual size on a slot of factor 1.

    def gap(self, running: float) -> float:
        """Return the least seconds between departures, given the size of the largest batch on a GPU; 0 if not spaced."""
        return self.headway + self.gap_each * running if self.headway else 0.0

    def part(self, factor: float) -> float:
        """Return the gap before a departure for a slot of this factor, as a multiple of the mean gap.

        A slow slot leaves earlier after the last departure than a fast one, so that gap and run time together are as long on each.
        Weighted by how often each leaves, the multiples have a mean of 1."""
        return max(self.team + 1.0 - factor * self.speed, 0.0) if self.team else 1.0

    def share(self, depth: float, busy: int = 0, slots: int = 1, running: float = 0.0) -> float:
        """Return the size of the batch that leaves, which is less than `depth` if that is well over an even share per GPU. Of
        `slots` live GPUs, `busy` run batches, the largest of size `running`."""
        everything = depth + busy * running
        if not self.split or depth * slots <= (OVER_UNLIKE if self.team else OVER) * everything:
            return depth
        batches = int(math.sqrt(self.split * depth + 0.25) + 0.5)
        return min(depth, math.ceil(max(depth / max(batches, 1), everything / slots)))


class QueueSnapshot(msgspec.Struct, frozen=True, gc=False):
    """State of a queue that decides about a departure."""

    depth: float  # Size of all waiting entries; their number unless they are weighed.
    oldest: float  # Arrival of the oldest.
    due: float  # Earliest deadline.
    last_departure: float  # Instant of the last departure.
    schedule: float = -math.inf  # Instant of the next departure if all so far had kept the rule's pace.
    newest: float = -math.inf  # Latest arrival, or for a rule with `company`, the latest end of a batch if later.
    running: float = 0.0  # Size of the largest batch on a GPU; 0 if all are idle.
    factor: float = 1.0  # Factor of the slot that asks, see `core.slot_factors`.
    unseen: float = 0.0  # Departures since a batch of that slot came back.
    busy: int = 0  # GPUs that run a batch.
    slots: int = 1  # Live GPUs.


class Dispatch(msgspec.Struct, frozen=True):
    """Decision to leave now, with the reason and the limit on the batch."""

    reason: str
    most: float = math.inf


class Hold(msgspec.Struct, frozen=True):
    """Decision to wait until this instant, or for the next arrival if it is infinite."""

    until: float


class Policy(Protocol):
    """Function from load to rule. It may keep state, but reads no clock."""

    def rule(self, load: Load) -> Rule: ...


def decide(rule: Rule, view: QueueSnapshot, now: float) -> Dispatch | Hold:
    """Apply a rule to the waiting entries, with a GPU free at instant `now`."""
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
    """Return True if every running or waiting entry can have its own GPU, and hardly any GPU is left over.

    This happens with about as many clients as GPUs, each waiting for its answer, so that no other entry is coming for which a GPU
    should be kept free. If all GPUs are idle, the result is False, as the entry may be the first of a burst."""
    fits = view.slots >= LONE_FROM and view.slots - 1 <= view.depth + view.busy <= view.slots
    if rule.company or not fits or rule.rate * (rule.headway or 0.0) > LONE_ARRIVALS:
        return False
    return 0.0 < view.running <= 1.0 and view.factor <= LONE_FACTOR


def _spaced(rule: Rule, view: QueueSnapshot, helps: bool) -> float:
    """Return the instant at which the gap before the next departure is over. A helping slot waits until all others are late."""
    if helps:
        return view.last_departure + rule.batch * view.factor
    part = rule.part(view.factor)
    gathered = view.oldest + rule.gather * part
    if view.depth >= rule.company:
        gathered = min(gathered, view.newest + rule.quiet)
    return max(view.last_departure + rule.gap(view.running) * part, gathered)


FEWEST = 1000  # Minimum number of arrivals in a record.
MOST = 6000  # Limit on arrivals in a record.
DECAY = 0.9  # Weight of the past, for the number of clients, at each observed end of a batch.
ENOUGH = 24  # Batches after which clients may be recognised.
EVERY = 4  # One in so many ends of batches is observed, to save time.
REGULAR = 0.06  # Ratio of variance to mean below which the number of waiting or running entries counts as constant.
SOON = 0.3  # Clients ask again within this share of the time between two ends of batches.
STILL_SOON = 0.6  # The same for clients already recognised, as batches of several slots may end nearly together.


class Past:
    """Arrivals of the last seconds, and the number of clients."""

    __slots__ = (
        "_arrived", "_ends", "_from", "_gaps", "_soon", "_squares", "_sum", "_weight", "clients", "each", "last_end", "long", "tells",
    )  # fmt: skip

    def __init__(self) -> None:
        self._arrived: list[float] = []
        self._from = -math.inf  # Instant from which arrivals are noted.
        self._ends = 0
        self.last_end = 0.0  # Instant at which a batch last came back.
        self._weight = self._sum = self._squares = self._gaps = self._soon = 0.0
        self.clients = 0  # Number of clients that wait for their answers; 0 for an open load.
        self.each = 1.0  # Mean size of an entry, to convert a batch's size into entries; 1 unless they have rows.
        self.long = False  # True if the record has enough arrivals.
        self.tells = False  # True once a look-ahead can learn from it: after a long record, or any clients.

    def left(self, arrived: Sequence[float], now: float) -> None:
        noted = self._arrived
        if now >= self._from and len(noted) < MOST:
            noted += arrived
            if len(noted) >= FEWEST:
                self.long = self.tells = True

    def ended(self, waiting: int, running: RunningBatches, newest: float, now: float) -> None:
        """Note the end of a batch, which is still among `running`, given the instant of the latest arrival."""
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
        """Take the sorted record if it spans so many seconds or is full, else an empty list. `resume` starts the next record."""
        arrived = self._arrived
        if not self.long or (len(arrived) < MOST and arrived[-1] - arrived[0] < seconds):
            return []
        self.resume(math.inf)
        arrived.sort()
        return arrived

    def resume(self, at: float = -math.inf) -> None:
        """Start a new record with batches that leave from instant `at` on."""
        self._arrived = []
        self._from = at
        self.long = False


class Departure(msgspec.Struct):
    """A batch that has departed, without the `late` entries, which could no longer be answered in time. The last `bulk` members are
    bulk entries. `failures`, `alone` and `rest` come from its group; see `core.suspects.Group`. `attempts` includes this run."""

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
        """True if it has only bulk entries; see `core.bulk`."""
        return self.bulk > 0 and self.bulk == len(self.members)


class FailureOutcome(msgspec.Struct):
    """Outcome of a failed batch: the number of entries that run again, and the entries that end."""

    again: int = 0
    dead: list[QueuedEntry] = msgspec.field(default_factory=list)
    spent: list[QueuedEntry] = msgspec.field(default_factory=list)  # Out of retries.
    late: list[QueuedEntry] = msgspec.field(default_factory=list)  # Too late to run again.
    bulk: list[QueuedEntry] = msgspec.field(default_factory=list)  # Retried by their sender.


BUSY_TIME = 5.0  # Time constant of the busy share, in seconds.


class RunningBatches:
    """Batches on GPUs."""

    __slots__ = ("_since", "_sizes", "utilisation")

    def __init__(self) -> None:
        self.utilisation = 0.0  # Busy share of the slots over the last seconds, 0 to 1, as of the last call.
        self._sizes: list[float] = []
        self._since = 0.0

    @property
    def busy(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> float:
        """Size of the largest batch; 0 if none runs."""
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
