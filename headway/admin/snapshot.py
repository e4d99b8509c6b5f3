"""Snapshots of the fleet for JSON routes, `headway status` and the dashboard, which show the last one if the broker is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from headway.admin.process import ProcessView, instant, tier_name
from headway.core.health import latest
from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable
from headway.http.problem import escaped
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
    WorkerInfo,
)
from headway.runtime.periodic import Periodic, PeriodicResource

KEEP_EVERY = 16.0  # Maximum seconds between snapshots kept for outages. The pause starts at 1 s, and doubles.
_Line = TypeVar("_Line", bound=msgspec.Struct)
_Aging = TypeVar("_Aging", "DepartedLine", "MemberLine", "CapacityLine")
_PLACES = {  # Decimal places of measured values.
    "utilisation": 4, "memory": 4, "share": 4, "failed": 4, "items_per_second": 2, "usable_per_second": 2, "requests_per_second": 2,
}  # fmt: skip
_TEXTS = frozenset(["reason", "uuid", "name", "lost", "trouble"])  # Fields that may contain lone surrogates.


class QueueLine(msgspec.Struct, frozen=True):
    """Depth of one tier in a queue, and how long its oldest entry has waited."""

    model: str
    version: str
    tier: str
    depth: int
    oldest_seconds: float


class BulkQueueLine(msgspec.Struct, frozen=True):
    """Bulk entries in one queue. `waiting` is how many are waiting, and `delayed` how many other entries they have delayed."""

    model: str
    version: str
    waiting: int
    delayed: int


class LineOfWeight(msgspec.Struct, frozen=True):
    """Estimated weight function."""

    fixed: float
    by_octet: float


class LineOfCost(msgspec.Struct, frozen=True):
    """Estimated run time of a call; see `CostLine`."""

    shape: str
    alpha: float
    beta: float
    longest: float
    error: float


class GpuLine(msgspec.Struct, frozen=True):
    """GPU of a worker; see `GpuFigures`. The keys of `xids` are the codes as strings."""

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
    """One worker; see `WorkerInfo`. `version` and `target` are those of its model."""

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
    """One process; see `ProcessInfo`."""

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
    """Process or worker that has stopped; see `Departed`."""

    id: str
    role: str
    host: str
    pid: int
    ending: str
    reason: str
    age_seconds: float


class CapacityLine(msgspec.Struct, frozen=True):
    """Capacity of one model; see `Capacity`. `rollout` describes a rollout, or is empty."""

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
    """Number of workers that a model should have; see `Scaling`."""

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
    """State of the fleet at the broker's time `now`, which was `age_seconds` ago."""

    now: float
    queues: list[QueueLine]
    workers: list[WorkerLine]
    members: list[MemberLine]
    capacities: list[CapacityLine]
    dead_letters: int
    age_seconds: float = 0.0
    away: str = ""  # Why the broker is unreachable. Empty while it isn't.
    scaling: dict[str, ScalingLine] = {}  # By model.
    departed: list[DepartedLine] = []  # What stopped in the last few minutes and hasn't come back, newest first.
    bulk: list[BulkQueueLine] = []  # Queues that have had bulk entries.


async def collect(process: ProcessView, learn: Callable[[Sequence[WorkerInfo]], None]) -> Snapshot:
    """Read the state of the fleet from the broker, and pass the workers to `learn`. Raises BrokerUnavailable."""
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
        now=now,
        queues=queue_lines(depths, process.settings.tier_names),
        workers=worker_lines(workers, now),
        members=member_lines(members, now),
        capacities=[capacity_line(capacity, now) for capacity in capacities],
        dead_letters=letters,
        scaling={known.model: scaling_line(known.scaling) for known in capacities if known.scaling is not None},
        departed=[_departed_line(gone, now) for gone in latest(departed, members)],
        bulk=bulk_lines(bulk),
    )


def aged(last: Snapshot, age: float, away: str) -> Snapshot:
    """Return a copy of a snapshot with all ages increased by `age` seconds. `away` says why there is no newer snapshot."""

    def older(lines: list[_Aging]) -> list[_Aging]:
        return [replace(line, age_seconds=round(line.age_seconds + age, 3)) for line in lines]

    return replace(
        last,
        now=last.now + age,
        age_seconds=round(age, 1),
        away=away,
        departed=older(last.departed),
        members=older(last.members),
        capacities=older(last.capacities),
    )


class SnapshotSource(PeriodicResource):
    """Takes the snapshots of one process. `learn` is called with the workers of each snapshot."""

    def __init__(self, process: ProcessView, learn: Callable[[Sequence[WorkerInfo]], None]) -> None:
        self._process, self._learn = process, learn
        self._last: Snapshot | None = None
        self._taken_at = 0.0
        self._pause = 0.5
        super().__init__(Periodic("snapshots", self._take, process.clock, what="", every=self._every))

    async def fresh(self) -> Snapshot:
        self._last = await within_answer_time(collect(self._process, self._learn))
        self._taken_at = self._process.clock()
        return self._last

    async def latest(self) -> Snapshot:
        """Return a fresh snapshot or, without the broker, the last one (`aged`). Raises BrokerUnavailable if there is none."""
        try:
            return await self.fresh()
        except BrokerUnavailable as exc:
            known = self.known(str(exc))
            if known is None:
                raise
            return known

    def known(self, away: str) -> Snapshot | None:
        """Return the last snapshot, or None if there is none; see `aged`."""
        if self._last is None:
            return None
        age = self._process.clock() - self._taken_at
        return aged(self._last, age, away)

    async def _take(self) -> None:
        await self.fresh()

    def _every(self) -> float:
        self._pause = min(2 * self._pause, KEEP_EVERY)
        return self._pause


def queue_lines(depths: Sequence[TierDepth], tiers: Sequence[str]) -> list[QueueLine]:
    """Describe queues. `tiers` contains the tier names, highest first."""
    return [
        QueueLine(tier.model, tier.version, tier_name(tier.tier, tiers), tier.depth, round(tier.oldest_seconds, 4))
        for tier in depths
    ]


def bulk_lines(bulk: Sequence[BulkDepth]) -> list[BulkQueueLine]:
    """Describe the queues that have had bulk entries."""
    return [_line(BulkQueueLine, queue) for queue in bulk]


def worker_lines(workers: Sequence[WorkerInfo], now: float) -> list[WorkerLine]:
    """Describe the workers at broker time `now`."""
    wall = time.time()
    return [
        _line(
            WorkerLine,
            worker,
            status=worker.status.value,
            last_heartbeat=instant(wall - _age(worker.last_heartbeat, now)),
            weight=None
            if (line := worker.weight) is None
            else LineOfWeight(round(line.fixed, 4), round(line.by_octet, 6)),
            version=worker.runs.version,
            target=worker.runs.target,
            loading_seconds=round(worker.loading, 1),
            retry_seconds=round(worker.retry_in, 1),
            gpu_figures=_gpu_line(worker.gpu_figures),
            cost=_cost(worker.cost),
        )
        for worker in workers
    ]


def _gpu_line(gpu: GpuFigures | None) -> GpuLine | None:
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
    """Describe the processes at broker time `now`. If several claim to lead, only the one with the newest heartbeat is the leader."""
    leader = max((member.last_seen for member in members if member.leads), default=0.0)
    return [
        _line(
            MemberLine,
            member,
            role=member.role.value,
            age_seconds=round(_age(member.last_seen, now), 3),
            leads=member.leads and member.last_seen == leader,
        )
        for member in members
    ]


def _departed_line(gone: Departed, now: float) -> DepartedLine:
    ages = {"role": gone.role.value, "ending": gone.ending.value, "age_seconds": round(_age(gone.at, now), 3)}
    return _line(DepartedLine, gone, **ages)


def capacity_line(capacity: Capacity, now: float) -> CapacityLine:
    """Describe a model's capacity at broker time `now`."""
    age = round(_age(capacity.measured_at, now), 3)
    return _line(CapacityLine, capacity, age_seconds=age, rollout=_rollout(capacity.rollout))


def _rollout(rollout: Rollout | None) -> str:
    """Describe a rollout that is running or was rolled back. Return an empty string for any other."""
    if rollout is None or rollout.state not in (RolloutState.RUNNING, RolloutState.ROLLED_BACK):
        return ""
    state = f"at {rollout.percent:g} %" if rollout.running else f"rolled back: {rollout.reason}"
    return f"version {rollout.version} {state}"


def scaling_line(scaling: Scaling) -> ScalingLine:
    """Describe the number of workers that a model should have."""
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
    """Create a line from the values in `own`. Take its other fields from `source`, by name."""
    for name in kind.__struct_fields__:
        if name not in own:
            value = getattr(source, name)
            own[name] = round(value, _PLACES[name]) if name in _PLACES else escaped(value) if name in _TEXTS else value
    return kind(**own)


def _cost(line: CostLine | None) -> LineOfCost | None:
    if line is None:
        return None
    return LineOfCost(line.shape.value, line.alpha, line.beta, round(line.longest, 1), round(line.error, 4))


def _age(instant: float, now: float) -> float:
    """Return the seconds since a time, or 0 if it seems to lie ahead because the clocks of shards differ a little."""
    return max(now - instant, 0.0)
