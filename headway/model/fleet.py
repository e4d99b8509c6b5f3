"""Workers and processes of a fleet, as they tell of themselves, and what they carry."""

from __future__ import annotations

import enum

import msgspec


class Role(enum.Enum):
    """What a process does. `serve` does all three."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as it tells of itself.

    Attributes:
        id: unique; a gateway's is the `gateway` of its entries.
        role: what it does.
        host: name of its machine.
        pid: process id there.
        admin: URL of its admin port, as seen from that machine.
        version: of Headway.
        pending: requests that it holds.
        requests_per_second: that it takes in.
        leads: whether it is the leading controller.
        model: that a gateway serves.
        lowest_per_second, higher_per_second: requests that come to a gateway, of the lowest tier and of the others.
        shared: settings in which all of a fleet must agree, by name.
        last_seen: broker instant; set by the broker.
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
    higher_per_second: float = 0.0
    lowest_per_second: float = 0.0
    shared: dict[str, str] = {}
    last_seen: float = 0.0


class WorkerStatus(enum.Enum):
    """`starting` until its warm-up batch came back; `degraded` and `offline` by missing heartbeats."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the worker registry.

    Attributes:
        worker_id: unique name, for example `gpu-0`.
        model: what it serves.
        status: see WorkerStatus.
        utilisation: busy share of the last seconds, 0 to 1.
        in_flight: batches running now, 0 or 1.
        last_heartbeat: broker instant.
        restarts: how often its process was replaced.
        pid: process id of the child, 0 for a remote API.
        memory: share of the memory in use that its process lives in, 0 to 1.
        reason: why it is degraded or offline, in words; empty when it is not, or was told to be.
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


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one model can carry.

    Attributes:
        model: whose.
        healthy: slots that serve.
        degraded: slots that were heard of, but not lately, or rest.
        items_per_second: what the healthy slots do at most together, as measured; 0 before the first batch.
        usable_per_second: the same times the target utilisation; 0 while the broker's memory is scarce.
        scarce: the broker's memory is scarce.
        measured_at: broker instant; set by the broker.
    """

    model: str
    healthy: int
    degraded: int
    items_per_second: float
    usable_per_second: float
    scarce: bool = False
    measured_at: float = 0.0


class TierDepth(msgspec.Struct, frozen=True):
    """Depth of one tier of one model's queue, and how long its oldest entry has waited, in seconds."""

    model: str
    tier: int
    depth: int
    oldest_seconds: float
