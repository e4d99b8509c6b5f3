"""Reaper: calls the broker's housekeeping, which expires what is overdue on time and runs again what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.health import REST_EVERY
from headway.errors import BrokerUnavailable
from headway.ports import Maintenance
from headway.runtime.periodic import PERIOD

GRAIN = 0.01
"""Least seconds between two reaps."""


async def reap_on(broker: Maintenance, every: Callable[[], float] = lambda: REST_EVERY) -> None:
    """Reap for ever, as often as the broker wants it. A broker that does not answer is asked again a second later.

    `every`: returns the seconds after which the process calls again while nothing is due.
    """
    while True:
        try:
            pause = await broker.reap(every())
        except BrokerUnavailable:
            pause = PERIOD
        await asyncio.sleep(max(pause, GRAIN))
