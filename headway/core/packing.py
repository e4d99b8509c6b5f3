"""Who rides: tiers in order with a share kept for the lowest, tenants in turn inside a tier.

Inside a tier, each tenant is a flow with a virtual time that grows by one with every entry it gets served;
the flow that is furthest behind goes next. A tenant that comes back after a pause starts at the present
virtual time, so it cannot save up credit. This is start-time fair queueing with unit cost (Goyal, Vin and
Cheng, 1996), as the virtual token counter applies it to inference (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence

from headway.model import Entry

QUEUED, RUNNING, SUSPECT, GONE = 0, 1, 2, 3


class Queued:
    """An admitted entry and where it stands; owned by one queue.

    `queue_due` is the instant by which it must have left for the first time, `due` the one by which it must
    be answered. `state` is QUEUED (waits for its first departure), RUNNING, SUSPECT (its batch failed, or was handed back) or
    GONE; lanes and due lines drop what is no longer QUEUED when they meet it.
    """

    __slots__ = ("arrived", "attempts", "due", "entry", "queue_due", "state")

    def __init__(self, entry: Entry, now: float) -> None:
        self.entry = entry
        self.arrived = now
        self.due = now + entry.timeout
        self.queue_due = now + min(entry.queue_timeout, entry.timeout)
        self.attempts = 0
        self.state = QUEUED


class _Flow:
    __slots__ = ("line", "order", "tenant", "virtual")

    def __init__(self, tenant: str, virtual: float, order: int) -> None:
        self.tenant = tenant
        self.line: deque[Queued] = deque()
        self.virtual = virtual
        self.order = order

    def __lt__(self, other: _Flow) -> bool:
        return (self.virtual, self.order) < (other.virtual, other.order)


class Lane:
    """One tier's waiting entries, fair between tenants. `depth` counts those still queued."""

    __slots__ = ("_arrivals", "_flows", "_heap", "_orders", "_virtual", "depth")

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._heap: list[_Flow] = []
        self._arrivals: deque[Queued] = deque()
        self._virtual = 0.0
        self._orders = 0
        self.depth = 0

    def push(self, queued: Queued) -> None:
        """Add an entry at the end of its tenant's line."""
        tenant = queued.entry.tenant
        flow = self._flows.get(tenant)
        if flow is None:
            self._orders += 1
            flow = self._flows[tenant] = _Flow(tenant, self._virtual, self._orders)
            heapq.heappush(self._heap, flow)
        flow.line.append(queued)
        self._arrivals.append(queued)
        self.depth += 1

    def pop(self) -> Queued | None:
        """Take the entry whose turn it is; its state is left to the caller, `depth` is not."""
        heap = self._heap
        while heap:
            flow = heap[0]
            line = flow.line
            while line and line[0].state != QUEUED:
                line.popleft()
            if not line:
                heapq.heappop(heap)
                del self._flows[flow.tenant]
                continue
            queued = line.popleft()
            self._virtual = flow.virtual
            flow.virtual += 1.0
            if len(heap) > 1:
                heapq.heapreplace(heap, flow)
            self.depth -= 1
            return queued
        return None

    def oldest(self) -> Queued | None:
        """The entry that has waited longest, whoever's turn it is."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].state != QUEUED:
            arrivals.popleft()
        return arrivals[0] if arrivals else None


class DueLine:
    """Queued entries by the instant they are due.

    Deadlines come almost in order, since most requests use the configured timeout: those go to a deque, and
    only what is due sooner than the one before it pays for a heap.
    """

    __slots__ = ("_heap", "_line", "_order")

    def __init__(self) -> None:
        self._line: deque[Queued] = deque()
        self._heap: list[tuple[float, int, Queued]] = []
        self._order = 0

    def push(self, queued: Queued) -> None:
        """Add an entry, keyed by its `queue_due`."""
        if not self._line or queued.queue_due >= self._line[-1].queue_due:
            self._line.append(queued)
        else:
            self._order += 1
            heapq.heappush(self._heap, (queued.queue_due, self._order, queued))

    def earliest(self) -> float:
        """When the first is due; infinite when none waits."""
        line, heap = self._line, self._heap
        while line and line[0].state != QUEUED:
            line.popleft()
        while heap and heap[0][2].state != QUEUED:
            heapq.heappop(heap)
        first = line[0].queue_due if line else math.inf
        return min(first, heap[0][0]) if heap else first

    def overdue(self, now: float) -> Iterator[Queued]:
        """Take out all that are due by `now` and still queued."""
        while self.earliest() <= now:
            if self._heap and (not self._line or self._heap[0][0] < self._line[0].queue_due):
                yield heapq.heappop(self._heap)[2]
            else:
                yield self._line.popleft()


def reserved_places(limit: int, share: float) -> int:
    """Places of a batch of `limit` kept for lower tiers; at least one when a share is set and there is room."""
    if share <= 0.0 or limit < 2:
        return 0
    return max(1, int(limit * share))


def turns(lanes: Sequence[Lane], limit: int, share: float) -> Iterator[Lane]:
    """Whose lane each next place of the batch belongs to, until it is full or nothing waits.

    Tiers in order; but when more waits than fits, the last `reserved_places` go to the tiers below the
    highest one that waits, the longest wait first. The caller pops one entry from each lane it is given.
    """
    waiting = [lane for lane in lanes if lane.depth]
    lower = waiting[1:]
    contended = sum(lane.depth for lane in waiting) > limit
    kept = min(reserved_places(limit, share), sum(lane.depth for lane in lower)) if contended else 0
    left = limit - kept
    for lane in waiting:
        count = min(left, lane.depth)
        left -= count
        for _ in range(count):
            yield lane
    for _ in range(kept + left):
        oldest = [(found.arrived, index) for index, lane in enumerate(lower) if (found := lane.oldest()) is not None]
        if not oldest:
            return
        yield lower[min(oldest)[1]]
