"""History on the dashboard: half an hour of the fleet's counts, and rates of the last seconds. `hub` sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from headway.core.departure_board import STEP, BoardHistory
from headway.model.board import HistoryRow, Notice, RequestFlow, ScalingChange
from headway.runtime.counters import SECONDS

WINDOW = 10.0
"""Seconds that current rates and percentiles cover."""
QUANTILES = (0.5, 0.95, 0.99)


class FleetHistory:
    """Rows of the last half hour, and current rates and percentiles. `tiers` are names, highest first. `rows` include `notices`."""

    def __init__(self, tiers: Sequence[str], rows: Iterable[HistoryRow] = (), notices: Iterable[Notice] = ()) -> None:
        self._tiers = tiers
        self._history = BoardHistory(rows)
        self._changed: dict[int, HistoryRow] = {}
        self._flows: deque[tuple[float, str, RequestFlow]] = deque()
        for notice in notices:
            self._note(notice)

    def add(self, notice: Notice) -> None:
        self._note(notice)
        if (row := self._history.add(notice)) is not None:
            self._changed[row.step] = row

    def rows(self) -> list[list[Any]]:
        """Return all rows, oldest first."""
        self._changed.clear()
        return [self._shown(row) for row in self._history.rows()]

    def scalings(self) -> list[list[Any]]:
        """Return all decisions of the autoscaler, oldest first, as `scaling_of` makes them."""
        return [scaling_of(row.step * STEP, change) for row in self._history.rows() for change in row.scalings]

    def changed(self) -> list[list[Any]]:
        """Return the rows that have changed since the last call."""
        changed, self._changed = self._changed, {}
        return [self._shown(changed[step]) for step in sorted(changed)]

    def recent(self, now: float) -> dict[str, Any]:
        """Return rates per second, and percentiles in seconds, of the WINDOW before broker time `now`."""
        while self._flows and self._flows[0][0] < now - WINDOW:
            self._flows.popleft()
        answered: dict[str, int] = {}
        buckets: dict[str, list[int]] = {}
        reasons: dict[str, dict[str, float]] = {"refused": {}, "failed": {}, "retries": {}, "ended": {}}
        processes: dict[str, float] = {}
        for _, process, flow in self._flows:
            processes[process] = processes.get(process, 0.0) + sum(flow.ended.values()) / WINDOW
            for tier, count in flow.answered.items():
                answered[tier] = answered.get(tier, 0) + count
            for tier, counts in flow.latencies.items():
                of_tier = buckets.setdefault(tier, [0] * (len(SECONDS) + 1))
                for bucket, count in counts.items():
                    of_tier[min(bucket, len(SECONDS))] += count
            for name, counted in reasons.items():
                for reason, count in getattr(flow, name).items():
                    counted[reason] = counted.get(reason, 0.0) + count
        everything = [sum(counts) for counts in zip(*buckets.values(), strict=True)]
        return {
            "window": WINDOW,
            "tiers": [
                {
                    "tier": tier,
                    "answered": answered.get(tier, 0) / WINDOW,
                    "latency": percentiles(buckets.get(tier, ())),
                }
                for tier in self._tiers
            ],
            "latency": percentiles(everything),
            "processes": processes,
            **{
                name: dict(sorted(((key, count / WINDOW) for key, count in counted.items()), key=lambda item: -item[1]))
                for name, counted in reasons.items()
            },
        }

    def _note(self, notice: Notice) -> None:
        if notice.flow is not None:
            self._flows.append((notice.at, notice.process, notice.flow))

    def _shown(self, row: HistoryRow) -> list[Any]:
        """Return a row as the page reads it: time, rates, percentiles, and the fleet's figures if known."""
        rates = [count / STEP for count in (row.ended, row.answered, row.refused, row.failed)]
        buckets = [0] * (len(SECONDS) + 1)
        for bucket, count in row.latencies.items():
            buckets[min(bucket, len(SECONDS))] += count
        figures = row.fleet
        fleet = [None] * 5 if figures is None else [
            figures.waiting, max(figures.oldest, default=0.0), figures.capacity, figures.usable, figures.healthy,
        ]  # fmt: skip
        return [row.step * STEP, *rates, *percentiles(buckets), *fleet]


def scaling_of(at: float, change: ScalingChange) -> list[Any]:
    """Return a scaling decision as the page reads it. `at` is the time of the notice that reported it."""
    return [round(at - change.ago, 1), change.model, change.before, change.desired, change.direction, change.reason]


def percentiles(buckets: Sequence[int]) -> list[float | None]:
    """Return percentiles in seconds from counts by bucket, or None if nothing was counted."""
    total = sum(buckets)
    return [round(_quantile(buckets, share * total), 4) if total else None for share in QUANTILES]


def _quantile(buckets: Sequence[int], rank: float) -> float:
    """Return the value below which `rank` of the counted values lie, assuming an even spread within each bucket."""
    for index, count in enumerate(buckets):
        if count and rank <= count:
            low, high = SECONDS[index - 1] if index else 0.0, SECONDS[min(index, len(SECONDS) - 1)]
            return low + (high - low) * rank / count
        rank -= count
    return SECONDS[-1]
