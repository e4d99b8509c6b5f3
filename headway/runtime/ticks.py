"""Ticks: instants at which all that is periodic in a process wakes up together.

Timers of the same instant cost one wake-up, and find the caches warm. What is due every so many seconds is due at the whole
multiples of that by the event loop's clock, so half-seconds and seconds meet.
"""

from __future__ import annotations

import asyncio
import math

EARLY = 0.1
"""Share of a period within which a tick that is near counts as passed: who wakes up a little early is not woken twice."""

HALF = 0.5
"""Period in seconds of the ticks at which long pauses end."""


def until_tick(every: float) -> float:
    """Return the seconds until the next tick of a period of `every` seconds: from a tenth of a period to a tenth more than one."""
    now = asyncio.get_running_loop().time()
    return (math.floor(now / every + EARLY) + 1) * every - now


def ending_at_tick(pause: float) -> float:
    """Return the pause in seconds, or a little less, so that one of half a second or more ends at a tick; one of a second, at a whole second."""
    now = asyncio.get_running_loop().time()
    if pause >= 1.0 and (at_second := math.floor(now + pause) - now) >= HALF / 2:
        return at_second
    at_tick = math.floor((now + pause) / HALF + EARLY * HALF) * HALF - now
    return at_tick if at_tick >= HALF / 2 else pause
