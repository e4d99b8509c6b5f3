"""Names of all metrics, in one place. Reads the Counters and the broker's state, and writes Prometheus text.

Nothing here is on the path of a request: counters are plain numbers in `runtime.counters` until a scrape.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.model import Capacity, TierDepth, WorkerInfo, WorkerStatus
from headway.ports import Broker, DeadLetters, Fleet
from headway.runtime.counters import Counters, Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Media type of the text that `exposition` returns."""

_AT_ONCE = 8
_PROCESS = ProcessCollector(registry=None)
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=tuple[str, ...])


@dataclass(frozen=True)
class State:
    """State of one process at one instant, as it is exported.

    Attributes:
        counters: counters of what has happened so far.
        tiers: names of the tiers, highest first.
        depths: depths of the queues.
        workers: worker registry.
        letters: number of dead letters by model; None when it is not known.
        capacities: capacities of the workers by model.
        broker_up: whether the broker answered; what it knows is empty when it did not.
    """

    counters: Counters
    tiers: Sequence[str]
    depths: Sequence[TierDepth]
    workers: Sequence[WorkerInfo]
    letters: Mapping[str, int] | None
    capacities: Sequence[Capacity] = ()
    broker_up: bool = True


async def collect(
    counters: Counters, tiers: Sequence[str], broker: Broker, letters: DeadLetters, fleet: Fleet
) -> State:
    """Ask broker, dead letters and fleet for their part of the state.

    Raises:
        BrokerUnavailable: one of them does not answer.
    """
    depths, workers, count, capacities = await asyncio.gather(
        broker.depths(), broker.workers(), letters.counts(), fleet.capacities()
    )
    return State(counters, tiers, depths, workers, count, capacities)


async def exposition(state: State) -> bytes:
    """Write the state as text.

    Other tasks get their turn after each family, and after each few histograms of one, so that a scrape of many workers
    does not hold up a batch.
    """
    parts: list[bytes] = []
    named = ""
    for family in families(state):
        text = generate_latest(_One(family))
        if family.name == named:
            text = text.split(b"\n", 2)[2]  # its HELP and TYPE stand above already
        named = family.name
        parts.append(text)
        await asyncio.sleep(0)
    parts.append(generate_latest(_PROCESS))
    return b"".join(parts)


def families(state: State) -> Iterator[Metric]:
    """Make every metric, each when it is asked for; a histogram of many labels comes in several parts."""
    counters = state.counters
    yield _counter(
        "requests", "Requests answered, by outcome: ok, an error code, or cancelled.",
        ("model", "tier", "outcome"), counters.requests,
    )  # fmt: skip
    yield from _histogram(
        "request_seconds",
        "From the decoded request to its answer, of those not refused at the door.",
        ("model", "tier"),
        counters.request_seconds,
    )
    yield from _histogram("queue_seconds", "From the enqueue to the claim.", ("model", "tier"), counters.queue_seconds)
    tier_of = dict(enumerate(state.tiers))
    depths: dict[tuple[str, str], int] = {}
    oldest: dict[tuple[str, str], float] = {}
    for one in state.depths:  # Of a model with several versions, all together.
        key = one.model, tier_of.get(one.tier, str(one.tier))
        depths[key] = depths.get(key, 0) + one.depth
        oldest[key] = max(oldest.get(key, 0.0), one.oldest_seconds)
    yield _gauge("queue_depth", "Entries that wait.", ("model", "tier"), depths)
    yield _gauge("queue_oldest_seconds", "How long the oldest entry has waited.", ("model", "tier"), oldest)
    yield from _histogram("batch_size", "Entries in a batch.", ("model",), _keyed(counters.batch_size))
    yield _counter("batches", "Batches that left, by reason.", ("model", "reason"), counters.batches)
    yield from _histogram(
        "batch_fill_ratio", "Batch size over the largest batch.", ("model",), _keyed(counters.batch_fill)
    )
    yield from _histogram("gpu_batch_seconds", "Run time of a batch.", ("model", "worker"), counters.gpu_seconds)
    yield _gauge(
        "gpu_utilization", "Busy share of a worker's last seconds, 0 to 1.",
        ("model", "worker"), {(w.model, w.worker_id): w.utilisation for w in state.workers},
    )  # fmt: skip
    yield _gauge("workers", "Workers by status.", ("model", "status"), _census(state.workers))
    yield _gauge(
        "capacity_items_per_second", "What the healthy workers of a model do at most together.",
        ("model",), {(c.model,): c.items_per_second for c in state.capacities},
    )  # fmt: skip
    yield _gauge(
        "capacity_estimated", "Whether that is an estimate yet, as few full batches were seen.",
        ("model",), {(c.model,): int(c.estimated) for c in state.capacities},
    )  # fmt: skip
    yield _gauge(
        "throttle_per_second", "Requests of the lowest tier that this gateway lets in a second; none: all of them.",
        ("model",), _keyed(counters.throttle),
    )  # fmt: skip
    yield _gauge("broker_up", "Whether the broker answered this scrape.", (), {(): int(state.broker_up)})
    yield _counter(
        "worker_restarts", "How often a worker's process was replaced.", ("worker",), _keyed(counters.worker_restarts)
    )
    yield _counter("model_loads", "How often a worker has loaded its model.", ("model", "worker"), counters.model_loads)
    yield from _histogram(
        "model_load_seconds",
        "Seconds of a load, from the first step to ready.",
        ("model",),
        _keyed(counters.load_seconds),
    )
    yield _counter(
        "model_evictions", "Models that made room on their GPU for another, by why that was loaded.",
        ("reason",), _keyed(counters.model_evictions),
    )  # fmt: skip
    yield _counter(
        "large_payloads", "Large inputs and outputs of worker processes, and whether there was room for them in the arena.",
        ("direction", "way"), counters.large_payloads,
    )  # fmt: skip
    yield _counter("refusals", "Requests refused at the door.", ("reason", "tier"), counters.refusals)
    yield _counter(
        "input_policy", "Requests by rule of the input policy, and what it did: changed, refused, shadow or failed.",
        ("rule", "effect"), counters.input_policy,
    )  # fmt: skip
    yield _counter(
        "client_retries", "Requests that their client said it had sent before.", (), {(): counters.client_retries}
    )
    yield _counter(
        "shared", "Requests answered with the outcome of another: joined while it ran, or kept of it.",
        ("model", "kind", "how"), counters.shared,
    )  # fmt: skip
    yield _counter("ledger_dropped", "Records that the ledger never got.", (), {(): counters.ledger_dropped})
    yield _gauge(
        "keys_age_seconds", "How old the API keys are that requests are checked by.",
        (), {} if counters.keys_age is None else {(): counters.keys_age},
    )  # fmt: skip
    yield _gauge(
        "tls_certificate_expiry_timestamp_seconds", "When the certificate of the ports ends, in Unix seconds.",
        (), {} if counters.certificate_ends is None else {(): counters.certificate_ends},
    )  # fmt: skip
    ends = counters.remote_certificate_ends
    yield _gauge(
        "remote_certificate_expiry_timestamp_seconds", "When the certificate that a remote API is shown ends, in Unix seconds.",
        (), {} if ends is None else {(): ends},
    )  # fmt: skip
    yield _counter(
        "tls_handshakes_failed", "TLS handshakes that failed, by port and reason.",
        ("port", "reason"), counters.tls_failures,
    )  # fmt: skip
    yield _counter(
        "direct", "Requests answered by the fallback, for want of a broker.", ("model",), _keyed(counters.direct)
    )
    yield _counter("retries", "Entries queued again after a failed run.", ("cause",), _keyed(counters.retries))
    dead = {} if state.letters is None else dict.fromkeys((d.model for d in state.depths), 0) | dict(state.letters)
    yield _gauge("dlq_depth", "Dead letters kept.", ("model",), _keyed(dead))
    yield _counter(
        "wasted_gpu_seconds", "GPU time spent on clients that had left, or on batches that failed.",
        ("cause",), _keyed(counters.wasted_seconds),
    )  # fmt: skip
    yield from _histogram(
        "batching_overhead_seconds",
        "Headway's own share of a request: end to end less queueing and the run; one sample a batch.",
        (),
        {(): counters.overhead_seconds},
    )
    yield _gauge(
        "breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", ("backend",), _keyed(counters.breaker_state)
    )


class _One(Collector):
    """Metric family alone, as `generate_latest` takes it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]


def _census(workers: Iterable[WorkerInfo]) -> dict[tuple[str, str], int]:
    """Workers by model and status, with a zero for each status a model has none of."""
    counted = Counter((worker.model, worker.status) for worker in workers)
    models = dict.fromkeys(model for model, _ in counted)
    return {(model, status.value): counted[model, status] for model in models for status in WorkerStatus}


def _keyed(values: Mapping[str, _T]) -> dict[tuple[str, ...], _T]:
    return {(key,): value for key, value in values.items()}


def _counter(name: str, text: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = CounterMetricFamily(f"headway_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = GaugeMetricFamily(f"headway_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: Sequence[str], values: Mapping[_Key, Histogram]) -> Iterator[Metric]:
    items = list(values.items())
    for start in range(0, max(1, len(items)), _AT_ONCE):
        family = HistogramMetricFamily(f"headway_{name}", text, labels=labels)
        for key, histogram in items[start : start + _AT_ONCE]:
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            family.add_metric(key, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
        yield family
