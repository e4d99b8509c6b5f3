"""Workers and processes of a fleet: what each reports about itself, and the workers' capacity."""

from __future__ import annotations

import enum

import msgspec

from headway.model.entry import QueueName
from headway.model.rollout import Rollout, VersionCounts
from headway.model.value import ALL_PARAMETERS, CostLine, PerCall, RowsTogether, TensorSpec, WeightLine

MODEL_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Xid errors that a program can cause on a healthy GPU. Some are caused by its end."""


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU. A figure is None if the driver doesn't report it.

    Attributes:
        uuid: id of the GPU or of its part (MIG).
        memory_used, memory_total: bytes.
        utilisation: share of the last moment in which the GPU computed anything, 0 to 1.
        power: watts.
        temperature: degrees Celsius.
        ecc_errors: uncorrectable memory errors since the driver was loaded.
        xids: number of Xid errors seen by this process, by code.
        lost: why nothing can run on the GPU any more, or empty.
    """

    uuid: str = ""
    name: str = ""
    memory_used: int | None = None
    memory_total: int | None = None
    utilisation: float | None = None
    power: float | None = None
    temperature: float | None = None
    ecc_errors: int | None = None
    xids: dict[int, int] = {}
    lost: str = ""

    @property
    def memory_share(self) -> float:
        """Share of the memory in use, 0 to 1. 0 if unknown."""
        return self.memory_used / self.memory_total if self.memory_used and self.memory_total else 0.0


class ModelReport(msgspec.Struct, frozen=True, gc=False):
    """Report on the model that a worker runs.

    Attributes:
        target: digest of the target's code, which is the same for all workers with that code. Empty if unknown.
        terms: names and values of the model's settings that matter to its clients.
    """

    version: str = ""
    target: str = ""
    terms: tuple[tuple[str, str | int | float | bool], ...] = ()


class Role(enum.Enum):
    """Roles of a process. `serve` includes the three others."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as its heartbeat describes it.

    Attributes:
        id: unique id. A gateway's id is the `gateway` of its entries.
        admin: URL of the admin port, as seen from the host.
        version: version of Headway.
        leads: True for the leading controller.
        model: name of a model that a gateway serves.
        arrivals: requests per second received by a gateway, by model. The first number is for all tiers but the lowest.
        tenant_rates: requests per second of the busiest tenants of the lowest tier at a gateway, by model and tenant.
        scalable: number of workers and its limit, by model, if the process can change the number.
        shared: settings on which a fleet must agree, by name.
        last_seen: broker instant of the last heartbeat, set by the broker.
        every: seconds until the next heartbeat.
        versions: finished requests at a gateway, by model and version, for models with a running rollout.
    """

    id: str
    role: Role
    host: str
    pid: int
    admin: str = ""
    version: str = ""
    pending: int = 0
    requests_per_second: float = 0.0
    leads: bool = False
    model: str = ""
    shared: dict[str, str] = {}
    last_seen: float = 0.0
    arrivals: dict[str, tuple[float, float]] = {}
    scalable: dict[str, tuple[int, int]] = {}
    tenant_rates: dict[str, dict[str, float]] = {}
    every: float = 1.0
    versions: dict[str, dict[str, VersionCounts]] = {}


class EndKind(enum.Enum):
    """How a process ended. One that is `lost` gave no notice. A worker's process is `killed` if its host runs on."""

    STOPPED = "stopped"
    DRAINED = "drained"
    LOST = "lost"
    KILLED = "killed"


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is gone, or a worker's process that was replaced.

    Attributes:
        id: id of the process or worker.
        role: role of the process, or of the worker's host.
        pid: process id, or 0 if unknown.
        at: broker instant of the end, or of the last heartbeat of a lost process, set by the broker.
    """

    id: str
    role: Role
    host: str
    pid: int = 0
    ending: EndKind
    reason: str = ""
    at: float = 0.0


class WorkerStatus(enum.Enum):
    """Status of a worker.

    A worker is `starting` until its warm-up batch is back, and `degraded` and then `offline` after missing heartbeats. The model of
    a `cold` worker isn't loaded, but will be when that is worthwhile. The model of a `failed` worker failed to load, and is tried
    again later. A `drained` worker claims nothing more by an operator's order, but finishes its batch.
    """

    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"
    COLD = "cold"
    FAILED = "failed"
    DRAINED = "drained"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the registry. What its target takes and gives is described in `headway.model.value.Signature`.

    Attributes:
        worker_id: unique name, for example `gpu-0`.
        utilisation: recent share of time spent running batches, 0 to 1.
        last_heartbeat: broker instant.
        restarts: number of times that the worker's process was replaced.
        pid: process id of the child, or 0 for a remote API.
        memory: used share of the memory in which the process lives, 0 to 1.
        reason: why the worker is degraded, offline or failed, or what it waits for.
        items_per_second: items per second in full batches, or 0 if unknown.
        estimated: True if `items_per_second` is uncertain because few full batches ran.
        warm_up: sizes and run times in seconds of the batches that the start ran.
        takes, gives: values of `ValueKind`, empty until the target is loaded.
        example: JSON text of the target's example, if short.
        gpu: name of the worker's GPU within its process, if several models share that GPU.
        share: share of the GPU that is available to the worker.
        version: version whose queue it claims from, or empty for the queue for any.
        loading: seconds that the process has been starting, or 0.
        start_failed: True if the worker is starting and its last attempt failed.
        retry_in: seconds until the next attempt to load a failed model. 0 means now, or on the next request.
        failed: share of the last inputs whose runs failed, 0 to 1.
        every: seconds until the next heartbeat.
        scarce: True if the worker is degraded only because memory is scarce, and goes on working.
        load_seconds: expected or last load time of the model, or 0 if unknown.
    """

    worker_id: str
    model: str
    status: WorkerStatus
    utilisation: float = 0.0
    in_flight: int = 0
    last_heartbeat: float = 0.0
    restarts: int = 0
    pid: int = 0
    memory: float = 0.0
    reason: str = ""
    items_per_second: float = 0.0
    estimated: bool = False
    warm_up: tuple[tuple[int, float], ...] = ()
    takes: str = ""
    gives: str = ""
    example: str = ""
    weight: WeightLine | None = None
    runs: ModelReport = ModelReport()
    gpu: str = ""
    share: float = 1.0
    version: str = ""
    loading: float = 0.0
    start_failed: bool = False
    retry_in: float = 0.0
    failed: float = 0.0
    every: float = 0.5
    gpu_figures: GpuFigures | None = None
    load_seconds: float = 0.0
    scarce: bool = False
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
    """An operator's order that the worker or process with id `name` claim nothing more until the process ends."""

    name: str
    process: str
    host: str


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Number of workers that a model should have, and progress towards it.

    Attributes:
        current: number of serving workers.
        coming: number of requested workers on their way.
        late: number of requested workers that didn't come in time. While no worker serves and the model may scale to zero, it
            counts workers that take longer than a start usually does.
        policy: policy that chooses the number, a value of the setting `scale_policy`.
        driver: who changes the number, a value of the setting `autoscale`.
        utilisation: offered load over the capacity of the serving workers, or None if unknown.
        rate: offered entries per second.
        least, most: limits on the number. 0 is no upper limit.
        trouble: why a worker failed to load, or empty.
        start_seconds: observed duration of a worker's start, or 0 if unknown.
        starts_in: seconds until a worker serves, if none serves now. None for a model that always has a worker.
        awaited: seconds that the longest awaited worker has been on its way, or 0.
    """

    desired: int
    current: int
    coming: int = 0
    late: int = 0
    reason: str = ""
    policy: str = ""
    driver: str = ""
    utilisation: float | None = None
    rate: float = 0.0
    least: int = 1
    most: int = 0
    trouble: str = ""
    start_seconds: float = 0.0
    starts_in: float | None = None
    awaited: float = 0.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of the workers of one model.

    Attributes:
        healthy: number of serving slots.
        degraded: number of slots that rest or whose heartbeats are late.
        drained: number of slots that an operator has drained.
        items_per_second: maximum items per second of the healthy slots together, or 0 if unknown.
        usable_per_second: `items_per_second` times the target utilisation, or 0 while `scarce`.
        scarce: True while the broker's memory is nearly full.
        estimated: True if `items_per_second` is uncertain because some slot has run few full batches.
        measured_at: broker instant, set by the broker.
        least_seconds: shortest time in which a worker can answer, however many there are. 0 if unknown.
    """

    model: str
    healthy: int
    degraded: int
    items_per_second: float
    usable_per_second: float
    scarce: bool = False
    estimated: bool = False
    measured_at: float = 0.0
    scaling: Scaling | None = None
    least_seconds: float = 0.0
    rollout: Rollout | None = None
    drained: int = 0


class BulkDepth(msgspec.Struct, frozen=True):
    """Bulk entries of one queue.

    Attributes:
        delayed: number of other entries that they have delayed.
        version: version of the queue, or empty for the queue for any.
        busy: number of GPUs that run only bulk entries.
        held: seconds until an idle GPU runs bulk entries alone if no other entries come. Infinite if they only take empty seats.
    """

    model: str
    waiting: int
    delayed: int
    version: str = ""
    busy: int = 0
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
