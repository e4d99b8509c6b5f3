"""Packing: which entries make up a batch, by tier, tenant, number, weight and pages.

A batch is full when the next entry would be one too many, or too heavy. The next entry of a tier is the one whose turn it
is: none is put before it for being lighter, but other tiers may have the room that is left. An entry that is heavier than a
whole batch runs alone. Where entries have rows, all of a batch are of one shape, and its next entry is the next of that shape.

The room that is kept for lower tiers may be too little for their next entry, or that be of another shape. It is then owed to them, and added to what is
kept of the next batch, until that entry fits, or the next batch is theirs. (A deficit counter: Shreedhar and Varghese, "Efficient fair queuing using
deficit round-robin", IEEE/ACM Transactions on Networking 4, 1996.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from headway.core.fair_queue import GONE, QueuedEntry, TierQueue


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Terms on which a batch is packed.

    Attributes:
        limit: most entries.
        weight: most weight; infinite where entries are not weighed.
        unit: weight of one of `limit` places; infinite where entries are not weighed.
        share: share of the batch that is kept for lower tiers.
        owed: weight that lower tiers are owed besides.
        pages: most pages of large entries together, unless there is only one of them; infinite for no bound.
        rows: whether entries have rows, so that only those of one shape ride together.
        hopeless: instant at which the batch ends. An entry due before it does not ride while more waits than fits.
    """

    limit: int
    weight: float = math.inf
    unit: float = math.inf
    share: float = 0.0
    owed: float = 0.0
    pages: float = math.inf
    rows: bool = False
    hopeless: float = -math.inf


class Packed(msgspec.Struct):
    """Entries that ride, entries that are dropped because they would be late, and the weight that lower tiers are owed."""

    members: list[QueuedEntry]
    late: list[QueuedEntry]
    owed: float = 0.0


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

    While more waits than fits, no room goes to an entry that cannot be answered in time.
    """
    waiting = [tier_queue for tier_queue in tier_queues if tier_queue.depth]
    weighs = terms.weight < math.inf
    several = len(waiting) != 1 or (weighs and not _are_ones(waiting[0], terms))
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
            if most is None and (empty or not weighs):
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


def _owed_after(lower: Sequence[TierQueue], terms: Terms, promised: float, served: float, blocked: bool) -> float:
    """Weight that lower tiers are owed after a batch that promised them so much and has served them so much of it.

    `blocked`: the next entry of one of them did not fit. All might have, but for its shape.
    """
    if not blocked:
        return min(max(0.0, promised - served), sum(tier_queue.weight for tier_queue in lower))
    if terms.weight < math.inf:
        places = reserved_places(terms.limit, terms.share)
        promised = max(promised, min(places * terms.unit + terms.owed, terms.weight))
    return max(0.0, promised - served)


def _are_ones(tier_queue: TierQueue, terms: Terms) -> bool:
    """Whether all entries of a queue weigh one, ride with any, and fill a batch by their number alone."""
    return tier_queue.weight == tier_queue.depth and terms.weight >= terms.limit and not tier_queue.shaped


def _pack_of_one(tier_queue: TierQueue, terms: Terms) -> Packed:
    """Fill a batch from the only tier queue in which something waits, as far as entries are small."""
    contended = tier_queue.depth > terms.limit
    taken = tier_queue.take(terms.limit, small=terms.pages < math.inf)
    if not contended:
        return Packed(taken, [])
    late = [queued for queued in taken if queued.due < terms.hopeless]
    for queued in late:
        queued.state, queued.attempts = GONE, 0
    return Packed([queued for queued in taken if queued.state != GONE] if late else taken, late)


def reserved_places(limit: int, share: float) -> int:
    """Places of a batch of `limit` kept for lower tiers; at least one when a share is set and there is room."""
    if share <= 0.0 or limit < 2:
        return 0
    return max(1, int(limit * share))


def turns(
    tier_queues: Sequence[TierQueue], room: BatchRoom, share: float, unit: float = math.inf, owed: float = 0.0
) -> Iterator[TierQueue]:
    """Tier queue of each next entry of the batch, until there is no room or nothing waits.

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
