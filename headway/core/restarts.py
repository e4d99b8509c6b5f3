"""Pauses before a worker's backend is started again.

A backend that does not start, or starts well and dies before it was given anything, is started at ever longer
intervals. Only a finished batch or some seconds of life show that it is well. One that dies in a batch is started again
at once: the retry plan bounds how often that happens, and others may wait for the worker.
"""

from __future__ import annotations

FIRST_PAUSE = 0.25
"""Seconds of the first pause; doubles with each."""
PAUSE_CAP = 30.0
"""Longest pause, seconds."""
KILLED_CAP = 2.0
"""Longest pause in seconds after a start that was killed from outside: nothing is wrong with what was started."""
STEADY_LIFE = 5.0
"""Seconds of life that show that a backend is well."""


class RestartPauses:
    """Counter of starts in a row that came to nothing."""

    def __init__(self) -> None:
        self._failures = 0

    def well(self) -> None:
        """Note that the backend finished a batch."""
        self._failures = 0

    def start_failed(self, killed: bool) -> float:
        """Seconds to wait after a start that failed. `killed`: the process was killed from outside."""
        self._failures += 1
        return min(FIRST_PAUSE * 2.0 ** min(self._failures - 1, 16), KILLED_CAP if killed else PAUSE_CAP)

    def died_idle(self, lived: float) -> float:
        """Seconds to wait after a backend ended that ran nothing in the `lived` seconds of its life; 0 after the first."""
        if lived >= STEADY_LIFE:
            self._failures = 0
            return 0.0
        self._failures += 1
        return min(FIRST_PAUSE * 2.0 ** min(self._failures - 2, 16), PAUSE_CAP) if self._failures > 1 else 0.0
