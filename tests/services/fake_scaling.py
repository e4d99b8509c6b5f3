"""Driver of the autoscaler that records what it is asked for, and fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headway.errors import HeadwayError, ScalingRefused


class FakeScaling:
    """Recording driver. See `headway.ports.ScalingDriver`.

    Arguments:
        workers: workers of each model at first; others are refused.

    Attributes:
        workers: workers that the platform was last asked for, by model.
        asked: every call of `scale`.
        trouble: error that each call raises; None: calls succeed.
        answers: event without which no call returns; set at first.
    """

    def __init__(self, workers: Mapping[str, int]) -> None:
        self.workers = dict(workers)
        self.asked: list[tuple[str, int]] = []
        self.trouble: HeadwayError | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def current(self, model: str) -> int:
        await self._check(model)
        return self.workers[model]

    async def scale(self, model: str, workers: int) -> None:
        await self._check(model)
        self.asked.append((model, workers))
        self.workers[model] = workers

    async def _check(self, model: str) -> None:
        await self.answers.wait()
        if self.trouble is not None:
            raise self.trouble
        if model not in self.workers:
            raise ScalingRefused(f"{model!r} has no workers here. Name a model that has.")
