"""Counters of a process, and its departure log for the departure board.

`telemetry/metrics.py` names and exports the counters. Keys are label values in the order of the metric's labels; tiers appear by
name. Each part of a process has its own counters, and updates them once per batch where it can. One event loop owns them all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from msgspec.structs import replace

from headway.core.excerpt import excerpt
from headway.model import Lease, Slot, WorkerStatus
from headway.model.board import ARRIVED, BatchDeparture, ScalingChange, SlotChange

SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.125, 0.15, 0.18, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
SIZES = (
    1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100,
    128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
OK, ITEM = "ok", "item"  # Outcomes of an input in a successful batch: an output, or a failure of this input alone.
BULK = "bulk"  # Outcome of a failed bulk entry, and of all inputs of a failed batch with bulk entries.
MOST_UNTOLD = 256  # Maximum number of batches, and of changes, to keep for the next notice to the board.


class Histogram:
    """Counts by upper bound. The last count is for values above all bounds."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, tuple[float, str, float]] = {}
        """Value, trace id and Unix time in seconds of the last sampled request, by index of its count."""

    def exemplify(self, value: float, trace_id: str, at: float) -> None:
        """Make an observed value the exemplar of its bucket, with its trace id and Unix time."""
        self.exemplars[bisect_left(self.bounds, value)] = value, trace_id, at

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        bounds, ordered, begun = self.bounds, sorted(values), 0
        while begun < len(ordered):
            place = bisect_left(bounds, ordered[begun])
            end = bisect_right(ordered, bounds[place]) if place < len(bounds) else len(ordered)
            self.counts[place] += end - begun
            begun = end
        self.sum += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)


class RunTotal:
    """Number of batches of one size, and the total seconds of their runs."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0


def _seconds() -> Histogram:
    return Histogram(SECONDS)


class DepartureLog:
    """Batches, slot changes and scaling decisions for the next notice to the departure board."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running: dict[str, BatchDeparture] = {}
        self._departures: dict[tuple[str, float], BatchDeparture] = {}
        self._statuses: dict[str, WorkerStatus] = {}
        self._changes: list[tuple[float, SlotChange]] = []
        self._scalings: list[tuple[float, ScalingChange]] = []
        self._dropped = 0
        self._killed: dict[str, str] = {}

    def killed(self, worker: str, how: str) -> None:
        """Record why a worker's process ended, unless Headway ended it."""
        self._killed.setdefault(worker, excerpt(how))

    def take_killed(self) -> dict[str, str]:
        """Return the causes recorded since the last call, by worker."""
        killed, self._killed = self._killed, {}
        return killed

    def left(self, lease: Lease) -> None:
        slot, entries, size = lease.slot, lease.entries, lease.rows
        tiers = [entry.tier for entry in entries]
        if size != len(entries):
            place = slot.max_weight / slot.max_batch
            tiers = [entry.tier for entry in entries for _ in range(round(min(entry.weight, slot.max_weight) / place))]
        departure = BatchDeparture(
            slot.worker, slot.model, slot.runs.version, lease.granted_at, size, lease.fill, lease.reason,
            tuple([tiers.count(tier) for tier in range(max(tiers) + 1)]),
        )  # fmt: skip
        self._running[slot.worker] = departure
        self._add(departure)

    def arrived(self, worker: str, seconds: float, outcome: str = ARRIVED) -> None:
        departure = self._running.pop(worker, None)
        if departure is not None:
            self._add(replace(departure, seconds=seconds, outcome=outcome))

    def became(self, slot: Slot, status: WorkerStatus, restarts: int, cause: str = "") -> None:
        if self._statuses.get(slot.worker) is status:
            return
        self._statuses[slot.worker] = status
        if status is WorkerStatus.OFFLINE:
            del self._statuses[slot.worker]
        cause = "" if status is WorkerStatus.HEALTHY else excerpt(cause)
        self.changed(SlotChange(slot.worker, slot.model, status.value, restarts, cause=cause))

    def changed(self, change: SlotChange) -> None:
        if len(self._changes) < MOST_UNTOLD:
            self._changes.append((self._clock(), change))
        else:
            self._dropped += 1

    def scaled(self, change: ScalingChange) -> None:
        if len(self._scalings) < MOST_UNTOLD:
            self._scalings.append((self._clock(), change))

    def take_scalings(self) -> tuple[ScalingChange, ...]:
        now, scalings = self._clock(), self._scalings
        self._scalings = []
        return tuple(replace(change, ago=max(now - at, 0.0)) for at, change in scalings)

    def take(self) -> tuple[tuple[BatchDeparture, ...], tuple[SlotChange, ...], int]:
        """Return the batches and changes since the last call, and the number of dropped ones."""
        now = self._clock()
        changes = tuple(replace(change, ago=max(now - at, 0.0)) for at, change in self._changes)
        taken = tuple(self._departures.values()), changes, self._dropped
        self._departures, self._changes, self._dropped = {}, [], 0
        return taken

    def _add(self, departure: BatchDeparture) -> None:
        key = departure.worker, departure.left
        if key in self._departures or len(self._departures) < MOST_UNTOLD:
            self._departures[key] = departure
        else:
            self._dropped += 1


class GatewayCounts:
    """Counts for all requests of a gateway and its ports, or for one tenant's requests."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Requests by (model, tier, outcome). The outcome is `ok`, an error code in lower case, or `cancelled`."""
        self.request_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)
        """Seconds from the decoded request to its answer by (model, tier), leaving out requests refused on arrival."""
        self.queue_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)  # Waits, by (model, tier).
        self.overhead_seconds = _seconds()  # Total time minus waiting and running; one sample per batch.
        self.failed_seconds: defaultdict[str, float] = defaultdict(float)  # Seconds of failed requests, by model.
        self.refusals: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Refusals by (reason, tier, model). The model is empty if it was unknown or isn't served."""
        self.client_retries = 0  # Requests that clients declare to be retries.
        self.shared: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Answers that came from another request's run, by (model, kind of the dedup key, `joined` or `kept`)."""
        self.tokens: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Tokens reported by targets, by (model, tenant, source): `run`, or `shared` for answers from another request's run."""
        self.token_tenants: set[str] = set()  # Tenants that have their own counts in `tokens`.
        self.runs: defaultdict[tuple[str, int], RunTotal] = defaultdict(RunTotal)
        """Batches that have answered requests of this process, by (model, size in entries, or in rows of tensors)."""
        self.more_rows: defaultdict[str, int] = defaultdict(int)  # Answered rows beyond the first of each request.
        self.last_answer: dict[str, float] = {}  # Monotonic time of the last answer from a batch, by model.
        self.throttle: dict[str, float] = {}
        """Requests per second that the throttle lets in from the lowest tier, by model; no entry while the throttle is open."""
        self.direct: defaultdict[str, int] = defaultdict(int)  # Requests answered by the fallback, by model.

    def forget(self, model: str) -> None:
        _forget(model, (self.requests, self.request_seconds, self.queue_seconds, self.shared, self.tokens, self.runs))
        for refusal in [key for key in self.refusals if key[2] == model]:
            del self.refusals[refusal]
        by_model: Iterable[dict[str, Any]] = (
            self.failed_seconds, self.last_answer, self.more_rows, self.throttle, self.direct,
        )  # fmt: skip
        for counts in by_model:
            counts.pop(model, None)


class WorkerCounts:
    """Counts for batchers and their workers."""

    def __init__(self, departures: DepartureLog | None = None) -> None:
        self.departures = DepartureLog() if departures is None else departures
        self.batches: defaultdict[tuple[str, str], int] = defaultdict(int)  # By (model, reason of departure).
        self.batch_size: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SIZES))  # Entries, by model.
        self.batch_fill: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(RATIOS))
        """Size of a batch as a fraction of the largest allowed, by model."""
        self.gpu_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(_seconds)  # Runs, by (model, worker).
        self.inputs: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Finished inputs by (model, version that ran them, outcome): OK, ITEM, BULK, or why the batch failed."""
        self.wasted_seconds: defaultdict[str, float] = defaultdict(float)
        """GPU seconds without a used output, by cause (`departed` clients, the cause of a failed batch, or BULK)."""
        self.breaker_state: dict[str, int] = {}  # State of the breaker by backend: 0 closed, 1 half open, 2 open.
        self.bulk_kills: defaultdict[str, int] = defaultdict(int)  # Deaths during batches with bulk entries, by worker.
        self.restarts: defaultdict[str, int] = defaultdict(int)  # Restarts by worker.
        self.loads: defaultdict[tuple[str, str], int] = defaultdict(int)  # Starts of backends, by (model, worker).
        self.load_seconds: defaultdict[str, Histogram] = defaultdict(_seconds)  # Times of successful starts, by model.
        self.evictions: defaultdict[str, int] = defaultdict(int)  # Unloaded models, by the reason to load another one.
        self.large_payloads: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Large inputs and outputs of worker processes, by (`in` or `out`, way): `arena`, or `frame` if the arena was full."""


class BrokerCounts:
    """Counts for a broker's queue, and for the calls to a broker in another process."""

    def __init__(self) -> None:
        self.retries: defaultdict[str, int] = defaultdict(int)  # Entries queued again, by cause.
        self.call_seconds = _seconds()  # Seconds of successful calls, without blocking reads.
        self.call_failures = 0  # Calls that got no answer.


class ControllerCounts:
    """Counts of a controller."""

    def __init__(self, departures: DepartureLog | None = None) -> None:
        self.departures = DepartureLog() if departures is None else departures
        self.scaling_decisions: defaultdict[tuple[str, str], int] = defaultdict(int)  # By (model, direction).
        self.rollout_changes: defaultdict[tuple[str, str], int] = defaultdict(int)  # By (model, `step` or end state).

    def forget(self, model: str) -> None:
        _forget(model, (self.scaling_decisions, self.rollout_changes))


class TlsCounts:
    """Failed handshakes, and the expiry of certificates."""

    def __init__(self) -> None:
        self.ends: float | None = None  # When the ports' certificate expires, in Unix seconds; None without one.
        self.remote_ends: float | None = None  # The same for the certificate for a remote API.
        self.failures: defaultdict[tuple[str, str], int] = defaultdict(int)  # Failed handshakes, by (port, reason).


class StoreCounts:
    """Counts for the ledger and the key store."""

    def __init__(self) -> None:
        self.ledger_dropped = 0  # Records that never reached the ledger.
        self.keys_age: float | None = None  # Seconds since the key store last answered; None without keys.


class Counters:
    """All counters of one process."""

    def __init__(self) -> None:
        self.departures = DepartureLog()
        self.gateway = GatewayCounts()
        self.worker = WorkerCounts(self.departures)
        self.broker = BrokerCounts()
        self.controller = ControllerCounts(self.departures)
        self.tls = TlsCounts()
        self.store = StoreCounts()
        self.input_policy: defaultdict[tuple[str, str], int] = defaultdict(int)  # Requests, by (rule, effect).
        self.bulk_lines: defaultdict[str, int] = defaultdict(int)  # Finished lines, by `answered` or `failed`.
        self.spans_dropped = {"queue": 0, "export": 0, "refused": 0}  # By reason. One thread changes each number.


def _forget(model: str, tables: Iterable[dict[Any, Any]]) -> None:
    for table in tables:
        for key in [key for key in table if key[0] == model]:
            del table[key]
