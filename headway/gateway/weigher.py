"""Weigher of inputs, where batches are bounded by weight: by their characters, or by what a function of the target counts.

That function runs in the workers, which report by which line its result follows from the length of an input. So an input
is weighed here without a call of user code, and without a look at more than its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.config import CHARS, Settings
from headway.core.weight_estimate import UNKNOWN, estimated, mean_line
from headway.model import Value, WorkerInfo, WorkerStatus


class Weigher:
    """Weigher of one gateway.

    Arguments:
        settings: settings of weights.
        model: name of the model; None: that of the settings.

    Attributes:
        line: line by which a function's weights are estimated.
        weigh: returns the weight of an input. An empty one weighs 1.
    """

    def __init__(self, settings: Settings, model: str | None = None) -> None:
        self.line = UNKNOWN
        self._model = settings.model if model is None else model
        self.weigh: Callable[[Value], int] = _one
        if settings.max_batch_weight:
            self.weigh = _characters if settings.weight == CHARS else self._estimate

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        """Take note of the lines that workers report. Without a healthy one what was known stays."""
        lines = (one.weight for one in workers if one.status is WorkerStatus.HEALTHY and one.model == self._model)
        self.line = mean_line(line for line in lines if line is not None) or self.line

    def _estimate(self, input: Value) -> int:
        return estimated(self.line, input)


def _one(input: Value) -> int:
    return 1


def _characters(input: Value) -> int:
    return len(input) or 1
