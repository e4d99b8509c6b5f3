"""Sets how many workers each model should have, while this process's controller leads.

This module collects the fleet's reports, and `core/scaling` decides from them. The number of workers is published along with the
reason and the model's capacity. A new leader resumes from that number. Each process with workers runs its share of them. A
process that is the entire fleet resizes its own pools. A slot finishes its batch before it is removed. A slot that fails to start
is retried for as long as it is needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from headway.config.settings import LOCAL, NONE
from headway.core.capacity import Freshness
from headway.core.departure import Load
from headway.core.scaling.scaler import ModelState, ScaleDecision, ScaleLimits, Scaler
from headway.core.scaling.sizing import MOST_SLOTS, BatchCost, shares
from headway.model import Capacity, ProcessInfo, Scaling, WorkerInfo, WorkerStatus
from headway.model.board import ScalingChange
from headway.ports import Fleet
from headway.runtime.counters import ControllerCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import PERIOD, Periodic, PeriodicResource

log = get_logger(__name__)


class Pool(Protocol):
    """Worker slots whose number can change; see `headway.worker.pool`."""

    @property
    def size(self) -> int:
        """Number of slots that serve or are starting."""

    @property
    def most(self) -> int:
        """Maximum number of slots, given the available devices."""

    @property
    def serving(self) -> bool:
        """True once the pool can be resized."""

    async def resize(self, size: int) -> None:
        """Change the number of slots to `size`. Returns once the slots that are removed have finished."""


class LocalScaling:
    """This process's pools by model, and the size last requested for each."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools
        self._asked: dict[str, int] = {}
        self._resizing: set[asyncio.Task[None]] = set()

    def current(self, model: str) -> int:
        """Return the size last requested or, if there was no request, the pool's size; 0 for a model without a pool."""
        pool = self._pools.get(model)
        return 0 if pool is None else self._asked.get(model, pool.size)

    def scale(self, model: str, workers: int) -> None:
        """Start resizing a model's pool, as far as devices allow. Skips a pool that hasn't started; the caller will retry."""
        pool = self._pools.get(model)
        if pool is None or not pool.serving or (workers := min(workers, pool.most)) == self.current(model):
            return
        self._asked[model] = workers
        task = asyncio.get_running_loop().create_task(self._resize(model, pool, workers), name=f"resize {model}")
        self._resizing.add(task)
        task.add_done_callback(self._resizing.discard)

    async def _resize(self, model: str, pool: Pool, workers: int) -> None:
        try:
            await pool.resize(workers)
        except Exception as exc:
            log.exception("could not resize a worker pool", model=model, workers=workers, error=str(exc))


class ScalingFollower(PeriodicResource):
    """Resizes the pools of `models` to the published numbers. A `headway.app.lifecycle.Resource`."""

    def __init__(
        self, process: str, models: Collection[str], pools: LocalScaling, fleet: Fleet, clock: Callable[[], float]
    ) -> None:
        self._process, self._models, self._pools, self._fleet = process, models, pools, fleet
        self._clock, self._freshness = clock, Freshness(clock())
        self._warned: set[tuple[str, str]] = set()  # Models and drivers about which a warning was logged.
        super().__init__(Periodic("scaling follower", self._follow, clock, every=PERIOD))

    async def _follow(self) -> None:
        capacities, members = await asyncio.gather(self._fleet.capacities(), self._fleet.members())
        for capacity in capacities:
            model, scaling = capacity.model, capacity.scaling
            if model not in self._models or scaling is None or not self._freshness.hear(capacity, self._clock()):
                continue
            scalable = {member.id: member.scalable[model] for member in members if model in member.scalable}
            if self._process not in scalable:
                continue
            self._warn_of_other(model, scaling.driver)
            self._pools.scale(model, shares(scaling.desired, scalable)[self._process])

    def _warn_of_other(self, model: str, driver: str) -> None:
        """Warn once that the controller has another driver, so it doesn't know that this process scales its own workers."""
        if driver in ("", LOCAL) or (model, driver) in self._warned:
            return
        self._warned.add((model, driver))
        log.warning(
            "this process scales its own workers, but its controller is set to another driver; the process follows the "
            "controller's number of workers nevertheless: start both with --autoscale local, and set the limits and rules on "
            "the controller",
            model=model,
            controller=driver,
        )


SETTLES_AFTER = 3.0  # Seconds for which a new leader only listens, because workers and hosts don't all report at once.
YIELDS_AFTER = 2.0  # Seconds without requests until a model gives up its last worker, if another waits for the GPU.
LEFT_FOR = 30.0  # Seconds for which a model without workers is remembered, because its host may just be restarting.


class ScaledModel(msgspec.Struct):
    """State of one model's scaling in this process, since the time `since`."""

    since: float
    there_at: float = -math.inf  # Last time at which the model had a worker that hadn't been told to stop.
    scaler: Scaler | None = None  # None until the number to start from is known.
    live: int = 0  # Number of workers that aren't offline.
    follows: bool = False  # True until the first decision. Meanwhile, the number follows the workers that appear.
    published: Scaling | None = None  # The previous leader's last scaling.
    warned: bool = False  # True if it was logged that the model keeps a worker.
    short: bool = False  # True while the model wants more workers than its processes have room for.


class Autoscaler:
    """Autoscaler of one controller. `pools` is None if other processes follow the published numbers. `limits` returns None for
    a model that isn't scaled. `name` is the value of the setting `autoscale`. Models not in `named` are forgotten once their
    workers have left."""

    def __init__(
        self, pools: LocalScaling | None, limits: Callable[[str], ScaleLimits | None], counters: ControllerCounts,
        clock: Callable[[], float], name: str = NONE, named: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._pools, self._limits, self._counters, self._clock, self._name = pools, limits, counters, clock, name
        self._named = named
        self._own_scalings: dict[str, Scaling] = {}  # Last published by this process. Empty once another one leads.
        self._models: dict[str, ScaledModel] = {}

    def forget(self) -> None:
        """Forget all decisions because another controller leads."""
        self.interrupt()
        self._own_scalings.clear()

    def interrupt(self) -> None:
        """Stop deciding until it is known who leads."""
        self._models.clear()

    def begin(self, published: Collection[Capacity]) -> None:
        """Start leading with the published numbers. If the broker has lost them, use this process's last ones."""
        scalings = {capacity.model: capacity.scaling for capacity in published if capacity.scaling is not None}
        last, now = scalings or self._own_scalings, self._clock()
        self._models = {model: ScaledModel(now, now, published=scaling) for model, scaling in last.items()}

    def drop(self, model: str) -> None:
        self._models.pop(model, None)
        self._own_scalings.pop(model, None)

    def look(
        self, capacity: Capacity, load: Load | None, queue: int, workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo],
        bulk: int = 0,
    ) -> Capacity:  # fmt: skip
        """Decide about one model, and return its capacity with the scaling to publish. `queue` counts its waiting entries, and `bulk`
        its waiting bulk lines. `workers` and `members` are the entire fleet's."""
        model = capacity.model
        limits = self._bounded(model, members)
        kept = [worker for worker in workers if worker.model == model and not _left(worker)]
        live = [worker for worker in kept if worker.status is not WorkerStatus.OFFLINE]
        if limits is None or any(worker.gpu for worker in kept):
            reason = "its workers share GPUs with other models, and such models are not scaled"
            held = Scaling(desired=len(kept), current=capacity.healthy, reason=reason, driver=self._name)
            return replace(capacity, scaling=held)
        now = self._clock()
        state = self._models.setdefault(model, ScaledModel(now))
        state.live = len(live)
        if model in self._named or not has_left(model, workers):
            state.there_at = now
        elif now - state.there_at >= LEFT_FOR:
            self.drop(model)
            return capacity
        scaler = state.scaler or self._begin(model, state, limits)
        if scaler is None:
            return capacity
        limits = self._kept_alive(model, state, limits)
        if now < state.since + SETTLES_AFTER:  # Not all hosts have reported their devices yet.
            limits = replace(limits, most=max(limits.most, scaler.desired))
        scaler.limits = limits
        if state.follows and state.live > scaler.desired:
            scaler.desired = limits.clamp(state.live)
        measured = ModelState(
            ready=capacity.healthy,
            queue=queue,
            rate=offered(model, load, members),
            capacity=capacity.items_per_second,
            cost=batch_cost(load),
            # While bulk lines are waiting, most running batches consist of such lines.
            running=0 if bulk else sum(worker.in_flight for worker in live),
            load=round(max((worker.load_seconds for worker in live), default=0.0), 3),
            bulk=bulk if bulk and self._may_run_lines(model, scaler, members) else 0,
            trouble=start_trouble(live),
            retry_in=retry_in(live),
            drained=capacity.drained,
        )
        decision = scaler.decide(measured, now)
        configured = self._limits(model)
        state.short = scaler.short and configured is not None and limits.most < configured.most
        if decision is not None:
            self._order(model, state, decision)
        if self._pools is not None:
            self._pools.scale(model, scaler.desired)
        self._own_scalings[model] = scaling = self._shown(state, scaler, capacity.healthy)
        return replace(capacity, scaling=scaling)

    def _kept_alive(self, model: str, state: ScaledModel, limits: ScaleLimits) -> ScaleLimits:
        """Keep one worker for a model that no setting names, because without workers nobody would know that the model exists."""
        if not limits.idle_after or model in self._named:
            return limits
        if not state.warned:
            state.warned = True
            hint = "Name it in the settings of controllers and gateways, with --model or in a table [models.NAME]."
            log.warning("a model keeps a worker without requests, because no setting names it", model=model, hint=hint)
        return replace(limits, idle_after=0.0)

    def _bounded(self, model: str, members: Sequence[ProcessInfo]) -> ScaleLimits | None:
        """Return a model's limits, reduced to what its processes have room for. Each process keeps one worker."""
        limits = self._limits(model)
        room = [member.scalable[model] for member in members if model in member.scalable]
        if limits is None or not room:
            return limits
        places = sum(most for _, most in room)
        if limits.idle_after and places < sum(size for size, _ in room):  # Another model is waiting for a place.
            limits = replace(limits, idle_after=min(limits.idle_after, YIELDS_AFTER))
        most = max(min(limits.most, places), 1)
        return replace(limits, most=most, least=min(max(limits.least, len(room)), most))

    def _may_run_lines(self, model: str, scaler: Scaler, members: Sequence[ProcessInfo]) -> bool:
        """Return True if bulk lines may keep or start workers of a model, because no other model wants their places."""
        homes = [member.scalable for member in members if model in member.scalable]
        if homes and not any(home[model][1] for home in homes):
            return False
        for name, other in self._models.items():
            coming = other.scaler is not None and other.scaler.coming > 0 and not scaler.desired
            if name != model and (coming or (other.short and any(name in home for home in homes))):
                return False
        return True

    def _shown(self, state: ScaledModel, scaler: Scaler, ready: int) -> Scaling:
        limits, utilisation = scaler.limits, scaler.utilisation
        now = self._clock()
        starts_in, waits = scaler.starts_in(now), scaler.limits.idle_after > 0 and not ready and not scaler.trouble
        late = max(scaler.late, scaler.overdue(now)) if waits else scaler.late
        return Scaling(
            desired=scaler.desired,
            current=ready,
            coming=scaler.coming - (late - scaler.late),
            late=late,
            reason=scaler.reason,
            policy=limits.policy,
            driver=self._name,
            utilisation=None if utilisation is None else round(utilisation, 4),
            rate=round(scaler.forecast.rate, 3),
            least=0 if limits.idle_after else limits.least,
            most=limits.most if limits.most < MOST_SLOTS else 0,
            trouble=scaler.trouble,
            start_seconds=round(scaler.seen_start, 3),
            starts_in=None if starts_in is None else round(starts_in, 3),
            awaited=round(scaler.awaited(now), 3),
        )

    def _order(self, model: str, state: ScaledModel, decision: ScaleDecision) -> None:
        state.follows = False
        self._counters.scaling_decisions[model, decision.direction] += 1
        change = ScalingChange(model, decision.before, decision.desired, decision.direction, decision.reason)
        self._counters.departures.scaled(change)
        log.info(
            "workers are wanted" if self._name == NONE else "workers are scaled", model=model, workers=decision.desired,
            before=decision.before, direction=decision.direction, reason=decision.reason, driver=self._name,
        )  # fmt: skip

    def _begin(self, model: str, state: ScaledModel, limits: ScaleLimits) -> Scaler | None:
        """Create the scaler from the published number or from the running workers. Return None while it is too early for that."""
        published, now = state.published, self._clock()
        current = 0 if self._pools is None else self._pools.current(model)
        if published is not None:
            state.scaler = Scaler(limits, published.desired, now, published.reason, published.start_seconds)
        elif now == state.since or (not current and now < state.since + SETTLES_AFTER):
            return None  # At the first look, rates cover too short a period.
        else:
            may_have_none = limits.idle_after > 0 and self._name != NONE
            state.scaler = Scaler(limits, current or max(state.live, 0 if may_have_none else 1), now)
        state.follows = published is None and not current
        return state.scaler


def has_left(model: str, workers: Sequence[WorkerInfo]) -> bool:
    """Return True if all workers of a model were stopped on purpose. A lost worker (with a reason) counts as present."""
    own = [worker for worker in workers if worker.model == model]
    return bool(own) and all(map(_left, own))


def _left(worker: WorkerInfo) -> bool:
    return worker.status is WorkerStatus.OFFLINE and not worker.reason


def start_trouble(workers: Sequence[WorkerInfo]) -> str:
    """Return why a worker failed to start, or "" if none did."""
    for worker in workers:
        if worker.status is WorkerStatus.STARTING and worker.start_failed:
            return f"{worker.worker_id} does not start: {worker.reason}"
    return ""


def retry_in(workers: Sequence[WorkerInfo]) -> float:
    """Return the seconds until a failed start is retried. 0 if none failed, or while a worker is loading."""
    starting = [worker for worker in workers if worker.status is WorkerStatus.STARTING]
    if not any(worker.start_failed for worker in starting):
        return 0.0
    return min(worker.retry_in for worker in starting)


def offered(model: str, load: Load | None, members: Sequence[ProcessInfo]) -> float:
    """Return the entries per second that clients send to a model, including refused ones. If no gateway reports a rate, this is the
    broker's rate, which excludes entries that were withdrawn unanswered."""
    arrivals = [member.arrivals[model] for member in members if model in member.arrivals]
    return sum(map(sum, arrivals)) if arrivals or load is None else load.rate


def batch_cost(load: Load | None) -> BatchCost | None:
    """Return the cost of a model's batches in terms of entries, or None if no batch has been measured yet."""
    if load is None or load.alpha + load.beta <= 0.0 or load.largest <= 0.0:
        return None
    size = load.entry_size
    return BatchCost(load.alpha, load.beta * size, max(load.max_batch / size, 1.0), load.deviation)
