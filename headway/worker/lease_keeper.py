"""Renewal of the lease of the batch that a slot runs, by calls that wait for nothing else of the broker's."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from headway.core.health import HEARTBEAT_EVERY
from headway.errors import BrokerUnavailable
from headway.model import Lease
from headway.ports import WorkSource
from headway.runtime.ticks import until_tick

TRIES = 3
"""Calls to which a lease leaves time: each may take this part of its seconds."""


class LeaseKeeper:
    """Keeper of one slot's lease.

    Arguments:
        broker: broker that granted it.
        clock: monotonic seconds.

    Attributes:
        renewed_at: instant at which the last answer came that the lease is renewed.
    """

    def __init__(self, broker: WorkSource, clock: Callable[[], float]) -> None:
        self._broker, self._clock = broker, clock
        self.renewed_at = -math.inf
        self._ended = False
        self._lease: Lease | None = None
        self._there = asyncio.Event()

    @property
    def lease(self) -> Lease | None:
        """Lease of the batch that runs; None while none does."""
        return self._lease

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        self._lease = lease
        if lease is not None:
            self._there.set()

    async def renew_on(self) -> None:
        """Renew the lease twice a second until `end`. A slot that rests is not looked at.

        A call that takes too long is given up and made again: the next one has another connection.
        """
        self._ended = False
        while not self._ended:
            await asyncio.sleep(until_tick(HEARTBEAT_EVERY))
            if (lease := self._lease) is None:
                self._there.clear()
                await self._there.wait()
            else:
                with contextlib.suppress(BrokerUnavailable, TimeoutError):
                    async with asyncio.timeout((lease.expires_at - lease.granted_at) / TRIES):
                        if await self._broker.extend(lease):
                            self.renewed_at = self._clock()

    def end(self) -> None:
        """Have the loop end: the slot runs nothing any more."""
        self._ended = True
        self._there.set()
