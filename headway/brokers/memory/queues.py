"""Queues of the memory broker, and the wake-ups of their idle workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from headway.core.batch_cost import is_news
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import CostLine, QueueName

TIMER_GRAIN = 0.001
"""Minimum delay of a timer in seconds, because event loops count in milliseconds."""


class Wakeups:
    """Idle workers of one queue, first come first woken, and a timer to wake the next.

    A woken worker is `coming` until it claims. Only then is another woken, if the claim leaves work.
    """

    def __init__(self) -> None:
        self.idle: dict[str, asyncio.Future[None]] = {}
        self.coming: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.looks_at = math.inf
        self.looks_soon = False

    def wake(self, worker: str) -> None:
        sleeper = self.idle.pop(worker, None)
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)
            self.coming.add(worker)

    def arm(self, at: float, now: float, look: Callable[[], None]) -> None:
        """Call `look` at instant `at` or sooner. An earlier timer stays, because `look` sets the next."""
        if at < self.looks_at:
            if self.timer is not None:
                self.timer.cancel()
            self.looks_at = at
            self.timer = asyncio.get_running_loop().call_later(max(at - now, TIMER_GRAIN), self._look, look)

    def look_soon(self, look: Callable[[], None]) -> None:
        """Call `look` in a later turn of the event loop. `looks_soon` is True until then."""
        self.looks_soon = True
        asyncio.get_running_loop().call_soon(self._look_now, look)

    def _look_now(self, look: Callable[[], None]) -> None:
        self.looks_soon = False
        look()

    def _look(self, look: Callable[[], None]) -> None:
        self.timer, self.looks_at = None, math.inf
        look()


class Queues(dict[QueueName, ModelQueue]):
    """Queues by name. Each model has a queue for any version, and a queue for each known version.

    Attributes:
        for_any: queue for any version of each model, and its wake-ups.
        rows: models whose entries have rows or shapes. See `core.rows.counted`.
    """

    def __init__(self, models: Mapping[str, QueueLimits]) -> None:
        super().__init__()
        self.limits: dict[str, QueueLimits] = {}
        self.wakeups: dict[QueueName, Wakeups] = {}
        self.for_any: dict[str, tuple[ModelQueue, Wakeups]] = {}
        self.rows: set[str] = set()
        self.padded: dict[str, CostLine | None] = {}
        self.know(models)

    def know(self, models: Mapping[str, QueueLimits]) -> None:
        """Add queues of these models. Existing queues keep their bounds."""
        for model in models.keys() - self.limits.keys():
            self.limits[model] = models[model]
            self.for_any[model] = self._add(QueueName(model), models[model])

    def count_rows(self, counted: Mapping[str, bool]) -> None:
        """Note for each known model whether its entries have rows and shapes, which decide their weight and which ride together."""
        for model, counts in counted.items():
            if model in self.limits and counts is not (model in self.rows):
                (self.rows.add if counts else self.rows.discard)(model)
                for name, queue in self.items():
                    if name.model == model:
                        queue.bound(self._bounds(model))

    def fill_up(self, lines: Mapping[str, CostLine]) -> None:
        """For models that pad, batch entries with others of similar weight."""
        for model in self.limits:
            line = lines.get(model)
            if is_news(line, self.padded.get(model)):
                self.padded[model] = line
                for name, queue in self.items():
                    if name.model == model:
                        queue.bound(self._bounds(model))

    def _bounds(self, model: str) -> QueueLimits:
        limits = self.limits[model].filling_up(self.padded.get(model))
        return limits.counting_rows() if model in self.rows else limits

    def has(self, name: QueueName) -> bool:
        """Return True if a queue of this name exists. If the name is another version of a known model, its queue is created."""
        if name in self:
            return True
        limits = self.limits.get(name.model)
        if limits is not None:
            self._add(name, self._bounds(name.model))
        return limits is not None

    def _add(self, name: QueueName, limits: QueueLimits) -> tuple[ModelQueue, Wakeups]:
        self[name], self.wakeups[name] = made = ModelQueue(limits), Wakeups()
        return made
