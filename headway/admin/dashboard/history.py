"""Half an hour of the fleet's counts and figures, put together from the notices of its processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from headway.core.departure_board import HISTORY_SECONDS
from headway.model.board import FleetFigures, Notice, RequestFlow
from headway.runtime.counters import SECONDS

STEP = 2
"""Seconds of one row."""
WINDOW = 10.0
"""Seconds of which the present rates and percentiles are."""
QUANTILES = (0.5, 0.95, 0.99)


class _Row:
    """Counts and figures of one step."""

    __slots__ = ("answered", "buckets", "ended", "failed", "figures", "refused")

    def __init__(self) -> None:
        self.ended = self.answered = self.refused = self.failed = 0
        self.buckets = [0] * (len(SECONDS) + 1)
        self.figures: FleetFigures | None = None


class FleetHistory:
    """Rows of the last half hour, and the rates and percentiles of the last seconds.

    Arguments:
        tiers: names of the tiers, highest first.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self._rows: dict[int, _Row] = {}
        self._changed: set[int] = set()
        self._flows: deque[tuple[float, RequestFlow]] = deque()

    def add(self, notice: Notice) -> None:
        """Add what a notice counts."""
        if notice.flow is None and notice.fleet is None:
            return
        step = int(notice.at // STEP)
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = _Row()
            oldest = step - HISTORY_SECONDS // STEP
            for old in [one for one in self._rows if one < oldest]:
                del self._rows[old]
        self._changed.add(step)
        row.figures = notice.fleet or row.figures
        if (flow := notice.flow) is not None:
            row.ended += sum(flow.ended.values())
            row.answered += sum(flow.answered.values())
            row.refused += sum(flow.refused.values())
            row.failed += sum(flow.failed.values())
            for counts in flow.latencies.values():
                for bucket, count in counts.items():
                    row.buckets[min(bucket, len(SECONDS))] += count
            self._flows.append((notice.at, flow))

    def rows(self) -> list[list[Any]]:
        """All rows, oldest first."""
        self._changed.clear()
        return [self._shown(step) for step in sorted(self._rows)]

    def changed(self) -> list[list[Any]]:
        """Rows that have changed since the last call."""
        steps = sorted(self._changed & self._rows.keys())
        self._changed.clear()
        return [self._shown(step) for step in steps]

    def recent(self, now: float) -> dict[str, Any]:
        """Rates per second and percentiles in seconds of the window that ends at broker instant `now`."""
        while self._flows and self._flows[0][0] < now - WINDOW:
            self._flows.popleft()
        answered: dict[str, int] = {}
        buckets: dict[str, list[int]] = {}
        reasons: dict[str, dict[str, float]] = {"refused": {}, "failed": {}, "retries": {}, "ended": {}}
        for _, flow in self._flows:
            for tier, count in flow.answered.items():
                answered[tier] = answered.get(tier, 0) + count
            for tier, counts in flow.latencies.items():
                of_tier = buckets.setdefault(tier, [0] * (len(SECONDS) + 1))
                for bucket, count in counts.items():
                    of_tier[min(bucket, len(SECONDS))] += count
            for name, found in reasons.items():
                for reason, count in getattr(flow, name).items():
                    found[reason] = found.get(reason, 0.0) + count
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
            **{
                name: dict(sorted(((key, count / WINDOW) for key, count in found.items()), key=lambda item: -item[1]))
                for name, found in reasons.items()
            },
        }

    def _shown(self, step: int) -> list[Any]:
        """Row as the page reads it: instant, rates, percentiles, and the figures of the fleet where they are known."""
        row = self._rows[step]
        rates = [count / STEP for count in (row.ended, row.answered, row.refused, row.failed)]
        figures = row.figures
        fleet = [None] * 5 if figures is None else [
            figures.waiting, max(figures.oldest, default=0.0), figures.capacity, figures.usable, figures.healthy,
        ]  # fmt: skip
        return [step * STEP, *rates, *percentiles(row.buckets), *fleet]


def percentiles(buckets: Sequence[int]) -> list[float | None]:
    """Percentiles in seconds of counts by bucket; None where nothing was counted."""
    total = sum(buckets)
    return [round(_quantile(buckets, share * total), 4) if total else None for share in QUANTILES]


def _quantile(buckets: Sequence[int], rank: float) -> float:
    """Value below which `rank` of the counted lie, taken as even within a bucket."""
    for low, high, count in _bounds(buckets):
        if rank <= count:
            return low + (high - low) * rank / count
        rank -= count
    return SECONDS[-1]


def _bounds(buckets: Sequence[int]) -> Iterator[tuple[float, float, int]]:
    """Lower and upper bound of each bucket that is not empty, and its count."""
    for index, count in enumerate(buckets):
        if count:
            yield SECONDS[index - 1] if index else 0.0, SECONDS[min(index, len(SECONDS) - 1)], count
