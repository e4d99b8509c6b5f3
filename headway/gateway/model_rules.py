"""Rules of each model that a gateway serves: what its settings say of requests for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from headway.config import Settings
from headway.gateway.weigher import Weigher
from headway.model import Value, WorkerInfo, WorkerStatus


class ModelRules:
    """Rules of one model.

    Attributes:
        settings: settings of the model.
        version: version of the model, by which identical requests share answers.
        sharing: whether identical requests share answers.
        queue_timeout: seconds that a request may wait in the queue.
        longest: most seconds of a request in all; infinite where its connection sees to that.
        longest_task: most seconds of a task.
        weigher: weigher of inputs.
        weighs: whether inputs are weighed.
        weigh: returns the weight of an input.
    """

    __slots__ = (
        "longest", "longest_task", "queue_timeout", "settings", "sharing", "version", "weigh", "weigher", "weighs",
    )  # fmt: skip

    def __init__(self, model: str, settings: Settings, *, alone: bool) -> None:
        self.settings = settings
        self.version = settings.model_version
        self.sharing = settings.cache or settings.collapse
        self.queue_timeout = settings.queue_timeout_ms / 1000
        self.longest = math.inf if alone else settings.request_timeout_ms / 1000
        self.longest_task = math.inf if alone else settings.task_timeout_ms / 1000
        self.weigher = Weigher(settings, model)
        self.weighs = settings.max_batch_weight > 0
        self.weigh: Callable[[Value], int] = self.weigher.weigh


class RuleTable(dict[str, ModelRules]):
    """Rules by model; those of a model that is not served are `unserved`.

    Arguments:
        settings: settings of the process.
        models: names of the models at first.

    Attributes:
        unserved: rules of requests for any other model, which are refused.
    """

    def __init__(self, settings: Settings, models: Iterable[str]) -> None:
        super().__init__()
        of_each: Mapping[str, Settings] = settings.served
        alone = not settings.models
        self._settings: Mapping[str, Settings] = of_each
        self.unserved = ModelRules("", settings, alone=alone)
        for model in models:
            self[model] = ModelRules(model, of_each.get(model, settings), alone=alone)

    def __missing__(self, model: str) -> ModelRules:
        return self.unserved

    def serve(self, served: Mapping[str, Settings]) -> None:
        """Go by these settings from now on, and know no other models."""
        for gone in self.keys() - served.keys():
            del self[gone]
        for model, settings in served.items():
            if model not in self or self._settings.get(model) is not settings:
                self[model] = ModelRules(model, settings, alone=False)
        self._settings = served

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        """Take note of what workers report of weights and versions."""
        listed, versions = list(workers), defaultdict[str, set[str]](set)
        for worker in listed:
            if worker.status is WorkerStatus.HEALTHY and worker.runs.version:
                versions[worker.model].add(worker.runs.version)
        for model, rules in self.items():
            rules.weigher.learn(listed)
            if model in versions:  # Of two at once an answer may come from either; so neither's outcomes are taken.
                rules.version = ",".join(sorted(versions[model]))
