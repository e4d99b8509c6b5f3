"""Packing: which entries make up a batch, by tier, tenant, number, weight and pages.

A batch is full if the next entry would exceed its limit on number or weight. The next entry of a tier is the one whose turn it
is. Lighter entries don't overtake it, but other tiers may use the remaining room. An entry that is heavier than a full batch
runs alone. If entries have rows or call parameters, all entries of a batch have one shape, and the next entry is the next one
of that shape.

A batch reserves room for lower tiers. If their next entry is too large for it, or of another shape, this room is owed to them:
it adds to what the next batch reserves, until that entry fits or the whole batch is theirs. (A deficit counter: Shreedhar and
Varghese, "Efficient fair queuing using deficit round-robin", IEEE/ACM Transactions on Networking 4, 1996.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice

import msgspec

from headway.core.batch_cost import LEAST_SAVED
from headway.core.fair_queue import GONE, QueuedEntry, TierQueue

ALIKE = 0.1  # Heavier entries count as similar if they lengthen a batch by at most this share of a full batch's time.
Cost = Callable[[float], float]  # Returns how many rounds a place costs if it is padded to a weight.


class Nearness(msgspec.Struct, frozen=True, gc=False):
    """Plan for batching entries of similar weight, because all inputs of a batch are padded to the longest."""

    full: int  # Entries of a full batch. If no more are waiting, they run in turn, unless separating them saves time.
    fixed: float  # Weight that takes as long as the fixed part of a batch.
    most: int  # Number of a tier's next entries that are searched for the nearest.
    cost: Cost  # Returns how many rounds a place costs if it is padded to a weight.
    by_age: bool = False  # True if the tier with the oldest entry goes first, provided that it gets a place anyway.


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Terms for packing a batch."""

    limit: int  # Limit on its entries.
    weight: float = math.inf  # Limit on its weight; infinite if entries aren't weighed.
    unit: float = math.inf  # Weight of one of `limit` places; infinite if entries aren't weighed.
    share: float = 0.0  # Share of the batch reserved for lower tiers.
    owed: float = 0.0  # Weight owed to lower tiers in addition.
    pages: float = math.inf  # Limit on the pages of all large entries together. A single one may have more.
    rows: bool = False  # True if entries have rows or call parameters, so that a batch has entries of one shape only.
    fewest: bool = False  # True if a batch with shapes begins with the tenant that needs the fewest batches.
    hopeless: float = -math.inf  # If not all waiting entries fit, those due before this time are dropped.


class Packed(msgspec.Struct):
    """Entries that run, entries dropped as too late, and the weight owed to lower tiers."""

    members: list[QueuedEntry]
    late: list[QueuedEntry]
    owed: float = 0.0
    parted: bool = False  # True if only light or only heavy entries run, although all would fit.


class BatchRoom(msgspec.Struct, gc=False):
    """Remaining room in a batch."""

    count: int  # Initial room for entries.
    weight: float = math.inf  # Room for weight.
    kept: float = 0.0  # Part of the weight reserved for lower tiers now; infinite while they go first.
    promised: float = 0.0  # Part of the weight that lower tiers should get.


def pack(tier_queues: Sequence[TierQueue], terms: Terms) -> Packed:
    """Fill a batch, highest tier first. Entries that run become RUNNING. If not all entries fit, late ones become GONE."""
    waiting = [tier_queue for tier_queue in tier_queues if tier_queue.depth]
    weighs = terms.weight < math.inf
    picks = weighs or terms.rows
    several = len(waiting) != 1 or (picks and not _are_ones(waiting[0], terms))
    packed = Packed([], []) if several else _pack_of_one(waiting[0], terms)
    left, pages = terms.weight, terms.pages
    if weighs:
        left -= len(packed.members)
    page_limit: float | None = None
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
            elif page_limit is None and (empty or not picks):
                queued = tier_queue.pop()
            else:
                heaviest = math.inf if empty else room.weight - room.kept
                shape = (members or packed.late)[-1].entry.shape if terms.rows else None
                queued = tier_queue.pop(math.inf if page_limit is None else page_limit, heaviest, shape)
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
                page_limit = max(pages, 1.0)
            if contended and queued.due < terms.hopeless:
                queued.state, queued.attempts = GONE, 0
                packed.late.append(queued)
            else:
                members.append(queued)
                if weighs:
                    left -= queued.weight
        promised, owed = max(promised, room.promised), 0.0
        if not members:  # All taken entries were too late, so that entries that didn't fit beside them may fit now.
            allowed, pages, page_limit = tier_queues, terms.pages, None
    if (blocked or left <= 0.0) and not (
        members and members[0].entry.shape and tier_queues[members[0].entry.tier] is not top  # A batch of a lower tier.
    ):
        lower = [tier_queue for tier_queue in tier_queues if tier_queue is not top]
        packed.owed = _owed_after(lower, terms, promised, served, blocked)
    return packed


def pack_nearest(tier_queues: Sequence[TierQueue], terms: Terms, near: Nearness) -> Packed:
    """Fill a batch with the entry whose turn it is and the entries nearest to it in weight. If all entries fit, fill it as
    `pack` does. But if heavy entries would make the batch much longer, light and heavy ones run in separate batches, starting
    with the one that has the oldest entry.

    Tiers go in order, and lower tiers have their share. But entries of any tier that are lighter than the first go before
    heavier ones, because all others would be padded to those. The first entry is sometimes from a lower tier."""
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
    """Return the greatest weight of light entries, or None if separating them from heavy ones saves no time."""
    weights = sorted([queued.weight for tier_queue in tier_queues for queued in tier_queue.in_turn()])
    count, longest = len(weights), weights[-1]
    spared, bound = max([(number * (longest - weight), weight) for number, weight in enumerate(weights, 1)])
    return bound if spared - near.fixed >= LEAST_SAVED * (near.fixed + count * longest) else None


def _first(tier_queues: Sequence[TierQueue], terms: Terms, by_age: bool) -> QueuedEntry:
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
    """Fill a batch with the entries that are nearest in weight to its first one, and on the same side of `bound`."""
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
    def __init__(self, terms: Terms, first: QueuedEntry, late: list[QueuedEntry], *, parted: bool) -> None:
        self.packed = Packed([], late, parted=parted)
        self.count, self.weight, self.pages = terms.limit, terms.weight, math.inf
        self._pages = terms.pages
        self._hopeless = terms.hopeless
        self.add(first, contended=False)

    def add(self, queued: QueuedEntry, contended: bool) -> None:
        """Add an entry. Drop it instead if it would be answered too late and others are waiting for the room."""
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
    """Entries of each tier that may run with the first entry of a batch, nearest in weight first. Those heavier than the first
    are kept separately."""

    def __init__(self, first: QueuedEntry, near: Nearness, bound: float) -> None:
        self._bound, self._light = bound, first.weight <= bound
        self._weight, self._shape, self._near = first.weight, first.entry.shape, near
        self._step = ALIKE * (near.fixed / near.full + first.weight)
        self._lines: dict[TierQueue, tuple[Iterator[QueuedEntry], Iterator[QueuedEntry]]] = {}
        self._free: set[QueuedEntry] = set()  # Entries behind one of another shape. They cost their tenants nothing.

    def pop(self, tier_queue: TierQueue, pages: float, weight: float, heavier: bool) -> QueuedEntry | None:
        """Take the nearest entry of a tier that has at most these pages and this weight. If `heavier`, take it from the entries
        heavier than the first, otherwise from all others. Returns None if there is none."""
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
        return int(abs(queued.weight - self._weight) / self._step)


def _oldest(tier_queue: TierQueue) -> float:
    oldest = tier_queue.oldest()
    return oldest.arrived if oldest is not None else math.inf


def _owed_after(lower: Sequence[TierQueue], terms: Terms, promised: float, served: float, blocked: bool) -> float:
    """Return the weight owed to the lower tiers after a batch. `blocked` is True if an entry of theirs didn't fit."""
    if not blocked:
        return min(max(0.0, promised - served), sum(tier_queue.weight for tier_queue in lower))
    if terms.weight < math.inf:
        places = reserved_places(terms.limit, terms.share)
        promised = max(promised, min(places * terms.unit + terms.owed, terms.weight))
    return max(0.0, promised - served)


def _are_ones(tier_queue: TierQueue, terms: Terms) -> bool:
    """Return True if all entries of a queue weigh 1 and can run with any other, and batches are full by number."""
    return tier_queue.weight == tier_queue.depth and terms.weight >= terms.limit and not tier_queue.shaped


def _pack_of_one(tier_queue: TierQueue, terms: Terms) -> Packed:
    contended = tier_queue.depth > terms.limit
    taken = tier_queue.take(terms.limit, small=terms.pages < math.inf)
    if not contended:
        return Packed(taken, [])
    late = [queued for queued in taken if queued.due < terms.hopeless]
    for queued in late:
        queued.state, queued.attempts = GONE, 0
    return Packed([queued for queued in taken if queued.state != GONE] if late else taken, late)


def reserved_places(limit: int, share: float) -> int:
    """Return how many of a batch's `limit` places are reserved for lower tiers: at least one if possible and `share` > 0."""
    if share <= 0.0 or limit < 2:
        return 0
    return max(1, int(limit * share))


def turns(
    tier_queues: Sequence[TierQueue], room: BatchRoom, share: float, unit: float = math.inf, owed: float = 0.0
) -> Iterator[TierQueue]:
    """Yield the tier queue of each next entry, highest tier first, until there is no room or nothing waits. The caller pops an entry
    from each yielded queue, and subtracts its weight from the room. If more waits than fits, the last `reserved_places` go to the
    tiers below the highest waiting one, longest wait first. A place has the weight `unit`. In addition, lower
    tiers are promised the weight `owed`."""
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
            (first.arrived, index)
            for index, tier_queue in enumerate(lower)
            if (first := tier_queue.oldest()) is not None
        ]
        if not oldest:
            return
        yield lower[min(oldest)[1]]
