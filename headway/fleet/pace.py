"""Pace of a process: how often it tells the fleet of itself, and asks for what the fleet tells of others.

    works ──nothing came for RESTS_AFTER──▶ rests ──something comes──▶ works

A gateway rests to which nothing comes, and a controller that does not lead. A process with workers never does: each of these
says once a second at least that it is there. Whoever rests tells and asks all in one call of the broker every other second.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core.health import REST_EVERY, STANDBY_EVERY

RESTS_AFTER = 5.0
"""Seconds without anything to do after which a process rests. A fleet changes most while it comes up."""


class Pace:
    """Pace of one process.

    Arguments:
        clock: monotonic seconds.
        may_rest: whether it ever rests.
    """

    def __init__(self, clock: Callable[[], float], *, may_rest: bool = True) -> None:
        self._clock, self._may_rest = clock, may_rest
        self._stirred_at = clock()

    def stir(self) -> None:
        """Note that there is something to do."""
        self._stirred_at = self._clock()

    @property
    def rests(self) -> bool:
        """Whether there was nothing to do for a while."""
        return self._may_rest and self._clock() - self._stirred_at >= RESTS_AFTER

    def every(self) -> float:
        """Seconds between two heartbeats of the process, and between two looks while there is nothing to do."""
        return STANDBY_EVERY if self.rests else REST_EVERY
