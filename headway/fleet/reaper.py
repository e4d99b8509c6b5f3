"""Housekeeping that nobody asks a broker for: what is overdue is answered on time, what was lost runs again."""

from __future__ import annotations

import asyncio

from headway.errors import BrokerUnavailable
from headway.ports import Maintenance
from headway.runtime.periodic import PULSE

GRAIN = 0.01
"""Least seconds between two reaps."""


async def reap_on(broker: Maintenance) -> None:
    """Reap for ever, as often as the broker wants it; one that does not answer is asked again with the next beat."""
    while True:
        try:
            pause = await broker.reap()
        except BrokerUnavailable:
            pause = PULSE
        await asyncio.sleep(max(pause, GRAIN))
