"""Reader of the arrival instants of a recorded trace: text lines in, seconds out.

A trace is CSV, of one of two shapes: with a header line that names a `TIMESTAMP` column, whose cells are ISO 8601
times (`2023-11-16 18:17:03.9799600`, as in the Azure LLM inference traces) or seconds; or one bare column of
seconds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from headway.errors import SettingError

COLUMN = "TIMESTAMP"


def instants(lines: Iterable[str], name: str, setting: str = "--arrivals") -> Iterator[float]:
    """The arrivals of a trace, in seconds from its first one, one at a time.

    Arguments:
        lines: the text of the trace, line by line.
        name: name of the trace in errors, for example its path.
        setting: name in errors of the setting that it came from.

    Raises:
        SettingError: while iterating: no TIMESTAMP column, an instant that cannot be read, or one that is
            earlier than the one before it; with the number of the line.
    """
    column: int | None = None
    read: Callable[[str], float] | None = None
    before = -math.inf
    for line, cells in _rows(lines, name, setting):
        if column is None:
            column, heads = _column(cells, name, setting)
            if heads:
                continue
        text = cells[column].strip() if column < len(cells) else ""
        try:
            if read is None:
                read = _reading(text)
            instant = read(text)
        except (ValueError, TypeError):
            reason = f"line {line}: {text!r} is not an instant like the others"
            raise SettingError(
                setting, name, reason, f"Write seconds or YYYY-MM-DD HH:MM:SS.ffffff in {COLUMN}."
            ) from None
        if instant < before:
            reason = f"line {line}: {text!r} is earlier than the line before it"
            raise SettingError(setting, name, reason, f"Sort the trace by {COLUMN}.")
        before = instant
        yield instant


def _rows(lines: Iterable[str], name: str, setting: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as exc:
        reason = f"line {reader.line_num} is not CSV: {exc}"
        raise SettingError(setting, name, reason, "Mend the line.") from None


def _column(cells: Sequence[str], name: str, setting: str) -> tuple[int, bool]:
    """Find the column of the instants by the first line, and whether that line is a header."""
    names = [cell.strip().lstrip("\ufeff").upper() for cell in cells]
    if COLUMN in names:
        return names.index(COLUMN), True
    if len(cells) == 1 and not names[0].isidentifier():
        return 0, False
    reason = f"has no column {COLUMN}; its first line is {','.join(cells)[:80]!r}"
    raise SettingError(setting, name, reason, f"Name the column of arrival instants {COLUMN}.")


def _reading(sample: str) -> Callable[[str], float]:
    """Choose the parser for a trace whose first instant is `sample`. It returns seconds from that instant."""
    try:
        zero = float(sample)
    except ValueError:
        start = datetime.fromisoformat(sample)
        return lambda text: (datetime.fromisoformat(text) - start).total_seconds()

    def seconds(text: str) -> float:
        value = float(text) - zero
        if not math.isfinite(value):
            raise ValueError(text)
        return value

    return seconds
