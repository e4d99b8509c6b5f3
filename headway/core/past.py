"""Recent arrivals of a queue, and the number of clients that wait for their answers.

Arrivals are noted when their batch leaves, all at once, so that a request costs nothing extra.

A fixed number of clients, each of which asks again once answered, differs from an open load in two ways. At the end of a batch the
number of waiting or running entries nearly always equals the number of clients, whereas with Poisson arrivals it varies as much as
its mean. And arrivals follow soon after a batch, with its answers, whereas other arrivals come at any time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.batch import RunningBatches

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
        self.tells = False  # True once there has been a long record or any clients, so that it can be learnt from.

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
