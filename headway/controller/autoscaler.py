"""Autoscaler: decides how many workers each model should have, while its controller leads.

`core/scaling` decides; here is what it needs of the world. The number and its reason are published with the capacity of the
model, so that another leader goes on from there, and every process can tell it. Processes with workers follow it, each with its
share; a process that is alone sets its own pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import msgspec
from msgspec.structs import replace

from headway.config.settings import NONE
from headway.core.departure import Load
from headway.core.scaling.scaler import ModelState, ScaleDecision, ScaleLimits, Scaler
from headway.core.scaling.sizing import MOST_SLOTS, BatchCost
from headway.fleet.local_scaling import LocalScaling
from headway.model import Capacity, ProcessInfo, Scaling, WorkerInfo, WorkerStatus
from headway.model.board import ScalingChange
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger

log = get_logger(__name__)

SETTLES_AFTER = 3.0
"""Seconds for which a leader hears of workers and hosts, which come one by one, before it tells a number that it does not know, or bounds one."""
YIELDS_AFTER = 2.0
"""Seconds after which a model that nobody asks for gives its last worker up where another waits for its GPU."""
LEFT_FOR = 30.0
"""Seconds after which a model whose workers have all left has no number any more. A host that is restarted finds its number."""


class ScaledModel(msgspec.Struct):
    """State of one model's scaling in this process.

    Attributes:
        scaler: decides; None until it is known how many there are.
        live: workers that are there, start or are drained, as last heard.
        follows: whether the number follows those that turn up: nothing was decided yet, and this process has none.
        since: monotonic instant from which on it is scaled here.
        there_at: monotonic instant at which it was there last; see `has_left`.
        published: what was published last, before this process led; None: that is not known.
        warned: whether the log tells that it keeps a worker.
        short: whether it wants more workers than there are places in its processes.
    """

    since: float
    there_at: float = -math.inf
    scaler: Scaler | None = None
    live: int = 0
    follows: bool = False
    published: Scaling | None = None
    warned: bool = False
    short: bool = False


class Autoscaler:
    """Autoscaler of one controller.

    Arguments:
        pools: pools of this process, whose numbers it sets; None where others follow what is published.
        limits: bounds and times of a model by its name; None for a model that is not scaled.
        counters: counters of the process.
        clock: monotonic seconds.
        name: who sets the numbers, as the setting has it.
        named: models that have a number whether they have workers or not; any other has none once all of its workers have left.
    """

    def __init__(
        self,
        pools: LocalScaling | None,
        limits: Callable[[str], ScaleLimits | None],
        counters: Counters,
        clock: Callable[[], float],
        name: str = NONE,
        named: Collection[str] = (),
    ) -> None:
        self._pools, self._limits, self._counters, self._clock, self._name = pools, limits, counters, clock, name
        self._named = named
        self._told: dict[str, Scaling] = {}
        """Last publications of this process, by model, since another controller led."""
        self._models: dict[str, ScaledModel] = {}

    def forget(self) -> None:
        """Forget all that was decided, as another controller leads."""
        self.interrupt()
        self._told.clear()

    def interrupt(self) -> None:
        """Decide no more, as it is not known who leads."""
        self._models.clear()

    def begin(self, published: Collection[Capacity]) -> None:
        """Begin to lead, from the numbers that were published last; if the broker has lost them, from this process's own."""
        found = {one.model: one.scaling for one in published if one.scaling is not None} or self._told
        now = self._clock()
        self._models = {model: ScaledModel(now, now, published=scaling) for model, scaling in found.items()}

    def drop(self, model: str) -> None:
        """Forget a model, which is gone."""
        self._models.pop(model, None)
        self._told.pop(model, None)

    def look(
        self,
        found: Capacity,
        load: Load | None,
        queue: int,
        workers: Sequence[WorkerInfo],
        members: Sequence[ProcessInfo],
        bulk: int = 0,
    ) -> Capacity:
        """Decide on one model; returns its capacity with what is to be published of the scaling.

        Arguments:
            found: capacity of the model.
            load: load of the model; None when nothing is known.
            queue: entries that wait for it.
            workers: the worker registry.
            members: processes of the fleet.
            bulk: lines of bulk jobs that wait for it.
        """
        model = found.model
        limits = self._bounded(model, members)
        kept = [one for one in workers if one.model == model and not _left(one)]
        own = [one for one in kept if one.status is not WorkerStatus.OFFLINE]
        if limits is None or any(one.gpu for one in kept):
            reason = "its workers share GPUs with other models, which are not scaled"
            held = Scaling(desired=len(kept), current=found.healthy, reason=reason, driver=self._name)
            return msgspec.structs.replace(found, scaling=held)
        now = self._clock()
        state = self._models.setdefault(model, ScaledModel(now))
        state.live = len(own)
        if model in self._named or not has_left(model, workers):
            state.there_at = now
        elif now - state.there_at >= LEFT_FOR:
            self.drop(model)
            return found
        scaler = state.scaler or self._begin(model, state, limits)
        if scaler is None:
            return found
        limits = self._kept_alive(model, state, limits)
        if now < state.since + SETTLES_AFTER:  # Hosts tell what they have room for one by one, too.
            limits = replace(limits, most=max(limits.most, scaler.desired))
        scaler.limits = limits
        if state.follows and state.live > scaler.desired:
            scaler.desired = limits.clamp(state.live)
        lines = bulk if bulk and self._may_run_lines(model, scaler, members) else 0
        measured = ModelState(
            found.healthy,
            queue,
            offered(model, load, members),
            found.items_per_second,
            batch_cost(load),
            0 if bulk else sum(one.in_flight for one in own),  # What runs beside waiting lines is mostly lines.
            round(max((one.load_seconds for one in own), default=0.0), 3),
            lines,
            *failed_starts(own),
            found.drained,
        )
        decision = scaler.decide(measured, now)
        configured = self._limits(model)
        state.short = scaler.short and configured is not None and limits.most < configured.most
        if decision is not None:
            self._order(model, state, decision)
        if self._pools is not None:
            self._pools.scale(model, scaler.desired)
        self._told[model] = scaling = self._shown(state, scaler, found.healthy)
        return msgspec.structs.replace(found, scaling=scaling)

    def _kept_alive(self, model: str, state: ScaledModel, limits: ScaleLimits) -> ScaleLimits:
        """Limits of a model that keeps a worker where no setting names it: without any, nobody would know that it exists."""
        if not limits.idle_after or model in self._named:
            return limits
        if not state.warned:
            state.warned = True
            hint = "Name it in the settings of the controllers and the gateways: --model, or a table [models.NAME]."
            log.warning(
                "a model keeps a worker while nobody asks for it, as no setting names it", model=model, hint=hint
            )
        return replace(limits, idle_after=0.0)

    def _bounded(self, model: str, members: Sequence[ProcessInfo]) -> ScaleLimits | None:
        """Limits of a model where processes scale themselves: each keeps one worker, and has devices for so many."""
        limits = self._limits(model)
        room = [one.scalable[model] for one in members if model in one.scalable]
        if limits is None or not room:
            return limits
        there = sum(most for _, most in room)
        if limits.idle_after and there < sum(has for has, _ in room):  # Another model waits for what this one has.
            limits = replace(limits, idle_after=min(limits.idle_after, YIELDS_AFTER))
        most = max(min(limits.most, there), 1)
        return replace(limits, most=most, least=min(max(limits.least, len(room)), most))

    def _may_run_lines(self, model: str, scaler: Scaler, members: Sequence[ProcessInfo]) -> bool:
        """Whether lines of bulk jobs may keep a model's workers, or bring one: no other model wants the places that it has or would get."""
        homes = [one.scalable for one in members if model in one.scalable]
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
        """Tell of a decision."""
        state.follows = False
        self._counters.scaling_decisions[model, decision.direction] += 1
        self._counters.departures.scaled(
            ScalingChange(model, decision.before, decision.desired, decision.direction, decision.reason)
        )
        log.info(
            "workers are wanted" if self._name == NONE else "workers are scaled",
            model=model,
            workers=decision.desired,
            before=decision.before,
            direction=decision.direction,
            reason=decision.reason,
            driver=self._name,
        )

    def _begin(self, model: str, state: ScaledModel, limits: ScaleLimits) -> Scaler | None:
        """Go on from what was published last, or from the workers that are there."""
        published, now = state.published, self._clock()
        current = 0 if self._pools is None else self._pools.current(model)
        if published is not None:
            state.scaler = Scaler(limits, published.desired, now, published.reason, published.start_seconds)
        elif now == state.since or (not current and now < state.since + SETTLES_AFTER):
            return None  # At the first look rates are those of an instant.
        else:
            may_have_none = limits.idle_after > 0 and self._name != NONE
            state.scaler = Scaler(limits, current or max(state.live, 0 if may_have_none else 1), now)
        state.follows = published is None and not current
        return state.scaler


def has_left(model: str, workers: Sequence[WorkerInfo]) -> bool:
    """Whether all workers of a model were told to stop. One that was lost has not left: its reason says so."""
    own = [one for one in workers if one.model == model]
    return bool(own) and all(map(_left, own))


def _left(worker: WorkerInfo) -> bool:
    return worker.status is WorkerStatus.OFFLINE and not worker.reason


def failed_starts(workers: Sequence[WorkerInfo]) -> tuple[str, float]:
    """Reason for which a worker did not load, and the seconds until one of those that start is tried again, 0 while any of them loads."""
    starting = [one for one in workers if one.status is WorkerStatus.STARTING]
    failed = next((one for one in starting if one.start_failed), None)
    if failed is None:
        return "", 0.0
    return f"{failed.worker_id} does not start: {failed.reason}", min(one.retry_in for one in starting)


def offered(model: str, load: Load | None, members: Sequence[ProcessInfo]) -> float:
    """Entries per second that clients ask a model for and that a worker could answer, those included that are refused.

    What the broker counts is for gateways that tell nothing: it knows of no client that was gone before it could be answered.
    """
    told = [one.arrivals[model] for one in members if model in one.arrivals]
    return sum(map(sum, told)) if told or load is None else load.rate


def batch_cost(load: Load | None) -> BatchCost | None:
    """Cost of a model's batches in entries; None while no batch was measured."""
    if load is None or load.alpha + load.beta <= 0.0 or load.largest <= 0.0:
        return None
    size = load.entry_size
    return BatchCost(load.alpha, load.beta * size, max(load.max_batch / size, 1.0), load.deviation)
