"""Functions that end tasks: all of them, or all but the first that finishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from headway.runtime.logger import get_logger

log = get_logger(__name__)

MOST_TRIES = 4  # Number of times to cancel a task before leaving it running.
TIDIES = 20.0  # Seconds to clean up, for a task that may have to end and reap a worker's child process.


async def race(*waits: Awaitable[Any], tidies: float = 5.0) -> list[asyncio.Future[Any] | None]:
    """Wait until one of the awaitables is done, and end the others. If cancelled, end them all. Return a list with the
    future of each awaitable that has finished, and None in place of each other one. For `tidies`, see `end`."""
    running = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return [wait if wait.done() else None for wait in running]
    finally:
        await end(*running, tidies=tidies)


async def end(*waits: asyncio.Future[Any] | None, tidies: float = 5.0) -> None:
    """Cancel tasks, and wait until they have ended. Skips None.

    Libraries may catch a cancellation, and before Python 3.12 `asyncio.wait_for` drops it if a result arrives at the same
    time. So a task that still runs after `tidies` seconds is cancelled again, even if this call is cancelled too. After
    MOST_TRIES, it is left running."""
    tasks = [task for task in waits if task is not None]
    running = [task for task in tasks if not task.done()]
    cancelled = False
    for again in range(MOST_TRIES):
        if not running:
            break
        if again and not cancelled:
            log.warning("task does not end, cancelling it again", tasks=_named(running))
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=tidies)
        except asyncio.CancelledError:
            cancelled = True
        running = [task for task in running if not task.done()]
    if running:
        log.error("task does not end, and is left running", tasks=_named(running))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # Otherwise asyncio would log it as never retrieved.
    if cancelled:
        raise asyncio.CancelledError


async def end_all() -> None:
    """End all other tasks. `asyncio.run` would wait forever for a task that lost its cancellation."""
    await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def heed_cancellation() -> None:
    """Raise CancelledError if the current task was cancelled but got another error instead, such as the first error of the
    calls in an `asyncio.gather`. Call this in a loop that continues after an error."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _named(waits: Iterable[asyncio.Future[Any]]) -> list[str]:
    return sorted(
        f"{wait.get_name()}: {getattr(wait.get_coro(), '__qualname__', '')}"
        if isinstance(wait, asyncio.Task)
        else repr(wait)
        for wait in waits
    )
