"""Deadlines of messages that are being read. All have the same time, so that one timer does for all."""

from __future__ import annotations

import asyncio
from typing import Any


class ReadDeadlines:
    """Deadlines of the tasks that read a message; a task reads one at a time.

    Arguments:
        seconds: seconds within which a message has to come.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reading: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> asyncio.Task[Any]:
        """Have the current task cancelled at the end of its time, unless `end` is called before. Returns the task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a message is read in a task")
        loop = asyncio.get_running_loop()
        self._reading[task] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)
        return task

    def end(self, task: asyncio.Task[Any]) -> bool:
        """Note that a task reads no more. False: it was cancelled, as its time was over."""
        return self._reading.pop(task, None) is not None

    def _look(self) -> None:
        """Cancel what is late, and look again when the next one would be."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = []
        for task, deadline in self._reading.items():  # In the order of their deadlines.
            if deadline > now:
                self._timer = loop.call_at(deadline, self._look)
                break
            late.append(task)
        for task in late:
            del self._reading[task]
            task.cancel()
