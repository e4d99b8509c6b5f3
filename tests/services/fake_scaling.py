"""Driver of the autoscaler that records what it is asked for, and fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headway.errors import HeadwayError, ScalingRefused


class FakeScaling:
    """Recording driver. See `headway.ports.ScalingDriver`.

    Arguments:
        workers: workers of each model at first; others are refused.
        slots: workers of one process.

    Attributes:
        workers: workers that the platform was last asked for, by model.
        asked: every call of `scale`.
        costs: costs as they were last marked.
        trouble: error that each call raises; None: calls succeed.
        answers: event without which no call returns; set at first.
    """

    def __init__(self, workers: Mapping[str, int], slots: int = 1) -> None:
        self.workers = dict(workers)
        self.asked: list[tuple[str, int]] = []
        self.costs: dict[str, int] = {}
        self.trouble: HeadwayError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._slots = slots

    async def current(self, model: str) -> int:
        await self._check(model)
        return self.workers[model]

    async def scale(self, model: str, workers: int) -> None:
        await self._check(model)
        self.asked.append((model, workers))
        self.workers[model] = -(-workers // self._slots) * self._slots

    async def mark(self, costs: Mapping[str, int]) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.costs = dict(costs)

    async def _check(self, model: str) -> None:
        await self.answers.wait()
        if self.trouble is not None:
            raise self.trouble
        if model not in self.workers:
            raise ScalingRefused(f"{model!r} has no workers here. Name a model that has.")
