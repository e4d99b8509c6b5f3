"""Workers and processes of a fleet: what each reports about itself, and the workers' capacity."""

from __future__ import annotations

import enum

import msgspec

from headway.model.entry import QueueName
from headway.model.rollout import Rollout, VersionCounts
from headway.model.value import ALL_PARAMETERS, CostLine, PerCall, RowsTogether, TensorSpec, WeightLine

# Xid errors that a program can cause on a healthy GPU. Some are caused by its end.
MODEL_XIDS = frozenset((13, 31, 43, 45, 68, 109))


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU. A figure is None if the driver doesn't report it."""

    uuid: str = ""  # Id of the GPU or of its part (MIG).
    name: str = ""
    memory_used: int | None = None  # Bytes.
    memory_total: int | None = None  # Bytes.
    utilisation: float | None = None  # Recent share of time in which the GPU computed anything, 0 to 1.
    power: float | None = None  # Watts.
    temperature: float | None = None  # Degrees Celsius.
    ecc_errors: int | None = None  # Uncorrectable memory errors since the driver was loaded.
    xids: dict[int, int] = {}  # Number of Xid errors seen by this process, by code.
    lost: str = ""  # Why nothing can run on the GPU any more, or empty.

    @property
    def memory_share(self) -> float:
        """Share of the memory in use, 0 to 1. 0 if unknown."""
        return self.memory_used / self.memory_total if self.memory_used and self.memory_total else 0.0


class ModelReport(msgspec.Struct, frozen=True, gc=False):
    """Report on the model that a worker runs."""

    version: str = ""
    target: str = ""  # Digest of the target's code, which is the same for all workers with that code. Empty if unknown.
    # Names and values of the model's settings that matter to its clients.
    terms: tuple[tuple[str, str | int | float | bool], ...] = ()


class Role(enum.Enum):
    """Roles of a process. `serve` includes the three others."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as its heartbeat describes it."""

    id: str  # Unique id. A gateway's id is the `gateway` of its entries.
    role: Role
    host: str
    pid: int
    admin: str = ""  # URL of the admin port, as seen from the host.
    version: str = ""  # Version of Headway.
    pending: int = 0
    requests_per_second: float = 0.0
    leads: bool = False  # True for the leading controller.
    model: str = ""  # Name of a model that a gateway serves.
    shared: dict[str, str] = {}  # Settings on which a fleet must agree, by name.
    last_seen: float = 0.0  # Broker instant of the last heartbeat, set by the broker.
    # Requests per second received by a gateway, by model. The first number is for all tiers but the lowest.
    arrivals: dict[str, tuple[float, float]] = {}
    # Number of workers and its limit, by model, if the process can change the number.
    scalable: dict[str, tuple[int, int]] = {}
    # Requests per second of the busiest tenants of the lowest tier at a gateway, by model and tenant.
    tenant_rates: dict[str, dict[str, float]] = {}
    every: float = 1.0  # Seconds until the next heartbeat.
    # Finished requests at a gateway, by model and version, for models with a running rollout.
    versions: dict[str, dict[str, VersionCounts]] = {}


class EndKind(enum.Enum):
    """How a process ended. A `lost` process gave no notice. A `killed` one was a worker's process whose host runs on."""

    STOPPED = "stopped"
    DRAINED = "drained"
    LOST = "lost"
    KILLED = "killed"


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is gone, or a worker's process that was replaced."""

    id: str  # Id of the process or worker.
    role: Role  # Role of the process, or of the worker's host.
    host: str
    pid: int = 0  # Process id, or 0 if unknown.
    ending: EndKind
    reason: str = ""
    at: float = 0.0  # Broker instant of the end, or of the last heartbeat of a lost process, set by the broker.


class WorkerStatus(enum.Enum):
    """Status of a worker.

    A worker is `starting` until its warm-up batch is back, and `degraded` and then `offline` after missing heartbeats. The model of
    a `cold` worker isn't loaded, but will be when that is worthwhile. The model of a `failed` worker failed to load, and is tried
    again later. A `drained` worker claims nothing more by an operator's order, but finishes its batch."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"
    COLD = "cold"
    FAILED = "failed"
    DRAINED = "drained"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the registry. What its target takes and gives is described in `headway.model.value.Signature`."""

    worker_id: str  # Unique name, for example `gpu-0`.
    model: str
    status: WorkerStatus
    utilisation: float = 0.0  # Recent share of time spent running batches, 0 to 1.
    in_flight: int = 0
    last_heartbeat: float = 0.0  # Broker instant.
    restarts: int = 0  # Number of times that the worker's process was replaced.
    pid: int = 0  # Process id of the child, or 0 for a remote API.
    memory: float = 0.0  # Used share of the memory in which the process lives, 0 to 1.
    reason: str = ""  # Why the worker is degraded, offline or failed, or what it waits for.
    items_per_second: float = 0.0  # Items per second in full batches, or 0 if unknown.
    estimated: bool = False  # True if `items_per_second` is uncertain because few full batches ran.
    warm_up: tuple[tuple[int, float], ...] = ()  # Sizes and run times in seconds of the batches that the start ran.
    # Values of `ValueKind`, empty until the target is loaded.
    takes: str = ""
    gives: str = ""
    example: str = ""  # JSON text of the target's example, if short.
    weight: WeightLine | None = None
    runs: ModelReport = ModelReport()
    gpu: str = ""  # Name of the worker's GPU within its process, if several models share that GPU.
    share: float = 1.0  # Share of the GPU that is available to the worker.
    version: str = ""  # Version whose queue it claims from, or empty for the queue for any.
    loading: float = 0.0  # Seconds that the process has been starting, or 0.
    start_failed: bool = False  # True if the worker is starting and its last attempt failed.
    retry_in: float = 0.0  # Seconds until the next attempt to load a failed model. 0 means now, or on the next request.
    failed: float = 0.0  # Share of the last inputs whose runs failed, 0 to 1.
    every: float = 0.5  # Seconds until the next heartbeat.
    gpu_figures: GpuFigures | None = None
    load_seconds: float = 0.0  # Expected or last load time of the model, or 0 if unknown.
    scarce: bool = False  # True if the worker is degraded only because memory is scarce, and goes on working.
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    together: RowsTogether = RowsTogether.ANY
    sees: PerCall = ALL_PARAMETERS
    per_call: PerCall = ()
    cost: CostLine | None = None

    @property
    def backend(self) -> tuple[int, int, str]:
        """Identity of the process and its code, which changes with every restart."""
        return self.pid, self.restarts, self.runs.target

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """Order of an operator: the worker or process with id `name` claims nothing more until the process ends."""

    name: str
    process: str
    host: str


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Number of workers that a model should have, and progress towards it."""

    desired: int
    current: int  # Number of serving workers.
    coming: int = 0  # Number of requested workers on their way.
    # Number of requested workers that didn't come in time. While no worker serves and the model may scale to zero, it
    # counts workers that take longer than a start usually does.
    late: int = 0
    reason: str = ""
    policy: str = ""  # Value of the setting `scale_policy`.
    driver: str = ""  # Value of the setting `autoscale`.
    utilisation: float | None = None  # Offered load over the capacity of the serving workers, or None if unknown.
    rate: float = 0.0  # Offered entries per second.
    least: int = 1
    most: int = 0  # 0 for no limit.
    trouble: str = ""  # Why a worker failed to load, or empty.
    start_seconds: float = 0.0  # Observed duration of a worker's start, or 0 if unknown.
    # Seconds until a worker serves, if none serves now. None for a model that always has a worker.
    starts_in: float | None = None
    awaited: float = 0.0  # Seconds that the longest awaited worker has been on its way, or 0.


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of the workers of one model."""

    model: str
    healthy: int  # Number of serving slots.
    degraded: int  # Number of slots that rest or whose heartbeats are late.
    items_per_second: float  # Maximum items per second of the healthy slots together, or 0 if unknown.
    usable_per_second: float  # `items_per_second` times the target utilisation, or 0 while `scarce`.
    scarce: bool = False  # True while the broker's memory is nearly full.
    estimated: bool = False  # True if `items_per_second` is uncertain because some slot has run few full batches.
    measured_at: float = 0.0  # Broker instant, set by the broker.
    scaling: Scaling | None = None
    least_seconds: float = 0.0  # Shortest time in which a worker can answer, however many there are. 0 if unknown.
    rollout: Rollout | None = None
    drained: int = 0  # Number of slots that an operator has drained.


class BulkDepth(msgspec.Struct, frozen=True):
    """Bulk entries of one queue."""

    model: str
    waiting: int
    delayed: int  # Number of other entries that they have delayed.
    version: str = ""  # Version of the queue, or empty for the queue for any.
    busy: int = 0  # Number of GPUs that run only bulk entries.
    # Seconds until an idle GPU runs bulk entries alone if no others come. Infinite if bulk only fills empty seats.
    held: float = 0.0


class TierDepth(msgspec.Struct, frozen=True):
    """Depth of one tier of a queue, and how long its oldest entry has waited. `version` is empty for the queue for any."""

    model: str
    tier: int
    depth: int
    oldest_seconds: float
    version: str = ""

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)
