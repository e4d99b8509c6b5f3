"""Workers and processes of a fleet: what each reports about itself, and the workers' capacity."""

from __future__ import annotations

import enum

import msgspec

from headway.model.entry import QueueName
from headway.model.rollout import Rollout, VersionCounts
from headway.model.value import ALL_PARAMETERS, CostLine, PerCall, RowsTogether, TensorSpec, WeightLine

MODEL_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Xid errors that a program can cause on a healthy GPU, some of them by its end."""


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU; None for what its driver doesn't report.

    Attributes:
        uuid: id of the GPU or of its part (MIG); empty if unknown.
        name: name of its product.
        memory_used, memory_total: bytes.
        utilisation: share of the last moment in which it computed anything, 0 to 1.
        power: watts.
        temperature: degrees Celsius.
        ecc_errors: uncorrectable memory errors since the driver was loaded.
        xids: number of its Xid errors seen by this process, by code.
        lost: why nothing can run on it any more; empty while it works.
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
        """Share of its memory in use, 0 to 1; 0 if unknown."""
        return self.memory_used / self.memory_total if self.memory_used and self.memory_total else 0.0


class ModelReport(msgspec.Struct, frozen=True, gc=False):
    """Report on one model.

    Attributes:
        version: version of the model; empty if the worker names none.
        target: digest of the target's code; workers with the same digest run the same code. Empty if unknown.
        terms: names and values of the model's settings that matter to its clients.
    """

    version: str = ""
    target: str = ""
    terms: tuple[tuple[str, str | int | float | bool], ...] = ()


class Role(enum.Enum):
    """Roles of a process. `serve` has all three parts in one process."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as its heartbeat describes it.

    Attributes:
        id: unique id; a gateway's is the `gateway` of its entries.
        role: role of the process.
        host: name of its machine.
        pid: process id on that machine.
        admin: URL of its admin port, as seen from that machine.
        version: version of Headway.
        pending: number of pending requests.
        requests_per_second: requests received per second.
        leads: True for the leading controller.
        model: name of a model that a gateway serves.
        arrivals: requests per second received by a gateway, by model: of all tiers but the lowest, and of the lowest.
        tenant_rates: requests per second of the busiest tenants of the lowest tier at a gateway, by model and tenant.
        scalable: by model, its number of workers and their limit, if it can change their number.
        shared: settings on which a fleet must agree, by name.
        last_seen: broker instant of the last heartbeat; set by the broker.
        every: seconds until its next heartbeat; more while it is idle.
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
    """How a process ended: `stopped` or `drained` with notice, `lost` without, or `killed`, if a worker's while its host runs on."""

    STOPPED = "stopped"
    DRAINED = "drained"
    LOST = "lost"
    KILLED = "killed"


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is gone, or a worker's process that was replaced.

    Attributes:
        id: id of the process or worker.
        role: role of the process, or of the worker's host.
        host: name of its machine.
        pid: process id on that machine; 0 if unknown.
        ending: how it ended.
        reason: why it ended.
        at: broker instant of its end, or of its last heartbeat if it was lost; set by the broker.
    """

    id: str
    role: Role
    host: str
    pid: int = 0
    ending: EndKind
    reason: str = ""
    at: float = 0.0


class WorkerStatus(enum.Enum):
    """Status of a worker: `starting` until its warm-up batch is back; `degraded` and `offline` after missing heartbeats.

    `cold`: its model isn't loaded on its GPU, which holds others, but will be when that is worthwhile.
    `failed`: its model failed to load and is tried again later.
    `drained`: an operator has ordered it to claim nothing more; its current batch still finishes.
    """

    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"
    COLD = "cold"
    FAILED = "failed"
    DRAINED = "drained"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the registry.

    Attributes:
        worker_id: unique name, for example `gpu-0`.
        model: name of the model that it serves.
        status: see `WorkerStatus`.
        utilisation: recent share of time spent running batches, 0 to 1.
        in_flight: number of batches running now, 0 or 1.
        last_heartbeat: broker instant.
        restarts: number of times its process was replaced.
        pid: process id of the child; 0 for a remote API.
        memory: used share of the memory that its process lives in, 0 to 1.
        reason: why it is degraded, offline or failed, or what it waits for; empty if it is healthy or was told to stop.
        items_per_second: items per second in full batches; 0 if unknown.
        estimated: True if `items_per_second` is uncertain because few full batches ran.
        warm_up: sizes and run times in seconds of the batches that its start ran.
        takes, gives: kinds of its target's inputs and outputs, values of `ValueKind`; empty until it is loaded.
        example: JSON text of its target's example, if short; else empty.
        weight: estimate of its target's weight function, if it has one and something is known about it.
        runs: report on the model that it runs.
        gpu: name of its GPU within its process, if that holds several models; else empty.
        share: share of its GPU that is available to it.
        version: version whose queue it claims from; empty: the queue for any.
        loading: seconds that its process has been starting; 0 while none starts.
        start_failed: True if it is starting and its last attempt failed.
        retry_in: seconds until the next attempt to load a model that failed to load; 0: now, or on the next request.
        failed: share of its last inputs whose runs failed, 0 to 1.
        every: seconds until its next heartbeat; more while it is idle.
        gpu_figures: figures of its GPU, if there are any.
        scarce: True if it is degraded only because memory is scarce, and goes on working.
        load_seconds: expected or last load time of its model; 0 if unknown.
        inputs, outputs: specifications of the tensors that its target takes and gives; empty for none.
        together: which rows of its tensors may share a call.
        sees: parameters of requests that its target gets.
        per_call: parameters that apply to a whole call of its target.
        cost: estimate of a call's run time; None if the number of inputs determines it, or if unknown.
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
        """Identity of its backend: the process, its restarts, and its code."""
        return self.pid, self.restarts, self.runs.target

    @property
    def queue(self) -> QueueName:
        """Name of the queue that it claims from."""
        return QueueName(self.model, self.version)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order that a worker, or a whole process, claim nothing more. It ends with the process.

    Attributes:
        name: id of the worker, or of the process for all of its workers.
        process: id of the process.
        host: name of the machine of the process.
    """

    name: str
    process: str
    host: str


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Number of workers that a model should have, and progress towards it.

    Attributes:
        desired: wanted number of workers.
        current: number of serving workers.
        coming: requested workers that are on their way.
        late: requested workers that didn't come in time. While no worker serves and the model may scale to zero, those that
            take longer than a start usually does.
        reason: why this number.
        policy: policy that chooses the number, a value of the setting `scale_policy`.
        driver: who carries it out, a value of the setting `autoscale`.
        utilisation: offered load over the capacity of the serving workers; None if unknown.
        rate: offered entries per second.
        least, most: limits on the number; `most` is 0 for none.
        trouble: why a worker failed to load; empty if none did.
        start_seconds: observed duration of a worker's start; 0 if unknown.
        starts_in: seconds until a worker serves, if none does: the rest of the current start, or a whole one. None for a model
            that always has a worker.
        awaited: seconds that the longest awaited worker has been on its way; 0 if none is awaited.
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
        model: name of the model.
        healthy: number of serving slots.
        degraded: number of slots that rest or whose heartbeats are late.
        drained: number of slots that an operator has drained.
        items_per_second: limit on items per second of the healthy slots together; 0 if unknown.
        usable_per_second: `items_per_second` times the target utilisation; 0 while `scarce`.
        scarce: True while the broker's memory is nearly full.
        estimated: True if `items_per_second` is uncertain because some slot has run few full batches.
        measured_at: broker instant; set by the broker.
        scaling: wanted number of workers, if known.
        least_seconds: shortest time in which a worker can answer, however many there are; 0 if unknown.
        rollout: last rollout of the model, if there was one.
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
    """Bulk entries of one queue: how many wait, and how many entries of others were delayed by them.

    Attributes:
        version: version of the queue; empty: the queue for any.
        busy: number of GPUs that run only bulk entries.
        held: seconds until an idle GPU runs bulk entries alone, if no other entries come; 0 if at once, infinite if bulk entries
            only take empty seats.
    """

    model: str
    waiting: int
    delayed: int
    version: str = ""
    busy: int = 0
    held: float = 0.0


class TierDepth(msgspec.Struct, frozen=True):
    """Depth of one tier of a queue, and how long its oldest entry has waited; `version` is empty for the queue for any."""

    model: str
    tier: int
    depth: int
    oldest_seconds: float
    version: str = ""

    @property
    def queue(self) -> QueueName:
        """Name of the queue."""
        return QueueName(self.model, self.version)
