"""Bulk entries: a class below all tiers, which fills empty seats of batches and runs on idle GPUs.

A bulk entry never makes a batch of regular entries leave, and isn't counted in any number that affects them, such as depth, arrival
rate or admission. It runs in one of two ways:

    seats   in a batch that leaves anyway, once all regular entries are packed
    whole   in a batch of bulk entries only, on a GPU that is expected to stay idle for the time of a batch

If run times hardly grow with size, bulk entries fill all empty seats. Otherwise, they fill only as many as the promised latency
of the regular entries allows. If the model pads, bulk entries heavier than all regular ones go last. A whole batch then has
entries of similar weight, and takes no longer than a full batch of regular entries.

A whole batch is a bet: a request that then finds no free GPU may wait as long as a batch takes. To make that rarer than
`QueueLimits.delayed`, enough GPUs are left free, assuming Poisson arrivals. A credit keeps track: each departing request earns
`delayed`, and each request that waited while bulk held a GPU costs 1. A bet needs enough credit. After QUIET seconds without a
request, bulk gets all GPUs.

The credit starts at FIRST_CREDIT, so that no job waits long while GPUs are idle. While the credit is enough for a bet, a single
whole batch may start even if no GPU is left for regular entries. This requires that no regular entry is waiting, and that at
most one is expected during the batch. After SETTLED seconds without a request, the earlier rate says little, and the batch may
start anyway.

Bulk entries that may fail, or are large, run `apart`: only in whole batches, with entries of one shape. If a batch fails, the
sender of its bulk entries has to search them for the bad one. The batch's regular entries run again, not yet suspected. (A bulk
class for a black-box target follows HyGen, arXiv 2501.14808, and ConServe, arXiv 2410.01228.)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter

import msgspec

from headway.core.departure import LEEWAY
from headway.core.fair_queue import QUEUED, RUNNING, QueuedEntry, TierQueue
from headway.core.packing import Nearness

STRETCH = 1.03  # A full batch counts as no longer than the departing batch if it takes up to this multiple of its time.
WITHIN = 0.8  # A batch with bulk entries should finish within this share of the promised latency.
QUIET = 30.0  # Seconds without a regular entry after which a fleet counts as idle.
FIRST_CREDIT = 1.0  # Initial credit.
SETTLED = 0.5  # Seconds without a regular entry after which their earlier rate no longer predicts the next.
SPACING = 0.8  # Smallest gap between whole batches, relative to an even gap. Keeps GPUs from becoming free together.
LOOK = 0.05  # Seconds after which to check again whether a whole batch may leave.
MOST_PAGES = 64  # Limit on the pages of the large entries in a whole batch, unless there is only one.
APART_AHEAD = 256  # Limit on entries searched for those that can run with the first entry that runs apart.
BATCHES_WAITING = 4  # Limit on waiting entries, in full batches per GPU. The sender holds back further entries.
_WEIGHT = attrgetter("weight")


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """Forecast for a whole batch that leaves now: how long the batch runs, and which regular entries arrive in the meantime."""

    seconds: float  # Expected run time of the batch in seconds.
    rate: float  # Regular arrivals per second.
    gap: float  # Shortest time in seconds between two regular departures; 0 for none.
    slots: int  # Live GPUs.
    whole: (
        float  # Whole GPUs that they amount to. On a GPU shared by several models, a batch would delay another model.
    )
    newest: float  # Time of the latest regular arrival; minus infinity for none.
    waiting: int = 0  # Regular entries that are waiting.


class BulkClass:
    """Bulk entries of one queue."""

    def __init__(self, delayed: float, most_credit: float) -> None:
        self._delayed, self._most_credit = delayed, most_credit
        self._seats, self._apart, self._again = TierQueue(), list[QueuedEntry](), list[QueuedEntry]()
        self.busy = 0  # Whole batches that are running.
        self.credit = FIRST_CREDIT  # Number of requests that may still be delayed.
        self.delayed = 0  # Requests that waited for a GPU that ran a whole batch.
        self._left = self._excused = self.ended = -math.inf

    @property
    def depth(self) -> int:
        return self._seats.depth + len(self._apart) + len(self._again)

    def push(self, queued: QueuedEntry) -> None:
        if _rides_apart(queued):
            self._apart.append(queued)
        else:
            self._seats.push(queued)

    def hand_back(self, members: Sequence[QueuedEntry]) -> None:
        """Put back entries that never ran, ahead of all other bulk entries."""
        self._seats.sweep()  # Entries that left out of turn are still listed.
        for queued in members:
            queued.state, queued.attempts = QUEUED, 0
        self._apart[:0] = [queued for queued in members if _rides_apart(queued)]
        self._again[:0] = [queued for queued in members if not _rides_apart(queued)]

    def drop(self, queued: QueuedEntry) -> None:
        for line in (self._apart, self._again):
            if queued in line:
                line.remove(queued)
                return
        self._seats.drop(queued)

    def fill(self, count: int, weight: float) -> list[QueuedEntry]:
        """Take entries for the empty seats of a batch, up to a number and a total weight."""
        taken: list[QueuedEntry] = []
        while len(taken) < count and weight > 0.0 and (queued := self._next(weight)) is not None:
            taken.append(queued)
            weight -= queued.weight
        self._seats.tidy()
        return taken

    def fill_near(
        self, count: int, weight: float, members: int, heaviest: int, near: Nearness, padded: float = 0.0
    ) -> list[QueuedEntry]:
        """Take entries closest in weight to the heaviest of a batch, if the model pads inputs. Lighter entries go first. Heavier
        entries are taken only while the padded batch weighs at most `padded`."""
        taken: list[QueuedEntry] = []
        for queued in self._by_nearness(heaviest, near.most):
            longest = max(queued.weight, heaviest)
            if len(taken) >= count or weight <= 0.0:
                break
            fits = queued.weight <= heaviest or (members + len(taken) + 1) * longest <= padded
            if fits and queued.weight <= weight:
                self._take_early(queued, near.cost(longest))
                taken.append(queued)
                weight -= queued.weight
        self._seats.tidy()
        return taken

    def _next(self, weight: float) -> QueuedEntry | None:
        if not self._again:
            return self._seats.pop() if weight == math.inf else self._seats.pop(1.0, weight)
        if self._again[0].weight > weight:
            return None
        queued = self._again.pop(0)
        queued.state, queued.attempts = RUNNING, 1
        return queued

    def _by_nearness(self, weight: int, most: int) -> list[QueuedEntry]:
        """Return the next entries: first those of at most the given weight, heaviest first, then the others, lightest first."""
        ahead = list(islice(chain(self._again, self._seats.in_turn()), most))
        lighter = sorted([queued for queued in ahead if queued.weight <= weight], key=_WEIGHT, reverse=True)
        return lighter + sorted([queued for queued in ahead if queued.weight > weight], key=_WEIGHT)

    def _take_early(self, queued: QueuedEntry, cost: float) -> None:
        """Take an entry out of turn. Its tenant pays a cost in rounds, unless the entry was handed back."""
        if queued in self._again:
            self._again.remove(queued)
            queued.state, queued.attempts = RUNNING, 1
        else:
            self._seats.take_early(queued, cost)

    def whole(
        self,
        count: int,
        weight: float,
        forecast: Forecast,
        now: float,
        near: Nearness | None = None,
        padded: float = 0.0,
    ) -> list[QueuedEntry]:
        """Take the entries of a whole batch. Entries that run apart go first, because they can't run otherwise. Pass `near` and
        `padded` if the model pads: the entries then have similar weight, and the padded batch weighs at most `padded`."""
        self.busy, self._left = self.busy + 1, now
        if now >= forecast.newest + QUIET:
            self._excused = now + 2.0 * forecast.seconds
        if self._apart:
            return self._take_apart(count, weight)
        first = self._next(math.inf)
        if first is None:
            return []
        weight -= first.weight
        if near is None:
            return [first, *self.fill(count - 1, weight)]
        count = min(count, int(padded / first.weight)) - 1
        return [first, *self.fill_near(count, weight, 1, first.weight, near, padded)]

    def _take_apart(self, count: int, weight: float) -> list[QueuedEntry]:
        """Take the first entry that runs apart, and as many of its shape as fit."""
        taken: list[QueuedEntry] = []
        pages = MOST_PAGES
        for queued in self._apart[:APART_AHEAD]:
            is_large = queued.pages > 1
            if not taken or (
                queued.entry.shape == taken[0].entry.shape
                and len(taken) < count
                and 0.0 < weight >= queued.weight
                and not (is_large and queued.pages > pages)
            ):
                queued.state, queued.attempts = RUNNING, 1
                taken.append(queued)
                weight -= queued.weight
                pages -= queued.pages if is_large else 0
        chosen = set(map(id, taken))
        self._apart = [queued for queued in self._apart if id(queued) not in chosen]
        return taken

    def back(self, now: float) -> None:
        self.busy, self.ended = self.busy - 1, now

    def earn(self, entries: int) -> None:
        """Record that regular entries left, and earn credit for them."""
        self.credit = min(self.credit + self._delayed * entries, self._most_credit)

    def charge(self, entries: int, now: float) -> None:
        """Record that regular entries waited for a GPU that ran a whole batch. The first entries after a lull cost nothing."""
        self.delayed += entries
        if now <= self._excused:
            return
        self.credit = max(self.credit - entries, -self._most_credit)

    def near(self, now: float) -> bool:
        """Return True if regular entries that leave now may have waited for a batch of bulk entries."""
        return self.busy > 0 or now - self.ended <= LEEWAY

    def opens_at(self, forecast: Forecast, now: float) -> float:
        """Return the earliest time at which a whole batch may start on an idle GPU or, if that isn't known yet, when to check again."""
        if not self.depth:
            return math.inf
        held = self.held(forecast, now)
        if held <= 0.0:
            return self._left + SPACING * forecast.seconds / max(forecast.slots, 1)
        return now + min(LOOK, held) if held < math.inf else held

    def held(self, forecast: Forecast, now: float) -> float:
        """Return the seconds until a whole batch may start on an idle GPU if no regular entry arrives; infinite if never."""
        if forecast.whole < forecast.slots:
            return math.inf
        left = forecast.slots - self.busy - 1
        affords = self.credit >= 1.0 and left > 0 and _none_left(forecast, left) <= self._delayed
        worst = max(forecast.rate * forecast.seconds, 1.0)
        if affords or (self._apart and self.credit >= worst) or self._may_begin(forecast, now):
            return 0.0
        return max(forecast.newest + QUIET - now, 0.0)

    def _may_begin(self, forecast: Forecast, now: float) -> bool:
        """Return True if regular entries arrive so rarely that a whole batch may start even on the last free GPU."""
        if self.busy or forecast.waiting or self.credit < 1.0:
            return False
        return forecast.rate * forecast.seconds <= 1.0 or now >= forecast.newest + SETTLED


def seats(alpha: float, beta: float, size: float, limit: float, waited: float, promise: float) -> float:
    """Return the size, at most `limit`, to which bulk entries may fill a batch. `size` is its size now. Size n takes `alpha` +
    `beta`·n seconds. The oldest entry has waited `waited` seconds. `promise` is the promised latency in seconds, or 0."""
    if alpha + beta * limit <= STRETCH * (alpha + beta * size):
        return limit
    return max(size, min(limit, (WITHIN * promise - waited - alpha) / beta))


def _none_left(forecast: Forecast, left: int) -> float:
    """Return the probability that regular entries need more than `left` GPUs while a whole batch runs."""
    mean = forecast.rate * forecast.seconds
    if forecast.gap > 0.0:
        mean = min(mean, forecast.seconds / forecast.gap)
    term = total = math.exp(-mean)
    for count in range(1, left):
        term *= mean / count
        total += term
    return 1.0 - total


def _rides_apart(queued: QueuedEntry) -> bool:
    return bool(queued.entry.shape) or queued.pages > 1
