"""Drains: a worker that has reported itself drained claims nothing until it is undrained, and then works again.

Failed requests need no rule here: a drain costs nothing (`tests.promises.faults.COSTS`), so it excuses no failure and
no second run.
"""

import math
from collections.abc import Iterator, Sequence

from tests.promises.faults import Drained
from tests.promises.operation import History, Run, Violation

SETTLED = 5.0
"""Seconds after a fault in which an order may not have arrived yet."""
SHARED = ("redis", "connections", "service")
"""Roles whose faults keep an order from reaching any worker."""


def drains(history: History) -> Iterator[Violation]:
    found = [one for one in history.faults if isinstance(one, Drained)]
    asked = {text for one in history.operations for text in one.texts} if found else set()
    asked.update(text for job in history.jobs for texts in job.lines.values() for text in texts)
    runs = [run for run in history.runs if not asked.isdisjoint(run.inputs)]  # Without the backend's warm-up runs.
    for one in found:
        yield from _Judge(history, one, runs).judge()


class _Judge:
    def __init__(self, history: History, drain: Drained, runs: Sequence[Run]) -> None:
        self._history, self._drain, self._runs = history, drain, runs
        self._story = f"{drain.whom}, worker of {drain.pid or 'any process'}, drained at {drain.began:.3f}"

    def judge(self) -> Iterator[Violation]:
        drain, undrained = self._drain, self._drain.undrained
        if drain.told is None:
            if undrained is not None and self._calm(drain.began, undrained):
                yield Violation("a drain that is not heard of", self._story)
        else:
            yield from self._claims(
                drain.told, min(math.inf if undrained is None else undrained, self._lost_after(drain.told))
            )
        if (
            undrained is not None
            and drain.back is None
            and drain.ended is not None
            and self._calm(undrained, drain.ended)
        ):
            yield Violation(
                "an undrained worker that does not work again", f"{self._story}, undrained at {undrained:.3f}"
            )

    def _claims(self, told: float, until: float) -> Iterator[Violation]:
        """Find anything that ran, or was healthy, while it was drained."""
        pid, host = self._drain.pid, self._drain.whom
        for run in self._runs:
            if told < run.began < until and run.host == host and pid in (0, run.pid):
                yield Violation(
                    "a drained worker runs something", f"{self._story}, told at {told:.3f}; run at {run.began:.3f}"
                )
        for sighting in self._history.evidence.sightings:
            if told < sighting.at < until and any(one.host == host and pid in (0, one.pid) for one in sighting.healthy):
                yield Violation("a drain that is forgotten", f"{self._story}; healthy at {sighting.at:.3f}")
                return

    def _lost_after(self, told: float) -> float:
        """Return the earliest time at which the drain itself may be lost."""
        losses = (one for one in self._history.faults if one.cost.loses)
        return min((max(one.began, told) for one in losses if (one.ended or math.inf) >= told), default=math.inf)

    def _calm(self, since: float, until: float) -> bool:
        """Return True if there was no fault in the process, or in anything shared, in this time or shortly before."""
        return not any(
            (one.whom == self._drain.whom or one.what.startswith(SHARED))
            and not isinstance(one, Drained)
            and one.began <= until
            and (one.ended or until) + SETTLED >= since
            for one in self._history.faults
        )
