"""Arrivals: endless streams of the instants at which requests come, drawn at random or read from a trace.

Each stream yields seconds from 0 on, never decreasing. It is drawn from as needed, so an hour's load takes no more memory than a
second's. As randomness is an argument, the same seed gives the same arrivals in a load test and in a simulation.

A trace is CSV. Either it has a header line that names a `TIMESTAMP` column, whose cells are ISO 8601 times (`2023-11-16
18:17:03.9799600`, as in the Azure LLM inference traces) or seconds, or it is one bare column of seconds."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate, count, repeat
from typing import Protocol

from headway.errors import SettingError


class RandomSource(Protocol):
    """Source of randomness, uniform in [0, 1); a `random.Random` is one."""

    def random(self) -> float: ...


def poisson(rate: float, rng: RandomSource) -> Iterator[float]:
    """Return arrivals of many independent clients, with exponential gaps, at a mean rate per second. Raises SettingError."""
    _check(rate)
    mean = 1.0 / rate
    return accumulate(-math.log(1.0 - rng.random()) * mean for _ in repeat(None))


def uniform(rate: float) -> Iterator[float]:
    """Return arrivals at equal gaps, the first at 0, at a rate per second. Raises SettingError if it isn't positive."""
    _check(rate)
    return (number / rate for number in count())


def replay(recorded: Iterable[float], rate: float) -> Iterator[float]:
    """Return recorded arrivals, sped up or slowed down to a mean rate.

    Every gap is multiplied by (recorded rate / wanted rate), which keeps the burstiness. At its end the record starts again, one
    mean gap later. It has instants in seconds, never decreasing, from any origin, and must not be an iterator, as it is read often.

    Raises SettingError if the rate is not a positive number, or the record has no time span to scale."""
    _check(rate)
    number, first, last = 0, 0.0, 0.0
    for last in recorded:
        if not number:
            first = last
        number += 1
    span = last - first
    if number < 2 or span <= 0.0:
        raise SettingError(
            "trace", f"{number} arrivals in {span:g} s", "has no rate", "Use one with arrivals at two instants or more."
        )
    scale, length = (number - 1) / span / rate, number / rate
    return (lap * length + (instant - first) * scale for lap in count() for instant in recorded)


def _check(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0.0):
        raise SettingError("rate", rate, "must be a positive number of requests per second", "For example 1000.")


COLUMN = "TIMESTAMP"


def instants(lines: Iterable[str], name: str, setting: str = "--arrivals") -> Iterator[float]:
    """Yield the arrivals of a trace, given line by line, in seconds from its first one. On iteration, raises SettingError with the
    number of a line if there is no TIMESTAMP column, or if an instant can't be read or is earlier than the previous instant."""
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
        raise SettingError(setting, name, reason, "Fix the line.") from None


def _column(cells: Sequence[str], name: str, setting: str) -> tuple[int, bool]:
    """Return the column of instants, given the first line, and True if that line is a header."""
    names = [cell.strip().lstrip("\ufeff").upper() for cell in cells]
    if COLUMN in names:
        return names.index(COLUMN), True
    if len(cells) == 1 and not names[0].isidentifier():
        return 0, False
    reason = f"has no column {COLUMN}; its first line is {','.join(cells)[:80]!r}"
    raise SettingError(setting, name, reason, f"Name the column of arrival instants {COLUMN}.")


def _reading(sample: str) -> Callable[[str], float]:
    """Return a parser for a trace whose first instant is `sample`. It returns seconds from that instant."""
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
