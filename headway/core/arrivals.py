"""Arrivals: endless streams of request arrival times, drawn at random or read from a trace.

Each stream yields non-decreasing times in seconds, starting at 0. Streams are lazy, so an hour of load takes no more memory than a second.
The source of randomness is an argument, so the same seed yields the same arrivals in a load test and in a simulation.

A trace is a CSV file. Either it has a header line that names a `TIMESTAMP` column, or it is a single column without a header. A `TIMESTAMP`
column holds ISO 8601 times (`2023-11-16 18:17:03.9799600`, as in the Azure LLM inference traces) or seconds."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate, count, repeat
from typing import Protocol

from headway.errors import SettingError


class RandomSource(Protocol):
    """Source of random numbers, uniform in [0, 1). A `random.Random` is one."""

    def random(self) -> float: ...


def poisson(rate: float, rng: RandomSource) -> Iterator[float]:
    """Return arrivals of independent clients, with exponential gaps. `rate` is their mean per second. Raises SettingError."""
    _check(rate)
    mean = 1.0 / rate
    return accumulate(-math.log(1.0 - rng.random()) * mean for _ in repeat(None))


def uniform(rate: float) -> Iterator[float]:
    """Return evenly spaced arrivals at a rate per second, the first at 0. Raises SettingError if the rate isn't positive."""
    _check(rate)
    return (number / rate for number in count())


def replay(recorded: Iterable[float], rate: float) -> Iterator[float]:
    """Return recorded arrivals, sped up or slowed down to a mean rate. Every gap is scaled alike, which preserves the burstiness.

    `recorded` holds non-decreasing times in seconds, from any origin, and must not be an iterator. After its last arrival it
    starts again, one mean gap later. Raises SettingError if the rate isn't positive, or the recording spans no time."""
    _check(rate)
    number, first, last = 0, 0.0, 0.0
    for last in recorded:
        if not number:
            first = last
        number += 1
    span = last - first
    if number < 2 or span <= 0.0:
        raise SettingError(
            "trace", f"{number} arrivals in {span:g} s", "has no rate", "Use one with arrivals at two or more times."
        )
    scale, length = (number - 1) / span / rate, number / rate
    return (lap * length + (instant - first) * scale for lap in count() for instant in recorded)


def _check(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0.0):
        raise SettingError("rate", rate, "must be a positive number of requests per second", "For example 1000.")


COLUMN = "TIMESTAMP"


def instants(lines: Iterable[str], name: str, setting: str = "--arrivals") -> Iterator[float]:
    """Yield the arrivals of a trace, given line by line, in seconds since the first one. Iterating raises SettingError, with the
    line number, if there is no TIMESTAMP column, a time can't be read, or a time is earlier than the one before it."""
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
            reason = f"line {line}: {text!r} is not a time like the others"
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
    """Return the index of the time column, and True if the first line (`cells`) is a header."""
    names = [cell.strip().lstrip("\ufeff").upper() for cell in cells]
    if COLUMN in names:
        return names.index(COLUMN), True
    if len(cells) == 1 and not names[0].isidentifier():
        return 0, False
    reason = f"has no column {COLUMN}; its first line is {','.join(cells)[:80]!r}"
    raise SettingError(setting, name, reason, f"Name the column of arrival times {COLUMN}.")


def _reading(sample: str) -> Callable[[str], float]:
    """Return a parser for a trace whose first timestamp is `sample`. It returns seconds since then."""
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
