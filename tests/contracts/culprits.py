"""Naive model of inputs that failed alone, for the state machines of the broker suite."""

from headway import errors
from headway.core.failures import CULPRIT
from headway.core.retry import SEARCHED
from headway.core.suspects import KNOWN_SECONDS
from headway.model import Cause, Entry, Failure

BOUNDARY = 0.01
"""Seconds by which the end of what is known may be off."""


class Culprits:
    """Inputs that failed alone, by model and tenant. What only raised may be forgotten when workers come."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], tuple[float, bool, int]] = {}
        self._doubtful: dict[tuple[str, str, str], float] = {}
        self._changes = 0

    def found(self, entry: Entry, cause: Cause, now: float) -> None:
        self._found[_asked(entry)] = now, cause not in SEARCHED, self._changes

    def perhaps(self, entry: Entry, now: float) -> None:
        self._doubtful[_asked(entry)] = now

    def workers_changed(self) -> None:
        self._changes += 1

    def judge(self, entry: Entry, verdict: Failure | None, now: float, *, runs: bool = True) -> bool:
        """Check the verdict of an enqueue; whether it is that of a known culprit. `runs`: nothing is kept for it, and nobody runs
        for it."""
        told = verdict is not None and verdict.reason == CULPRIT
        found_at, killed, changes = self._found.get(_asked(entry), (-KNOWN_SECONDS, False, 0))
        ends = found_at + KNOWN_SECONDS
        if told:
            assert verdict is not None
            assert verdict.code == errors.REJECTED_BY_MODEL
            assert entry.caller, "a replay runs"
            ends = max(ends, self._doubtful.get(_asked(entry), -KNOWN_SECONDS) + KNOWN_SECONDS)
            assert now < ends + BOUNDARY, "this tenant's input has not failed alone of late"
        elif runs and entry.caller and (killed or changes == self._changes):
            assert now > ends - BOUNDARY, "a known culprit is let in"
        return told


def _asked(entry: Entry) -> tuple[str, str, str]:
    return str(entry.queue), entry.tenant, str(entry.input)
