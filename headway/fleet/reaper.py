"""Reaper: calls the broker's housekeeping, which expires what is overdue on time and runs again what was lost."""

from __future__ import annotations

import asyncio

from headway.errors import BrokerUnavailable
from headway.ports import Maintenance, Resting
from headway.runtime.periodic import PERIOD

GRAIN = 0.01
"""Least seconds between two reaps."""


async def reap_on(broker: Maintenance) -> None:
    """Reap for ever, as often as the broker wants it. A broker that does not answer is asked again a second later."""
    reap = broker.reap_and_rest if isinstance(broker, Resting) else broker.reap
    while True:
        try:
            pause = await reap()
        except BrokerUnavailable:
            pause = PERIOD
        await asyncio.sleep(max(pause, GRAIN))
