"""Bulk entries: a class below all tiers, which takes seats that would be empty and GPUs that would be idle.

A bulk entry is no reason for a batch of others to leave, and none of the figures that decide about others know of it: depth,
arrivals, admission. It rides in two ways.

    seats   in a batch that leaves anyway, once all others have been packed
    whole   in a batch of bulk entries alone, on a GPU that is expected to stay idle for the time of a batch

A batch takes as many bulk entries as its members can afford. Where the run time of a batch hardly grows with its size those are all
empty seats; else as many as keep the members within the latency that was promised. Where the model fills inputs up to the longest of a
call, none heavier than the heaviest member takes a seat while lighter ones wait, and a whole batch has entries of like weight, and takes no longer than a
full batch of others.

A whole batch is a bet. A request that comes meanwhile and finds no GPU waits for at most one batch. Arrivals during a batch are taken for
Poisson, so as many GPUs are left to others as make that rarer than `QueueLimits.delayed`. What happens is counted all the same:
each entry that has left earns that share of a credit, and each that has waited for a GPU while bulk had one costs one. No bet is
placed that the credit could not pay. Where nobody has asked for QUIET seconds the fleet counts as idle, and bulk has all its GPUs.

So that no job waits for long beside idle GPUs, the credit begins with FIRST_CREDIT. While it pays for one, one GPU at a time may begin a
whole batch though no other is left, if nothing waits and at most one request is expected meanwhile, or none has come for SETTLED
seconds: the rate of what came before tells little then.

Bulk entries that may fail, or that are large, ride `apart`: in whole batches alone, where their shapes say which belong together. A batch that
fails is searched by whoever sent its bulk entries. The others of it never hear of that: they run again, once, before anybody
suspects them. (The idea of such a class for a black box follows HyGen, arXiv 2501.14808, and ConServe, arXiv 2410.01228.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter

import msgspec

from headway.core.departure import LEEWAY
from headway.core.fair_queue import QUEUED, RUNNING, QueuedEntry, TierQueue
from headway.core.packing import Nearness

STRETCH = 1.03
"""Multiple of its expected run time up to which a full batch counts as no longer than the one that leaves."""
WITHIN = 0.8
"""Share of the promised latency by which a batch with bulk entries is expected to be back."""
QUIET = 30.0
"""Seconds without an entry of others after which a fleet counts as idle."""
FIRST_CREDIT = 1.0
"""Credit at first."""
SETTLED = 0.5
"""Seconds without an entry of others after which the rate of those before says no more whether one comes."""
SPACING = 0.8
"""Least gap between whole batches, as a share of the even one, so that GPUs do not all become free at once."""
LOOK = 0.05
"""Seconds after which a whole batch that may not leave yet is looked at again."""
MOST_PAGES = 64
"""Most pages of large entries in a whole batch together, unless it is a single one."""
APART_AHEAD = 256
"""Entries that are looked at for those that ride apart with the first."""
BATCHES_WAITING = 4
"""Full batches for each GPU that wait at most; whoever feeds bulk entries holds the rest."""
_WEIGHT = attrgetter("weight")


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """Forecast of a queue for the time of a whole batch that would leave now.

    Attributes:
        seconds: expected run time of the batch in seconds.
        rate: arrivals of others per second.
        gap: least seconds between two departures of others; 0 for none.
        slots: live GPUs.
        whole: whole GPUs that they come to. On a GPU that models share, a batch would delay another model.
        newest: instant of the latest arrival of others; minus infinity for none.
        waiting: others that wait.
    """

    seconds: float
    rate: float
    gap: float
    slots: int
    whole: float
    newest: float
    waiting: int = 0


class BulkClass:
    """Bulk entries of one queue.

    Attributes:
        busy: whole batches that run.
        credit: entries that may yet be delayed, less those that were.
        delayed: entries of others that have waited for a GPU that had a whole batch.
        ended: instant at which a whole batch came back last.
    """

    def __init__(self, delayed: float, most_credit: float) -> None:
        self._delayed, self._most_credit = delayed, most_credit
        self._seats, self._apart, self._again = TierQueue(), list[QueuedEntry](), list[QueuedEntry]()
        self.busy, self.credit, self.delayed = 0, FIRST_CREDIT, 0
        self._left = self._excused = self.ended = -math.inf

    @property
    def depth(self) -> int:
        """Entries that wait."""
        return self._seats.depth + len(self._apart) + len(self._again)

    def push(self, queued: QueuedEntry) -> None:
        """Let an entry wait."""
        if _rides_apart(queued):
            self._apart.append(queued)
        else:
            self._seats.push(queued)

    def hand_back(self, members: Sequence[QueuedEntry]) -> None:
        """Have entries that never ran wait anew, ahead of all others."""
        self._seats.sweep()  # Those that left out of turn still have their places there.
        for queued in members:
            queued.state, queued.attempts = QUEUED, 0
        self._apart[:0] = [queued for queued in members if _rides_apart(queued)]
        self._again[:0] = [queued for queued in members if not _rides_apart(queued)]

    def drop(self, queued: QueuedEntry) -> None:
        """Take an entry out that waits."""
        for line in (self._apart, self._again):
            if queued in line:
                line.remove(queued)
                return
        self._seats.drop(queued)

    def fill(self, count: int, weight: float) -> list[QueuedEntry]:
        """Take entries for the empty seats of a batch: so many at most, of so much weight together."""
        taken: list[QueuedEntry] = []
        while len(taken) < count and weight > 0.0 and (queued := self._next(weight)) is not None:
            taken.append(queued)
            weight -= queued.weight
        self._seats.tidy()
        return taken

    def fill_near(
        self, count: int, weight: float, members: int, heaviest: int, near: Nearness, padded: float = 0.0
    ) -> list[QueuedEntry]:
        """Take entries nearest in weight to the heaviest of a batch of so many members, where the model fills inputs up.

        Lighter ones go first. Heavier ones ride only as far as the batch weighs no more than `padded` with each place filled up.
        """
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
        """Take the next entry for a seat, unless it is heavier than this."""
        if not self._again:
            return self._seats.pop() if weight == math.inf else self._seats.pop(1.0, weight)
        if self._again[0].weight > weight:
            return None
        queued = self._again.pop(0)
        queued.state, queued.attempts = RUNNING, 1
        return queued

    def _by_nearness(self, weight: int, most: int) -> list[QueuedEntry]:
        """Of the entries whose turns come next those up to a weight, the heaviest first, then the others, the lightest first; of these by turn."""
        ahead = list(islice(chain(self._again, self._seats.in_turn()), most))
        lighter = sorted([queued for queued in ahead if queued.weight <= weight], key=_WEIGHT, reverse=True)
        return lighter + sorted([queued for queued in ahead if queued.weight > weight], key=_WEIGHT)

    def _take_early(self, queued: QueuedEntry, cost: float) -> None:
        """Take an entry out of turn, which costs its tenant so many rounds, unless it was handed back."""
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
        """Take the entries of a whole batch. What rides apart goes first, since it has no other way.

        With `near`, they are of like weight, and weigh no more than `padded` if each counts as the heaviest.
        """
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
        """Take the first entry that rides apart, and as many of its shape as fit."""
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
        """Note that a whole batch has ended."""
        self.busy, self.ended = self.busy - 1, now

    def earn(self, entries: int) -> None:
        """Note that entries of others have left."""
        self.credit = min(self.credit + self._delayed * entries, self._most_credit)

    def charge(self, entries: int, now: float) -> None:
        """Note that entries of others have waited for a GPU that had a whole batch. The first after a silence cost no credit."""
        self.delayed += entries
        if now <= self._excused:
            return
        self.credit = max(self.credit - entries, -self._most_credit)

    def near(self, now: float) -> bool:
        """Return True if others that leave now may have waited for a whole batch."""
        return self.busy > 0 or now - self.ended <= LEEWAY

    def opens_at(self, forecast: Forecast, now: float) -> float:
        """Return the instant from which a whole batch may leave on a GPU that is idle: the present one or before, or when to look again."""
        if not self.depth:
            return math.inf
        held = self.held(forecast, now)
        if held <= 0.0:
            return self._left + SPACING * forecast.seconds / max(forecast.slots, 1)
        return now + min(LOOK, held) if held < math.inf else held

    def held(self, forecast: Forecast, now: float) -> float:
        """Return the seconds until a whole batch may leave on a GPU that is idle, if no others come; 0 now; infinite: they ride in seats alone."""
        if forecast.whole < forecast.slots:
            return math.inf
        left = forecast.slots - self.busy - 1
        affords = self.credit >= 1.0 and left > 0 and _none_left(forecast, left) <= self._delayed
        worst = max(forecast.rate * forecast.seconds, 1.0)
        if affords or (self._apart and self.credit >= worst) or self._may_begin(forecast, now):
            return 0.0
        return max(forecast.newest + QUIET - now, 0.0)

    def _may_begin(self, forecast: Forecast, now: float) -> bool:
        """Return True if a whole batch may leave though no GPU is left to others: the first one, while hardly anybody comes."""
        if self.busy or forecast.waiting or self.credit < 1.0:
            return False
        return forecast.rate * forecast.seconds <= 1.0 or now >= forecast.newest + SETTLED


def seats(alpha: float, beta: float, size: float, limit: float, waited: float, promise: float) -> float:
    """Size up to which bulk entries may fill a batch.

    Arguments:
        alpha: fixed part of its run time in seconds.
        beta: seconds for each unit of its size.
        size: size of the batch without them.
        limit: size of a full batch.
        waited: seconds for which its oldest member has waited.
        promise: latency in seconds that was promised; 0 for none.
    """
    if alpha + beta * limit <= STRETCH * (alpha + beta * size):
        return limit
    return max(size, min(limit, (WITHIN * promise - waited - alpha) / beta))


def _none_left(forecast: Forecast, left: int) -> float:
    """Return the chance that so many GPUs are not enough for the batches of others that begin while a whole batch runs."""
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
