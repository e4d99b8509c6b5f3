"""The loop that has the broker expire overdue entries in time, and requeue the entries of lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.health import REST_EVERY
from headway.errors import BrokerUnavailable
from headway.ports import Maintenance
from headway.runtime.periodic import PERIOD

GRAIN = 0.01
"""Fewest seconds between two calls."""


async def reap_on(broker: Maintenance, every: Callable[[], float] = lambda: REST_EVERY) -> None:
    """Reap for ever, as often as the broker asks for, or after `every()` seconds. Try an unavailable broker again in a second."""
    while True:
        try:
            pause = await broker.reap(every())
        except BrokerUnavailable:
            pause = PERIOD
        await asyncio.sleep(max(pause, GRAIN))
