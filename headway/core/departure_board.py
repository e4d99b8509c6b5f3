"""Limits of the departure board, and its history, whose rows add up the notices of all processes in the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.model.board import HistoryRow, Notice

RECENT_SECONDS = 180  # Seconds for which complete notices are kept.
RECENT_NOTICES = 4000  # Limit on the complete notices kept in one process, which posts four a second.
RECENT_BYTES = 16 << 20  # Approximate limit in bytes on the complete notices in Redis, to which many processes post.
HISTORY_SECONDS = 1800  # Seconds for which the fleet's counts and stats are kept.
STEP = 2  # Seconds of one row.
WATCH_SECONDS = 5.0  # Seconds after a request for the board during which it counts as watched.
RECORD_SECONDS = 3.0  # Seconds for which a process has the right to record the fleet's stats. It may renew the right.


def counts(notice: Notice) -> bool:
    """Return True if a notice adds to the history."""
    return notice.flow is not None or notice.fleet is not None or bool(notice.scalings)


def add_to(row: HistoryRow, notice: Notice) -> None:
    """Add a notice's counts to a row."""
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
    """Rows of the last half hour, beginning with `rows`."""

    def __init__(self, rows: Iterable[HistoryRow] = ()) -> None:
        self._rows = {row.step: row for row in rows}

    def add(self, notice: Notice) -> HistoryRow | None:
        """Add a notice's counts, and drop old rows. Returns the changed row, or None if the notice adds nothing."""
        if not counts(notice):
            return None
        step = int(notice.at // STEP)
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = HistoryRow(step)
            for old in [known for known in self._rows if known < step - HISTORY_SECONDS // STEP]:
                del self._rows[old]
        add_to(row, notice)
        return row

    def rows(self) -> Sequence[HistoryRow]:
        return [self._rows[step] for step in sorted(self._rows)]
