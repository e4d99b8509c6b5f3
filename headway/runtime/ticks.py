"""Ticks: instants at which everything periodic in a process wakes up together.

Timers at the same instant cost one wake-up, and find the caches warm. A period of so many seconds ends at whole
multiples of it on the event loop's clock, so half-seconds and seconds coincide.
"""

from __future__ import annotations

import asyncio
import math

EARLY = 0.1
"""Share of a period before a tick in which it counts as passed, so that a timer that fires a little early isn't followed by another."""

HALF = 0.5
"""Period in seconds of the ticks at which long pauses end."""


def until_tick(every: float) -> float:
    """Return the seconds until the next tick of a period: between 0.1 and 1.1 of `every`."""
    now = asyncio.get_running_loop().time()
    return (math.floor(now / every + EARLY) + 1) * every - now


def ending_at_tick(pause: float) -> float:
    """Return a pause of about as many seconds that ends at a tick, if it is half a second or more; at a whole second, if it is one or more."""
    now = asyncio.get_running_loop().time()
    if pause >= 1.0 and (at_second := math.floor(now + pause) - now) >= HALF / 2:
        return at_second
    at_tick = math.floor((now + pause) / HALF + EARLY * HALF) * HALF - now
    return at_tick if at_tick >= HALF / 2 else pause
