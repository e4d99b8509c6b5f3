"""Turns of the models on one GPU: whose batch runs next.

Each model has a virtual time: the GPU seconds that it has had, counted from when it last came to wait (start-time fair
queueing; Goyal, Vin and Cheng, SIGCOMM 1996). Whoever has had less goes first, so a flood of one model costs another at most
the batch that is running. Where two have had about the same, the more urgent goes first: the one whose oldest member has the
least slack, in run times of its batch. Urgency alone would not do: what is flooded is always late.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from headway.core.queue import ModelQueue

LEAD = 0.5
"""Run times of the shorter batch by which two models may differ in what they have had and still count as even."""


class Contender(msgspec.Struct, frozen=True):
    """Model that waits for the GPU.

    Attributes:
        model: name of the model.
        slack: seconds until the most urgent of its entries would be too late; infinite where nothing says so.
        seconds: expected run time in seconds of its next batch; 0 as long as it is not known.
        waits: whether anything waits for it, as far as is known.
    """

    model: str
    slack: float = math.inf
    seconds: float = 0.0
    waits: bool = True

    @property
    def urgency(self) -> float:
        """Slack in run times: the less, the more urgent."""
        return self.slack / self.seconds if self.seconds > 0.0 else self.slack


def contender(model: str, queue: ModelQueue, now: float) -> Contender:
    """Return the model that waits for a GPU, with what its queue says of the next batch at instant `now`."""
    size = min(queue.depth, queue.limits.max_batch)
    return Contender(model, queue.next_due() - now, queue.service.seconds(size), queue.depth > 0)


class FairOrder:
    """Order of the models on one GPU."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        """Virtual instant at which the last batch of each model ended."""
        self._now = 0.0
        """Virtual time: that of the last batch at its start."""

    def order(self, contenders: Collection[Contender]) -> list[str]:
        """Return the order in which these models are asked for a batch; the first that has one due runs it.

        Those for which nothing waits come last.
        """
        if not contenders:
            return []
        starts = {one.model: self._start(one.model) for one in contenders}
        waiting = [one for one in contenders if one.waits] or contenders
        even = min(starts[one.model] for one in waiting) + LEAD * min(one.seconds for one in waiting)

        def rank(one: Contender) -> tuple[bool, float, float, str]:
            start = starts[one.model]
            return not one.waits, -math.inf if start <= even else start, one.urgency, one.model

        return [one.model for one in sorted(contenders, key=rank)]

    def began(self, model: str) -> None:
        """Note that a batch of a model begins."""
        self._now = self._had[model] = self._start(model)

    def ended(self, model: str, seconds: float) -> None:
        """Note that the batch of a model has ended, after `seconds`."""
        self._had[model] = self._had.get(model, self._now) + seconds

    def forget(self, model: str) -> None:
        """Forget a model that has left the GPU."""
        self._had.pop(model, None)

    def _start(self, model: str) -> float:
        """Return the virtual instant at which the next batch of a model would begin. What nobody asked for is not saved up."""
        return max(self._had.get(model, 0.0), self._now)
