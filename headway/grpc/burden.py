"""Burden of one client: the frames it sends that bring no message, minus the frames that its answers explain."""

from __future__ import annotations

import math

LIMIT = 10_000
"""Burden at which a client is cut off. At half of it, the client is told to open another connection."""
RELIEF = 500
"""Number of frames forgiven with each sweep."""
CANCELLED = 4
"""Number of frames that a cancelled call counts as, and that one frame of an answer explains."""
LEAST_PING = 9.0
"""Seconds between two pings that are always allowed: the client's ten seconds, minus a margin for the network."""
_EARLY_PINGS = 2
"""Number of earlier pings that are allowed in a row while nothing is sent to the client."""


class Burden:
    """Burden of one client, in `frames`."""

    __slots__ = ("_early_pings", "_pinged_at", "frames")

    def __init__(self) -> None:
        self.frames = self._early_pings = 0
        self._pinged_at = -math.inf

    def explain(self, frames: int) -> None:
        """Take some frames off the burden, and allow another ping, because part of an answer is sent."""
        self.frames -= min(self.frames, frames)
        self._early_pings, self._pinged_at = 0, -math.inf

    def relieve(self) -> None:
        self.frames -= min(self.frames, RELIEF)

    def ping(self, now: float) -> bool:
        """Count a ping at a monotonic instant. Return False if the client pings too often."""
        early, self._pinged_at = now < self._pinged_at + LEAST_PING, now
        self._early_pings += early
        return not early or self._early_pings <= _EARLY_PINGS
