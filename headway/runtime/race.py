"""Ends of waits: of those that are no longer needed, and of a race, whose first that is over ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from headway.runtime.logger import get_logger

log = get_logger(__name__)

MOST_TRIES = 4
"""Most times that a task is cancelled until it is left running."""
TIDIES = 20.0
"""Seconds that a task has to tidy up which may have to end a worker's child, and reap it."""


async def race(*waits: Awaitable[Any], tidies: float = 5.0) -> list[asyncio.Future[Any] | None]:
    """Wait until one of these is over, and end the others; `tidies`: see `end`. A call that is cancelled ends all of them.

    Returns those that are over, in order; None in the place of one that was ended.
    """
    running = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return [one if one.done() else None for one in running]
    finally:
        await end(*running, tidies=tidies)


async def end(*waits: asyncio.Future[Any] | None, tidies: float = 5.0) -> None:
    """Cancel these, as far as there are any, and wait until they have ended, however they do.

    A cancellation can be lost: libraries catch it, and before Python 3.12 `asyncio.wait_for` returns in its place what has
    come at the same time. What has not ended after `tidies` seconds, in which it may tidy up, is cancelled again, as it is
    when this call is cancelled itself; what does not heed that either is left running.
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
            one.exception()  # Else asyncio would tell of an error that nobody has looked at.
    if cancelled:
        raise asyncio.CancelledError


async def end_all() -> None:
    """End all other tasks. The end of the event loop itself would wait for ever for one that loses its cancellation."""
    await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def heed_cancellation() -> None:
    """Raise the cancellation that the running task was asked for and has lost.

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
