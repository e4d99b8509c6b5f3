"""Fair queueing: which entries leave next. Higher tiers go first, but a share is reserved for the lowest. Tenants of a tier take turns.

In a tier, entries are served in rounds, and a tenant gets one place in each. Its next entry goes into the round after its last entry's, or
into the first round that hasn't begun, whichever is later. So a tenant that floods the queue only fills more rounds of its own,
and a tenant that comes back after a pause hasn't saved anything up. This is self-clocked fair queueing with unit cost
(Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994), with integer tags and a bucket for
each, so that nothing is sorted. The virtual token counter does the same for inference (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024).

A large entry costs as many rounds as it has pages: its tenant's next entry waits that long. The large entry itself is served in the first
of these rounds. So a tenant that sends little waits no longer for a large entry than for a small one (start-time fair queueing:
Goyal, Vin and Cheng, SIGCOMM 1996). If batches are limited by weight, an entry costs rounds in proportion to its weight, but at
least its place in the batch, and several light entries of a tenant can share a round."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

import msgspec

from headway.model import Entry

# States of an entry: waiting for its first departure, running, waiting for another run, gone, following another entry.
QUEUED, RUNNING, RETRYING, GONE, FOLLOWS = 0, 1, 2, 3, 4
_COST, _WEIGHT, _DUE = attrgetter("cost"), attrgetter("weight"), attrgetter("queue_due")
_ENTRY, _TENANT = attrgetter("entry"), attrgetter("entry.tenant")
_HAS_LEFT = attrgetter("state")  # False only for QUEUED.
_EVEN = frozenset((1,))  # Costs of entries that take exactly one round.

PAGE = 64 << 10  # Characters of input and parameters that cost one round.
BATCH_PAGES = 16  # Limit on the pages of a batch's large entries if several tenants wait. A single entry may have more.
LOOKED_AT = 256  # Limit on rounds counted one by one to find what is served first, and on the cost of a weight.
BATCH_ROUNDS = 32  # Most rounds that a full batch's weight costs.
MEAN_WEIGHT = 0.02  # Weight of the newest arrival in a tier's mean entry weight.

STALE = 64  # Number of entries that may stay listed after they left, before the list is swept.
LOOK_AHEAD = 64  # Entries searched for one that fits a batch out of turn.
FORGET_ABOVE = 1024  # If more tenants than this have no waiting entries, those with only past rounds are forgotten.


class QueuedEntry(msgspec.Struct, eq=False):
    """An admitted entry and its state, owned by one queue. Compared by identity."""

    entry: Entry
    arrived: float  # Time of its admission in seconds.
    due: float  # Time by which it must be answered.
    queue_due: float  # Time by which it must have left for the first time.
    cost: float  # Rounds that it costs its tenant.
    weight: int  # Its weight, limited to that of a full batch; see `QueueLimits.weight`.
    held: object = None  # The gateway's object for it, returned with its output. If None, the gateway looks it up.
    pages: int = 1  # Pages of its input and parameters.
    attempts: int = 0  # Number of times it has left.
    reservation: object = None  # The memory reserved for it, until it has an outcome.
    round: float = 0  # Round of its tier queue in which it is served.
    state: int = QUEUED  # A queue drops an entry that is no longer QUEUED when it comes across it.
    hung: bool = False  # True if its last run was stopped at the GPU deadline.


def queued_at(entry: Entry, now: float, cost: float = 1, weight: int | None = None) -> QueuedEntry:
    """Admit an entry at time `now`, with a cost in rounds. `weight` replaces the entry's own weight, if given."""
    weight = entry.weight if weight is None else weight
    timeout, queue_timeout = entry.timeout, entry.queue_timeout
    length = len(entry.input) + len(entry.parameters)
    queue_due = now + (queue_timeout if queue_timeout < timeout else timeout)
    if length <= PAGE:
        return QueuedEntry(entry, now, now + timeout, queue_due, cost, weight)
    pages = -(-length // PAGE)
    return QueuedEntry(entry, now, now + timeout, queue_due, cost if cost > pages else pages, weight, pages=pages)


def entries_of(members: Sequence[QueuedEntry]) -> tuple[Entry, ...]:
    """Return the entries of a batch, in order."""
    return tuple(map(_ENTRY, members))


class TierQueue:
    """Waiting entries of one tier. Tenants are treated fairly."""

    __slots__ = (
        "_arrivals", "_begun", "_dropped", "_gaps", "_latest", "_next", "_rough", "_round", "_rounds", "depth", "mean", "shaped", "weight",
    )  # fmt: skip

    def __init__(self) -> None:
        self._round: list[QueuedEntry] = []  # Remaining entries of the round being served, last first.
        self._rounds: dict[float, list[QueuedEntry]] = {}  # Entries of the rounds that haven't begun.
        self._next: float = 1  # Number of the first round that hasn't begun.
        self._gaps: dict[float, int] = {}  # Number of dropped entries in each round that hasn't begun, if any.
        self._begun = 0  # Entries still queued in the round being served; kept so that a refusal needn't count them.
        self._latest: dict[str, float] = {}  # Last round that each tenant has paid for.
        # Last round paid for by an entry whose cost isn't one round, or whose tenant has used part of a round. Up to this round, a
        # tenant's entries may be several rounds apart, or share one. After it, every tenant has used whole rounds.
        self._rough = 0
        self._arrivals: deque[QueuedEntry] = deque()
        self._dropped = 0  # Dropped entries that are still in the rounds.
        self.depth = 0  # Number of queued entries.
        self.weight = 0  # Their weight.
        self.mean = 0.0  # Mean weight of recent arrivals, including refused entries; 0 before the first.
        self.shaped = False  # True if entries are weighed, and some may only run with entries of their own shape.

    def counted(self) -> Counter[str]:
        return Counter(queued.entry.tenant for queued in self._arrivals if queued.state == QUEUED)

    @property
    def tenants(self) -> int:
        """Number of tenants that have had entries in the queue since it was last empty."""
        return len(self._latest)

    def push(self, queued: QueuedEntry) -> None:
        """Add an entry to the first round in which its tenant has no entry yet."""
        self.push_all((queued,))

    def push_all(self, entries: Sequence[QueuedEntry]) -> None:
        if self._rough < self._next and _EVEN.issuperset(map(_COST, entries)):
            latest_of, rounds, next_round = self._latest, self._rounds, self._next
            for tenant, queued in zip(map(_TENANT, entries), entries, strict=True):
                number = latest_of.get(tenant, 0) + 1
                if number < next_round:
                    number = next_round
                queued.round = latest_of[tenant] = number
                if number in rounds:
                    rounds[number].append(queued)
                else:
                    rounds[number] = [queued]
        else:
            for queued in entries:
                self._push_rough(queued)
        self._arrivals += entries
        self.depth += len(entries)
        self.weight += sum(map(_WEIGHT, entries))

    def _push_rough(self, queued: QueuedEntry) -> None:
        """Place an entry whose cost isn't one round, or that comes after such entries."""
        tenant, cost = queued.entry.tenant, queued.cost
        latest = max(self._latest.get(tenant, 0), self._next - 1)
        queued.round = latest // 1 + 1
        self._latest[tenant] = latest = latest + cost
        self._rounds.setdefault(queued.round, []).append(queued)
        if cost != 1 or latest % 1:
            self._rough = max(self._rough, math.ceil(latest))

    def tidy(self) -> None:
        if len(self._arrivals) > 2 * self.depth + STALE:  # Many may have left behind a first one that still waits.
            self._arrivals = deque(queued for queued in self._arrivals if queued.state == QUEUED)

    def ahead(self, tenant: str) -> int:
        """Return an upper bound on the number of entries that are served before a tenant's next entry.

        The bound is the rest of the current round, plus the size of the next round times the number of rounds up to the
        tenant's own. No round is larger than the next one, because each tenant's entries occupy consecutive rounds. If costs
        aren't one round each, the sizes of all these rounds are added instead."""
        begun = self._begun
        first = int(self._next)
        rounds = max(int(self._latest.get(tenant, 0)) + 2 - first, 1)
        if self._rough < self._next:
            return min(self.depth, begun + rounds * self._wide(self._next))
        if rounds > LOOKED_AT:
            return self.depth
        return begun + sum(self._wide(number) for number in range(first, first + rounds))

    def _wide(self, number: float) -> int:
        return len(self._rounds.get(number, ())) - self._gaps.get(number, 0)

    def pop(self, pages: float | None = None, weight: float = math.inf, shape: int | None = None) -> QueuedEntry | None:
        """Take the entry whose turn it is, and mark it RUNNING. Returns None if it exceeds `pages` or `weight`. If its shape
        isn't `shape`, it stays, and the next entry of shape `shape` is taken at no cost; see `_pop_alike`."""
        places = self._round
        while self.depth:
            while places:
                queued = places.pop()
                if queued.state == QUEUED:
                    if pages is not None:
                        if shape is not None and queued.entry.shape != shape:
                            places.append(queued)
                            return self._pop_alike(pages, weight, shape)
                        if queued.pages > pages or queued.weight > weight:
                            places.append(queued)
                            return None
                    queued.state = RUNNING
                    queued.attempts = 1
                    self.depth -= 1
                    self._begun -= 1
                    self.weight -= queued.weight
                    if self.depth == 0:
                        self._reset()
                    return queued
                self._dropped -= 1
            if pages is not None:
                first = self._first()
                if shape is not None and first.entry.shape != shape:
                    return self._pop_alike(pages, weight, shape)
                if first.pages > pages or first.weight > weight:
                    return None
            places = self._begin()
        return None

    def _pop_alike(self, pages: float, weight: float, shape: int) -> QueuedEntry | None:
        """Take the first entry of a shape out of turn, at no cost, unless it has too many pages, is too heavy or too far behind."""
        for queued in itertools.islice(self.in_turn(), LOOK_AHEAD):
            if queued.entry.shape == shape:
                if queued.pages > pages or queued.weight > weight:
                    return None
                self._take_out(queued, RUNNING)
                queued.attempts = 1
                return queued
        return None

    def pop_of_fewest(self, limit: int, weight: float) -> QueuedEntry | None:
        """Take the first entry of the tenant whose next entries need the fewest batches. A batch has at most `limit`
        entries, all of one shape, which weigh at most `weight` in total. If the entry whose turn it is has no shape, it can run
        with any other and goes first. An entry that is taken out of turn costs nothing, as in `_pop_alike`."""
        ahead = list(itertools.islice(self.in_turn(), LOOK_AHEAD))
        if not ahead or not ahead[0].entry.shape:
            return self.pop()
        counts, weights, batches = Counter[tuple[str, int]](), Counter[tuple[str, int]](), Counter[str]()
        for queued in ahead:
            alike = queued.entry.tenant, queued.entry.shape
            counts[alike] += 1
            weights[alike] += queued.weight
        for alike, count in counts.items():
            batches[alike[0]] += math.ceil(max(count / limit, weights[alike] / weight))
        first = min(ahead, key=lambda queued: batches[queued.entry.tenant])
        if first is ahead[0]:
            return self.pop()
        self._take_out(first, RUNNING)
        first.attempts = 1
        return first

    def in_turn(self) -> Iterator[QueuedEntry]:
        left = self.depth
        if not left:  # The round numbers below never end.
            return
        coming = itertools.chain.from_iterable(self._rounds.get(number, ()) for number in itertools.count(self._next))
        for queued in itertools.chain(reversed(self._round), coming):
            if queued.state == QUEUED:
                yield queued
                left -= 1
                if not left:
                    return

    def take(self, count: int, *, small: bool) -> list[QueuedEntry]:
        """Take up to `count` entries of any weight, and mark them RUNNING. If `small`, stop before a large entry."""
        begun, rounds, number = self._round, self._rounds, self._next
        left = count if count < self.depth else self.depth
        if self._dropped or self._rough >= number - 1:
            taken = []
            while left and (queued := self.pop(1 if small else None)) is not None:
                taken.append(queued)
                left -= 1
            return taken
        taken = begun[: -left - 1 : -1]
        del begun[len(begun) - len(taken) :]
        if len(taken) < left:
            # No number is skipped: a tenant's entries are in consecutive rounds, starting with the next.
            coming = itertools.chain.from_iterable(map(rounds.__getitem__, itertools.count(int(number))))
            taken += itertools.islice(coming, left - len(taken))
            last = taken[-1]
            for whole in range(int(number), int(last.round)):
                del rounds[whole]
            places = rounds.pop(last.round)
            self._round = places[: places.index(last) : -1]
            number = last.round + 1
        for queued in taken:
            queued.state = RUNNING
            queued.attempts = 1
        self._begun, self._next = len(self._round), number
        self.depth -= len(taken)
        if self.depth == 0:
            self.weight = 0
            self._reset()
        else:
            self.weight -= sum(map(_WEIGHT, taken))
            self._forget_past()
        return taken

    def drop(self, queued: QueuedEntry) -> None:
        """Remove an entry for good. Its tenant gets the place back."""
        self._take_out(queued, GONE)
        self.tidy()

    def take_early(self, queued: QueuedEntry, cost: float) -> None:
        """Take an entry out of turn to run now. Its tenant pays `cost` rounds instead of the usual cost."""
        self._take_out(queued, RUNNING)
        queued.attempts = 1
        if self.depth:
            self.charge(queued.entry.tenant, cost)

    def charge(self, tenant: str, cost: float) -> None:
        """Delay a tenant's next entries by `cost` rounds."""
        self._latest[tenant] = latest = max(self._latest.get(tenant, 0), self._next - 1) + cost
        self._rough = max(self._rough, math.ceil(latest))

    def _take_out(self, queued: QueuedEntry, state: int) -> None:
        """Take an entry out, and set its state. Its tenant gets the place back."""
        queued.state = state
        tenant = queued.entry.tenant
        latest = self._latest.get(tenant, 0)
        if latest > self._next - 1:
            self._latest[tenant] = latest = latest - queued.cost
            if latest % 1:
                self._rough = max(self._rough, math.ceil(latest))
        if queued.round >= self._next:
            self._gaps[queued.round] = self._gaps.get(queued.round, 0) + 1
        else:
            self._begun -= 1
        self.depth -= 1
        self.weight -= queued.weight
        self._dropped += 1
        if self.depth == 0:
            self._reset()
        elif self._dropped > 2 * self.depth + STALE:
            self.sweep()

    def oldest(self) -> QueuedEntry | None:
        arrivals = self._arrivals
        _skip(arrivals)
        return arrivals[0] if arrivals else None

    def sweep(self) -> None:
        self._dropped = 0
        self._gaps.clear()
        for places in (self._round, *self._rounds.values()):
            places[:] = [queued for queued in places if queued.state == QUEUED]

    def _first(self) -> QueuedEntry:
        rounds = (self._rounds.get(number, ()) for number in itertools.count(self._next))
        return next(queued for places in rounds for queued in places if queued.state == QUEUED)

    def _begin(self) -> list[QueuedEntry]:
        number, rounds = self._next, self._rounds
        while number not in rounds:
            number += 1
        self._round = places = rounds.pop(number)
        places.reverse()
        self._begun = len(places) - self._gaps.pop(number, 0)
        self._next = number + 1
        self._forget_past()
        return places

    def _forget_past(self) -> None:
        if len(self._latest) > self.depth + FORGET_ABOVE:
            begun = self._next - 1
            self._latest = {tenant: latest for tenant, latest in self._latest.items() if latest > begun}

    def _reset(self) -> None:
        self._round = []
        self._dropped = 0
        self._rounds.clear()
        self._gaps.clear()
        self._begun = 0
        self._latest.clear()
        self._arrivals.clear()


def _skip(line: deque[QueuedEntry]) -> None:
    left = len(list(itertools.takewhile(_HAS_LEFT, line)))
    if left == len(line):
        line.clear()
    else:
        for _ in range(left):
            line.popleft()


class DeadlineQueue:
    """Queued entries, ordered by their queue deadline. Most arrive almost in order, because they have the configured timeout;
    they go into a deque. An entry that is due before the previous one goes into a heap, which is slower."""

    __slots__ = ("_full_at", "_heap", "_line", "_order")

    def __init__(self) -> None:
        self._line: deque[QueuedEntry] = deque()
        self._heap: list[tuple[float, int, QueuedEntry]] = []
        self._order = 0
        self._full_at = STALE  # If the deque and heap have more entries, those that left are swept.

    def push(self, queued: QueuedEntry) -> None:
        self.push_all((queued,))

    def push_all(self, entries: Sequence[QueuedEntry]) -> None:
        """Add one or more entries, keyed by their `queue_due`."""
        line = self._line
        last = line[-1].queue_due if line else -math.inf
        dues = list(map(_DUE, entries))
        if dues[0] >= last and dues == sorted(dues):
            line += entries
            return
        for queued, due in zip(entries, dues, strict=True):
            if due >= last:
                line.append(queued)
                last = due
            else:
                self._order += 1
                heapq.heappush(self._heap, (due, self._order, queued))

    def tidy(self) -> None:
        if len(self._line) + len(self._heap) > self._full_at:
            self._line = deque(queued for queued in self._line if queued.state == QUEUED)
            self._heap = [due for due in self._heap if due[2].state == QUEUED]
            heapq.heapify(self._heap)
            self._full_at = 2 * (len(self._line) + len(self._heap)) + STALE

    def earliest(self) -> float:
        """Return the time at which the first entry is due; infinite if none is waiting."""
        line, heap = self._line, self._heap
        _skip(line)
        while heap and heap[0][2].state != QUEUED:
            heapq.heappop(heap)
        first = line[0].queue_due if line else math.inf
        return min(first, heap[0][0]) if heap else first

    def overdue(self, now: float) -> Iterator[QueuedEntry]:
        while self.earliest() <= now:
            if self._heap and (not self._line or self._heap[0][0] < self._line[0].queue_due):
                yield heapq.heappop(self._heap)[2]
            else:
                yield self._line.popleft()
