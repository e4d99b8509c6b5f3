"""Numbers of workers that are only recorded, in place of the pools of a process."""

from collections.abc import Mapping

from headway.controller.autoscaler import LocalScaling


class FakeScaling(LocalScaling):
    """Records the numbers of workers that it was asked for."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        super().__init__({})
        self._workers = dict(workers)
        self.asked: list[tuple[str, int]] = []

    def current(self, model: str) -> int:
        return self._workers[model]

    def scale(self, model: str, workers: int) -> None:
        if workers != self._workers[model]:
            self._workers[model] = workers
            self.asked.append((model, workers))
