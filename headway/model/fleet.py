"""Reports of a fleet's workers and other processes, and the workers' capacity."""

from __future__ import annotations

import enum

import msgspec

from headway.model.entry import QueueName
from headway.model.rollout import Rollout, VersionCounts
from headway.model.value import ALL_PARAMETERS, CostLine, PerCall, RowsTogether, TensorSpec, WeightLine

MODEL_XIDS = frozenset((13, 31, 43, 45, 68, 109))  # Xids that running or ending programs can cause on a healthy GPU.


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Stats of one GPU. A value is None if the driver doesn't report it."""

    uuid: str = ""  # Id of the GPU, or of a MIG instance.
    name: str = ""
    memory_used: int | None = None  # Bytes.
    memory_total: int | None = None  # Bytes.
    utilisation: float | None = None  # Share of the recent past in which the GPU was busy, from 0 to 1.
    power: float | None = None  # Watts.
    temperature: float | None = None  # Degrees Celsius.
    ecc_errors: int | None = None  # Uncorrectable memory errors since the driver was loaded.
    xids: dict[int, int] = {}  # Number of Xid errors that this process has seen, by code.
    lost: str = ""  # Why the GPU can't run anything any more, or empty.

    @property
    def memory_share(self) -> float:
        """Share of the memory that is in use, from 0 to 1. 0 if unknown."""
        return self.memory_used / self.memory_total if self.memory_used and self.memory_total else 0.0


class ModelReport(msgspec.Struct, frozen=True, gc=False):
    """A worker's report about the model that it runs."""

    version: str = ""
    target: str = ""  # Digest of the target's code, the same for all workers that run this code. Empty if unknown.
    terms: tuple[tuple[str, str | int | float | bool], ...] = ()  # The model's settings that matter to clients.


class Role(enum.Enum):
    """Roles that a process can have. `serve` combines the other three."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as described in its heartbeat."""

    id: str  # Unique id. A gateway's id is the `gateway` of its entries.
    role: Role
    host: str
    pid: int
    admin: str = ""  # URL of the admin port, as seen from its host.
    version: str = ""  # Version of Headway.
    pending: int = 0
    requests_per_second: float = 0.0
    leads: bool = False  # True for the leading controller.
    model: str = ""  # Name of a model that a gateway serves.
    shared: dict[str, str] = {}  # Settings that must be the same in the entire fleet, by name.
    last_seen: float = 0.0  # Broker time of the last heartbeat, set by the broker.
    arrivals: dict[str, tuple[float, float]] = {}  # A gateway's requests/s by model: (higher tiers, lowest tier).
    scalable: dict[str, tuple[int, int]] = {}  # Number of workers and its maximum, by model, if it can be changed.
    tenant_rates: dict[str, dict[str, float]] = {}  # Requests/s of the lowest tier's busiest tenants, by model.
    every: float = 1.0  # Seconds until the next heartbeat.
    versions: dict[str, dict[str, VersionCounts]] = {}  # Finished requests, by model in a rollout and version.


class EndKind(enum.Enum):
    """Way in which a process ended."""

    STOPPED = "stopped"
    DRAINED = "drained"
    LOST = "lost"  # It stopped reporting without notice.
    KILLED = "killed"  # It ran a worker, and its host process keeps running.


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended, or a worker's process that was replaced."""

    id: str  # Id of the process or worker.
    role: Role  # Role of the process, or of the worker's host.
    host: str
    pid: int = 0  # Process id, or 0 if unknown.
    ending: EndKind
    reason: str = ""
    at: float = 0.0  # Broker time of the end or, for a lost process, of its last heartbeat. Set by the broker.


class WorkerStatus(enum.Enum):
    """Status of a worker. If its heartbeats stop, it becomes `degraded` and then `offline`."""

    STARTING = "starting"  # Its warm-up batch hasn't finished yet.
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"
    COLD = "cold"  # Its model isn't loaded, but will be when that is worthwhile.
    FAILED = "failed"  # Its model couldn't be loaded, which is tried again later.
    DRAINED = "drained"  # It finishes its batch but claims no more, because an operator said so.


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the registry. `headway.model.value.Signature` describes the fields about its target's inputs and outputs."""

    worker_id: str  # Unique name, for example `gpu-0`.
    model: str
    status: WorkerStatus
    utilisation: float = 0.0  # Share of the recent past spent running batches, from 0 to 1.
    in_flight: int = 0
    last_heartbeat: float = 0.0  # Broker time.
    restarts: int = 0  # Number of times that the worker's process was replaced.
    pid: int = 0  # Process id of the child process, or 0 for a remote API.
    memory: float = 0.0  # Share of the memory available to the process that is in use, from 0 to 1.
    reason: str = ""  # Why the worker is degraded, offline or failed, or what it is waiting for.
    items_per_second: float = 0.0  # Items per second in full batches, or 0 if unknown.
    estimated: bool = False  # True if `items_per_second` is uncertain because few full batches have run.
    warm_up: tuple[tuple[int, float], ...] = ()  # Sizes and run times in seconds of the warm-up batches.
    takes: str = ""  # Value of `ValueKind`. Empty until the target is loaded.
    gives: str = ""  # Value of `ValueKind`. Empty until the target is loaded.
    example: str = ""  # JSON text of the target's example, if short.
    weight: WeightLine | None = None
    runs: ModelReport = ModelReport()
    gpu: str = ""  # Name of the worker's GPU within its process, if several models share that GPU.
    share: float = 1.0  # Share of the GPU that is available to the worker.
    version: str = ""  # Version whose queue it claims from. Empty for the queue for any version.
    loading: float = 0.0  # Seconds since the process began to start, or 0 if it isn't starting.
    start_failed: bool = False  # True if the worker is starting and its last attempt failed.
    retry_in: float = 0.0  # Seconds until a failed model is loaded again. 0 means now, or on the next request.
    failed: float = 0.0  # Share of recent inputs that failed, from 0 to 1.
    every: float = 0.5  # Seconds until the next heartbeat.
    gpu_figures: GpuFigures | None = None
    load_seconds: float = 0.0  # Expected or last load time of the model in seconds, or 0 if unknown.
    scarce: bool = False  # True if the worker is degraded only because memory is scarce. It keeps working.
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    together: RowsTogether = RowsTogether.ANY
    sees: PerCall = ALL_PARAMETERS
    per_call: PerCall = ()
    cost: CostLine | None = None

    @property
    def backend(self) -> tuple[int, int, str]:
        """Identity of the process and its code. It changes with every restart."""
        return self.pid, self.restarts, self.runs.target

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order that the worker or process `name` claim no more batches. The order ends with the process."""

    name: str
    process: str
    host: str


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Number of workers that a model should have, and progress towards it."""

    desired: int
    current: int  # Number of serving workers.
    coming: int = 0  # Number of requested workers that are expected to start serving.
    # Number of requested workers that didn't start in time. For a start from zero, those slower than usual count, too.
    late: int = 0
    reason: str = ""
    policy: str = ""  # Value of the setting `scale_policy`.
    driver: str = ""  # Value of the setting `autoscale`.
    utilisation: float | None = None  # Offered load divided by the serving workers' capacity, or None if unknown.
    rate: float = 0.0  # Offered entries per second.
    least: int = 1
    most: int = 0  # 0 if there is no limit.
    trouble: str = ""  # Why a worker failed to load, or empty.
    start_seconds: float = 0.0  # Observed time that a worker takes to start, or 0 if unknown.
    starts_in: float | None = None  # Seconds until a worker serves, if none does. None if the model always has one.
    awaited: float = 0.0  # Seconds since the oldest pending worker was requested, or 0.


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one model's workers."""

    model: str
    healthy: int  # Number of serving slots.
    degraded: int  # Number of slots that rest or whose heartbeats are late.
    items_per_second: float  # Maximum items per second of all healthy slots in total, or 0 if unknown.
    usable_per_second: float  # `items_per_second` times the target utilisation, or 0 while `scarce`.
    scarce: bool = False  # True while the broker's memory is nearly full.
    estimated: bool = False  # True if `items_per_second` is uncertain because some slot has run few full batches.
    measured_at: float = 0.0  # Broker time, set by the broker.
    scaling: Scaling | None = None
    least_seconds: float = 0.0  # Shortest time in which any worker can answer, or 0 if unknown.
    rollout: Rollout | None = None
    drained: int = 0  # Number of slots that an operator has drained.


class BulkDepth(msgspec.Struct, frozen=True):
    """Number of bulk entries in one queue."""

    model: str
    waiting: int
    delayed: int  # Number of other entries that bulk entries have delayed.
    version: str = ""  # Version of the queue. Empty for the queue for any version.
    busy: int = 0  # Number of GPUs that are running only bulk entries.
    held: float = 0.0  # Seconds until an idle GPU runs bulk entries only; infinite if they may only fill empty seats.


class TierDepth(msgspec.Struct, frozen=True):
    """Depth of one tier of a queue, and how long its oldest entry has waited. `version` is empty for the queue for any version."""

    model: str
    tier: int
    depth: int
    oldest_seconds: float
    version: str = ""

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)
