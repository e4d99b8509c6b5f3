"""Watcher of the workers, for all in a process that go by what they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.model import WorkerInfo
from headway.ports import Registry
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic, PeriodicResource

READ_WORKERS_EVERY = 0.5
"""Seconds between two looks at the workers."""
log = get_logger(__name__)


class Learner(Protocol):
    """Whatever goes by the reports of workers."""

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""


class WorkersWatcher(PeriodicResource):
    """Watcher of the workers; see `headway.app.lifecycle.Resource`.

    Arguments:
        learners: told of the workers in this order, as the first may change which models are served.
        registry: broker that knows the workers.
        clock: monotonic seconds.
        every: returns the seconds until the next look.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        registry: Registry,
        clock: Callable[[], float],
        every: Callable[[], float] = lambda: READ_WORKERS_EVERY,
    ) -> None:
        self._learners = learners
        self._registry = registry
        super().__init__(Periodic("kinds of models", self.look, clock, every=every))

    async def look(self) -> None:
        """Look at the workers once."""
        self.learn(await self._registry.workers())

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""
        for learner in self._learners:
            learner.learn(workers)
