"""Deadlines of messages that are being read. All have the same time, so that one timer does for all."""

from __future__ import annotations

import asyncio
from typing import Any


class ReadDeadlines:
    """Deadlines of the tasks that read a message, each for a reader; a task reads for one at a time.

    A reader never gets to hold its task, as a task that is cancelled holds what it has run.

    Arguments:
        seconds: seconds within which a message has to come.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reading: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reader: object) -> None:
        """Have the current task cancelled at the end of its time, unless `end` is called before."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a message is read in a task")
        loop = asyncio.get_running_loop()
        self._reading[reader] = loop.time() + self._seconds, task
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def end(self, reader: object) -> bool:
        """Note that a reader reads no more. False: its task was cancelled for its time alone, and goes on."""
        if self._reading.pop(reader, None) is not None:
            return True
        task = asyncio.current_task()
        return task is None or task.uncancel() > 0

    def _look(self) -> None:
        """Cancel what is late, and look again when the next one would be."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = []
        for reader, (deadline, _) in self._reading.items():  # In the order of their deadlines.
            if deadline > now:
                self._timer = loop.call_at(deadline, self._look)
                break
            late.append(reader)
        for reader in late:
            self._reading.pop(reader)[1].cancel()
