"""Figures of a process between two scrapes of its metrics: rates, refusals, errors, percentiles of latency. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

REFUSALS_SHOWN = 4
"""Reasons and codes that are named in one line; the rest is summed up."""

_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Counters of a process at an instant.

    Attributes:
        at: instant in seconds on the reader's monotonic clock.
        values: value of each sample, by its name and its labels in order of their names.
    """

    at: float
    values: Mapping[str, Mapping[_Labels, float]]


class TierFigures(NamedTuple):
    """Figures of one tier, or of one model; rates per second, latencies in seconds, NaN where nothing was answered.

    `tier` is the name of either.
    """

    tier: str
    answered: float
    refused: float
    errors: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a process over some seconds.

    Attributes:
        seconds: length of the time that they are of.
        tiers: figures of each tier that was asked for, and last of all together where there are several.
        refusals: refusals per second by reason, most first.
        errors: errors per second by code, most first.
        departures: batches that left per second.
        size: mean entries of a batch; NaN without one.
        reasons: share of the departures by reason, most first.
        models: figures of each model, where requests came for several.
    """

    seconds: float
    tiers: Sequence[TierFigures] = ()
    refusals: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    departures: float = 0.0
    size: float = math.nan
    reasons: Mapping[str, float] = field(default_factory=dict)
    models: Sequence[TierFigures] = ()


def read(text: str, at: float) -> Scrape:
    """Read the text of a process's metrics, scraped at instant `at`."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[_Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return Scrape(at, values)


def between(before: Scrape, after: Scrape) -> Figures:
    """Figures between two scrapes. A process that began anew meanwhile counts from its beginning."""
    from headway.errors import REFUSALS

    seconds = max(after.at - before.at, 1e-9)
    refused = {code.lower() for code in REFUSALS}
    grown = _Grown(before, after)
    answered, errors, codes = _counts(), _counts(), _counts()
    for labels, count in grown.of("headway_requests_total"):
        outcome, tier = labels["outcome"], labels["tier"]
        if outcome == "ok":
            answered[tier] += count
        elif outcome != "cancelled" and outcome not in refused:
            errors[tier] += count
            codes[outcome.upper()] += count
    refusals, reasons = _counts(), _counts()
    for labels, count in grown.of("headway_refusals_total"):
        refusals[labels["tier"]] += count
        reasons[labels["reason"]] += count
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, count in grown.of("headway_request_seconds_bucket"):
        buckets[labels["tier"]][float(labels["le"])] += count
    named = [tier for tier in {**answered, **refusals, **errors, **buckets} if tier != "none"]
    tiers = [_tier(tier, seconds, [tier], answered, refusals, errors, buckets) for tier in sorted(named)]
    if len(tiers) != 1 or refusals["none"]:
        tiers.append(_tier("all", seconds, [*named, "none"], answered, refusals, errors, buckets))
    left, departures = _counts(), 0.0
    for labels, count in grown.of("headway_batches_total"):
        left[labels["reason"]] += count
        departures += count
    members = sum(count for _, count in grown.of("headway_batch_size_sum"))
    batches = sum(count for _, count in grown.of("headway_batch_size_count"))
    return Figures(
        seconds,
        tiers,
        _sorted(reasons, seconds),
        _sorted(codes, seconds),
        departures / seconds,
        members / batches if batches else math.nan,
        _sorted(left, departures),
        _of_models(grown, seconds, refused),
    )


def _of_models(grown: _Grown, seconds: float, refused: set[str]) -> list[TierFigures]:
    """Figures of each model, where there are several. A refusal of a model that does not exist is none's."""
    answered, refusals, errors = _counts(), _counts(), _counts()
    for labels, count in grown.of("headway_requests_total"):
        outcome = labels["outcome"]
        if outcome != "cancelled" and count:
            counts = answered if outcome == "ok" else refusals if outcome in refused else errors
            counts[labels["model"]] += count
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, count in grown.of("headway_request_seconds_bucket"):
        buckets[labels["model"]][float(labels["le"])] += count
    models = sorted(model for model in {**answered, **refusals, **errors} if model)
    if len(models) < 2:
        return []
    return [_tier(model, seconds, [model], answered, refusals, errors, buckets) for model in models]


def percentile(buckets: Mapping[float, float], share: float) -> float:
    """Value that `share` (0 to 1) of what a histogram counted does not exceed, interpolated; NaN when it counted nothing.

    Arguments:
        buckets: number of values up to each bound, which is one of infinity, too.
        share: share of the values.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0.0:
        return math.nan
    low, under = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= share * total:
            inside = buckets[bound] - under
            return low if math.isinf(bound) else low + (bound - low) * (share * total - under) / max(inside, 1e-12)
        low, under = bound, buckets[bound]
    return low


class _Grown:
    """Growth of counters between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before.values, after.values

    def of(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and growth of each sample of a name; one that became less began anew."""
        known = self._before.get(name, {})
        found = []
        for labels, value in self._after.get(name, {}).items():
            grown = value - known.get(labels, 0.0)
            found.append((dict(labels), value if grown < 0.0 else grown))
        return found


def _tier(
    name: str,
    seconds: float,
    tiers: Sequence[str],
    answered: Mapping[str, float],
    refused: Mapping[str, float],
    errors: Mapping[str, float],
    buckets: Mapping[str, Mapping[float, float]],
) -> TierFigures:
    rates = [sum(counts.get(tier, 0.0) for tier in tiers) / seconds for counts in (answered, refused, errors)]
    merged: dict[float, float] = defaultdict(float)
    for tier in tiers:
        for bound, count in buckets.get(tier, {}).items():
            merged[bound] += count
    return TierFigures(name, rates[0], rates[1], rates[2], *(percentile(merged, share) for share in (0.5, 0.95, 0.99)))


def _counts() -> dict[str, float]:
    return defaultdict(float)


def _sorted(counts: Mapping[str, float], by: float) -> dict[str, float]:
    return {
        name: counts[name] / by for name in sorted(counts, key=counts.__getitem__, reverse=True) if counts[name] > 0.0
    }
