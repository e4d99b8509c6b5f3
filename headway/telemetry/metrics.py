"""Names of all metrics, in one place. Reads counters and figures, and writes Prometheus text.

Nothing here is on the path of a request: counters are plain numbers in `runtime.counters` until a scrape.

Figures of the whole fleet are exported by one process, so that a sum over all processes is the truth: by the leading
controller or, where one process is the fleet, by that. Everything else is of the process that exports it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from headway.core.health import heard
from headway.model import Role, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters, Histogram
from headway.telemetry import labels
from headway.telemetry.figures import FleetState, ProcessFigures, State

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Media type of the text that `exposition` returns."""

OPENMETRICS_TYPE = openmetrics.CONTENT_TYPE_LATEST
"""Media type of the text with exemplars."""

_AT_ONCE = 8
_EOF = b"# EOF\n"
_PROCESS = ProcessCollector(registry=None)
_NOTHING = FleetState()
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=tuple[str, ...])


def asks_for_exemplars(accept: str) -> bool:
    """Whether the `Accept` of a scrape asks for OpenMetrics, in which histograms have exemplars."""
    return "application/openmetrics-text" in accept


async def exposition(state: State, *, exemplars: bool = False) -> bytes:
    """Write the state as Prometheus text, or as OpenMetrics text with exemplars.

    Other tasks get their turn after each family, and after each few histograms of one, so that a scrape of many workers
    does not hold up a batch.
    """
    parts: list[bytes] = []
    named = ""
    write = openmetrics.generate_latest if exemplars else generate_latest
    for family in families(state):
        text = write(_One(family)).removesuffix(_EOF)
        if family.name == named:
            text = text.split(b"\n", 2)[2]  # its HELP and TYPE stand above already
        named = family.name
        parts.append(text)
        await asyncio.sleep(0)
    parts.append(write(_PROCESS))
    return b"".join(parts)


def families(state: State) -> Iterator[Metric]:
    """Make every metric, each when it is asked for; a histogram of many labels comes in several parts."""
    counters, own = state.counters, state.own
    yield from _of_process(state)
    yield from _of_requests(counters, own)
    yield from _of_gateways(counters, own)
    yield from _of_batches(counters, own)
    yield from _of_gpus(own)
    yield from _of_scaling(counters, own)
    yield from _of_certificates(counters, own)
    yield from _of_fleet(state.fleet, own)


def _of_process(state: State) -> Iterator[Metric]:
    counters, own = state.counters, state.own
    yield _gauge("build_info", "Version of Headway; always 1.", ("version",), {(own.version,): 1})
    yield _gauge("draining", "Whether the process is going down.", (), {(): int(own.draining)})
    yield _gauge(
        "leader", "Whether the process has the controller that leads; only where there is one.",
        (), {} if own.leader is None else {(): int(own.leader)},
    )  # fmt: skip
    yield _gauge("broker_up", "Whether the broker answered this scrape.", (), {(): int(state.broker_up)})
    yield from _histogram(
        "broker_call_seconds",
        "Answered calls to a broker in another process, reads that wait left out.",
        (),
        {(): counters.broker_seconds},
    )
    yield _counter("broker_call_failures", "Such calls without an answer.", (), {(): counters.broker_failures})
    yield _counter(
        "trace_spans_dropped", "Spans of traces that were dropped, by reason: queue, export, rejected or refused.",
        ("reason",), _keyed(counters.spans_dropped),
    )  # fmt: skip
    yield _gauge("open_connections", "Open connections by port.", ("port",), _keyed(own.connections))
    yield _counter(
        "retries", "Entries queued again after a failed run.", ("cause",),
        _zeroed(_keyed(counters.retries), labels.causes(), 0),
    )  # fmt: skip
    yield _counter(
        "zone_help_batches", "Batches that workers of this process took from another zone, by that zone.",
        ("model", "zone"), counters.zone_help,
    )  # fmt: skip


def _of_requests(counters: Counters, own: ProcessFigures) -> Iterator[Metric]:
    """Make the metrics of the requests that a gateway and its port answer."""
    models = {labels.NO_MODEL, *own.models}
    yield _counter(
        "requests", "Requests answered, by outcome: ok, an error code, or cancelled.", ("model", "tier", "outcome"),
        _zeroed(_served(counters.requests, models), labels.requests(own), 0),
    )  # fmt: skip
    yield _counter(
        "tokens", "Tokens that targets have told, by tenant, of the run of a request or of another's that it shares.",
        ("model", "tenant", "how"), _served(counters.tokens, models),
    )  # fmt: skip
    yield from _histogram(
        "request_seconds",
        "From the decoded request to its answer, of those not refused at the door.",
        ("model", "tier"),
        _zeroed(_served(counters.request_seconds, models), labels.latencies(own), Counters().request_seconds["", ""]),
    )
    yield from _histogram(
        "queue_seconds",
        "From the enqueue to the claim.",
        ("model", "tier"),
        _zeroed(_served(counters.queue_seconds, models), labels.latencies(own), Counters().queue_seconds["", ""]),
    )
    yield from _histogram(
        "batching_overhead_seconds",
        "Headway's own share of a request: end to end less queueing and the run; one sample a batch.",
        (),
        {(): counters.overhead_seconds},
    )
    yield _counter(
        "refusals", "Requests refused at the door.", ("reason", "tier", "model"),
        _zeroed({key: count for key, count in counters.refusals.items() if key[2] in models}, labels.refusals(own), 0),
    )  # fmt: skip


def _of_gateways(counters: Counters, own: ProcessFigures) -> Iterator[Metric]:
    """Make the metrics of what a gateway holds and holds back, shares, and answers by itself."""
    models = {labels.NO_MODEL, *own.models}
    yield _gauge(
        "pending_requests", "Requests that the gateway holds; only where there is one.",
        (), {} if own.pending is None else {(): own.pending},
    )  # fmt: skip
    yield _gauge(
        "promise_seconds", "Latency that is promised for 95 % of the requests; only where there is a gateway.",
        (), {} if own.promise is None else {(): own.promise},
    )  # fmt: skip
    yield _gauge(
        "throttle_per_second", "Requests of the lowest tier that this gateway lets in a second; none: all of them.",
        ("model",), _served(_keyed(counters.throttle), models),
    )  # fmt: skip
    yield _counter(
        "input_policy", "Requests by rule of the input policy, and what it did: changed, refused, shadow or failed.",
        ("rule", "effect"), _zeroed(counters.input_policy, labels.rules(own), 0),
    )  # fmt: skip
    yield _counter(
        "client_retries", "Requests that their client said it had sent before.", (), {(): counters.client_retries}
    )
    yield _counter(
        "shared", "Requests answered with the outcome of another: joined while it ran, or kept of it.",
        ("model", "kind", "how"), _zeroed(_served(counters.shared, models), labels.shared(own), 0),
    )  # fmt: skip
    yield _counter(
        "direct", "Requests answered by the fallback, for want of a broker.",
        ("model",), _zeroed(_served(_keyed(counters.direct), models), labels.direct(own), 0),
    )  # fmt: skip
    yield _counter("ledger_dropped", "Records that the ledger never got.", (), {(): counters.ledger_dropped})
    yield _gauge(
        "ledger_backlog", "Records that wait for the ledger; only where there is one.",
        (), {} if own.ledger_backlog is None else {(): own.ledger_backlog},
    )  # fmt: skip
    yield _gauge(
        "keys_age_seconds", "How old the API keys are that requests are checked by.",
        (), {} if counters.keys_age is None else {(): counters.keys_age},
    )  # fmt: skip


def _of_batches(counters: Counters, own: ProcessFigures) -> Iterator[Metric]:
    """Make the metrics of batchers and their workers."""
    zeros, label = Counters(), own.worker_label
    yield from _histogram(
        "batch_size", "Entries in a batch.", ("model",),
        _zeroed(_keyed(counters.batch_size), labels.runs(own), zeros.batch_size[""]),
    )  # fmt: skip
    yield _counter(
        "batches", "Batches that left, by reason.", ("model", "reason"),
        _zeroed(counters.batches, labels.departures(own), 0),
    )  # fmt: skip
    yield _counter(
        "inputs", "Inputs that ran, by the version of the model and how that went.", ("model", "version", "outcome"),
        _zeroed(counters.inputs, labels.inputs(own), 0),
    )  # fmt: skip
    yield from _histogram(
        "batch_fill_ratio", "Batch size over the largest batch.", ("model",),
        _zeroed(_keyed(counters.batch_fill), labels.runs(own), zeros.batch_fill[""]),
    )  # fmt: skip
    run_times = _zeroed(counters.gpu_seconds, labels.slots(own), zeros.gpu_seconds["", ""])
    yield from _histogram(
        "gpu_batch_seconds", "Run time of a batch.", ("model", "worker"),
        {(model, label(worker)): one for (model, worker), one in run_times.items()},
    )  # fmt: skip
    yield _gauge(
        "gpu_utilization", "Busy share of a worker's last seconds, 0 to 1.", ("model", "worker"),
        {(model, label(worker)): share for (model, worker), share in (own.slots or {}).items()},
    )  # fmt: skip
    restarts = _zeroed(_keyed(counters.worker_restarts), labels.workers(own), 0)
    yield _counter(
        "worker_restarts", "How often a worker's process was replaced.", ("worker",),
        {(label(worker),): count for (worker,), count in restarts.items()},
    )  # fmt: skip
    loads = _zeroed(counters.model_loads, labels.slots(own), 0)
    yield _counter(
        "model_loads", "How often a worker has loaded its model.", ("model", "worker"),
        {(model, label(worker)): count for (model, worker), count in loads.items()},
    )  # fmt: skip
    yield from _histogram(
        "model_load_seconds",
        "Seconds of a load, from the first step to ready.",
        ("model",),
        _zeroed(_keyed(counters.load_seconds), labels.runs(own), zeros.load_seconds[""]),
    )
    yield _counter(
        "model_evictions", "Models that made room on their GPU for another, by why that was loaded.", ("reason",),
        _zeroed(_keyed(counters.model_evictions), labels.of_batchers(own, labels.EVICTIONS), 0),
    )  # fmt: skip
    yield _counter(
        "large_payloads", "Large inputs and outputs of worker processes, and whether there was room for them in the arena.",
        ("direction", "way"), _zeroed(counters.large_payloads, labels.payloads(own), 0),
    )  # fmt: skip
    yield _counter(
        "wasted_gpu_seconds", "GPU time spent on clients that had left, or on batches that failed.", ("cause",),
        _zeroed(_keyed(counters.wasted_seconds), labels.of_batchers(own, labels.WASTES), 0.0),
    )  # fmt: skip
    breakers = _zeroed(_keyed(counters.breaker_state), labels.workers(own), 0)
    yield _gauge(
        "breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", ("backend",),
        {(label(backend),): state for (backend,), state in breakers.items()},
    )  # fmt: skip


def _of_gpus(own: ProcessFigures) -> Iterator[Metric]:
    """Make the metrics of GPUs, as their driver tells them; they have no samples without one, or for what it does not tell."""
    gpus = {(model, own.worker_label(worker)): gpu for (model, worker), gpu in own.gpus.items()}
    for name, text, told in (
        ("memory_used_bytes", "Memory of a worker's GPU that is in use, by whomever.", lambda gpu: gpu.memory_used),
        ("memory_total_bytes", "Memory of a worker's GPU.", lambda gpu: gpu.memory_total),
        (
            "device_utilization",
            "Share of the last moment in which a worker's GPU computed.",
            lambda gpu: gpu.utilisation,
        ),
        ("power_watts", "Power that a worker's GPU takes.", lambda gpu: gpu.power),
        ("temperature_celsius", "Temperature of a worker's GPU.", lambda gpu: gpu.temperature),
        ("lost", "Whether a worker's GPU is lost.", lambda gpu: int(bool(gpu.lost))),
    ):
        values = {key: value for key, gpu in gpus.items() if (value := told(gpu)) is not None}
        yield _gauge(f"gpu_{name}", text, ("model", "worker"), values)
    yield _counter(
        "gpu_ecc_errors", "Memory errors of a worker's GPU that were not corrected, since its driver was loaded.",
        ("model", "worker"), {key: gpu.ecc_errors for key, gpu in gpus.items() if gpu.ecc_errors is not None},
    )  # fmt: skip
    yield _counter(
        "gpu_xid_errors", "Xid errors of a worker's GPU, by whether the model can cause them by itself: model or gpu.",
        ("model", "worker", "cause"),
        {(*key, cause): count for key, gpu in gpus.items() for cause, count in labels.xid_causes(gpu)},
    )  # fmt: skip


def _of_scaling(counters: Counters, own: ProcessFigures) -> Iterator[Metric]:
    yield _counter(
        "scaling_decisions", "Decisions of the autoscaler, by direction: up, down or again.", ("model", "direction"),
        _zeroed(_served(counters.scaling_decisions, own.models), labels.scalings(own), 0),
    )  # fmt: skip
    yield _counter(
        "scaling_failures", "Calls that did not set the number of workers, as the platform refused or did not answer.",
        ("model",), _zeroed(_served(_keyed(counters.scaling_failures), own.models), labels.scaled(own), 0),
    )  # fmt: skip


def _of_certificates(counters: Counters, own: ProcessFigures) -> Iterator[Metric]:
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
        ("port", "reason"), _zeroed(counters.tls_failures, labels.handshakes(own), 0),
    )  # fmt: skip


def _of_fleet(fleet: FleetState | None, own: ProcessFigures) -> Iterator[Metric]:
    """Make the metrics of the fleet; they have no samples where another process exports them."""
    known = fleet or _NOTHING
    models = {*own.models, *(worker.model for worker in known.workers)} if fleet is not None else set[str]()
    queues = [(model, tier) for model in models for tier in own.tiers]
    depths: dict[tuple[str, str], int] = dict.fromkeys(queues, 0)
    oldest: dict[tuple[str, str], float] = dict.fromkeys(queues, 0.0)
    tier_of = dict(enumerate(own.tiers))
    for one in known.depths:  # Of a model with several versions, all together.
        if one.model in models:
            key = one.model, tier_of.get(one.tier, str(one.tier))
            depths[key] = depths.get(key, 0) + one.depth
            oldest[key] = max(oldest.get(key, 0.0), one.oldest_seconds)
    yield _gauge("queue_depth", "Entries of the fleet that wait.", ("model", "tier"), depths)
    yield _gauge("queue_oldest_seconds", "How long the oldest entry has waited.", ("model", "tier"), oldest)
    yield _gauge("workers", "Workers of the fleet by status.", ("model", "status"), _census(known.workers, models))
    yield _gauge(
        "expected_workers", "Healthy workers that the fleet should have; 0: nobody has said.",
        (), {} if fleet is None else {(): fleet.expected},
    )  # fmt: skip
    roles = Counter(member.role for member in heard(known.members))
    yield _gauge(
        "processes", "Processes of the fleet by role, heard of within 3 s.",  # Scrape configurations have a label `role` of their own.
        ("process_role",), {} if fleet is None else {(role.value,): roles[role] for role in Role},
    )  # fmt: skip
    capacities = {one.model: one for one in known.capacities if one.model in models}
    yield _gauge(
        "capacity_items_per_second", "What the healthy workers of a model do at most together.", ("model",),
        _keyed(dict.fromkeys(models, 0.0) | {model: one.items_per_second for model, one in capacities.items()}),
    )  # fmt: skip
    yield _gauge(
        "capacity_usable_items_per_second", "That times the target utilisation; 0 while the broker's memory is scarce.",
        ("model",),
        _keyed(dict.fromkeys(models, 0.0) | {model: one.usable_per_second for model, one in capacities.items()}),
    )  # fmt: skip
    yield _gauge(
        "capacity_estimated", "Whether that is an estimate yet, as few full batches were seen.", ("model",),
        _keyed(dict.fromkeys(models, 0) | {model: int(one.estimated) for model, one in capacities.items()}),
    )  # fmt: skip
    yield _gauge(
        "desired_workers", "Workers that a model should have, as the autoscaler has decided.", ("model",),
        _keyed(_desired(known, models)),
    )  # fmt: skip
    scaled = {one.model: one.scaling for one in known.capacities if one.scaling is not None and one.model in models}
    least = dict.fromkeys(models, 0) | {model: one.least for model, one in scaled.items()}
    most = dict.fromkeys(models, 0) | {model: one.most for model, one in scaled.items()}
    yield _gauge("min_workers", "Fewest workers that the autoscaler may want.", ("model",), _keyed(least))
    yield _gauge("max_workers", "Most workers that it may want; 0: there is no bound.", ("model",), _keyed(most))
    dead = dict.fromkeys(models, 0) | {model: n for model, n in known.letters.items() if n or model in models}
    yield _gauge("dlq_depth", "Dead letters kept.", ("model",), _keyed(dead))
    ever = dict.fromkeys(dead, 0) | {model: n for model, n in known.letters_ever.items() if model in dead}
    yield _counter("dead_letters", "Dead letters ever kept.", ("model",), _keyed(ever))
    memory = known.memory
    yield _gauge(
        "broker_memory_bytes", "Memory that the broker's servers use.", (), {} if memory is None else {(): memory[0]}
    )
    yield _gauge(
        "broker_memory_limit_bytes", "Memory that they may use at most; none: there is no limit.",
        (), {(): memory[1]} if memory is not None and memory[1] else {},
    )  # fmt: skip


class _One(Collector):
    """Metric family alone, as `generate_latest` takes it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]


def _census(workers: Iterable[WorkerInfo], models: Iterable[str]) -> dict[tuple[str, str], int]:
    """Workers by model and status, with a zero for each status a model has none of.

    A worker that was told to stop has left, as its missing reason says; it is no loss.
    """
    there = (one for one in workers if one.status is not WorkerStatus.OFFLINE or one.reason)
    counted = Counter((worker.model, worker.status) for worker in there)
    return {(model, status.value): counted[model, status] for model in models for status in WorkerStatus}


def _desired(fleet: FleetState, models: Iterable[str]) -> dict[str, int]:
    """Workers that each model should have; where nothing is decided yet, as many as there are, and one at least."""
    there = Counter(one.model for one in fleet.workers if one.status is not WorkerStatus.OFFLINE)
    decided = {one.model: one.scaling.desired for one in fleet.capacities if one.scaling is not None}
    return {model: decided.get(model, max(there[model], 1)) for model in models}


def _keyed(values: Mapping[str, _T]) -> dict[tuple[str], _T]:
    return {(key,): value for key, value in values.items()}


def _served(values: Mapping[_Key, _T], models: Iterable[str]) -> dict[_Key, _T]:
    """Values of served models; the model is the first label. A model that is served no longer has no series."""
    return {key: value for key, value in values.items() if key[0] in models}


def _zeroed(values: Mapping[_Key, _T], keys: Iterable[_Key], zero: _T) -> dict[_Key, _T]:
    """Values with a zero for each key that has none."""
    return dict.fromkeys(keys, zero) | dict(values)


def _counter(name: str, text: str, named: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = CounterMetricFamily(f"headway_{name}", text, labels=named)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, named: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = GaugeMetricFamily(f"headway_{name}", text, labels=named)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, named: Sequence[str], values: Mapping[_Key, Histogram]) -> Iterator[Metric]:
    items = list(values.items())
    for start in range(0, max(1, len(items)), _AT_ONCE):
        family = HistogramMetricFamily(f"headway_{name}", text, labels=named)
        for key, histogram in items[start : start + _AT_ONCE]:
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets: list[Any] = list(zip(bounds, accumulate(histogram.counts), strict=True))
            for place, (value, trace_id, at) in histogram.exemplars.items():
                buckets[place] = *buckets[place], Exemplar({"trace_id": trace_id}, value, at)
            family.add_metric(key, buckets, histogram.sum)
        yield family
