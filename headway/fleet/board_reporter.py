"""Reporter of a process to the departure board: one notice a second, four while somebody looks, and none while it rests and has nothing to tell.

Figures of the fleet are read as a notice is posted, and told with the next one, so that one call of the broker does for both. A board
out of reach is not waited for: what could not be told is lost, and the next notice goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from headway.fleet.pace import Pace
from headway.model import WorkerStatus
from headway.model.board import FleetFigures, Notice, Posted, RequestFlow
from headway.ports import Board, Fleet, Registry
from headway.runtime.counters import Counters
from headway.runtime.periodic import Periodic, PeriodicResource

PERIOD = 1.0
"""Seconds between two notices, and between two records of the fleet's figures."""
WATCHED_PERIOD = 0.25
"""Seconds between two notices while somebody looks."""
UNHEARD = Posted(watched=False, records=False)

K = TypeVar("K")


class FlowMeter:
    """Meter of the requests that a process ends.

    Arguments:
        counters: counters of the process.
        clock: monotonic seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters, self._clock = counters, clock
        self._at = clock()
        self._requests: dict[tuple[str, str, str], int] = {}
        self._refusals: dict[tuple[str, str, str], int] = {}
        self._latencies: dict[tuple[str, str], list[int]] = {}
        self._retries: dict[str, int] = {}

    def read(self) -> RequestFlow | None:
        """Requests since the last call; None when there was none."""
        counters, now = self._counters, self._clock()
        requests = _grown(self._requests, counters.requests)
        refusals = _grown(self._refusals, counters.refusals)
        retries = _grown(self._retries, counters.retries)
        seconds, self._at = now - self._at, now
        self._requests, self._refusals = dict(counters.requests), dict(counters.refusals)
        self._retries = dict(counters.retries)
        if not (requests or refusals or retries):
            return None
        answered: dict[str, int] = {}
        failed: dict[str, int] = {}
        ended: dict[str, int] = {}
        for (model, tier, outcome), count in requests.items():
            ended[model] = ended.get(model, 0) + count
            if outcome == "ok":
                answered[tier] = answered.get(tier, 0) + count
            else:
                failed[outcome] = failed.get(outcome, 0) + count
        refused: dict[str, int] = {}
        for (reason, _, _), count in refusals.items():
            refused[reason] = refused.get(reason, 0) + count
        return RequestFlow(seconds, answered, refused, failed, ended, self._latencies_grown(), retries)

    def _latencies_grown(self) -> dict[str, dict[int, int]]:
        grown: dict[str, dict[int, int]] = {}
        for key, histogram in self._counters.request_seconds.items():
            before = self._latencies.get(key)
            if before == histogram.counts:
                continue
            of_tier = grown.setdefault(key[1], {})
            for bucket, count in enumerate(histogram.counts):
                more = count - (before[bucket] if before is not None else 0)
                if more:
                    of_tier[bucket] = of_tier.get(bucket, 0) + more
            self._latencies[key] = histogram.counts.copy()
        return grown


class BoardReporter(PeriodicResource):
    """Reporter of one process, as a resource of it; see `headway.app.lifecycle.Resource`.

    Arguments:
        process: id of the process.
        board: board that gets the notices.
        registry: broker that knows queues and workers.
        fleet: fleet that knows the capacities.
        counters: counters of the process.
        clock: monotonic seconds.
        tiers: number of tiers.
        pace: pace of the process; None: it never rests.
    """

    def __init__(
        self,
        process: str,
        board: Board,
        registry: Registry,
        fleet: Fleet,
        counters: Counters,
        clock: Callable[[], float],
        tiers: int,
        pace: Pace | None = None,
    ) -> None:
        self._process, self._board, self._registry, self._fleet = process, board, registry, fleet
        self._counters, self._clock, self._tiers, self._pace = counters, clock, tiers, pace
        self._meter = FlowMeter(counters, clock)
        self._standing = UNHEARD
        self._recorded_at = clock()
        self._fleet_figures: FleetFigures | None = None
        """Figures that are still to be told."""
        super().__init__(Periodic("board reporter", self.report, clock, what="", every=self._every))

    def _every(self) -> float:
        return WATCHED_PERIOD if self._standing.watched else PERIOD

    async def report(self) -> None:
        """Post one notice, if there is anything to tell or to hear. A process that rests leaves the figures of the fleet to others.

        Raises:
            BrokerUnavailable: the board does not answer.
        """
        departures, changes, untold = self._counters.departures.take()
        scalings = self._counters.departures.take_scalings()
        (fleet, self._fleet_figures), flow = (self._fleet_figures, None), self._meter.read()
        notice, now = Notice(self._process, departures, changes, untold, flow, fleet, scalings=scalings), self._clock()
        rests = self._pace is not None and self._pace.rests
        standing, self._standing = self._standing, UNHEARD
        if rests and notice.empty:
            return
        posting = self._board.post(notice)
        if standing.records and not rests and now - self._recorded_at >= PERIOD * 0.9:
            self._recorded_at = now
            self._standing, self._fleet_figures = await asyncio.gather(posting, self._figures())
        else:
            self._standing = await posting

    async def _figures(self) -> FleetFigures:
        depths, workers, capacities = await asyncio.gather(
            self._registry.depths(), self._registry.workers(), self._fleet.capacities()
        )
        waiting, oldest = [0] * self._tiers, [0.0] * self._tiers
        for one in depths:
            if one.tier < self._tiers:
                waiting[one.tier] += one.depth
                oldest[one.tier] = max(oldest[one.tier], one.oldest_seconds)
        there = [worker for worker in workers if worker.status is not WorkerStatus.OFFLINE]
        return FleetFigures(
            tuple(waiting),
            tuple(round(seconds, 3) for seconds in oldest),
            round(sum(one.items_per_second for one in capacities), 1),
            round(sum(one.usable_per_second for one in capacities), 1),
            sum(worker.status is WorkerStatus.HEALTHY for worker in there),
            len(there),
        )


def _grown(before: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    """Differences of counts that have grown."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count != before.get(key, 0)}
