"""Arrival processes: endless streams of the instants at which requests come.

Each stream yields seconds counted from 0, never decreasing. It is drawn from as it is needed, so an hour's
load takes no more memory than a second's. Randomness is an argument: the same seed gives the same arrivals in a
load test and in a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from headway.errors import SettingError


class RandomSource(Protocol):
    """Source of randomness; a `random.Random` is one."""

    def random(self) -> float:
        """The next number, at least 0 and below 1."""


def poisson(rate: float, rng: RandomSource) -> Iterator[float]:
    """Arrivals of many independent clients: exponential gaps.

    Arguments:
        rate: mean arrivals per second.
        rng: source of randomness.

    Raises:
        SettingError: the rate is not a positive number.
    """
    _check(rate)
    return _poisson(rate, rng)


def uniform(rate: float) -> Iterator[float]:
    """Arrivals at equal gaps, the first at 0.

    Arguments:
        rate: arrivals per second.

    Raises:
        SettingError: the rate is not a positive number.
    """
    _check(rate)
    return _uniform(rate)


def replay(recorded: Iterable[float], rate: float) -> Iterator[float]:
    """Recorded arrivals, sped up or slowed down to a mean rate.

    Every gap is multiplied by (recorded rate / wanted rate), which keeps the burstiness. At its end the record
    starts again, one mean gap later.

    Arguments:
        recorded: instants in seconds, never decreasing, from any origin. It is iterated once here, to measure
            its rate, and once for each lap, so a lazy reader of a file will do; an iterator will not.
        rate: wanted mean arrivals per second.

    Raises:
        SettingError: the rate is not a positive number, or the record holds no time span to scale.
    """
    _check(rate)
    count, first, last = 0, 0.0, 0.0
    for last in recorded:
        if not count:
            first = last
        count += 1
    span = last - first
    if count < 2 or span <= 0.0:
        raise SettingError(
            "trace", f"{count} arrivals in {span:g} s", "has no rate", "Use one with arrivals at two instants or more."
        )
    return _laps(recorded, first, (count - 1) / span / rate, count / rate)


def _check(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0.0):
        raise SettingError("rate", rate, "must be a positive number of requests per second", "For example 1000.")


def _poisson(rate: float, rng: RandomSource) -> Iterator[float]:
    log, roll = math.log, rng.random
    mean = 1.0 / rate
    now = 0.0
    while True:
        now -= log(1.0 - roll()) * mean
        yield now


def _uniform(rate: float) -> Iterator[float]:
    number = 0
    while True:
        yield number / rate
        number += 1


def _laps(recorded: Iterable[float], first: float, scale: float, length: float) -> Iterator[float]:
    lap = 0
    while True:
        start = lap * length
        for instant in recorded:
            yield start + (instant - first) * scale
        lap += 1
