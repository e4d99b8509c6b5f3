"""Ends of tasks: cancel and wait for them, or let the first that finishes end the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from headway.runtime.logger import get_logger

log = get_logger(__name__)

MOST_TRIES = 4
"""Times that a task is cancelled before it is left running."""
TIDIES = 20.0
"""Seconds to tidy up for a task that may have to end a worker's child and reap it."""


async def race(*waits: Awaitable[Any], tidies: float = 5.0) -> list[asyncio.Future[Any] | None]:
    """Wait until one of these is done, and end the others; `tidies`: see `end`. If cancelled, end all of them.

    Returns the finished ones in order, with None for each that was ended.
    """
    running = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return [one if one.done() else None for one in running]
    finally:
        await end(*running, tidies=tidies)


async def end(*waits: asyncio.Future[Any] | None, tidies: float = 5.0) -> None:
    """Cancel these, except None, and wait until they have ended one way or another.

    A cancellation can get lost: libraries catch it, and before Python 3.12 `asyncio.wait_for` returns a result instead that
    came at the same time. What hasn't ended after `tidies` seconds is cancelled again, also if
    this call is cancelled itself; what ignores that, too, is left running.
    """
    there = [one for one in waits if one is not None]
    left = [one for one in there if not one.done()]
    cancelled = False
    for again in range(MOST_TRIES):
        if not left:
            break
        if again and not cancelled:
            log.warning("task does not end, cancelling it again", tasks=_named(left))
        for one in left:
            one.cancel()
        try:
            await asyncio.wait(left, timeout=tidies)
        except asyncio.CancelledError:
            cancelled = True
        left = [one for one in left if not one.done()]
    if left:
        log.error("task does not end, and is left running", tasks=_named(left))
    for one in there:
        if one.done() and not one.cancelled():
            one.exception()  # Otherwise asyncio would log it as never retrieved.
    if cancelled:
        raise asyncio.CancelledError


async def end_all() -> None:
    """End all other tasks. `asyncio.run` would wait for ever for one that lost its cancellation."""
    await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def heed_cancellation() -> None:
    """Raise CancelledError if the current task was cancelled and lost that.

    `asyncio.gather` raises the first error of its calls, so a call that fails as it is cancelled hides the
    cancellation of all. A loop that goes on after such an error asks here first.

    Raises:
        asyncio.CancelledError: somebody cancelled this task.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _named(waits: Iterable[asyncio.Future[Any]]) -> list[str]:
    """Return the name of each, and of the function that it runs."""
    return sorted(
        f"{one.get_name()}: {getattr(one.get_coro(), '__qualname__', '')}"
        if isinstance(one, asyncio.Task)
        else repr(one)
        for one in waits
    )
