"""Packing: which entries make up a batch, by tier, tenant, number, weight and pages.

A batch is full if the next entry would be one too many, or too heavy. The next entry of a tier is the one whose turn it
is: lighter ones don't overtake it, but other tiers may use the remaining room. An entry heavier than a
whole batch runs alone. If entries have rows or call parameters, all of a batch have one shape, and its next entry is the next of that shape.

The room kept for lower tiers may be too little for their next entry, or of another shape. Then it is owed to them, and added to what is
kept of the next batch, until that entry fits or the next batch is theirs. (A deficit counter: Shreedhar and Varghese, "Efficient fair queuing using
deficit round-robin", IEEE/ACM Transactions on Networking 4, 1996.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice

import msgspec

from headway.core.batch_cost import LEAST_SAVED
from headway.core.fair_queue import GONE, QueuedEntry, TierQueue

ALIKE = 0.1
"""Share of a full batch's time by which heavier entries may lengthen it and still count as light as its first."""
Cost = Callable[[float], float]
"""Cost in rounds of a place padded to a weight."""


class Nearness(msgspec.Struct, frozen=True, gc=False):
    """Terms on which entries of similar weight ride together, as all are padded to the longest.

    Attributes:
        full: entries of a full batch. While no more wait they ride in the order of their turns, unless it saves time to part light and heavy ones.
        fixed: weight that takes as long as the fixed part of a batch.
        most: most entries of a tier, in the order of their turns, among which the nearest are looked for.
        cost: rounds that a place costs which is filled up to a weight.
        by_age: the first entry is of the tier whose oldest has waited longest, where first come would give that tier a place.
    """

    full: int
    fixed: float
    most: int
    cost: Cost
    by_age: bool = False


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Terms on which a batch is packed.

    Attributes:
        limit: most entries.
        weight: most weight; infinite where entries are not weighed.
        unit: weight of one of `limit` places; infinite where entries are not weighed.
        share: share of the batch that is kept for lower tiers.
        owed: weight that lower tiers are owed besides.
        pages: most pages of large entries together, unless there is only one of them; infinite for no bound.
        rows: whether entries have rows or parameters of a call, so that only those of one shape ride together.
        fewest: whether the first is of the tenant whose next entries make the fewest batches, where these have shapes.
        hopeless: instant at which the batch ends. An entry due before it does not ride while more waits than fits.
    """

    limit: int
    weight: float = math.inf
    unit: float = math.inf
    share: float = 0.0
    owed: float = 0.0
    pages: float = math.inf
    rows: bool = False
    fewest: bool = False
    hopeless: float = -math.inf


class Packed(msgspec.Struct):
    """Entries that ride, entries dropped because they would be late, and the weight owed to lower tiers.

    `parted`: only light or only heavy entries ride, although all fit.
    """

    members: list[QueuedEntry]
    late: list[QueuedEntry]
    owed: float = 0.0
    parted: bool = False


class BatchRoom(msgspec.Struct, gc=False):
    """Room that is left in a batch.

    Attributes:
        count: entries that it has room for to begin with.
        weight: weight that it has room for.
        kept: part of that weight that is kept for lower tiers at present; infinite while they go first.
        promised: weight that lower tiers should get of it.
    """

    count: int
    weight: float = math.inf
    kept: float = 0.0
    promised: float = 0.0


def pack(tier_queues: Sequence[TierQueue], terms: Terms) -> Packed:
    """Fill a batch from tier queues, given from the highest down. What rides is RUNNING, what is dropped is GONE.

    While more waits than fits, no room goes to an entry that can't be answered in time.
    """
    waiting = [tier_queue for tier_queue in tier_queues if tier_queue.depth]
    weighs = terms.weight < math.inf
    picks = weighs or terms.rows
    several = len(waiting) != 1 or (picks and not _are_ones(waiting[0], terms))
    packed = Packed([], []) if several else _pack_of_one(waiting[0], terms)
    left, pages = terms.weight, terms.pages
    if weighs:
        left -= len(packed.members)
    most: float | None = None
    members, served, owed, promised = packed.members, 0, terms.owed, 0.0
    top = waiting[0] if waiting else None
    allowed, ended, blocked = tier_queues, False, False
    while not ended and (count := terms.limit - len(members)) > 0 and (left > 0.0 or not members):
        depth = weight = 0
        for tier_queue in tier_queues:
            depth += tier_queue.depth
            weight += tier_queue.weight
        if not depth:
            break
        room, ended, empty = BatchRoom(count, left), True, not members
        contended = depth > count or (weight > left and (depth > 1 or not empty))
        for tier_queue in turns(allowed, room, terms.share, terms.unit, owed):
            ended = False
            if empty and terms.fewest and tier_queue.shaped:
                queued = tier_queue.pop_of_fewest(terms.limit, terms.weight)
            elif most is None and (empty or not picks):
                queued = tier_queue.pop()
            else:
                heaviest = math.inf if empty else room.weight - room.kept
                shape = (members or packed.late)[-1].entry.shape if terms.rows else None  # Of the last that was taken.
                queued = tier_queue.pop(math.inf if most is None else most, heaviest, shape)
            if queued is None:
                blocked |= tier_queue is not top
                allowed = [other for other in allowed if other is not tier_queue]
                break
            empty = False
            if weighs:
                room.weight -= queued.weight
                served += queued.weight if tier_queue is not top else 0
            if queued.pages > 1 and pages < math.inf:
                pages -= queued.pages
                most = max(pages, 1.0)
            if contended and queued.due < terms.hopeless:
                queued.state, queued.attempts = GONE, 0
                packed.late.append(queued)
            else:
                members.append(queued)
                if weighs:
                    left -= queued.weight
        promised, owed = max(promised, room.promised), 0.0
        if not members:  # Whoever was too large or too heavy beside those that are too late has the batch now.
            allowed, pages, most = tier_queues, terms.pages, None
    if (blocked or left <= 0.0) and not (
        members and members[0].entry.shape and tier_queues[members[0].entry.tier] is not top  # The batch was theirs.
    ):
        lower = [tier_queue for tier_queue in tier_queues if tier_queue is not top]
        packed.owed = _owed_after(lower, terms, promised, served, blocked)
    return packed


def pack_nearest(tier_queues: Sequence[TierQueue], terms: Terms, near: Nearness) -> Packed:
    """Fill a batch with the entry whose turn it is and those nearest to it in weight; with the next ones, as `pack` does, where all fit.

    Tiers go in order and lower ones have their share, but lighter entries of any tier ride before heavier ones, which would have all
    others filled up. So that heavy entries of a lower tier get their turn, the first entry is one of them at times.

    Where all fit and heavy entries would make the batch much longer, light ones and heavy ones ride apart, and whoever has waited longest now.
    """
    late = list[QueuedEntry]()
    while depth := sum([tier_queue.depth for tier_queue in tier_queues]):
        bound = _bound_of_light(tier_queues, near) if depth <= near.full else math.inf
        if bound is None:
            break
        first = _first(tier_queues, terms, near.by_age or bound < math.inf)
        if depth <= terms.limit or first.due >= terms.hopeless:
            return _pack_around(first, late, tier_queues, terms, near, bound)
        first.state, first.attempts = GONE, 0
        late.append(first)
    packed = pack(tier_queues, terms)
    packed.late[:0] = late
    return packed


def _bound_of_light(tier_queues: Sequence[TierQueue], near: Nearness) -> float | None:
    """Return the greatest weight of light entries, if it saves time that they ride apart from heavy ones; else None."""
    weights = sorted([queued.weight for tier_queue in tier_queues for queued in tier_queue.in_turn()])
    count, longest = len(weights), weights[-1]
    spared, bound = max([(number * (longest - weight), weight) for number, weight in enumerate(weights, 1)])
    return bound if spared - near.fixed >= LEAST_SAVED * (near.fixed + count * longest) else None


def _first(tier_queues: Sequence[TierQueue], terms: Terms, by_age: bool) -> QueuedEntry:
    """Take the first entry of a batch while more waits than fits."""
    waiting = [tier_queue for tier_queue in tier_queues if tier_queue.depth]
    above = accumulate((tier_queue.depth for tier_queue in waiting), initial=0)
    served = [tier_queue for tier_queue, ahead in zip(waiting, above, strict=False) if ahead < terms.limit]
    chosen = min(served, key=_oldest) if by_age else waiting[0]
    first = chosen.pop_of_fewest(terms.limit, terms.weight) if terms.fewest and chosen.shaped else chosen.pop()
    assert first is not None  # noqa: S101 - it waits
    return first


def _pack_around(
    first: QueuedEntry,
    late: list[QueuedEntry],
    tier_queues: Sequence[TierQueue],
    terms: Terms,
    near: Nearness,
    bound: float,
) -> Packed:
    """Fill the batch of a first entry with those nearest to it in weight, on its side of a bound. `late` were dropped before it."""
    batch, candidates = _NearestBatch(terms, first, late, parted=bound < math.inf), _Candidates(first, near, bound)
    for heavier in (False, True):
        allowed, ended = tier_queues, False
        while not ended and batch.count > 0 and batch.weight > 0.0:
            room, ended = BatchRoom(batch.count, batch.weight), True
            contended = (
                sum([tier_queue.depth for tier_queue in tier_queues]) > batch.count
                or sum([tier_queue.weight for tier_queue in tier_queues]) > batch.weight
            )
            for tier_queue in turns(allowed, room, terms.share, terms.unit):
                ended = False
                queued = candidates.pop(tier_queue, batch.pages, room.weight - room.kept, heavier)
                if queued is None:
                    allowed = [other for other in allowed if other is not tier_queue]
                    break
                batch.add(queued, contended)
                room.weight -= queued.weight if terms.weight < math.inf else 0
    return batch.packed


class _NearestBatch:
    """Batch that fills with entries of like weight, and the room that is left in it."""

    def __init__(self, terms: Terms, first: QueuedEntry, late: list[QueuedEntry], *, parted: bool) -> None:
        self.packed = Packed([], late, parted=parted)
        self.count, self.weight, self.pages = terms.limit, terms.weight, math.inf
        self._pages = terms.pages
        self._hopeless = terms.hopeless
        self.add(first, contended=False)

    def add(self, queued: QueuedEntry, contended: bool) -> None:
        """Add an entry, or drop it if it would be answered too late and others wait for the room."""
        if queued.pages > 1 and self._pages < math.inf:
            self._pages -= queued.pages
            self.pages = max(self._pages, 1.0)
        if contended and queued.due < self._hopeless:
            queued.state, queued.attempts = GONE, 0
            self.packed.late.append(queued)
            return
        self.packed.members.append(queued)
        self.count -= 1
        if self.weight < math.inf:
            self.weight -= queued.weight


class _Candidates:
    """Entries of each tier that may ride with the first of a batch: alike and lighter ones, and heavier ones, the nearest in weight first, of these by turn."""

    def __init__(self, first: QueuedEntry, near: Nearness, bound: float) -> None:
        self._bound, self._light = bound, first.weight <= bound
        self._weight, self._shape, self._near = first.weight, first.entry.shape, near
        self._step = ALIKE * (near.fixed / near.full + first.weight)
        self._lines: dict[TierQueue, tuple[Iterator[QueuedEntry], Iterator[QueuedEntry]]] = {}
        self._free: set[QueuedEntry] = set()
        """Those whose turn is behind that of one of another shape. They have seats that would have been empty, so their tenants pay nothing."""

    def pop(self, tier_queue: TierQueue, pages: float, weight: float, heavier: bool) -> QueuedEntry | None:
        """Take the nearest entry of a tier, of the lighter or the heavier ones, that has at most so many pages and weighs no more than `weight`."""
        if tier_queue not in self._lines:
            self._lines[tier_queue] = self._around(islice(tier_queue.in_turn(), self._near.most))
        for queued in self._lines[tier_queue][heavier]:
            if queued.pages <= pages and queued.weight <= weight:
                cost = 0.0 if queued in self._free else self._near.cost(max(queued.weight, self._weight))
                tier_queue.take_early(queued, cost)
                return queued
        return None

    def _around(self, entries: Iterable[QueuedEntry]) -> tuple[Iterator[QueuedEntry], Iterator[QueuedEntry]]:
        lighter, heavier = list[QueuedEntry](), list[QueuedEntry]()
        passed = False
        for queued in entries:
            if queued.entry.shape != self._shape:
                passed = True
                continue
            if (queued.weight <= self._bound) != self._light:
                continue
            (heavier if queued.weight > self._weight and self._distance(queued) else lighter).append(queued)
            if passed:
                self._free.add(queued)
        return iter(sorted(lighter, key=self._distance)), iter(sorted(heavier, key=self._distance))

    def _distance(self, queued: QueuedEntry) -> int:
        """Return the steps in weight from the first of the batch; none to those that are alike. Those of one distance ride by turn."""
        return int(abs(queued.weight - self._weight) / self._step)


def _oldest(tier_queue: TierQueue) -> float:
    oldest = tier_queue.oldest()
    return oldest.arrived if oldest is not None else math.inf


def _owed_after(lower: Sequence[TierQueue], terms: Terms, promised: float, served: float, blocked: bool) -> float:
    """Return the weight that lower tiers are owed after a batch that promised them so much and has served them so much of it.

    `blocked`: the next entry of one of them did not fit. All might have, but for its shape.
    """
    if not blocked:
        return min(max(0.0, promised - served), sum(tier_queue.weight for tier_queue in lower))
    if terms.weight < math.inf:
        places = reserved_places(terms.limit, terms.share)
        promised = max(promised, min(places * terms.unit + terms.owed, terms.weight))
    return max(0.0, promised - served)


def _are_ones(tier_queue: TierQueue, terms: Terms) -> bool:
    """Return True if all entries of a queue weigh one, ride with any, and fill a batch by number only."""
    return tier_queue.weight == tier_queue.depth and terms.weight >= terms.limit and not tier_queue.shaped


def _pack_of_one(tier_queue: TierQueue, terms: Terms) -> Packed:
    """Fill a batch from the only tier queue with entries, while these are small."""
    contended = tier_queue.depth > terms.limit
    taken = tier_queue.take(terms.limit, small=terms.pages < math.inf)
    if not contended:
        return Packed(taken, [])
    late = [queued for queued in taken if queued.due < terms.hopeless]
    for queued in late:
        queued.state, queued.attempts = GONE, 0
    return Packed([queued for queued in taken if queued.state != GONE] if late else taken, late)


def reserved_places(limit: int, share: float) -> int:
    """Return how many places of a batch of `limit` are kept for lower tiers: at least one, if there is a share and room."""
    if share <= 0.0 or limit < 2:
        return 0
    return max(1, int(limit * share))


def turns(
    tier_queues: Sequence[TierQueue], room: BatchRoom, share: float, unit: float = math.inf, owed: float = 0.0
) -> Iterator[TierQueue]:
    """Yield the tier queue of each next entry of the batch, until there is no room or nothing waits.

    Tiers in order; but when more waits than fits, the last `reserved_places` go to the tiers below the highest one that
    waits, the longest wait first. The caller pops one entry from each queue it is given, and takes its weight from the room.

    Arguments:
        tier_queues: tier queues, from the highest down.
        room: room that is left in the batch.
        share: share of the batch that is kept for lower tiers.
        unit: weight of one place.
        owed: weight that lower tiers are owed besides.
    """
    waiting = [tier_queue for tier_queue in tier_queues if tier_queue.depth]
    lower, kept = waiting[1:], 0
    if lower and (
        owed > 0.0
        or sum(tier_queue.depth for tier_queue in waiting) > room.count
        or sum(tier_queue.weight for tier_queue in waiting) > room.weight
    ):
        places = reserved_places(room.count, share)
        kept = min(places, sum(tier_queue.depth for tier_queue in lower))
        if room.weight < math.inf:
            room.promised = min(places * unit + owed, room.weight)
            all_of_it = room.promised >= room.weight
            room.kept = math.inf if all_of_it else min(room.promised, sum(tier_queue.weight for tier_queue in lower))
    left = room.count - kept
    for tier_queue in waiting:
        for _ in range(min(left, tier_queue.depth)):
            if room.weight <= room.kept:
                break
            left -= 1
            yield tier_queue
    room.kept = 0.0
    for _ in range(kept + left):
        if room.weight <= 0.0:
            return
        oldest = [
            (found.arrived, index)
            for index, tier_queue in enumerate(lower)
            if (found := tier_queue.oldest()) is not None
        ]
        if not oldest:
            return
        yield lower[min(oldest)[1]]
