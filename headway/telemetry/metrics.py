"""Table of all metrics, each with a function that reads its values, and their text in Prometheus' formats.

Requests only update plain numbers in `runtime.counters`. All other work happens during a scrape. The fleet's
metrics are exported only by the leading controller, or by a process without a broker. So sums over all processes are correct.
All other metrics describe the process that exports them.

If a series began with its first event, `rate` and `increase` would miss that event. So each expected series starts at 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from operator import add
from typing import Any

import msgspec
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from headway import errors
from headway.core import batch_cost
from headway.core.departure import APART, DEADLINE, EARLY, FULL, HEADWAY, RETRY, WINDOW
from headway.core.health import heard
from headway.core.locality import BUSY, COLD, MIN_WARM
from headway.core.scaling.scaler import DIRECTIONS
from headway.model import (
    MODEL_XIDS,
    BulkDepth,
    Capacity,
    Cause,
    DedupKind,
    GpuFigures,
    Role,
    Rollout,
    RolloutState,
    WorkerStatus,
)
from headway.runtime.counters import BULK, ITEM, OK, RATIOS, SECONDS, SIZES, Histogram
from headway.runtime.tls_transport import REASONS
from headway.telemetry.figures import FleetState, ProcessFigures, State

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OPENMETRICS_TYPE = openmetrics.CONTENT_TYPE_LATEST  # Media type of text with exemplars.

CHANGES = ("step", *(state.value for state in RolloutState if state is not RolloutState.RUNNING))
NO_TIER = "none"  # Tier of requests refused before the caller is known.
NO_MODEL = ""  # Model of requests refused before their model is known.

_BEFORE_A_MODEL = frozenset((  # Error codes of refusals before the model is known.
    errors.HEADERS_TOO_LARGE, errors.METHOD_NOT_ALLOWED, errors.NOT_IMPLEMENTED, errors.REQUEST_TIMEOUT, errors.UNAUTHENTICATED,
))  # fmt: skip
_WITH_A_MODEL = (code for code in errors.CODES if code not in _BEFORE_A_MODEL and code not in errors.SHOWN)
OUTCOMES = ("ok", "cancelled", *map(str.lower, _WITH_A_MODEL))
REFUSED = (
    "answer", "bodies", "broker", "burst", "capacity", "conflict", "culprit", "draining", "list", "memory", "no_workers",
    "overloaded", "policy", "rate", "shed",
)  # fmt: skip
REFUSED_UNREAD = (  # Reasons for refusing a request before its model is known.
    "bad_request", "bodies", "calls", "forbidden", "headers_too_large", "internal", "method_not_allowed", "not_found",
    "payload_too_large", "polls", "rate", "request_timeout",
)  # fmt: skip
REFUSED_STRANGERS = ("connections", "unauthenticated")  # Reasons that only apply before the caller is known.
DEPARTURES = (FULL, DEADLINE, WINDOW, HEADWAY, EARLY, RETRY, APART)
CAUSES = tuple(cause.value for cause in Cause)
WASTES = ("departed", BULK, *CAUSES)
EVICTIONS = (COLD, BUSY, MIN_WARM)
WAYS = tuple(product(("in", "out"), ("arena", "frame")))
EFFECTS = ("changed", "refused", "shadow", "failed")
KINDS = tuple(kind.value for kind in DedupKind)

_AT_ONCE = 8
_EOF = b"# EOF\n"
_PROCESS = ProcessCollector(registry=None)
_NOTHING = FleetState()

Labels = str | tuple[str, ...]  # Label values in the metric's order; a plain string for a single label.
Values = Mapping[Any, Any] | float | None  # By `Labels`; a number for a metric without labels; None for no series.


class Scrape:
    """State during one scrape, and values that several metrics share."""

    def __init__(self, state: State) -> None:
        self.counters, self.own, self.broker_up = state.counters, state.own, state.broker_up
        self.fleet = state.fleet or _NOTHING
        self.exports_fleet = state.fleet is not None  # If False, the fleet's metrics have no series.
        self.served = {NO_MODEL, *self.own.models}
        workers = (worker.model for worker in self.fleet.workers)
        self.models = {*self.own.models, *workers} if self.exports_fleet else set[str]()

    def of_models(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(self.models, 0.0) | dict(values)

    def of_capacities(self, read: Callable[[Capacity], float]) -> dict[str, float]:
        capacities = (capacity for capacity in self.fleet.capacities if capacity.model in self.models)
        return self.of_models({capacity.model: read(capacity) for capacity in capacities})

    def of_rollouts(self, read: Callable[[Rollout], float]) -> Values:
        rollouts = (capacity.rollout for capacity in self.fleet.capacities if capacity.model in self.models)
        return {(rollout.model, rollout.version): read(rollout) for rollout in rollouts if rollout is not None}

    def of_queues(self, values: Iterable[tuple[str, int, float]], join: Callable[[float, float], float]) -> Values:
        """Return values by model and tier. `join` combines the values of a model's versions."""
        joined = dict.fromkeys(product(self.models, self.own.tiers), 0.0)
        names = dict(enumerate(self.own.tiers))
        for model, tier, value in values:
            if model in self.models:
                key = model, names.get(tier, str(tier))
                joined[key] = join(joined.get(key, 0.0), value)
        return joined

    def of_bulk(self, read: Callable[[BulkDepth], int]) -> dict[str, float]:
        sums = Counter[str]()
        for queue in self.fleet.bulk:
            if queue.model in self.models:
                sums[queue.model] += read(queue)
        return self.of_models(sums)

    def of_gpus(self, read: Callable[[GpuFigures], float | None]) -> Values:
        return {key: value for key, gpu in self.own.gpus.items() if (value := read(gpu)) is not None}

    @property
    def letters(self) -> dict[str, float]:
        """Number of dead letters by model, for the fleet's models and any other model that has dead letters."""
        return self.of_models({model: n for model, n in self.fleet.letters.items() if n or model in self.models})

    @property
    def desired(self) -> dict[str, float]:
        """Desired number of workers by model. Before the first decision, it is the current number, but at least one."""
        ended = (WorkerStatus.OFFLINE, WorkerStatus.DRAINED)
        present = Counter(worker.model for worker in self.fleet.workers if worker.status not in ended)
        capacities = self.fleet.capacities
        decided = {capacity.model: capacity.scaling.desired for capacity in capacities if capacity.scaling is not None}
        return {model: decided.get(model, max(present[model], 1)) for model in self.models}

    @property
    def census(self) -> dict[tuple[str, str], int]:
        """Number of workers by model and status, including zeros. Workers that were told to stop don't count."""
        counted_workers = (
            worker for worker in self.fleet.workers if worker.status is not WorkerStatus.OFFLINE or worker.reason
        )
        counted = Counter((worker.model, worker.status) for worker in counted_workers)
        return {(model, status.value): counted[model, status] for model in self.models for status in WorkerStatus}

    @property
    def roles(self) -> dict[str, int]:
        counted = Counter(member.role for member in heard(self.fleet.members))
        return {role.value: counted[role] for role in Role} if self.exports_fleet else {}


def _xids(scrape: Scrape) -> Values:
    """Return the Xid errors of each GPU. The last label says whether a model can cause them."""
    errors_by_cause = {}
    for key, gpu in scrape.own.gpus.items():
        of_model = sum(count for xid, count in gpu.xids.items() if xid in MODEL_XIDS)
        errors_by_cause[*key, "model"], errors_by_cause[*key, "gpu"] = of_model, sum(gpu.xids.values()) - of_model
    return errors_by_cause


def _asked(own: ProcessFigures) -> Iterable[str]:
    return own.models if own.pending is not None else ()


def _run(own: ProcessFigures) -> Iterable[str]:
    return sorted({model for model, _ in own.slots or ()})


def _inputs(own: ProcessFigures) -> Iterator[Labels]:
    return ((*run, outcome) for run, outcome in product(own.versions, (OK, ITEM, BULK, *CAUSES)))


def _workers(own: ProcessFigures) -> Iterable[str]:
    return (worker for _, worker in own.slots or ())


def _scaled(own: ProcessFigures) -> Iterable[str]:
    """Return the models whose scaling this process decides. Empty if it isn't the controller."""
    return own.models if own.leader is not None else ()


def _refused(own: ProcessFigures) -> Iterator[Labels]:
    if own.pending is not None:
        yield from product(REFUSED, own.tiers, own.models)
        yield from product(REFUSED_UNREAD, (NO_TIER, *own.tiers), (NO_MODEL,))
        yield from product(REFUSED_STRANGERS, (NO_TIER,), (NO_MODEL,))


COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Row(msgspec.Struct, frozen=True):
    """One metric. `name` omits the prefix `headway_` and a counter's suffix `_total`. Spaces separate the `labels`. `known` returns
    the label values that are exported as 0 from the start. If `served`, only served models are exported."""

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    labels: str
    text: str
    values: Callable[[Scrape], Values]
    known: Callable[[ProcessFigures], Iterable[Labels]] | None = None
    served: bool = False
    bounds: Sequence[float] = SECONDS


ROWS = (
    # The process.
    Row(GAUGE, "build_info", "version", "Version of Headway; always 1.", lambda of: {of.own.version: 1}),
    Row(GAUGE, "draining", "", "1 while the process is shutting down.", lambda of: of.own.draining),
    Row(GAUGE, "leader", "", "1 if the process's controller leads; absent if it has no controller.", lambda of: of.own.leader),
    Row(GAUGE, "broker_up", "", "1 if the broker answered this scrape.", lambda of: of.broker_up),
    Row(HISTOGRAM, "broker_call_seconds", "", "Seconds of successful calls to a broker in another process, except for blocking reads.",
        lambda of: {(): of.counters.broker.call_seconds}),
    Row(COUNTER, "broker_call_failures", "", "Calls to a broker in another process that got no answer.", lambda of: of.counters.broker.call_failures),
    Row(COUNTER, "trace_spans_dropped", "reason", "Dropped trace spans, by reason: queue, export or refused.",
        lambda of: of.counters.spans_dropped),
    Row(GAUGE, "open_connections", "port", "Open connections by port.", lambda of: of.own.connections),
    Row(COUNTER, "retries", "cause", "Entries queued again after a failed run, by cause.", lambda of: of.counters.broker.retries, lambda own: CAUSES),
    # Requests that a gateway and its ports answer.
    Row(COUNTER, "requests", "model tier outcome", "Requests answered, by outcome: ok, an error code, or cancelled.",
        lambda of: of.counters.gateway.requests, lambda own: product(_asked(own), own.tiers, OUTCOMES), served=True),
    Row(COUNTER, "tokens", "model tenant how", "Tokens reported by targets, by tenant, and by whether the request ran itself or shared another's run.",
        lambda of: of.counters.gateway.tokens, served=True),
    Row(HISTOGRAM, "request_seconds", "model tier", "Seconds from the decoded request to its answer, except for requests refused on arrival.",
        lambda of: of.counters.gateway.request_seconds, lambda own: product(_asked(own), own.tiers), served=True),
    Row(HISTOGRAM, "queue_seconds", "model tier", "Seconds from enqueueing to claiming.",
        lambda of: of.counters.gateway.queue_seconds, lambda own: product(_asked(own), own.tiers), served=True),
    Row(HISTOGRAM, "batching_overhead_seconds", "", "Seconds that Headway itself adds to a request: end to end minus queueing and run; one sample per batch.",
        lambda of: {(): of.counters.gateway.overhead_seconds}),
    Row(COUNTER, "refusals", "reason tier model", "Requests refused on arrival.", lambda of: of.counters.gateway.refusals, _refused, served=True),
    # What a gateway holds, throttles, shares, and answers without the broker.
    Row(GAUGE, "pending_requests", "", "Requests that the gateway holds; absent without a gateway.", lambda of: of.own.pending),
    Row(GAUGE, "promise_seconds", "", "Latency promised for 95 % of the requests; absent without a gateway.", lambda of: of.own.promise),
    Row(GAUGE, "throttle_per_second", "model", "Requests per second of the lowest tier that this gateway admits; absent while it admits all.",
        lambda of: of.counters.gateway.throttle, served=True),
    Row(COUNTER, "input_policy", "rule effect",
        "Requests that a rule of the input policy changed, refused, would have changed or refused (shadow), or failed on.",
        lambda of: of.counters.input_policy, lambda own: product(own.rules, EFFECTS)),
    Row(COUNTER, "client_retries", "", "Requests that clients marked as retries.", lambda of: of.counters.gateway.client_retries),
    Row(COUNTER, "shared", "model kind how", "Requests answered with another request's outcome: joined while that ran, or kept afterwards.",
        lambda of: of.counters.gateway.shared, lambda own: product(_asked(own), KINDS, ("joined", "kept")), served=True),
    Row(COUNTER, "direct", "model", "Requests answered by the fallback while the broker was unavailable.",
        lambda of: of.counters.gateway.direct, lambda own: own.fallbacks, served=True),
    Row(COUNTER, "ledger_dropped", "", "Records that never reached the ledger.", lambda of: of.counters.store.ledger_dropped),
    Row(GAUGE, "ledger_backlog", "", "Records waiting to be written to the ledger; absent without a ledger.", lambda of: of.own.ledger_backlog),
    Row(COUNTER, "bulk_lines", "outcome", "Bulk job lines that this process finished: answered or failed.",
        lambda of: of.counters.bulk_lines, lambda own: () if own.bulk_jobs is None else ("answered", "failed")),
    Row(GAUGE, "bulk_jobs", "status", "Bulk jobs that this process holds, by status; absent without bulk jobs.", lambda of: of.own.bulk_jobs),
    Row(GAUGE, "bulk_paused", "", "Bulk jobs paused for reasons other than their lines; the log and the job say why.", lambda of: of.own.bulk_paused),
    Row(GAUGE, "keys_age_seconds", "", "Age of the API keys against which requests are checked.", lambda of: of.counters.store.keys_age),
    # Batchers and their workers.
    Row(HISTOGRAM, "batch_size", "model", "Entries in a batch, or rows if they are tensors.", lambda of: of.counters.worker.batch_size, _run, bounds=SIZES),
    Row(COUNTER, "batches", "model reason", "Batches started, by reason.",
        lambda of: of.counters.worker.batches, lambda own: product(_run(own), DEPARTURES)),
    Row(COUNTER, "inputs", "model version outcome", "Inputs that ran, by version and outcome of the run.",
        lambda of: of.counters.worker.inputs, _inputs),
    Row(HISTOGRAM, "batch_fill_ratio", "model", "Batch size divided by the maximum batch size.",
        lambda of: of.counters.worker.batch_fill, _run, bounds=RATIOS),
    Row(HISTOGRAM, "gpu_batch_seconds", "model worker", "Run time of a batch.",
        lambda of: of.counters.worker.gpu_seconds, lambda own: own.slots or ()),
    Row(GAUGE, "gpu_utilization", "model worker", "Share of the last seconds in which a worker was busy, 0 to 1.", lambda of: of.own.slots),
    Row(COUNTER, "worker_restarts", "worker", "Replacements of a worker's process.", lambda of: of.counters.worker.restarts, _workers),
    Row(COUNTER, "bulk_kills", "worker", "Batches with bulk job lines whose worker's process died.",
        lambda of: of.counters.worker.bulk_kills, _workers),
    Row(COUNTER, "model_loads", "model worker", "Loads of a model by a worker.", lambda of: of.counters.worker.loads, lambda own: own.slots or ()),
    Row(HISTOGRAM, "model_load_seconds", "model", "Seconds that a load took, from the first step to ready.",
        lambda of: of.counters.worker.load_seconds, _run),
    Row(COUNTER, "model_evictions", "reason", "Models unloaded to make room on their GPU, by why another model was loaded.",
        lambda of: of.counters.worker.evictions, lambda own: () if own.slots is None else EVICTIONS),
    Row(COUNTER, "large_payloads", "direction way", "Large inputs and outputs of worker processes, by whether the arena had room for them.",
        lambda of: of.counters.worker.large_payloads, lambda own: () if own.slots is None else WAYS),
    Row(COUNTER, "wasted_gpu_seconds", "cause", "GPU time spent on clients that had disconnected, or on failed batches.",
        lambda of: of.counters.worker.wasted_seconds, lambda own: () if own.slots is None else WASTES),
    Row(GAUGE, "breaker_state", "backend", "Circuit breaker: 0 closed, 1 half open, 2 open.", lambda of: of.counters.worker.breaker_state, _workers),
    # GPUs, as their driver reports them. What it doesn't report has no samples.
    Row(GAUGE, "gpu_memory_used_bytes", "model worker", "Used memory of a worker's GPU, by any process.",
        lambda of: of.of_gpus(lambda gpu: gpu.memory_used)),
    Row(GAUGE, "gpu_memory_total_bytes", "model worker", "Memory of a worker's GPU.", lambda of: of.of_gpus(lambda gpu: gpu.memory_total)),
    Row(GAUGE, "gpu_device_utilization", "model worker", "Share of the driver's last sampling period in which a worker's GPU was computing.",
        lambda of: of.of_gpus(lambda gpu: gpu.utilisation)),
    Row(GAUGE, "gpu_power_watts", "model worker", "Power draw of a worker's GPU.", lambda of: of.of_gpus(lambda gpu: gpu.power)),
    Row(GAUGE, "gpu_temperature_celsius", "model worker", "Temperature of a worker's GPU.", lambda of: of.of_gpus(lambda gpu: gpu.temperature)),
    Row(GAUGE, "gpu_lost", "model worker", "1 if a worker's GPU is lost.", lambda of: of.of_gpus(lambda gpu: bool(gpu.lost))),
    Row(COUNTER, "gpu_ecc_errors", "model worker", "Uncorrected memory errors of a worker's GPU since its driver was loaded.",
        lambda of: of.of_gpus(lambda gpu: gpu.ecc_errors)),
    Row(COUNTER, "gpu_xid_errors", "model worker cause",
        "Xid errors of a worker's GPU, by possible cause: model or gpu.", _xids),
    # The autoscaler.
    Row(COUNTER, "scaling_decisions", "model direction", "Decisions of the autoscaler, by direction: up, down or again.",
        lambda of: of.counters.controller.scaling_decisions, lambda own: product(_scaled(own), DIRECTIONS), served=True),
    # Rollouts.
    Row(COUNTER, "rollout_changes", "model change", "Rollout changes: a step, or the final state.",
        lambda of: of.counters.controller.rollout_changes, lambda own: product(_scaled(own), CHANGES), served=True),
    # Certificates.
    Row(GAUGE, "tls_certificate_expiry_timestamp_seconds", "", "When the ports' certificate expires, in Unix seconds.",
        lambda of: of.counters.tls.ends),
    Row(GAUGE, "remote_certificate_expiry_timestamp_seconds", "", "When the certificate presented to a remote API expires, in Unix seconds.",
        lambda of: of.counters.tls.remote_ends),
    Row(COUNTER, "tls_handshakes_failed", "port reason", "Failed TLS handshakes, by port and reason.",
        lambda of: of.counters.tls.failures, lambda own: product(own.secure, REASONS)),
    # The fleet.
    Row(GAUGE, "queue_depth", "model tier", "Entries waiting in the fleet.",
        lambda of: of.of_queues(((depth.model, depth.tier, depth.depth) for depth in of.fleet.depths), add)),
    Row(GAUGE, "queue_oldest_seconds", "model tier", "How long the oldest entry has waited.",
        lambda of: of.of_queues(((depth.model, depth.tier, depth.oldest_seconds) for depth in of.fleet.depths), max)),
    Row(GAUGE, "bulk_waiting", "model", "Bulk job lines that wait in the queue for empty seats.",
        lambda of: of.of_bulk(lambda queue: queue.waiting)),
    Row(COUNTER, "bulk_delayed_requests", "model", "Requests that waited for a GPU that was running only bulk job lines.",
        lambda of: of.of_bulk(lambda queue: queue.delayed)),
    Row(GAUGE, "workers", "model status", "Workers of the fleet by status.", lambda of: of.census),
    Row(GAUGE, "padded_models", "model", "1 if the model is known to pad all inputs of a call to the longest one.",
        lambda of: of.of_models(dict.fromkeys(batch_cost.padded(of.fleet.workers), 1.0))),
    Row(GAUGE, "expected_workers", "", "Healthy workers that the fleet should have; 0 if not specified.",
        lambda of: of.fleet.expected if of.exports_fleet else None),
    # The label isn't `role`, because scrape configurations use that name.
    Row(GAUGE, "processes", "process_role", "Processes of the fleet that have reported within 3 s, by role.", lambda of: of.roles),
    Row(GAUGE, "capacity_items_per_second", "model", "Inputs per second that a model's healthy workers can process together.",
        lambda of: of.of_capacities(lambda capacity: capacity.items_per_second)),
    Row(GAUGE, "capacity_usable_items_per_second", "model", "Capacity times the target utilisation; 0 while the broker is short of memory.",
        lambda of: of.of_capacities(lambda capacity: capacity.usable_per_second)),
    Row(GAUGE, "capacity_estimated", "model", "1 while the capacity is an estimate, because few full batches have run.",
        lambda of: of.of_capacities(lambda capacity: capacity.estimated)),
    Row(GAUGE, "desired_workers", "model", "Workers that a model should have, as decided by the autoscaler.", lambda of: of.desired),
    Row(GAUGE, "min_workers", "model", "Lower bound on the workers that the autoscaler may request.",
        lambda of: of.of_capacities(lambda capacity: capacity.scaling.least if capacity.scaling else 0)),
    Row(GAUGE, "max_workers", "model", "Upper bound on the workers that the autoscaler may request; 0 for none.",
        lambda of: of.of_capacities(lambda capacity: capacity.scaling.most if capacity.scaling else 0)),
    Row(GAUGE, "rollout_share", "model version", "Share of a model's requests that the version of its last rollout gets.",
        lambda of: of.of_rollouts(lambda rollout: rollout.percent / 100.0)),
    Row(GAUGE, "rollout_rolled_back", "model version", "1 if that version was rolled back.",
        lambda of: of.of_rollouts(lambda rollout: rollout.state is RolloutState.ROLLED_BACK)),
    Row(GAUGE, "dlq_depth", "model", "Dead letters currently kept.", lambda of: of.letters),
    Row(COUNTER, "dead_letters", "model", "Dead letters that were ever kept.", lambda of: {model: of.fleet.letters_ever.get(model, 0) for model in of.letters}),
    Row(GAUGE, "broker_memory_bytes", "", "Memory that the broker's servers use.", lambda of: of.fleet.memory and of.fleet.memory[0]),
    Row(GAUGE, "broker_memory_limit_bytes", "", "Memory that the broker's servers may use; absent if unlimited.",
        lambda of: of.fleet.memory and (of.fleet.memory[1] or None)),
)  # fmt: skip


def asks_for_exemplars(accept: str) -> bool:
    """Return True if the `Accept` of a scrape asks for OpenMetrics, where histograms have exemplars."""
    return "application/openmetrics-text" in accept


async def exposition(state: State, *, exemplars: bool = False) -> bytes:
    """Return the state as Prometheus text or, with exemplars, as OpenMetrics text. Other tasks get a turn after each
    family, because a scrape of many workers must not delay a batch."""
    parts: list[bytes] = []
    previous = ""
    write = openmetrics.generate_latest if exemplars else generate_latest
    for family in families(state):
        text = write(_SingleFamily(family)).removesuffix(_EOF)
        if family.name == previous:
            text = text.split(b"\n", 2)[2]  # Its HELP and TYPE were already written.
        previous = family.name
        parts.append(text)
        await asyncio.sleep(0)
    parts.append(write(_PROCESS))
    return b"".join(parts)


def families(state: State) -> Iterator[Metric]:
    """Yield all metrics. A metric with many series may be split into several parts."""
    scrape = Scrape(state)
    for row in ROWS:
        items = [*_series(row, scrape).items()]
        step = _AT_ONCE if row.kind is HISTOGRAM else max(1, len(items))
        for start in range(0, max(1, len(items)), step):
            family = row.kind(f"headway_{row.name}", row.text, labels=row.labels.split())
            for key, value in items[start : start + step]:
                family.add_metric(key, *(_buckets(value) if isinstance(value, Histogram) else (value,)))
            yield family


def _series(row: Row, scrape: Scrape) -> dict[tuple[str, ...], Any]:
    names, values = row.labels.split(), row.values(scrape)
    if not isinstance(values, Mapping):
        return {} if values is None else {(): values}
    series = {_key(labels): value for labels, value in values.items()}
    if row.served:
        model = names.index("model")
        series = {key: value for key, value in series.items() if key[model] in scrape.served}
    if row.known:
        zero = Histogram(row.bounds) if row.kind is HISTOGRAM else 0
        series = {**dict.fromkeys(map(_key, row.known(scrape.own)), zero), **series}
    label = scrape.own.worker_label
    for place in (place for place, name in enumerate(names) if name in ("worker", "backend")):
        series = {(*key[:place], label(key[place]), *key[place + 1 :]): value for key, value in series.items()}
    return series


def _key(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


def _buckets(histogram: Histogram) -> tuple[list[Any], float]:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets: list[Any] = list(zip(bounds, accumulate(histogram.counts), strict=True))
    for place, (value, trace_id, at) in histogram.exemplars.items():
        buckets[place] = *buckets[place], Exemplar({"trace_id": trace_id}, value, at)
    return buckets, histogram.sum


class _SingleFamily(Collector):
    """Registry with a single family, because `generate_latest` takes a registry."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]
