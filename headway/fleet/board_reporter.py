"""Posts notices about a process's work to the departure board.

This happens once a second, four times a second while somebody is watching, and never while the process is idle. The fleet's
figures are read while a notice is posted, in the same round trip, and sent with the next notice. Nothing is retried: if the board is
unreachable, the notice is lost."""

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

PERIOD = 1.0  # Seconds between two notices, and between two readings of the fleet's figures.
WATCHED_PERIOD = 0.25
UNHEARD = Posted(watched=False, records=False)

K = TypeVar("K")


class FlowMeter:
    """Counts what a process has answered, refused and retried since the last reading."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters, self._clock = counters, clock
        self._at = clock()
        self._requests: dict[tuple[str, str, str], int] = {}
        self._refusals: dict[tuple[str, str, str], int] = {}
        self._latencies: dict[tuple[str, str], list[int]] = {}
        self._retries: dict[str, int] = {}

    def read(self) -> RequestFlow | None:
        counters, now = self._counters, self._clock()
        requests = _grown(self._requests, counters.gateway.requests)
        refusals = _grown(self._refusals, counters.gateway.refusals)
        retries = _grown(self._retries, counters.broker.retries)
        seconds, self._at = now - self._at, now
        self._requests, self._refusals = dict(counters.gateway.requests), dict(counters.gateway.refusals)
        self._retries = dict(counters.broker.retries)
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
        for key, histogram in self._counters.gateway.request_seconds.items():
            before = self._latencies.get(key)
            if before == histogram.counts:
                continue
            tier_counts = grown.setdefault(key[1], {})
            for bucket, count in enumerate(histogram.counts):
                more = count - (before[bucket] if before is not None else 0)
                if more:
                    tier_counts[bucket] = tier_counts.get(bucket, 0) + more
            self._latencies[key] = histogram.counts.copy()
        return grown


class BoardReporter(PeriodicResource):
    """Posts a process's notices. A `headway.app.lifecycle.Resource`. Without a `pace`, the process never counts as resting."""

    def __init__(
        self, process: str, board: Board, registry: Registry, fleet: Fleet, counters: Counters, clock: Callable[[], float],
        tiers: int, pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self._process, self._board, self._registry, self._fleet = process, board, registry, fleet
        self._counters, self._clock, self._tiers, self._pace = counters, clock, tiers, pace
        self._meter = FlowMeter(counters, clock)
        self._standing = UNHEARD
        self._recorded_at = clock()
        self._fleet_figures: FleetFigures | None = None
        super().__init__(Periodic("board reporter", self.report, clock, what="", every=self._every))

    def _every(self) -> float:
        return WATCHED_PERIOD if self._standing.watched else PERIOD

    async def report(self) -> None:
        """Post a notice. A resting process posts no empty notices, and reads no figures of the fleet. Raises
        BrokerUnavailable."""
        departures, changes, untold = self._counters.departures.take()
        scalings = self._counters.departures.take_scalings()
        figures, self._fleet_figures = self._fleet_figures, None
        flow, now = self._meter.read(), self._clock()
        notice = Notice(self._process, departures, changes, untold, flow, figures, scalings=scalings)
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
        registry, fleet = self._registry, self._fleet
        depths, workers, capacities = await asyncio.gather(registry.depths(), registry.workers(), fleet.capacities())
        waiting, oldest = [0] * self._tiers, [0.0] * self._tiers
        for depth in depths:
            if depth.tier < self._tiers:
                waiting[depth.tier] += depth.depth
                oldest[depth.tier] = max(oldest[depth.tier], depth.oldest_seconds)
        online = [worker for worker in workers if worker.status is not WorkerStatus.OFFLINE]
        return FleetFigures(
            tuple(waiting),
            tuple(round(seconds, 3) for seconds in oldest),
            round(sum(capacity.items_per_second for capacity in capacities), 1),
            round(sum(capacity.usable_per_second for capacity in capacities), 1),
            sum(worker.status is WorkerStatus.HEALTHY for worker in online),
            len(online),
        )


def _grown(before: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    return {key: count - before.get(key, 0) for key, count in now.items() if count != before.get(key, 0)}
