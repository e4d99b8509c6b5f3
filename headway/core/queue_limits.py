"""Limits of a queue, the size of its entries, and their memory, which is a budget in bytes that tenants share.

A tenant may hold at most as many bytes as remain free. So a single tenant gets half of the total. If n tenants take all they
can get, each ends up with one of n + 1 equal parts, and one part remains for the next tenant. This is the dynamic threshold of
shared packet buffers (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
Transactions on Networking, 1998)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import msgspec

from headway.core.fair_queue import BATCH_ROUNDS, GONE, LOOKED_AT, QueuedEntry
from headway.core.values import room
from headway.core.weight_estimate import MOST_WEIGHT
from headway.model import CostLine, Entry


class Padding(msgspec.Struct, frozen=True):
    """Cost of a place in a batch of a model that pads all inputs to the longest."""

    longest: float  # Mean weight to which inputs were padded recently.
    fixed: float = 0.0  # Weight that takes as long as one place's share of the fixed time of a full batch.


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of a queue. Entries are weighed if batches have a weight limit, or if the model pads."""

    tiers: int  # Number of tiers.
    max_batch: int  # Size of the largest batch.
    reserved_share: float = 0.1  # Share of a batch reserved for lower tiers.
    max_queue: int = 20_000  # Limit on waiting entries.
    # Depths from which the lowest tier is refused, and from which all but the highest are. None: never.
    shed_at: tuple[int, int] | None = None
    max_weight: int = 0  # Limit on the weight of a batch; 0 if entries aren't weighed.
    rows: bool = False  # True if entries have rows or call parameters, so that a batch has entries of one shape only.
    promise: float = 0.0  # Promised latency in seconds; 0 for none.
    delayed: float = 0.01  # Share of the entries that may have to wait for a batch of bulk entries; see `core.bulk`.
    padding: Padding | None = None  # If the model pads, entries of similar weight run together. Otherwise None.
    unit: float = field(init=False, default=math.inf)  # Weight of one place in a batch.
    round_weight: float = field(init=False, default=0.0)  # Weight that costs one round. If 0, each entry costs one.
    least_cost: float = field(init=False, default=1.0)  # Minimum cost of an entry in rounds: one place in a batch.

    def __post_init__(self) -> None:
        if self.max_weight:
            object.__setattr__(self, "unit", self.max_weight / self.max_batch)
            rounds = min(self.max_batch, BATCH_ROUNDS)
            object.__setattr__(self, "round_weight", self.max_weight / rounds)
            object.__setattr__(self, "least_cost", rounds / self.max_batch)

    def filling_up(self, line: CostLine | None) -> QueueLimits:
        """Return these limits for a model that pads and whose run times follow `line`. If `line` is None, the model doesn't
        pad, and nothing changes."""
        if line is None:
            return self
        fixed = min(line.alpha / line.beta / self.max_batch, MOST_WEIGHT) if line.beta else 0.0
        return replace(self, padding=Padding(line.longest, fixed))

    @property
    def weighs(self) -> bool:
        return self.max_weight > 0 or self.padding is not None

    def counting_rows(self) -> QueueLimits:
        """Return these limits for entries with rows: a batch's limit on entries becomes one on rows; see `headway.core.rows`."""
        most = self.max_weight if self.padding is not None else self.max_weight or self.max_batch
        return replace(self, max_weight=most, rows=True)

    def shed(self, tier: int, depth: int) -> int:
        """Return by how many entries the queue is too long to admit another one of a tier; 0 or less if it isn't."""
        if self.shed_at is None or tier == 0:
            return 0
        return depth + 1 - self.shed_at[0 if tier == self.tiers - 1 else 1]

    def weight(self, entry: Entry) -> int:
        """Return the weight of an entry, limited to that of a full batch. A heavier entry runs alone."""
        return min(entry.weight, self.max_weight) if self.max_weight else entry.weight

    def cost(self, entry: Entry) -> float:
        """Return how many rounds an entry costs its tenant. A batch that is full by number costs as much as one full by weight."""
        if self.padding is not None:
            return min(self.padded_cost(entry.weight), LOOKED_AT)
        if not self.max_weight:
            return 1
        return min(max(entry.weight / self.round_weight, self.least_cost), LOOKED_AT)

    def padded_cost(self, weight: float) -> float:
        """Return the cost in rounds of a place padded to this weight."""
        padding = self.padding
        return (padding.fixed + weight) / (padding.fixed + padding.longest) if padding is not None else 1.0

    def line_at(self, alpha: float, beta: float, longest: float) -> tuple[float, float]:
        """Return α and β for a batch that is padded to the weight `longest`, given the usual α and β."""
        padding = self.padding
        if padding is None:
            return alpha, beta
        each = (alpha + beta * self.max_batch) / (padding.fixed + padding.longest)
        return each * padding.fixed, each * longest / self.max_batch

    def size(self, count: int, weight: float) -> float:
        """Return the size of `count` entries: `count`, or `weight` converted to places in a batch if that is more. The size of
        a full batch is `max_batch`."""
        places = weight / self.unit
        return places if places > count else count

    def others(self, entry: Entry) -> float:
        """Return the size of the other entries that arrive with an entry. The entry is judged as if it came last."""
        others = entry.count - 1
        return self.size(others, others * self.weight(entry)) if others > 0 else 0

    def fits(self, ahead: float, entry: Entry, batches: float) -> bool:
        """Return True if `batches` batches have room for an entry and everything ahead of it."""
        return ahead + self.size(1, self.weight(entry)) <= batches * self.max_batch


OVERHEAD = 1000  # Bytes that an entry takes in addition to its input and parameters.
SMALL = 2048  # An entry with up to this many characters needs no reservation, because the number of entries is limited.

QUEUE_BYTES = 1 << 30  # Default limit in bytes on entries without an outcome.
ROOM_WAIT = 1.0  # Seconds that a client is asked to wait for room.


def bytes_of(entry: Entry) -> int:
    """Return the bytes that an entry must reserve, or 0 if it needs no reservation."""
    if len(entry.input) + len(entry.parameters) <= SMALL:
        return 0
    return _size(entry)


class Reservation:
    """Bytes reserved for an entry. They are freed once nothing refers to the reservation any more."""

    __slots__ = ("_room", "_size", "_tenant")

    def __init__(self, room: Room, tenant: str, size: int) -> None:
        self._room, self._tenant, self._size = room, tenant, size

    def give_to(self, queued: QueuedEntry) -> None:
        """Let an admitted entry hold the reservation, unless the entry already has its outcome."""
        if queued.state != GONE:
            queued.reservation = self

    def __del__(self) -> None:
        self._room.give_back(self._tenant, self._size)


class Room:
    """Bytes that entries take, in total and by tenant, up to `most`."""

    def __init__(self, most: int) -> None:
        self.free = most
        self._used: dict[str, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._used)

    def take(self, entry: Entry) -> Reservation | None:
        """Reserve bytes for an entry larger than SMALL. Returns None if its tenant would hold more than is free."""
        tenant, size = entry.tenant, _size(entry)
        used = self._used.get(tenant, 0) + size
        if used > self.free:
            return None
        self._used[tenant] = used
        self.free -= size
        return Reservation(self, tenant, size)

    def give_back(self, tenant: str, size: int) -> None:
        self.free += size
        left = self._used[tenant] - size
        if left:
            self._used[tenant] = left
        else:
            del self._used[tenant]


def _size(entry: Entry) -> int:
    return OVERHEAD + room(entry.input) + len(entry.parameters)
