"""Past of a queue: what has come of late, and whether it comes from clients that wait for their answers.

Arrivals are noted when their batch leaves, all of it at once, so that a request costs nothing more.

As many clients as keep asking, each when it has its answer, are told from an open load by two things. At the end of a batch
as many entries as there are clients wait or run, nearly always; of Poisson arrivals that number varies as much as its mean.
And what has come since the batch before came soon after that, with the answers; other arrivals come at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.batch import RunningBatches

FEWEST = 1000
"""Fewest arrivals in a record."""
MOST = 6000
"""Most arrivals in a record, however many come."""
DECAY = 0.9
"""Weight of the past at each end of a batch that is heeded, for the number of clients."""
ENOUGH = 24
"""Batches after which clients may be seen."""
EVERY = 4
"""Ends of batches of which one is heeded: so it costs a quarter."""
REGULAR = 0.06
"""Variance of the entries that wait or run, over their mean, below which their number counts as constant."""
SOON = 0.3
"""Share of the time between the ends of two batches in which what comes of answers has come."""
STILL_SOON = 0.6
"""Likewise for clients who were seen before: where batches of several slots end at nearly one instant, the next end is near, too."""


class Past:
    """Arrivals of the last seconds, and the number of clients.

    Attributes:
        clients: clients that wait for their answers; 0 where arrivals come by themselves.
        last_end: instant at which a batch last came back.
        long: whether the record has enough arrivals to be taken.
        tells: whether there ever was a long record, or were clients: before that there is nothing to look at.
        each: mean size of an entry, by which the sizes of batches tell how many entries they have; 1 unless entries have rows.
    """

    __slots__ = (
        "_arrived",
        "_ends",
        "_from",
        "_gaps",
        "_soon",
        "_squares",
        "_sum",
        "_weight",
        "clients",
        "each",
        "last_end",
        "long",
        "tells",
    )

    def __init__(self) -> None:
        self._arrived: list[float] = []
        self._from = -math.inf
        """Instant from which on arrivals are noted."""
        self._ends = 0
        self.last_end = 0.0
        self._weight = self._sum = self._squares = self._gaps = self._soon = 0.0
        self.clients = 0
        self.each = 1.0
        self.long = self.tells = False

    def left(self, arrived: Sequence[float], now: float) -> None:
        """Note a batch that leaves, by the instants at which its members came."""
        noted = self._arrived
        if now >= self._from and len(noted) < MOST:
            noted += arrived
            if len(noted) >= FEWEST:
                self.long = self.tells = True

    def ended(self, waiting: int, running: RunningBatches, newest: float, now: float) -> None:
        """Note the end of a batch.

        Arguments:
            waiting: entries that wait.
            running: batches that run, this one included.
            newest: instant of the latest arrival.
            now: the instant.
        """
        self._ends += 1
        if self._ends % EVERY:
            self.last_end = now
            return
        together = waiting + running.size / self.each
        self._weight = self._weight * DECAY + 1.0
        self._sum = self._sum * DECAY + together
        self._squares = self._squares * DECAY + together * together
        if newest >= self.last_end:  # Where answers take no time, it is the very instant.
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
        """Take the record out, in order, if it spans so many seconds or is full; nothing more is noted until `resume`.

        Otherwise nothing is returned.
        """
        arrived = self._arrived
        if not self.long or (len(arrived) < MOST and arrived[-1] - arrived[0] < seconds):
            return []
        self.resume(math.inf)
        arrived.sort()
        return arrived

    def resume(self, at: float = -math.inf) -> None:
        """Begin a new record with the batches that leave from an instant on."""
        self._arrived = []
        self._from = at
        self.long = False
