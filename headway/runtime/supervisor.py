"""Supervisor of long-lived loops. If a loop raises, or is cancelled by anyone but the supervisor, it is restarted after a pause that
grows with each failure. So neither a cancelled client nor an exception in user code can stop a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headway.core.retry import backoff
from headway.runtime.logger import get_logger
from headway.runtime.race import TIDIES, end

log = get_logger(__name__)


class Supervisor:
    """Supervisor of named loops, which run until `stop`."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # Running tasks, in the order of their start.
        self._stopping = False

    def start(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run `loop()`, and run it again if it fails, until it returns or `stop` is called. Returns the supervising task."""
        task = asyncio.get_running_loop().create_task(self._keep(name, loop), name=f"supervisor of {name}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def stop(self) -> None:
        self._stopping = True
        await end(*self._tasks, tidies=TIDIES)

    async def _keep(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        failures = 0
        while True:
            inner = asyncio.get_running_loop().create_task(loop(), name=name)
            try:
                await asyncio.wait({inner})
            except asyncio.CancelledError:
                await end(inner, tidies=TIDIES)
                if self._stopping:
                    raise
            error = None if inner.cancelled() else inner.exception()
            if error is None and not inner.cancelled():
                return
            failures += 1
            log.error("loop ended, restarting it", loop=name, error=repr(error), exc_info=error)
            await asyncio.sleep(backoff(failures, 1.0))
