"""Bounds of the departure board, and how the notices of all processes become the rows of its history.

A row has a fixed size, and is that of the whole fleet: half an hour takes as much memory with a hundred processes as with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.model.board import HistoryRow, Notice

RECENT_SECONDS = 180
"""Seconds for which whole notices are kept, with their departures."""
RECENT_NOTICES = 4000
"""Most whole notices in a process, which has four a second."""
RECENT_BYTES = 16 << 20
"""Bytes of whole notices over Redis, about, where many processes post."""
HISTORY_SECONDS = 1800
"""Seconds for which the counts and the figures of the fleet are kept."""
STEP = 2
"""Seconds of one row."""
WATCH_SECONDS = 5.0
"""Seconds for which the board counts as watched after somebody has looked."""
RECORD_SECONDS = 3.0
"""Seconds for which a process has the right to record the figures of the fleet, unless it renews that."""


def counts(notice: Notice) -> bool:
    """Return True if a notice has something for the history."""
    return notice.flow is not None or notice.fleet is not None or bool(notice.scalings)


def add_to(row: HistoryRow, notice: Notice) -> None:
    """Add what a notice counts to a row."""
    row.fleet = notice.fleet or row.fleet
    row.scalings += notice.scalings
    if (flow := notice.flow) is None:
        return
    row.ended += sum(flow.ended.values())
    row.answered += sum(flow.answered.values())
    row.refused += sum(flow.refused.values())
    row.failed += sum(flow.failed.values())
    for of_tier in flow.latencies.values():
        for bucket, count in of_tier.items():
            row.latencies[bucket] = row.latencies.get(bucket, 0) + count


class BoardHistory:
    """Rows of the last half hour.

    Arguments:
        rows: rows to begin with.
    """

    def __init__(self, rows: Iterable[HistoryRow] = ()) -> None:
        self._rows = {row.step: row for row in rows}

    def add(self, notice: Notice) -> HistoryRow | None:
        """Return the row to which the counts of a notice were added; None when there are none. What has become too old goes."""
        if not counts(notice):
            return None
        step = int(notice.at // STEP)
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = HistoryRow(step)
            for old in [one for one in self._rows if one < step - HISTORY_SECONDS // STEP]:
                del self._rows[old]
        add_to(row, notice)
        return row

    def rows(self) -> Sequence[HistoryRow]:
        """Return all rows, oldest first."""
        return [self._rows[step] for step in sorted(self._rows)]
