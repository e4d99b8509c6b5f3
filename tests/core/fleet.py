"""Runs a few GPUs on one queue in steps of a millisecond: enough of a simulator to see what the rules do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headway.core.admission import Refused
from headway.core.departure import Departure, Policy
from headway.core.queue import ModelQueue
from headway.model import Entry

STEP = 0.001


@dataclass
class Seen:
    """Events of a run. Batches are (left at, size, wait of the oldest), answers are (arrived, answered, entry)."""

    batches: list[tuple[float, int, float]] = field(default_factory=list)
    answered: list[tuple[float, float, Entry]] = field(default_factory=list)
    refused: list[tuple[float, Entry, Refused]] = field(default_factory=list)
    expired: list[tuple[float, Entry]] = field(default_factory=list)


def drive(
    queue: ModelQueue,
    policy: Policy,
    coming: Iterable[tuple[float, Entry]],
    slots: int,
    seconds: Callable[[int], float],
    until: float,
) -> Seen:
    """Offer the arrivals in order, and let `slots` GPUs take batches that run for `seconds(size)`. Stops at `until`."""
    queue.set_slots(slots)
    seen, arrivals = Seen(), iter(coming)
    upcoming = next(arrivals, None)
    free = [f"gpu-{number}" for number in range(slots)]
    running: list[tuple[float, Departure]] = []
    for step in range(int(until / STEP)):
        now = step * STEP
        while upcoming is not None and upcoming[0] <= now:
            offered = queue.offer(upcoming[1], now)
            if isinstance(offered, Refused):
                seen.refused.append((now, upcoming[1], offered))
            upcoming = next(arrivals, None)
        for back, departure in [run for run in running if run[0] <= now]:
            running.remove((back, departure))
            free.append(departure.worker)
            seen.answered += [(member.arrived, now, member.entry) for member in queue.finish(departure, now)]
        seen.expired += [(now, member.entry) for member in queue.expire(now)]
        while free and isinstance(departed := queue.depart(free[0], queue.limits.max_batch, policy, now), Departure):
            free.remove(departed.worker)
            size = len(departed.members)
            running.append((now + seconds(size), departed))
            seen.batches.append((now, size, now - min(member.arrived for member in departed.members)))
            seen.expired += [(now, member.entry) for member in departed.late]
    return seen
