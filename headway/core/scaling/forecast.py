"""Forecast of a model's arrivals from samples of their rate: how many come, how unevenly, and how many will soon.

The trend is extrapolated no further than it has been observed: over the seconds that a worker needs to start, arrivals may grow by
as much as they did in as many seconds before. So a slow wave is met in time, and a sudden doubling isn't mistaken for an endless
climb."""

from __future__ import annotations

import math
from collections import deque

SMOOTH_SECONDS = 5.0  # Time constant of the smoothed rate, and the least one of the level.
MOST_SMOOTH_SECONDS = 30.0  # Largest time constant of the level.
# Time constant of the level, as a share of a worker's start, since a peak that ends before a worker comes isn't worth one.
SMOOTH_SHARE = 0.5
NOTED_EVERY = 5.0  # Seconds between two levels that are kept for the trend.
LONGEST_TREND = 900.0  # Limit in seconds on the observation of a trend.
DAMPING = 0.5  # Share of the trend that is believed, as most climbs end.
APART = 2.0  # Seconds between samples that count as independent, as each is an average over about one.
SAMPLE_SECONDS = 2.0  # Seconds of arrivals that a sample stands for: twice the time constant of its average.
DISPERSION_SECONDS = 120.0  # Time constant of the dispersion.
MOST_DISPERSION = 400.0  # Limit on one sample's dispersion. Rarer and larger bursts aren't worth a fleet of their size.


class ArrivalForecast:
    """Forecast from samples of the arrival rate."""

    def __init__(self) -> None:
        self.rate = 0.0  # Smoothed arrivals per second; 0 before the first sample.
        self.level = 0.0  # The same, smoothed for longer if workers need long to start.
        self.dispersion = 1.0  # Variance over mean of the arrivals in a second or two; 1 for Poisson, more if burstier.
        self._at: float | None = None
        self._before: deque[tuple[float, float]] = deque()  # Samples with their instants, as far back as is compared.
        self._noted: deque[tuple[float, float]] = deque()  # Levels with their instants, as far back as a trend goes.

    def observe(self, rate: float, now: float, start: float) -> None:
        """Add a sample of arrivals per second, averaged over about a second, with the seconds that a worker needs to start."""
        last, self._at = self._at, now
        if last is None:
            self.rate = self.level = rate
            self._noted.append((now, rate))
            self._before.append((now, rate))
            return
        elapsed = max(now - last, 0.0)
        self.rate += (rate - self.rate) * -math.expm1(-elapsed / SMOOTH_SECONDS)
        constant = min(max(SMOOTH_SHARE * start, SMOOTH_SECONDS), MOST_SMOOTH_SECONDS)
        self.level += (rate - self.level) * -math.expm1(-elapsed / constant)
        self._compare(rate, now, elapsed)
        if now - self._noted[-1][0] >= NOTED_EVERY:
            self._noted.append((now, self.level))
            while self._noted[0][0] < now - LONGEST_TREND:
                self._noted.popleft()

    def ahead(self, seconds: float) -> float:
        """Return the arrivals per second to be ready for in so many seconds, which are never fewer than now."""
        return self.level + max(0.0, DAMPING * (self.level - self._level_before(seconds)))

    def _level_before(self, seconds: float) -> float:
        if self._at is None:
            return self.level
        since = self._at - seconds
        earlier = self._noted[0][1]
        for at, level in self._noted:
            if at > since:
                break
            earlier = level
        return earlier

    def _compare(self, rate: float, now: float, elapsed: float) -> None:
        """Learn the dispersion from two samples, as half of their squared difference is their variance. Samples of one level differ
        only by chance, and a slow climb adds little."""
        self._before.append((now, rate))
        while len(self._before) > 1 and self._before[1][0] <= now - APART:
            self._before.popleft()
        at, other = self._before[0]
        mean = (rate + other) / 2.0
        if now - at < APART or mean <= 0.0:
            return
        dispersion = min(SAMPLE_SECONDS * (rate - other) ** 2 / 2.0 / mean, MOST_DISPERSION)
        share = -math.expm1(-elapsed / DISPERSION_SECONDS)
        self.dispersion = max(self.dispersion + (dispersion - self.dispersion) * share, 1.0)
