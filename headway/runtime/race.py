"""Ends of waits: of those that are no longer needed, and of a race, whose first that is over ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def race(*waits: Awaitable[Any]) -> list[asyncio.Future[Any] | None]:
    """Wait until one of these is over, and end the others. A call that is cancelled ends all of them.

    Returns those that are over, in order; None in the place of one that was ended.
    """
    running = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return [one if one.done() else None for one in running]
    finally:
        await end(*running)


async def end(*waits: asyncio.Future[Any] | None) -> None:
    """Cancel these, as far as there are any, and wait until they have ended, however they do."""
    there = [one for one in waits if one is not None]
    for one in there:
        one.cancel()
    await asyncio.gather(*there, return_exceptions=True)
