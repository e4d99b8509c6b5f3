"""Bounds of the departure board: how much of it is kept, and for how long."""

from __future__ import annotations

from msgspec.structs import replace

from headway.model.board import Notice

RECENT_SECONDS = 180
"""Seconds for which whole notices are kept, with their departures."""
RECENT_NOTICES = 4000
"""Most whole notices."""
HISTORY_SECONDS = 1800
"""Seconds for which the counts and the figures of notices are kept."""
HISTORY_NOTICES = 40_000
"""Most of those over Redis, where many processes post."""
WATCH_SECONDS = 5.0
"""Seconds for which the board counts as watched after somebody has looked."""
RECORD_SECONDS = 3.0
"""Seconds for which a process has the right to record the figures of the fleet, unless it renews that."""


def coarse(notice: Notice) -> Notice | None:
    """Part of a notice that is kept for longer: its counts and figures; None where it has none."""
    if notice.flow is None and notice.fleet is None:
        return None
    return replace(notice, departures=(), changes=(), untold=0)
