"""Supervisor of long-lived loops.

A loop that ends, raises, or is cancelled by anybody but its supervisor is started again, after a pause that
grows while it keeps failing. So neither a cancelled client nor an exception in user code can wedge a service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headway.core.retry import backoff
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

CANCEL_AGAIN_AFTER = 20.0
"""Seconds that a cancelled loop has to tidy up; longer than a worker's child needs to be ended and reaped."""


class Supervisor:
    """Supervisor of named loops, which run until `stop`."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        """Tasks that have not ended, in the order in which they were started."""
        self._stopping = False

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `loop()` again and again; returns the task that does so."""
        task = asyncio.get_running_loop().create_task(self._keep(name, loop), name=f"supervisor of {name}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def stop(self) -> None:
        """Cancel all loops and wait until they are gone."""
        self._stopping = True
        tasks = tuple(self._tasks)
        await end(*tasks)

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            inner = asyncio.ensure_future(loop())
            try:
                await asyncio.wait({inner})
            except asyncio.CancelledError:
                await _cancelled(name, inner)
                if self._stopping:
                    raise
            error = None if inner.cancelled() else inner.exception()
            if error is None and not inner.cancelled():
                return
            failures += 1
            log.error("loop ended, starting it again", loop=name, error=repr(error), exc_info=error)
            await asyncio.sleep(backoff(failures, 1.0))


async def _cancelled(name: str, inner: asyncio.Future[None]) -> None:
    """Cancel a loop until it is gone. One that lost its cancellation, as code of others can, would go on for ever."""
    while True:
        inner.cancel()
        await asyncio.wait({inner}, timeout=CANCEL_AGAIN_AFTER)
        if inner.done():
            return
        log.warning("loop does not end, cancelling it again", loop=name)


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
