"""Plain counters of what happened; `telemetry/metrics.py` names and exports them.

Each part of a process has counts of its own, and counts per batch where it can. Nothing here knows of Prometheus, a clock
or a lock: one event loop owns all counts. Keys are label values, in the order of the metric's labels; tiers appear as names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from headway.runtime.departure_log import DepartureLog

SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.125, 0.15, 0.18, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
SIZES = (
    1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100,
    128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
OK, ITEM = "ok", "item"
"""Outcomes of the run of one input, where it is not the whole batch's: an output, or a failure of its own."""
BULK = "bulk"
"""Outcome of the run of a bulk entry that failed, and of all inputs of a batch that failed with some in it."""


class Histogram:
    """Counts by upper bound; the last count is of what lies above all bounds."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, tuple[float, str, float]] = {}
        """Value, trace id and Unix time in seconds of a sampled request, by the number of the bound that it counts under."""

    def exemplify(self, value: float, trace_id: str, at: float) -> None:
        """Remember a value that was counted, with the trace that it came from, in place of the last one like it."""
        self.exemplars[bisect_left(self.bounds, value)] = value, trace_id, at

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count several values."""
        bounds, ordered, begun = self.bounds, sorted(values), 0
        while begun < len(ordered):
            place = bisect_left(bounds, ordered[begun])
            end = bisect_right(ordered, bounds[place]) if place < len(bounds) else len(ordered)
            self.counts[place] += end - begun
            begun = end
        self.sum += sum(values)

    @property
    def count(self) -> int:
        """Number of values counted."""
        return sum(self.counts)


class RunTotal:
    """Batches of one size, and the seconds of their runs, added up."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0


def _seconds() -> Histogram:
    return Histogram(SECONDS)


class GatewayCounts:
    """Counts of the requests of a gateway and its ports, or of one tenant of them."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Requests by (model, tier, outcome): outcome is `ok`, an error code in lower case, or `cancelled`."""
        self.request_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)
        """Seconds from the decoded request to its answer by (model, tier); requests refused at once are left out."""
        self.queue_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)
        """Seconds from the enqueue to the claim by (model, tier)."""
        self.overhead_seconds = _seconds()
        """Seconds of Headway's own in a request: end to end less queueing and the run; one sample a batch."""
        self.failed_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of `request_seconds` whose answers were errors, by model."""
        self.refusals: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Refusals by (reason, tier, model); model is empty where none that is served was known yet."""
        self.client_retries = 0
        """Requests that their client says it has sent before."""
        self.shared: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Answers with the outcome of another request by (model, kind of the dedup key, `joined` or `kept`)."""
        self.tokens: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Tokens by (model, tenant, `run` or `shared`), where targets tell them; shared are those of another request's answer."""
        self.token_tenants: set[str] = set()
        """Tenants that have counts of their own in `tokens`."""
        self.runs: defaultdict[tuple[str, int], RunTotal] = defaultdict(RunTotal)
        """Batches from which an answer came to this process, by (model, entries of the batch). Tensors count by their rows."""
        self.more_rows: defaultdict[str, int] = defaultdict(int)
        """Rows beyond one of each of the requests for tensors that ran and were answered, by model."""
        self.last_answer: dict[str, float] = {}
        """Monotonic instant of the last answer from a batch, by model."""
        self.throttle: dict[str, float] = {}
        """Requests per second of the lowest tier that this gateway lets in, by model; no entry while it lets in all."""
        self.direct: defaultdict[str, int] = defaultdict(int)
        """Requests answered by the gateway's own fallback, by model."""

    def forget(self, model: str) -> None:
        """Forget what was counted of a model that requests no longer come for."""
        _forget(model, (self.requests, self.request_seconds, self.queue_seconds, self.shared, self.tokens, self.runs))
        for refusal in [key for key in self.refusals if key[2] == model]:
            del self.refusals[refusal]
        by_model: Iterable[dict[str, Any]] = (
            self.failed_seconds, self.last_answer, self.more_rows, self.throttle, self.direct,
        )  # fmt: skip
        for counts in by_model:
            counts.pop(model, None)


class WorkerCounts:
    """Counts of batchers and their workers.

    Arguments:
        departures: log of their batches and slots for the departure board; None: a new one.
    """

    def __init__(self, departures: DepartureLog | None = None) -> None:
        self.departures = DepartureLog() if departures is None else departures
        self.batches: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Batches by (model, reason of the departure)."""
        self.batch_size: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SIZES))
        """Entries of a batch by model."""
        self.batch_fill: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(RATIOS))
        """Share of the largest batch that a batch fills, by model."""
        self.gpu_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)
        """Seconds of a batch on its slot by (model, worker)."""
        self.inputs: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Inputs of batches that ended here, by (model, version that ran them, OK, ITEM, BULK or the cause of the batch's failure)."""
        self.wasted_seconds: defaultdict[str, float] = defaultdict(float)
        """GPU seconds whose outputs nobody got, by cause: `departed` clients, the cause of a failed batch, or BULK for one with bulk entries."""
        self.breaker_state: dict[str, int] = {}
        """State of the breaker by backend: 0 closed, 1 half open, 2 open."""
        self.bulk_kills: defaultdict[str, int] = defaultdict(int)
        """Batches with bulk entries that have ended the process of a worker, by worker."""
        self.restarts: defaultdict[str, int] = defaultdict(int)
        """Restarts by worker."""
        self.loads: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Starts of a backend that succeeded, by (model, worker)."""
        self.load_seconds: defaultdict[str, Histogram] = defaultdict(_seconds)
        """Seconds of these, from the first step to ready, by model."""
        self.evictions: defaultdict[str, int] = defaultdict(int)
        """Models that made room on their GPU for another, by the reason for which that was loaded."""
        self.large_payloads: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Large inputs and outputs of worker processes by (`in` or `out`, `arena` or `frame`, where the arena was full)."""


class BrokerCounts:
    """Counts of a broker: of its queue and, where it is in another process, of the calls to it."""

    def __init__(self) -> None:
        self.retries: defaultdict[str, int] = defaultdict(int)
        """Entries that were queued again, by cause."""
        self.call_seconds = _seconds()
        """Seconds of the calls that were answered; reads that wait are left out."""
        self.call_failures = 0
        """Calls that were not answered."""


class ControllerCounts:
    """Counts of a controller.

    Arguments:
        departures: log of its decisions for the departure board; None: a new one.
    """

    def __init__(self, departures: DepartureLog | None = None) -> None:
        self.departures = DepartureLog() if departures is None else departures
        self.scaling_decisions: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Decisions of the autoscaler by (model, direction)."""
        self.rollout_changes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Changes of rollouts by (model, `step` or the state that ended it)."""

    def forget(self, model: str) -> None:
        """Forget what was counted of a model that requests no longer come for."""
        _forget(model, (self.scaling_decisions, self.rollout_changes))


class TlsCounts:
    """Counts of TLS, and the ends of certificates."""

    def __init__(self) -> None:
        self.ends: float | None = None
        """Unix seconds at which the certificate of the ports ends; None without one."""
        self.remote_ends: float | None = None
        """Unix seconds at which the certificate ends that a remote API is shown; None without one."""
        self.failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Handshakes that failed by (port, reason)."""


class StoreCounts:
    """Counts of the stores of records and keys."""

    def __init__(self) -> None:
        self.ledger_dropped = 0
        """Records that never reached the ledger."""
        self.keys_age: float | None = None
        """Age of the cached keys in seconds: since the store of API keys last answered; None without keys."""


class Counters:
    """All counts of one process, for the metrics to read."""

    def __init__(self) -> None:
        self.departures = DepartureLog()
        """Batches, changes of slots and decisions that the departure board has not been told."""
        self.gateway = GatewayCounts()
        self.worker = WorkerCounts(self.departures)
        self.broker = BrokerCounts()
        self.controller = ControllerCounts(self.departures)
        self.tls = TlsCounts()
        self.store = StoreCounts()
        self.input_policy: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Requests by (rule of the input policy, what it did with them)."""
        self.bulk_lines: defaultdict[str, int] = defaultdict(int)
        """Lines of bulk jobs that got a record here: `answered`, or `failed`."""
        self.spans_dropped = {"queue": 0, "export": 0, "refused": 0}
        """Spans that were dropped, by reason: too many waited, they could not be sent, or a port refused too many requests.

        Each number has one thread that changes it.
        """


def _forget(model: str, tables: Iterable[dict[Any, Any]]) -> None:
    """Drop what tables have under keys that begin with a model."""
    for table in tables:
        for key in [key for key in table if key[0] == model]:
            del table[key]
