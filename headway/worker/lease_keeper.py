"""Renewal of the lease of the batch that a slot runs, by calls that wait for nothing else of the broker's."""

from __future__ import annotations

import asyncio
import contextlib

from headway.core.health import HEARTBEAT_EVERY
from headway.errors import BrokerUnavailable
from headway.model import Lease
from headway.ports import WorkSource

TRIES = 3
"""Calls to which a lease leaves time: each may take this part of its seconds."""


class LeaseKeeper:
    """Keeper of one slot's lease.

    Arguments:
        broker: broker that granted it.

    Attributes:
        lease: lease of the batch that runs; None while none does.
    """

    def __init__(self, broker: WorkSource) -> None:
        self._broker = broker
        self._ended = False
        self.lease: Lease | None = None

    async def renew_on(self) -> None:
        """Renew the lease twice a second until `end`.

        A call that takes too long is given up and made again: the next one has another connection.
        """
        self._ended = False
        while not self._ended:
            await asyncio.sleep(HEARTBEAT_EVERY)
            if (lease := self.lease) is not None:
                with contextlib.suppress(BrokerUnavailable, TimeoutError):
                    async with asyncio.timeout((lease.expires_at - lease.granted_at) / TRIES):
                        await self._broker.extend(lease)

    def end(self) -> None:
        """Have the loop end: the slot runs nothing any more."""
        self._ended = True
