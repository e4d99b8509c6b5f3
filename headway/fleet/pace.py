"""Intervals at which a process reports to the fleet, reads the reports of others, and makes the broker reap.

    works ──nothing arrives for RESTS_AFTER──▶ rests ──something arrives──▶ works

A gateway without requests rests, and so does a controller that doesn't lead. Each then makes one round trip to the broker every other
second. A process with workers never rests, because its workers must report at least once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.health import REST_EVERY, STANDBY_EVERY
from headway.errors import BrokerUnavailable
from headway.ports import Maintenance
from headway.runtime.periodic import PERIOD

RESTS_AFTER = 5.0


class Pace:
    """Pace of one process. It never rests unless `may_rest` is set."""

    def __init__(self, clock: Callable[[], float], *, may_rest: bool = True) -> None:
        self._clock, self._may_rest = clock, may_rest
        self._stirred_at = clock()

    def stir(self) -> None:
        self._stirred_at = self._clock()

    @property
    def rests(self) -> bool:
        """True if nothing has arrived for RESTS_AFTER seconds."""
        return self._may_rest and self._clock() - self._stirred_at >= RESTS_AFTER

    def every(self) -> float:
        """Return the seconds between heartbeats. An idle process also reads the others' reports at this interval."""
        return STANDBY_EVERY if self.rests else REST_EVERY


GRAIN = 0.01  # Minimum seconds between two calls.


async def reap_on(broker: Maintenance, every: Callable[[], float] = lambda: REST_EVERY) -> None:
    """Reap forever. The broker sets each pause (`every()` seconds if idle). If it is unavailable, pause for a second."""
    while True:
        try:
            pause = await broker.reap(every())
        except BrokerUnavailable:
            pause = PERIOD
        await asyncio.sleep(max(pause, GRAIN))
