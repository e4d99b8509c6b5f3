"""Report of a simulation: percentiles, shares and rates, made from its record.

Times are in milliseconds here, as people read them; percentiles are exact (nearest rank).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from headway.load.report import Latency
from headway.simulator.record import EXPIRED, FAILED, REFUSED, Record
from headway.simulator.scenario import Scenario


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the requests of one tier, or of all. The four outcomes add up to `requests`.

    Attributes:
        requests: requests that came.
        answered: requests answered before their deadline.
        refused: requests that were not admitted.
        expired: requests that were admitted and not answered before their deadline.
        failed: requests that were given up because their batches failed.
        reasons: the three kinds of loss by reason, such as `refused: shed`.
        in_time: answers within the promise; null without a promise.
        goodput: answers within the promise per second; without a promise, answers per second.
        latency_ms: latencies of answers in milliseconds.
    """

    requests: int
    answered: int
    refused: int
    expired: int
    failed: int
    reasons: dict[str, int]
    in_time: int | None
    goodput: float
    latency_ms: Latency


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the departures.

    Attributes:
        count: number of batches.
        mean_size: mean entries in a batch.
        fill: mean share of a full batch, by number or by weight.
        reasons: number of batches by reason of the departure.
        gap_ms: mean gap between two departures in milliseconds.
        gap_cv: coefficient of variation of those gaps: 0 for evenly spaced, 1 for random, more for bunched.
        shard_gap_cv: mean of each shard's own `gap_cv`, as shards are not in step with one another; null without
            shards.
        stolen: share of the batches that a worker took which is at home in another shard.
    """

    count: int
    mean_size: float
    fill: float
    reasons: dict[str, int]
    gap_ms: float
    gap_cv: float
    shard_gap_cv: float | None
    stolen: float


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of the queue at the end: arrivals per second, and ℓ(n) = α + βn with its standard deviation."""

    rate: float
    alpha_ms: float
    beta_ms: float
    deviation_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one simulation, its warm-up left out.

    Attributes:
        policy: name of the policy.
        workers: number of GPUs.
        capacity: most requests per second they can answer, all batches full.
        arrivals_cv: coefficient of variation of the gaps between arrivals: 0 even, 1 Poisson, more is burstier.
        offered_rate: requests that came, per second.
        total: figures of all requests.
        tiers: figures of each tier, highest first, when there are several.
        batches: figures of the departures.
        utilisation: share of the GPUs' time in which they ran batches.
        down: share of the GPUs' time in which they were dead.
        deaths: number of deaths of workers.
        retried: entries that ran again because their batch failed.
        estimates: estimates of the queue at the end.
    """

    policy: str
    workers: int
    capacity: float
    arrivals_cv: float
    offered_rate: float
    total: Flow
    tiers: dict[str, Flow]
    batches: Batches
    utilisation: float
    down: float
    deaths: int
    retried: int
    estimates: Estimates


def make_report(record: Record) -> Report:
    """Make the report of a finished simulation."""
    scenario = record.scenario
    seconds = scenario.duration - scenario.warmup
    tiers = range(len(scenario.mix))
    gpu_seconds = seconds * scenario.workers
    rate, alpha, beta, deviation = record.estimates
    return Report(
        policy=scenario.policy,
        workers=scenario.workers,
        capacity=scenario.capacity,
        arrivals_cv=record.gap_variation,
        offered_rate=sum(record.offered) / seconds,
        total=_flow(record, tiers, record.latency, seconds),
        tiers={
            name: _flow(record, (index,), _of_tier(record, index), seconds)
            for index, name in enumerate(scenario.tiers)
            if len(scenario.mix) > 1
        },
        batches=_batches(record),
        utilisation=record.busy / gpu_seconds,
        down=record.down / gpu_seconds,
        deaths=record.deaths,
        retried=record.retried,
        estimates=Estimates(rate=rate, alpha_ms=alpha * 1000, beta_ms=beta * 1000, deviation_ms=deviation * 1000),
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """Value that `share` (0 to 1) of the values do not exceed, by nearest rank; NaN of none."""
    if not ascending:
        return math.nan
    return ascending[min(len(ascending) - 1, max(0, math.ceil(len(ascending) * share) - 1))]


def latency_ms(seconds: Iterable[float]) -> Latency:
    """Distribution in milliseconds of latencies given in seconds."""
    ascending = sorted(seconds)
    if not ascending:
        return Latency(count=0)
    p50, p90, p95, p99, p999 = (percentile(ascending, share) * 1000 for share in (0.5, 0.9, 0.95, 0.99, 0.999))
    return Latency(
        count=len(ascending),
        mean=math.fsum(ascending) / len(ascending) * 1000,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=ascending[-1] * 1000,
    )


def _of_tier(record: Record, tier: int) -> list[float]:
    return [seconds for seconds, of in zip(record.latency, record.tier, strict=True) if of == tier]


def _flow(record: Record, tiers: Sequence[int], latencies: Sequence[float], seconds: float) -> Flow:
    promise = record.scenario.promise
    reasons: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (kind, reason, tier), count in record.lost.items():
        if tier in tiers:
            kinds[kind] += count
            reasons[f"{kind}: {reason}"] += count
    in_time = None if promise is None else sum(latency <= promise for latency in latencies)
    return Flow(
        requests=sum(record.offered[tier] for tier in tiers),
        answered=len(latencies),
        refused=kinds[REFUSED],
        expired=kinds[EXPIRED],
        failed=kinds[FAILED],
        reasons=dict(reasons.most_common()),
        in_time=in_time,
        goodput=(len(latencies) if in_time is None else in_time) / seconds,
        latency_ms=latency_ms(latencies),
    )


def _batches(record: Record) -> Batches:
    count = len(record.left_at)
    mean_size = sum(record.size) / count if count else 0.0
    gap, variation = _spacing(record.left_at)
    return Batches(
        count=count,
        mean_size=mean_size,
        fill=record.filled / count if count else 0.0,
        reasons=dict(record.reasons.most_common()),
        gap_ms=gap * 1000,
        gap_cv=variation,
        shard_gap_cv=_shard_variation(record) if record.scenario.shards * record.scenario.zones > 1 else None,
        stolen=record.stolen / count if count else 0.0,
    )


def _spacing(instants: Sequence[float]) -> tuple[float, float]:
    """Mean and coefficient of variation of the gaps between departures; 0 and 0 when there are too few."""
    gaps = [later - before for before, later in pairwise(instants)]
    if not gaps or instants[-1] <= instants[0]:
        return 0.0, 0.0
    mean = math.fsum(gaps) / len(gaps)
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    return mean, math.sqrt(variance) / mean


def _shard_variation(record: Record) -> float | None:
    """Mean over the shards that had departures enough to have gaps."""
    left: dict[int, list[float]] = {}
    for instant, shard in zip(record.left_at, record.shard, strict=True):
        left.setdefault(shard, []).append(instant)
    found = [_spacing(instants)[1] for instants in left.values() if len(instants) > 2]
    return math.fsum(found) / len(found) if found else None


def describe(scenario: Scenario) -> dict[str, object]:
    """Scenario as plain values, for JSON; of a trace, of weights and of recorded times only the length."""
    long = ("trace", "weights", "times")
    plain = {name: value for name, value in vars(scenario).items() if name not in long}
    lengths = {name: len(getattr(scenario, name) or ()) for name in long}
    return {**msgspec.to_builtins(plain), **lengths}
