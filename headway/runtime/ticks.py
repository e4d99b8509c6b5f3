"""Ticks: instants at which all periodic work of a process wakes up together.

Timers at the same instant cost one wake-up, and find the CPU caches warm. A tick of a period is a whole multiple of it on the
event loop's clock. So ticks of half a second and of a second coincide.
"""

from __future__ import annotations

import asyncio
import math

EARLY = 0.1
"""Fraction of a period before a tick that counts as after it. Otherwise a timer that fires slightly early would fire twice."""

HALF = 0.5
"""Period in seconds of the ticks at which longer pauses end."""


def until_tick(every: float) -> float:
    """Return the seconds until the next tick of a period: 0.1 to 1.1 times `every`."""
    now = asyncio.get_running_loop().time()
    return (math.floor(now / every + EARLY) + 1) * every - now


def ending_at_tick(pause: float) -> float:
    """Return a pause of about `pause` seconds that ends at a tick: of a second if it is that long, otherwise of half a second.

    Short pauses don't change.
    """
    now = asyncio.get_running_loop().time()
    if pause >= 1.0 and (at_second := math.floor(now + pause) - now) >= HALF / 2:
        return at_second
    at_tick = math.floor((now + pause) / HALF + EARLY * HALF) * HALF - now
    return at_tick if at_tick >= HALF / 2 else pause
