"""Bound on what is under way at once, where tenants take turns at the places that become free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headway.core.tenant_turns import TenantTurns


class FairSlots:
    """Places for what a process does at the same time: tenants take turns, each one's own come in their order.

    Arguments:
        count: most places in use at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = TenantTurns[asyncio.Future[None]]()
        """Futures of those that wait. Nobody waits while a place is free."""

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Have a place as long as the context lasts."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give()

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # It had its place already.
                self._give()
            raise

    def _give(self) -> None:
        """Give a place to the next, past those that wait no longer."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
