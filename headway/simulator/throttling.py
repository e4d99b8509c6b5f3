"""Throttle of the lowest tier in a simulation: the production rules, fed with what the simulated workers do.

The gateways of a fleet share the room as their traffic does, so together they are one here.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.capacity import capacity
from headway.core.departure import Load
from headway.core.throttle import Throttle, room
from headway.model import Entry, WorkerInfo, WorkerStatus
from headway.simulator.fleet import Worker
from headway.simulator.scenario import Scenario

SET_EVERY = 0.5
"""Seconds between two times that the rate is set, as in gateways."""


class LowestTierThrottle:
    """Throttle of the lowest of several tiers.

    Arguments:
        scenario: scenario that is simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._lowest = len(scenario.mix) - 1
        self._throttle = Throttle()

    def refuses(self, entry: Entry, now: float) -> bool:
        """Decide whether a request is refused for the fleet's capacity. One that is not is counted."""
        if entry.tier < self._lowest:
            self._throttle.higher += 1
            return False
        return self._throttle.admit(entry.tenant, now) > 0.0

    def refund(self, entry: Entry) -> None:
        """Note that an entry was let in here, and refused by the queue."""
        if entry.tier == self._lowest:
            self._throttle.refund(entry.tenant)

    def set_rate(self, workers: Iterable[Worker], load: Load, now: float) -> None:
        """Set the rate by what the workers do.

        Arguments:
            workers: all workers.
            load: load of the queue.
            now: the instant.
        """
        found = capacity(
            "", [_reported(worker, load.entry_size) for worker in workers], load, self._scenario.target_utilisation
        )
        flow = self._throttle.count(now)
        self._throttle.set_rate(room(found, self._scenario.reserved_share, [flow]), now)


def _reported(worker: Worker, entry_size: float) -> WorkerInfo:
    """Worker as its heartbeat would describe it."""
    return WorkerInfo(
        worker_id=worker.name,
        model="",
        status=WorkerStatus.HEALTHY if worker.alive else WorkerStatus.OFFLINE,
        items_per_second=worker.pace.items_per_second / entry_size,
        estimated=worker.pace.estimated,
    )
