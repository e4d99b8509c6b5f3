"""Names of all metrics, in one place: a row for each. Reads counters and figures, and writes Prometheus text.

Nothing here is on the path of a request: counters are plain numbers in `runtime.counters` until a scrape.

Figures of the whole fleet are exported by one process, so that a sum over all processes is the truth: by the leading
controller or, where one process is the fleet, by that. Everything else is of the process that exports it.

A series that begins with its first event hides that event from `rate` and `increase`, so every series that a process can
be expected to have is there from the start, with 0.
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
from headway.core.locality.placement import BUSY, COLD, MIN_WARM
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
"""Media type of the text that `exposition` returns."""

OPENMETRICS_TYPE = openmetrics.CONTENT_TYPE_LATEST
"""Media type of the text with exemplars."""

CHANGES = ("step", *(one.value for one in RolloutState if one is not RolloutState.RUNNING))
"""Changes of rollouts."""
NO_TIER = "none"
"""Tier of what is refused before anybody knows who asks."""
NO_MODEL = ""
"""Model of what is refused before a model that is served is known."""

_BEFORE_A_MODEL = frozenset((
    errors.HEADERS_TOO_LARGE, errors.METHOD_NOT_ALLOWED, errors.NOT_IMPLEMENTED, errors.REQUEST_TIMEOUT, errors.UNAUTHENTICATED,
))  # fmt: skip
"""Codes of what is refused before it is a request for a model."""
OUTCOMES = (
    "ok",
    "cancelled",
    *(code.lower() for code in errors.CODES if code not in _BEFORE_A_MODEL and code not in errors.SHOWN),
)
"""Outcomes of requests for a model that is served."""
REFUSED = (
    "answer", "bodies", "broker", "burst", "capacity", "conflict", "culprit", "draining", "list", "memory", "no_workers",
    "overloaded", "policy", "rate", "shed",
)  # fmt: skip
"""Reasons for which a request for a model that is served is refused."""
REFUSED_UNREAD = (
    "bad_request", "bodies", "calls", "forbidden", "headers_too_large", "internal", "method_not_allowed", "not_found",
    "payload_too_large", "polls", "rate", "request_timeout",
)  # fmt: skip
"""Reasons for which a request is refused before its model is known."""
REFUSED_STRANGERS = ("connections", "unauthenticated")
"""Reasons for which a request is refused before anybody knows who asks, and never afterwards."""
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

Labels = str | tuple[str, ...]
"""Values of the labels of a series, in the order of the metric's labels; of one label its value."""
Values = Mapping[Any, Any] | float | None
"""Numbers or histograms by `Labels`; the only one, where a metric has no labels; None: it has no series."""


class Scrape:
    """State of a process as it is exported, with what several metrics need of it."""

    def __init__(self, state: State) -> None:
        self.counters, self.own, self.broker_up = state.counters, state.own, state.broker_up
        self.fleet = state.fleet or _NOTHING
        self.exports_fleet = state.fleet is not None
        """Whether there are figures of the fleet; where another process exports them, metrics of the fleet have no series."""
        self.served = {NO_MODEL, *self.own.models}
        """Models whose requests are counted here; what was counted of one that is served no longer is not exported."""
        workers = (worker.model for worker in self.fleet.workers)
        self.models = {*self.own.models, *workers} if self.exports_fleet else set[str]()
        """Models of the fleet."""

    def of_models(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values by model, with a zero for each of the fleet that has none."""
        return dict.fromkeys(self.models, 0.0) | dict(values)

    def of_capacities(self, read: Callable[[Capacity], float]) -> dict[str, float]:
        """Figure of each model's capacity, as `read` finds it."""
        return self.of_models({one.model: read(one) for one in self.fleet.capacities if one.model in self.models})

    def of_rollouts(self, read: Callable[[Rollout], float]) -> Values:
        """Figure of the last rollout of each model that had one, by model and version, as `read` finds it."""
        found = (one.rollout for one in self.fleet.capacities if one.rollout is not None and one.model in self.models)
        return {(one.model, one.version): read(one) for one in found}

    def of_queues(self, values: Iterable[tuple[str, int, float]], join: Callable[[float, float], float]) -> Values:
        """Values by model and tier; those of a model's versions are joined."""
        found = dict.fromkeys(product(self.models, self.own.tiers), 0.0)
        names = dict(enumerate(self.own.tiers))
        for model, tier, value in values:
            if model in self.models:
                key = model, names.get(tier, str(tier))
                found[key] = join(found.get(key, 0.0), value)
        return found

    def of_bulk(self, read: Callable[[BulkDepth], int]) -> dict[str, float]:
        """Figure of the bulk entries of each model, as `read` finds it of each queue."""
        found = Counter[str]()
        for one in self.fleet.bulk:
            if one.model in self.models:
                found[one.model] += read(one)
        return self.of_models(found)

    def of_gpus(self, read: Callable[[GpuFigures], float | None]) -> Values:
        """Figure of each GPU, as `read` finds it; none where its driver does not tell."""
        return {key: value for key, gpu in self.own.gpus.items() if (value := read(gpu)) is not None}

    @property
    def letters(self) -> dict[str, float]:
        """Dead letters by model: of the fleet's models, and of others that have some."""
        return self.of_models({model: n for model, n in self.fleet.letters.items() if n or model in self.models})

    @property
    def desired(self) -> dict[str, float]:
        """Workers that each model should have; where nothing is decided yet, as many as there are, and one at least."""
        gone = (WorkerStatus.OFFLINE, WorkerStatus.DRAINED)
        there = Counter(one.model for one in self.fleet.workers if one.status not in gone)
        decided = {one.model: one.scaling.desired for one in self.fleet.capacities if one.scaling is not None}
        return {model: decided.get(model, max(there[model], 1)) for model in self.models}

    @property
    def census(self) -> dict[tuple[str, str], int]:
        """Workers by model and status, with a zero for each status a model has none of.

        A worker that was told to stop has left, as its missing reason says; it is no loss.
        """
        there = (one for one in self.fleet.workers if one.status is not WorkerStatus.OFFLINE or one.reason)
        counted = Counter((worker.model, worker.status) for worker in there)
        return {(model, status.value): counted[model, status] for model in self.models for status in WorkerStatus}

    @property
    def roles(self) -> dict[str, int]:
        """Processes of the fleet by role."""
        counted = Counter(member.role for member in heard(self.fleet.members))
        return {role.value: counted[role] for role in Role} if self.exports_fleet else {}


def _xids(scrape: Scrape) -> Values:
    """Xid errors of each GPU by cause."""
    found = {}
    for key, gpu in scrape.own.gpus.items():
        of_model = sum(count for xid, count in gpu.xids.items() if xid in MODEL_XIDS)
        found[*key, "model"], found[*key, "gpu"] = of_model, sum(gpu.xids.values()) - of_model
    return found


def _asked(own: ProcessFigures) -> Iterable[str]:
    """Models that requests come for."""
    return own.models if own.pending is not None else ()


def _run(own: ProcessFigures) -> Iterable[str]:
    """Models that are run here."""
    return sorted({model for model, _ in own.slots or ()})


def _inputs(own: ProcessFigures) -> Iterator[Labels]:
    """Model and version that run here, and how a run of an input goes."""
    return ((*run, outcome) for run, outcome in product(own.versions, (OK, ITEM, BULK, *CAUSES)))


def _workers(own: ProcessFigures) -> Iterable[str]:
    """Workers of the slots."""
    return (worker for _, worker in own.slots or ())


def _scaled(own: ProcessFigures) -> Iterable[str]:
    """Models whose number of workers this process may set, which only a controller does."""
    return own.models if own.leader is not None else ()


def _refused(own: ProcessFigures) -> Iterator[Labels]:
    """Reason, tier and model of refusals."""
    if own.pending is not None:
        yield from product(REFUSED, own.tiers, own.models)
        yield from product(REFUSED_UNREAD, (NO_TIER, *own.tiers), (NO_MODEL,))
        yield from product(REFUSED_STRANGERS, (NO_TIER,), (NO_MODEL,))


COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Row(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        kind: class of its family.
        name: its name, without `headway_` and without the `_total` of a counter.
        labels: names of its labels, with spaces between them.
        text: meaning of its values.
        values: reads its values.
        known: label values that it has from the start, with 0.
        served: whether only models that are served have series.
        bounds: bounds of a histogram.
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    labels: str
    text: str
    values: Callable[[Scrape], Values]
    known: Callable[[ProcessFigures], Iterable[Labels]] | None = None
    served: bool = False
    bounds: Sequence[float] = SECONDS


ROWS = (
    # Of the process.
    Row(GAUGE, "build_info", "version", "Version of Headway; always 1.", lambda of: {of.own.version: 1}),
    Row(GAUGE, "draining", "", "Whether the process is going down.", lambda of: of.own.draining),
    Row(GAUGE, "leader", "", "Whether the process has the controller that leads; only where there is one.",
        lambda of: of.own.leader),
    Row(GAUGE, "broker_up", "", "Whether the broker answered this scrape.", lambda of: of.broker_up),
    Row(HISTOGRAM, "broker_call_seconds", "", "Answered calls to a broker in another process, reads that wait left out.",
        lambda of: {(): of.counters.broker.call_seconds}),
    Row(COUNTER, "broker_call_failures", "", "Such calls without an answer.", lambda of: of.counters.broker.call_failures),
    Row(COUNTER, "trace_spans_dropped", "reason",
        "Spans of traces that were dropped, by reason: queue, export or refused.",
        lambda of: of.counters.spans_dropped),
    Row(GAUGE, "open_connections", "port", "Open connections by port.", lambda of: of.own.connections),
    Row(COUNTER, "retries", "cause", "Entries queued again after a failed run.",
        lambda of: of.counters.broker.retries, lambda own: CAUSES),
    # Of the requests that a gateway and its port answer.
    Row(COUNTER, "requests", "model tier outcome", "Requests answered, by outcome: ok, an error code, or cancelled.",
        lambda of: of.counters.gateway.requests, lambda own: product(_asked(own), own.tiers, OUTCOMES), served=True),
    Row(COUNTER, "tokens", "model tenant how",
        "Tokens that targets have told, by tenant, of the run of a request or of another's that it shares.",
        lambda of: of.counters.gateway.tokens, served=True),
    Row(HISTOGRAM, "request_seconds", "model tier", "From the decoded request to its answer, of those not refused at the door.",
        lambda of: of.counters.gateway.request_seconds, lambda own: product(_asked(own), own.tiers), served=True),
    Row(HISTOGRAM, "queue_seconds", "model tier", "From the enqueue to the claim.",
        lambda of: of.counters.gateway.queue_seconds, lambda own: product(_asked(own), own.tiers), served=True),
    Row(HISTOGRAM, "batching_overhead_seconds", "",
        "Headway's own share of a request: end to end less queueing and the run; one sample a batch.",
        lambda of: {(): of.counters.gateway.overhead_seconds}),
    Row(COUNTER, "refusals", "reason tier model", "Requests refused at the door.",
        lambda of: of.counters.gateway.refusals, _refused, served=True),
    # Of what a gateway holds and holds back, shares, and answers by itself.
    Row(GAUGE, "pending_requests", "", "Requests that the gateway holds; only where there is one.", lambda of: of.own.pending),
    Row(GAUGE, "promise_seconds", "", "Latency that is promised for 95 % of the requests; only where there is a gateway.",
        lambda of: of.own.promise),
    Row(GAUGE, "throttle_per_second", "model",
        "Requests of the lowest tier that this gateway lets in a second; none: all of them.",
        lambda of: of.counters.gateway.throttle, served=True),
    Row(COUNTER, "input_policy", "rule effect",
        "Requests by rule of the input policy, and what it did: changed, refused, shadow or failed.",
        lambda of: of.counters.input_policy, lambda own: product(own.rules, EFFECTS)),
    Row(COUNTER, "client_retries", "", "Requests that their client said it had sent before.",
        lambda of: of.counters.gateway.client_retries),
    Row(COUNTER, "shared", "model kind how",
        "Requests answered with the outcome of another: joined while it ran, or kept of it.",
        lambda of: of.counters.gateway.shared, lambda own: product(_asked(own), KINDS, ("joined", "kept")), served=True),
    Row(COUNTER, "direct", "model", "Requests answered by the fallback, for want of a broker.",
        lambda of: of.counters.gateway.direct, lambda own: own.fallbacks, served=True),
    Row(COUNTER, "ledger_dropped", "", "Records that the ledger never got.", lambda of: of.counters.store.ledger_dropped),
    Row(GAUGE, "ledger_backlog", "", "Records that wait for the ledger; only where there is one.",
        lambda of: of.own.ledger_backlog),
    Row(COUNTER, "bulk_lines", "outcome", "Lines of bulk jobs that this process had answered: answered, or failed.",
        lambda of: of.counters.bulk_lines, lambda own: () if own.bulk_jobs is None else ("answered", "failed")),
    Row(GAUGE, "bulk_jobs", "status", "Bulk jobs that this process holds, by status; only where there are any.",
        lambda of: of.own.bulk_jobs),
    Row(GAUGE, "bulk_paused", "", "Those of which nothing runs at present, by no fault of their lines; the log and the job say why.",
        lambda of: of.own.bulk_paused),
    Row(GAUGE, "keys_age_seconds", "", "How old the API keys are that requests are checked by.",
        lambda of: of.counters.store.keys_age),
    # Of batchers and their workers.
    Row(HISTOGRAM, "batch_size", "model", "Entries in a batch, or rows where they are tensors.", lambda of: of.counters.worker.batch_size, _run, bounds=SIZES),
    Row(COUNTER, "batches", "model reason", "Batches that left, by reason.",
        lambda of: of.counters.worker.batches, lambda own: product(_run(own), DEPARTURES)),
    Row(COUNTER, "inputs", "model version outcome", "Inputs that ran, by the version of the model and how that went.",
        lambda of: of.counters.worker.inputs, _inputs),
    Row(HISTOGRAM, "batch_fill_ratio", "model", "Batch size over the largest batch.",
        lambda of: of.counters.worker.batch_fill, _run, bounds=RATIOS),
    Row(HISTOGRAM, "gpu_batch_seconds", "model worker", "Run time of a batch.",
        lambda of: of.counters.worker.gpu_seconds, lambda own: own.slots or ()),
    Row(GAUGE, "gpu_utilization", "model worker", "Busy share of a worker's last seconds, 0 to 1.", lambda of: of.own.slots),
    Row(COUNTER, "worker_restarts", "worker", "How often a worker's process was replaced.",
        lambda of: of.counters.worker.restarts, _workers),
    Row(COUNTER, "bulk_kills", "worker", "How often a batch with lines of bulk jobs ended a worker's process.",
        lambda of: of.counters.worker.bulk_kills, _workers),
    Row(COUNTER, "model_loads", "model worker", "How often a worker has loaded its model.",
        lambda of: of.counters.worker.loads, lambda own: own.slots or ()),
    Row(HISTOGRAM, "model_load_seconds", "model", "Seconds of a load, from the first step to ready.",
        lambda of: of.counters.worker.load_seconds, _run),
    Row(COUNTER, "model_evictions", "reason", "Models that made room on their GPU for another, by why that was loaded.",
        lambda of: of.counters.worker.evictions, lambda own: () if own.slots is None else EVICTIONS),
    Row(COUNTER, "large_payloads", "direction way",
        "Large inputs and outputs of worker processes, and whether there was room for them in the arena.",
        lambda of: of.counters.worker.large_payloads, lambda own: () if own.slots is None else WAYS),
    Row(COUNTER, "wasted_gpu_seconds", "cause", "GPU time spent on clients that had left, or on batches that failed.",
        lambda of: of.counters.worker.wasted_seconds, lambda own: () if own.slots is None else WASTES),
    Row(GAUGE, "breaker_state", "backend", "Circuit breaker: 0 closed, 1 half open, 2 open.",
        lambda of: of.counters.worker.breaker_state, _workers),
    # Of GPUs, as their driver tells them; they have no samples without one, or for what it does not tell.
    Row(GAUGE, "gpu_memory_used_bytes", "model worker", "Memory of a worker's GPU that is in use, by whomever.",
        lambda of: of.of_gpus(lambda gpu: gpu.memory_used)),
    Row(GAUGE, "gpu_memory_total_bytes", "model worker", "Memory of a worker's GPU.",
        lambda of: of.of_gpus(lambda gpu: gpu.memory_total)),
    Row(GAUGE, "gpu_device_utilization", "model worker", "Share of the last moment in which a worker's GPU computed.",
        lambda of: of.of_gpus(lambda gpu: gpu.utilisation)),
    Row(GAUGE, "gpu_power_watts", "model worker", "Power that a worker's GPU takes.",
        lambda of: of.of_gpus(lambda gpu: gpu.power)),
    Row(GAUGE, "gpu_temperature_celsius", "model worker", "Temperature of a worker's GPU.",
        lambda of: of.of_gpus(lambda gpu: gpu.temperature)),
    Row(GAUGE, "gpu_lost", "model worker", "Whether a worker's GPU is lost.",
        lambda of: of.of_gpus(lambda gpu: bool(gpu.lost))),
    Row(COUNTER, "gpu_ecc_errors", "model worker",
        "Memory errors of a worker's GPU that were not corrected, since its driver was loaded.",
        lambda of: of.of_gpus(lambda gpu: gpu.ecc_errors)),
    Row(COUNTER, "gpu_xid_errors", "model worker cause",
        "Xid errors of a worker's GPU, by whether the model can cause them by itself: model or gpu.", _xids),
    # Of the autoscaler.
    Row(COUNTER, "scaling_decisions", "model direction", "Decisions of the autoscaler, by direction: up, down or again.",
        lambda of: of.counters.controller.scaling_decisions, lambda own: product(_scaled(own), DIRECTIONS), served=True),
    # Of rollouts.
    Row(COUNTER, "rollout_changes", "model change", "Changes of rollouts: a step, or the state that ended one.",
        lambda of: of.counters.controller.rollout_changes, lambda own: product(_scaled(own), CHANGES), served=True),
    # Of certificates.
    Row(GAUGE, "tls_certificate_expiry_timestamp_seconds", "", "When the certificate of the ports ends, in Unix seconds.",
        lambda of: of.counters.tls.ends),
    Row(GAUGE, "remote_certificate_expiry_timestamp_seconds", "",
        "When the certificate that a remote API is shown ends, in Unix seconds.",
        lambda of: of.counters.tls.remote_ends),
    Row(COUNTER, "tls_handshakes_failed", "port reason", "TLS handshakes that failed, by port and reason.",
        lambda of: of.counters.tls.failures, lambda own: product(own.secure, REASONS)),
    # Of the fleet.
    Row(GAUGE, "queue_depth", "model tier", "Entries of the fleet that wait.",
        lambda of: of.of_queues(((one.model, one.tier, one.depth) for one in of.fleet.depths), add)),
    Row(GAUGE, "queue_oldest_seconds", "model tier", "How long the oldest entry has waited.",
        lambda of: of.of_queues(((one.model, one.tier, one.oldest_seconds) for one in of.fleet.depths), max)),
    Row(GAUGE, "bulk_waiting", "model", "Lines of bulk jobs that wait in the queue for empty seats.",
        lambda of: of.of_bulk(lambda one: one.waiting)),
    Row(COUNTER, "bulk_delayed_requests", "model", "Requests that have waited for a GPU that ran lines of bulk jobs alone.",
        lambda of: of.of_bulk(lambda one: one.delayed)),
    Row(GAUGE, "workers", "model status", "Workers of the fleet by status.", lambda of: of.census),
    Row(GAUGE, "padded_models", "model", "1 while the model is known to fill the inputs of a call up to the longest, else 0.",
        lambda of: of.of_models(dict.fromkeys(batch_cost.padded(of.fleet.workers), 1.0))),
    Row(GAUGE, "expected_workers", "", "Healthy workers that the fleet should have; 0: nobody has said.",
        lambda of: of.fleet.expected if of.exports_fleet else None),
    # Scrape configurations have a label `role` of their own.
    Row(GAUGE, "processes", "process_role", "Processes of the fleet by role, heard of within 3 s.", lambda of: of.roles),
    Row(GAUGE, "capacity_items_per_second", "model", "What the healthy workers of a model do at most together.",
        lambda of: of.of_capacities(lambda one: one.items_per_second)),
    Row(GAUGE, "capacity_usable_items_per_second", "model",
        "That times the target utilisation; 0 while the broker's memory is scarce.",
        lambda of: of.of_capacities(lambda one: one.usable_per_second)),
    Row(GAUGE, "capacity_estimated", "model", "Whether that is an estimate yet, as few full batches were seen.",
        lambda of: of.of_capacities(lambda one: one.estimated)),
    Row(GAUGE, "desired_workers", "model", "Workers that a model should have, as the autoscaler has decided.",
        lambda of: of.desired),
    Row(GAUGE, "min_workers", "model", "Fewest workers that the autoscaler may want.",
        lambda of: of.of_capacities(lambda one: one.scaling.least if one.scaling else 0)),
    Row(GAUGE, "max_workers", "model", "Most workers that it may want; 0: there is no bound.",
        lambda of: of.of_capacities(lambda one: one.scaling.most if one.scaling else 0)),
    Row(GAUGE, "rollout_share", "model version", "Share of a model's requests that the version of its last rollout gets.",
        lambda of: of.of_rollouts(lambda one: one.percent / 100.0)),
    Row(GAUGE, "rollout_rolled_back", "model version", "Whether that version was rolled back.",
        lambda of: of.of_rollouts(lambda one: one.state is RolloutState.ROLLED_BACK)),
    Row(GAUGE, "dlq_depth", "model", "Dead letters kept.", lambda of: of.letters),
    Row(COUNTER, "dead_letters", "model", "Dead letters ever kept.",
        lambda of: {model: of.fleet.letters_ever.get(model, 0) for model in of.letters}),
    Row(GAUGE, "broker_memory_bytes", "", "Memory that the broker's servers use.",
        lambda of: of.fleet.memory and of.fleet.memory[0]),
    Row(GAUGE, "broker_memory_limit_bytes", "", "Memory that they may use at most; none: there is no limit.",
        lambda of: of.fleet.memory and (of.fleet.memory[1] or None)),
)  # fmt: skip
"""Every metric, in the order of the text."""


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
    """Values of a metric by the values of its labels."""
    names, values = row.labels.split(), row.values(scrape)
    if not isinstance(values, Mapping):
        return {} if values is None else {(): values}
    found = {_key(labels): value for labels, value in values.items()}
    if row.served:
        model = names.index("model")
        found = {key: value for key, value in found.items() if key[model] in scrape.served}
    if row.known:
        zero = Histogram(row.bounds) if row.kind is HISTOGRAM else 0
        found = {**dict.fromkeys(map(_key, row.known(scrape.own)), zero), **found}
    places = [place for place, name in enumerate(names) if name in ("worker", "backend")]
    for place in places:
        found = {
            (*key[:place], scrape.own.worker_label(key[place]), *key[place + 1 :]): value
            for key, value in found.items()
        }
    return found


def _key(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


def _buckets(histogram: Histogram) -> tuple[list[Any], float]:
    """Buckets of a histogram, and the sum of its values."""
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets: list[Any] = list(zip(bounds, accumulate(histogram.counts), strict=True))
    for place, (value, trace_id, at) in histogram.exemplars.items():
        buckets[place] = *buckets[place], Exemplar({"trace_id": trace_id}, value, at)
    return buckets, histogram.sum


class _One(Collector):
    """Metric family alone, as `generate_latest` takes it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]
