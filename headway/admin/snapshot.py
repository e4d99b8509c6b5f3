"""Snapshot of the fleet: what the JSON routes, `headway status` and the dashboard show, each line of one type."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from headway.admin.process import ProcessView
from headway.admin.rendering import instant, text, tier_name
from headway.core.health import latest
from headway.model import (
    BulkDepth,
    Capacity,
    CostLine,
    Departed,
    GpuFigures,
    ProcessInfo,
    Rollout,
    RolloutState,
    Scaling,
    TierDepth,
    WeightLine,
    WorkerInfo,
)

_Line = TypeVar("_Line", bound=msgspec.Struct)
_PLACES = {
    "utilisation": 4, "memory": 4, "share": 4, "failed": 4, "items_per_second": 2, "usable_per_second": 2, "requests_per_second": 2,
}  # fmt: skip
"""Decimal places of measured values."""
_TEXTS = frozenset(["reason", "uuid", "name", "lost", "trouble"])
"""Fields that others have written, who may have used lone surrogates."""


class QueueLine(msgspec.Struct, frozen=True):
    """Depth of one tier of one queue, and how long its oldest entry has waited."""

    model: str
    version: str
    tier: str
    depth: int
    oldest_seconds: float


class BulkQueueLine(msgspec.Struct, frozen=True):
    """Lines of bulk jobs in one queue: how many wait for empty seats, and how many requests have waited for a GPU that ran some."""

    model: str
    version: str
    waiting: int
    delayed: int


class LineOfWeight(msgspec.Struct, frozen=True):
    """Line by which a weight function is estimated."""

    fixed: float
    by_octet: float


class LineOfCost(msgspec.Struct, frozen=True):
    """Line by which the run time of a call is told; the names are those of `CostLine`, and `shape` is its value."""

    shape: str
    alpha: float
    beta: float
    longest: float
    error: float


class GpuLine(msgspec.Struct, frozen=True):
    """GPU of a worker; the names are those of `GpuFigures`. `xids` is by the code as text."""

    uuid: str
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilisation: float | None
    power_watts: float | None
    temperature_celsius: float | None
    ecc_errors: int | None
    xids: dict[str, int]
    lost: str


class WorkerLine(msgspec.Struct, frozen=True):
    """One worker; the names are those of `WorkerInfo`, but that `version` and `target` are of the model that it runs."""

    worker_id: str
    model: str
    status: str
    utilisation: float
    in_flight: int
    last_heartbeat: str
    restarts: int
    takes: str
    gives: str
    weight: LineOfWeight | None
    pid: int
    memory: float
    reason: str
    items_per_second: float
    estimated: bool
    version: str
    target: str
    gpu: str
    share: float
    loading_seconds: float
    retry_seconds: float
    failed: float
    gpu_figures: GpuLine | None
    cost: LineOfCost | None = None


class MemberLine(msgspec.Struct, frozen=True):
    """One process; the names are those of `ProcessInfo`."""

    id: str
    role: str
    host: str
    pid: int
    admin: str
    version: str
    pending: int
    requests_per_second: float
    leads: bool
    age_seconds: float


class DepartedLine(msgspec.Struct, frozen=True):
    """End of a process, or of a worker's; the names are those of `Departed`."""

    id: str
    role: str
    host: str
    pid: int
    ending: str
    reason: str
    age_seconds: float


class CapacityLine(msgspec.Struct, frozen=True):
    """Capacity of one model; the names are those of `Capacity`. `rollout` is text, empty where there is nothing to tell."""

    model: str
    healthy: int
    degraded: int
    items_per_second: float
    usable_per_second: float
    estimated: bool
    scarce: bool
    age_seconds: float
    rollout: str
    drained: int


class ScalingLine(msgspec.Struct, frozen=True):
    """Workers that a model should have; the names are those of `Scaling`."""

    desired: int
    current: int
    coming: int
    late: int
    reason: str
    policy: str
    driver: str
    utilisation: float | None
    requests_per_second: float
    min_workers: int
    max_workers: int
    trouble: str
    start_seconds: float
    starts_in: float | None
    awaited_seconds: float


class Snapshot(msgspec.Struct, frozen=True):
    """Fleet at one instant.

    Attributes:
        now: broker instant.
        queues, workers, members, capacities: lines of each.
        scaling: workers that each model should have, by its name.
        departed: lines of what ended in the last minutes and has not come back, newest first.
        bulk: lines of the queues that have had bulk entries.
        dead_letters: number of dead letters.
        age_seconds: how long ago that was; 0: it is asked for now.
        away: why the broker does not answer now; empty when it does.
    """

    now: float
    queues: list[QueueLine]
    workers: list[WorkerLine]
    members: list[MemberLine]
    capacities: list[CapacityLine]
    dead_letters: int
    age_seconds: float = 0.0
    away: str = ""
    scaling: dict[str, ScalingLine] = {}
    departed: list[DepartedLine] = []
    bulk: list[BulkQueueLine] = []


async def collect(process: ProcessView, learn: Callable[[Sequence[WorkerInfo]], None]) -> Snapshot:
    """Ask the broker for the state of the fleet. `learn` is told of the workers.

    Raises:
        BrokerUnavailable: it does not answer.
    """
    (depths, bulk), workers, letters, (members, departed), capacities, now = await asyncio.gather(
        asyncio.gather(process.broker.depths(), process.broker.bulk_queues()),
        process.broker.workers(),
        process.letters.count(),
        asyncio.gather(process.fleet.members(), process.fleet.departed()),
        process.fleet.capacities(),
        process.now(),
    )
    learn(workers)
    return Snapshot(
        now,
        queue_lines(depths, process.settings.tier_names),
        worker_lines(workers, now),
        member_lines(members, now),
        [capacity_line(capacity, now) for capacity in capacities],
        letters,
        scaling={one.model: scaling_line(one.scaling) for one in capacities if one.scaling is not None},
        departed=[departed_line(one, now) for one in latest(departed, members)],
        bulk=bulk_lines(bulk),
    )


def aged(last: Snapshot, age: float, away: str) -> Snapshot:
    """Snapshot as it was `age` seconds ago: whatever tells since when it is known is that much older. `away`: see Snapshot."""
    return replace(
        last,
        now=last.now + age,
        age_seconds=round(age, 1),
        away=away,
        departed=[replace(one, age_seconds=round(one.age_seconds + age, 3)) for one in last.departed],
        members=[replace(one, age_seconds=round(one.age_seconds + age, 3)) for one in last.members],
        capacities=[replace(one, age_seconds=round(one.age_seconds + age, 3)) for one in last.capacities],
    )


def queue_lines(depths: Sequence[TierDepth], tiers: Sequence[str]) -> list[QueueLine]:
    """Lines of the queues. `tiers`: names of the tiers, highest first."""
    return [
        QueueLine(one.model, one.version, tier_name(one.tier, tiers), one.depth, round(one.oldest_seconds, 4))
        for one in depths
    ]


def bulk_lines(bulk: Sequence[BulkDepth]) -> list[BulkQueueLine]:
    """Lines of the queues that have had bulk entries."""
    return [_line(BulkQueueLine, one) for one in bulk]


def worker_lines(workers: Sequence[WorkerInfo], now: float) -> list[WorkerLine]:
    """Lines of the workers at broker instant `now`."""
    wall = time.time()
    return [
        _line(
            WorkerLine,
            worker,
            status=worker.status.value,
            last_heartbeat=instant(wall - _age(worker.last_heartbeat, now)),
            weight=_weight(worker.weight),
            version=worker.runs.version,
            target=worker.runs.target,
            loading_seconds=round(worker.loading, 1),
            retry_seconds=round(worker.retry_in, 1),
            gpu_figures=gpu_line(worker.gpu_figures),
            cost=_cost(worker.cost),
        )
        for worker in workers
    ]


def gpu_line(gpu: GpuFigures | None) -> GpuLine | None:
    """Line of a worker's GPU, if its figures are known."""
    if gpu is None:
        return None
    return _line(
        GpuLine,
        gpu,
        memory_used_bytes=gpu.memory_used,
        memory_total_bytes=gpu.memory_total,
        utilisation=gpu.utilisation,
        power_watts=gpu.power,
        temperature_celsius=gpu.temperature,
        xids={str(xid): count for xid, count in sorted(gpu.xids.items())},
    )


def member_lines(members: Sequence[ProcessInfo], now: float) -> list[MemberLine]:
    """Lines of the processes at broker instant `now`. Of several that say that they lead, all but the last heard of led before."""
    leader = max((one.last_seen for one in members if one.leads), default=0.0)
    return [
        _line(
            MemberLine,
            one,
            role=one.role.value,
            age_seconds=round(_age(one.last_seen, now), 3),
            leads=one.leads and one.last_seen == leader,
        )
        for one in members
    ]


def departed_line(gone: Departed, now: float) -> DepartedLine:
    """Line of what has ended, at broker instant `now`."""
    ages = {"role": gone.role.value, "ending": gone.ending.value, "age_seconds": round(_age(gone.at, now), 3)}
    return _line(DepartedLine, gone, **ages)


def capacity_line(capacity: Capacity, now: float) -> CapacityLine:
    """Line of a model's capacity at broker instant `now`."""
    age = round(_age(capacity.measured_at, now), 3)
    return _line(CapacityLine, capacity, age_seconds=age, rollout=_rollout(capacity.rollout))


def _rollout(one: Rollout | None) -> str:
    """Text on a rollout that is under way, or was rolled back."""
    if one is None or one.state not in (RolloutState.RUNNING, RolloutState.ROLLED_BACK):
        return ""
    return f"version {one.version} {f'at {one.percent:g} %' if one.running else f'rolled back: {one.reason}'}"


def scaling_line(scaling: Scaling) -> ScalingLine:
    """Line of the workers that a model should have."""
    return _line(
        ScalingLine,
        scaling,
        utilisation=scaling.utilisation,
        requests_per_second=scaling.rate,
        min_workers=scaling.least,
        max_workers=scaling.most,
        awaited_seconds=scaling.awaited,
    )


def _line(kind: type[_Line], source: msgspec.Struct, **own: object) -> _Line:
    """Line with values of its own, and with those of `source` that have the names of its other fields."""
    for name in kind.__struct_fields__:
        if name not in own:
            value = getattr(source, name)
            own[name] = round(value, _PLACES[name]) if name in _PLACES else text(value) if name in _TEXTS else value
    return kind(**own)


def _weight(line: WeightLine | None) -> LineOfWeight | None:
    return None if line is None else LineOfWeight(round(line.fixed, 4), round(line.by_octet, 6))


def _cost(line: CostLine | None) -> LineOfCost | None:
    if line is None:
        return None
    return LineOfCost(line.shape.value, line.alpha, line.beta, round(line.longest, 1), round(line.error, 4))


def _age(instant: float, now: float) -> float:
    """Seconds since an instant. The servers of several shards may differ by a little."""
    return max(now - instant, 0.0)
