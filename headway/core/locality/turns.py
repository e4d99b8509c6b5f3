"""Turns of the models on one GPU: whose batch runs next.

Each model has a virtual time: its GPU seconds since it last began to wait (start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM
1996). The model with least goes first, so a flood of one model costs another at most the running batch. If two had about the same, the
more urgent one goes first: that whose most urgent entry has the least slack, in run times of its batch. Urgency alone isn't enough, as
a flooded model is always late.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from headway.core.queue import ModelQueue

LEAD = 0.5
"""Run times of the shorter batch up to which two models' virtual times count as equal."""


class Contender(msgspec.Struct, frozen=True):
    """Model that waits for the GPU.

    Attributes:
        model: name of the model.
        slack: seconds until its most urgent entry would be too late; infinite if unknown.
        seconds: expected run time of its next batch; 0 while unknown.
        waits: True if entries wait for it, as far as is known.
    """

    model: str
    slack: float = math.inf
    seconds: float = 0.0
    waits: bool = True

    @property
    def urgency(self) -> float:
        """Slack in run times; less is more urgent."""
        return self.slack / self.seconds if self.seconds > 0.0 else self.slack


def contender(model: str, queue: ModelQueue, now: float) -> Contender:
    """Return a model that waits for a GPU, with the figures of its next batch at instant `now`."""
    size = min(queue.depth, queue.limits.max_batch)
    return Contender(model, queue.next_due() - now, queue.service.seconds(size), queue.depth > 0)


class FairOrder:
    """Order of the models on one GPU."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        """Virtual instant at which the last batch of each model ended."""
        self._now = 0.0
        """Virtual time at which the last batch started."""

    def order(self, contenders: Collection[Contender]) -> list[str]:
        """Return the order in which to ask these models for a batch. The first model with a due batch runs it.

        Models without waiting entries come last."""
        if not contenders:
            return []
        starts = {rival.model: self._start(rival.model) for rival in contenders}
        waiting = [rival for rival in contenders if rival.waits] or contenders
        even = min(starts[rival.model] for rival in waiting) + LEAD * min(rival.seconds for rival in waiting)

        def rank(rival: Contender) -> tuple[bool, float, float, str]:
            start = starts[rival.model]
            return not rival.waits, -math.inf if start <= even else start, rival.urgency, rival.model

        return [rival.model for rival in sorted(contenders, key=rank)]

    def began(self, model: str) -> None:
        """Note that a batch of a model starts."""
        self._now = self._had[model] = self._start(model)

    def ended(self, model: str, seconds: float) -> None:
        """Note that a model's batch has ended after `seconds`."""
        self._had[model] = self._had.get(model, self._now) + seconds

    def forget(self, model: str) -> None:
        """Forget a model that has left the GPU."""
        self._had.pop(model, None)

    def _start(self, model: str) -> float:
        """Return the virtual instant at which a model's next batch would start. A model that was not asked for saves nothing up."""
        return max(self._had.get(model, 0.0), self._now)
