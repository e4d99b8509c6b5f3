"""Find capacity that is never used: a healthy slot must run something under load.

A place is a slot, or a GPU that several models share. It is idle if it was healthy and undisturbed for a while, but ran
nothing although others with the same model were busy, or requests for it were refused or late.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.promises.evidence import Slot
from tests.promises.faults import Drained
from tests.promises.operation import ASKS, BAD, History, Operation, Run, Violation

WINDOW = 10.0
"""Seconds in which a place must run something."""
SETTLED = 5.0
"""Seconds until a new or recovered place is in use."""
GAP = 3.0
"""Maximum seconds between two looks at the registry that count as consecutive."""
BUSY = 0.3
"""Share of time for which the others are busy, on average, under load."""
REFUSED = 5
"""Number of refused or late requests that also count as load."""
WANTING = ("SERVICE_OVERLOADED", "NO_WORKERS", "DEADLINE_EXCEEDED")
"""Codes of requests that failed for lack of capacity."""

Looks = list[tuple[float, list[Slot]]]


def idle(history: History) -> Iterator[Violation]:
    """Find healthy places that run nothing under load, if the registry was recorded."""
    yield from _Judge(history).judge()


class _Judge:
    def __init__(self, history: History) -> None:
        self._history = history
        self._asked = [one for one in history.operations if one.kind in ASKS and one.code in WANTING]
        self._runs = defaultdict[int, list[Run]](list)
        for run in history.runs:
            self._runs[run.pid].append(run)
        self._places = defaultdict[str, Looks](list)
        for sighting in history.evidence.sightings:
            at_place = defaultdict[str, list[Slot]](list)
            for slot in sighting.healthy:
                at_place[slot.place].append(slot)
            for place, slots in at_place.items():
                self._places[place].append((sighting.at, slots))

    def judge(self) -> Iterator[Violation]:
        for place, looks in self._places.items():
            for since, slots in self._windows(looks):
                until = since + WINDOW
                if self._calm(slots, since, until) and not self._busy(slots, since, until):
                    why = self._load(place, slots, since, until)
                    if why:
                        story = f"{place} of {slots[0].host}, {since:.3f}–{until:.3f}: {why}"
                        yield Violation("a healthy slot that runs nothing under load", story)

    def _windows(self, looks: Looks) -> Iterator[tuple[float, list[Slot]]]:
        """Yield windows in which a place was healthy throughout, with its slots."""
        since, last = looks[0][0] + SETTLED, looks[0][0]
        seen: set[Slot] = set()
        for at, slots in looks:
            if at - last > GAP:
                since, seen = at + SETTLED, set()
            last = at
            seen.update(slots)
            if at - since >= WINDOW:
                yield since, sorted(seen)
                since, seen = at, set()

    def _calm(self, slots: Sequence[Slot], since: float, until: float) -> bool:
        """Return True if no fault hit the place, its host, or anything shared, in a window or shortly before."""
        host, pids = slots[0].host, {0, *(slot.pid for slot in slots)}
        return not any(
            (
                (fault.whom == host and (not isinstance(fault, Drained) or fault.pid in pids))
                or fault.what.startswith(("redis", "connections"))
            )
            and fault.began <= until
            and (fault.ended or until) + SETTLED >= since
            for fault in self._history.faults
        )

    def _busy(self, slots: Sequence[Slot], since: float, until: float) -> float:
        """Return how many seconds of a window the slots were running. Runs that raised have no end and don't count."""
        runs = [run for pid in {slot.pid for slot in slots} for run in self._runs[pid]]
        runs = [run for run in runs if run.ended or not any(text.startswith(BAD[1]) for text in run.inputs)]
        spans = [(max(run.began, since), min(run.ended or until, until)) for run in runs]
        return sum(max(0.0, end - begin) for begin, end in spans)

    def _load(self, place: str, slots: Sequence[Slot], since: float, until: float) -> str:
        """Describe the load that a place could have had in a window, or return an empty string."""
        queues = {(slot.model, slot.version) for slot in slots}
        shares = []
        for other, looks in self._places.items():
            there = {slot for at, found in looks if since <= at <= until for slot in found}
            if other != place and queues & {(slot.model, slot.version) for slot in there}:
                shares.append(self._busy(sorted(there), since, until) / WINDOW)
        if shares and sum(shares) / len(shares) >= BUSY:
            return f"{len(shares)} others were busy for {sum(shares) / len(shares):.0%} of the time"
        wanting = [one for one in self._asked if since <= (one.returned or one.called) <= until and _fits(one, slots)]
        return f"{len(wanting)} requests were refused or late, such as {wanting[0]}" if len(wanting) >= REFUSED else ""


def _fits(one: Operation, slots: Sequence[Slot]) -> bool:
    """Return True if a request names something that one of these slots runs, and had time to run."""
    return one.timeout >= 1.0 and any(one.model == slot.model and one.wanted == slot.version for slot in slots)
