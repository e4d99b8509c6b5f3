"""Queues of the memory broker, with the wake-ups of the workers that wait at each."""

from __future__ import annotations

from collections.abc import Mapping

from headway.brokers.memory.wakeups import Wakeups
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import model_and_version


class Queues(dict[str, ModelQueue]):
    """Queues by their names: of each model one for any version, and one for each version that has been heard of.

    Arguments:
        models: bounds of the queues of each model.

    Attributes:
        limits: bounds of the queues of each model that is known.
        wakeups: wake-ups at each queue.
    """

    def __init__(self, models: Mapping[str, QueueLimits]) -> None:
        super().__init__()
        self.limits: dict[str, QueueLimits] = {}
        self.wakeups: dict[str, Wakeups] = {}
        self.know(models)

    def know(self, models: Mapping[str, QueueLimits]) -> None:
        """Have queues of these models too. The bounds of those that are there stay."""
        for model in models.keys() - self.limits.keys():
            self.limits[model] = models[model]
            self._add(model, models[model])

    def has(self, name: str) -> bool:
        """Whether there is a queue of a name. That of a version of a model that is known is made."""
        if name in self:
            return True
        limits = self.limits.get(model_and_version(name)[0])
        if limits is not None:
            self._add(name, limits)
        return limits is not None

    def _add(self, name: str, limits: QueueLimits) -> None:
        self[name], self.wakeups[name] = ModelQueue(limits), Wakeups()
