"""Line of large bodies that have arrived, and of large answers that are made and sent bit by bit.

To read a body takes up to some tens of milliseconds of the event loop. So they wait here, one is read at a time, and then the loop is
left to everything else for as long as that took. Tenants take turns, so that a flood of one holds up no other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from headway.runtime.fair_turns import FairTurns

LARGE = 1 << 16
"""Bytes of a body from which it waits for its turn."""


class LargeBodies(FairTurns):
    """Line of one listener's large bodies and answers: tenants take turns, each one's bodies in the order in which they came.

    Arguments:
        loop: event loop that gives the turns; called within it alone.
        clock: monotonic seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock, loop)
