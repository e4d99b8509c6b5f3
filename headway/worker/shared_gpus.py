"""GPUs that hold several models each: which of them have a batcher where, and the loads and evictions that change that.

    look, twice a second ──▶ placement ──▶ move: wind down the batcher that makes room ──▶ stop it ──▶ start the other's

What is decided is in `core.locality`; here it is carried out. A batcher here is one like any other. It starts its process
by itself, and starts it again when that dies; if that does not succeed it gives its place up, and the others of the GPU serve on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from headway.core.capacity import pace
from headway.core.departure import Load
from headway.core.locality.demand import Asked
from headway.core.locality.placement import Move, Placement
from headway.errors import BrokerUnavailable
from headway.model import ModelReport, QueueName, Signature, TierDepth, WorkerInfo, WorkerStatus
from headway.ports import Broker, WorkSource
from headway.runtime.counters import WorkerCounts
from headway.runtime.logger import get_logger
from headway.runtime.race import TIDIES, end, heed_cancellation
from headway.runtime.supervisor import Supervisor
from headway.runtime.ticks import until_tick
from headway.worker.batcher import BY_OPERATOR, Batcher
from headway.worker.gpu_turns import GpuTurns, TurnedSource
from headway.worker.pool import ServingBatchers, replace_all
from headway.worker.starting import start_all

log = get_logger(__name__)

CHECK_LOADS_EVERY = 0.5
"""Seconds between two looks at what is to be loaded."""
COLD_EVERY = 4
"""Looks between two heartbeats for the models that are nowhere loaded."""

CLAIMED = 5.0
"""Seconds until the heartbeats of a load tell other processes of it, at most."""

Started = Callable[[float | str], None]
"""Function that hears of each start of a batcher's process: its seconds, or the text of the error with which it failed."""


class MakeBatcher(Protocol):
    """Builder of a batcher."""

    def __call__(self, index: int, broker: WorkSource, started: Started = ...) -> Batcher:
        """Build the batcher of the GPU with a number, over a broker; `started` hears of each start of its process."""


class SharedModel(msgspec.Struct, frozen=True):
    """One of the models that share the GPUs.

    Attributes:
        make: builds its batchers.
        worker: id of its worker on the GPU with a number.
        min_warm: copies that are kept loaded at least.
        report: what workers report of it.
        read_report: reads that anew, for changed code; None where it stays.
        version: version whose queue they claim from; empty: the queue for any.
    """

    make: MakeBatcher
    worker: Callable[[int], str]
    min_warm: int = 0
    report: ModelReport = msgspec.field(default_factory=ModelReport)
    version: str = ""
    read_report: Callable[[], Awaitable[ModelReport]] | None = None


class SharedGpus:
    """Workers of several models on the GPUs of one process; to whoever starts and stops it a pool like others.

    Arguments:
        gpus: names of the GPUs.
        room: models that one of them holds at most.
        models: the models, by name.
        broker: broker that batches come from.
        counters: counts of the workers.
        clock: monotonic seconds.
        slots: set that the ids of its workers are kept in.
        may_load: asks the fleet for the right to load a model for some seconds; None where no other process has workers.

    Attributes:
        slots: that set.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        room: int,
        models: Mapping[str, SharedModel],
        broker: Broker,
        counters: WorkerCounts,
        clock: Callable[[], float],
        slots: set[str],
        *,
        may_load: Callable[[str, float], Awaitable[bool]] | None = None,
    ) -> None:
        self.slots = slots
        self._models, self._broker, self._counters, self._clock = models, broker, counters, clock
        self._may_load = may_load
        self._queues = {QueueName(name, model.version): name for name, model in models.items()}
        """Models by the queues that their batchers claim from."""
        room = min(room, len(models))
        self._placement = Placement(gpus, room, {name: model.min_warm for name, model in models.items()})
        self._numbers = {gpu: number for number, gpu in enumerate(gpus)}
        self._turns = {
            gpu: GpuTurns(
                gpu, clock, broker.contenders, partial(self._share, gpu), self._placement.load_seconds, self._absent
            )
            for gpu in gpus
        }
        self._on: dict[tuple[str, str], Batcher] = {}
        """Batchers by GPU and model."""
        self._last: dict[str, str] = {}
        """GPU that each model has left last."""
        self._told = set[tuple[str, str]]()
        """GPUs and models that the fleet has been told to be cold, or failed."""
        self._reports = {name: model.report for name, model in models.items()}
        """Report on each model, from when it was last loaded or its files last changed."""
        self._faults: dict[str, str] = {}
        """Texts of the errors with which models did not load last."""
        self._others_begun: dict[str, float] = {}
        """Instant since which each worker of another process has been starting."""
        self._telling = asyncio.Lock()
        self._serving = ServingBatchers()
        self._moving = set[asyncio.Task[None]]()
        self._supervisor: Supervisor | None = None
        self._winding_down = False
        self._looks = 0
        self._plan({})

    @property
    def batchers(self) -> Sequence[Batcher]:
        """Batchers that serve, or load."""
        return list(self._on.values())

    @property
    def items_per_second(self) -> float:
        """Items per second in full batches; 0, as several models have no sum."""
        return 0.0

    @property
    def signature(self) -> Signature | None:
        """Signature of the first model's target; None while it is not loaded."""
        first = next(iter(self._models))
        found = (one.signature for (_, model), one in self._on.items() if model == first)
        return next((signature for signature in found if signature is not None), None)

    async def start(self) -> None:
        """Load the models that there is room for; the first that fails ends the attempt.

        The fleet is told of the others before that, so that gateways know them when this process is ready.

        Raises:
            TargetError: a backend does not start.
        """
        with contextlib.suppress(BrokerUnavailable):
            if self._may_load is not None:
                await self._spread(self._may_load)
            await self._tell_absent(self._models)
        await start_all(batcher.start() for batcher in self.batchers)

    async def _spread(self, may_load: Callable[[str, float], Awaitable[bool]]) -> None:
        """Plan to begin with the models that the fleet has least of. Of several processes that start, each claims its own."""
        there = (WorkerStatus.HEALTHY, WorkerStatus.STARTING)
        workers = await self._broker.workers()
        elsewhere = Counter(one.model for one in workers if one.status in there and one.queue in self._queues)
        asked = set[str]()
        while wanted := [model for model in self._plan(elsewhere) if model not in asked]:
            asked.add(wanted[0])
            if not await may_load(wanted[0], CLAIMED):
                elsewhere[wanted[0]] += 1

    def _plan(self, elsewhere: Mapping[str, int]) -> Sequence[str]:
        """Plan the first loads, with the copies that others have; returns their models."""
        self._on.clear()
        self.slots.difference_update(*(map(one.worker, self._numbers.values()) for one in self._models.values()))
        moves = self._placement.first(elsewhere)
        for move in moves:
            self._add(move.gpu, move.model)
        return [move.model for move in moves]

    def run(self, supervisor: Supervisor) -> None:
        """Start serving, and moving models."""
        self._supervisor = supervisor
        for batcher in self.batchers:
            self._serving[batcher] = batcher.run(supervisor)
        supervisor.start("look at what is to be loaded", self._look_on)

    async def replace(self) -> None:
        """Swap every backend for a fresh one; see `replace_all`. The fleet is told of the code of what is not loaded, too."""
        try:
            await replace_all(self.batchers)
        finally:
            await self._tell_changed()

    async def _tell_changed(self) -> None:
        """Tell the fleet which code models that are not loaded have now. One that failed to load on other code is only cold."""
        for name, model in self._models.items():
            if model.read_report is None or name in {held for _, held in self._on}:
                continue
            report = await model.read_report()
            if report != self._reports[name]:
                self._reports[name] = report
                self._faults.pop(name, None)
                with contextlib.suppress(BrokerUnavailable):  # Its next heartbeat tells it.
                    await self._tell_absent([name])

    async def wind_down(self) -> None:
        """Begin no other batch and no load; returns when the batches that run are done and all slots are offline."""
        self._end()
        for batcher in self.batchers:
            batcher.wind_down()
        await asyncio.gather(*map(self._serving.finish, self.batchers), *self._moving)
        await self._tell_gone()

    async def stop(self) -> None:
        """Stop all backends, after the loops have been stopped or have ended."""
        self._end()
        await end(*self._moving, tidies=TIDIES)
        await asyncio.gather(*(batcher.stop() for batcher in {*self._on.values(), *self._serving}))
        await self._tell_gone()

    def _end(self) -> None:
        """Begin nothing from now on; what leaves its GPU then is offline, as nothing here can load it any more."""
        self._winding_down = True
        for turns in self._turns.values():
            turns.evicted.clear()

    def _share(self, gpu: str, model: str) -> float:
        return self._placement.share(gpu, model) or 1.0

    def _add(self, gpu: str, model: str) -> Batcher:
        self._turns[gpu].evicted.discard(model)
        self._told.discard((gpu, model))
        source = TurnedSource(self._broker, self._turns[gpu], model)
        batcher = self._models[model].make(self._numbers[gpu], source, partial(self._started, gpu, model))
        self._on[gpu, model] = batcher
        self.slots.add(batcher.slot.worker)
        return batcher

    def _started(self, gpu: str, model: str, told: float | str) -> None:
        """Hear of a start of a process: it has taken its place, or gives it up."""
        if (gpu, model) not in self._on:
            return  # It is leaving.
        if not isinstance(told, str):
            self._placement.loaded(gpu, model, told, self._clock())
            if self._faults.pop(model, None):
                self._begin(self._tell_absent([model]))
        elif self._supervisor is not None and not self._winding_down:
            self._placement.failed(gpu, model, self._clock())
            self._faults[model] = told
            self._begin(self._leave(gpu, model))

    async def _look_on(self) -> None:
        while not self._winding_down:
            await asyncio.sleep(until_tick(CHECK_LOADS_EVERY))
            with contextlib.suppress(BrokerUnavailable):
                await self._look()
            heed_cancellation()

    async def _look(self) -> None:
        """Look once, and begin the moves that follow."""
        loads, depths = await self._broker.loads(), await self._broker.depths()
        workers = [] if self._may_load is None else await self._broker.workers()
        waiting, elsewhere = self._waiting(depths, workers), self._elsewhere(workers)
        asked = {
            model: _asked(loads.get(queue), waiting[model], elsewhere.get(model, (0.0, False)))
            for queue, model in self._queues.items()
        }
        if self._held:  # What another process could load is not to be loaded here.
            await self._tell_absent(self._models)
            return
        used = {place: batcher.figures.utilisation for place, batcher in self._on.items()}
        if self._winding_down:
            return
        for gpu in {gpu for (gpu, _), batcher in self._on.items() if batcher.lost}:
            self._placement.lose(gpu)
        for move in self._placement.look(asked, used, self._clock()):
            if await self._is_first(move):
                self._begin(self._move(move))
            else:
                self._placement.undo(move)
        held = {model for _, model in self._on} if self._looks % COLD_EVERY == 0 else self._models
        await self._tell_absent([model for model in self._models if model not in held or model in self._faults])
        self._looks += 1

    @property
    def _held(self) -> bool:
        """Whether an operator has drained all that is loaded here."""
        return bool(self._on) and all(batcher.held for batcher in self._on.values())

    async def _is_first(self, move: Move) -> bool:
        """Whether no other process begins to load the model of a move just now."""
        if self._may_load is None:
            return True
        try:
            return await self._may_load(move.model, CLAIMED)
        except BrokerUnavailable:
            return False

    def _begin(self, moving: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(moving)
        self._moving.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a move of models broke", error=repr(error), exc_info=error)

    async def _move(self, move: Move) -> None:
        """Have a model make room, if one must, and load another."""
        log.info("loading a model", model=move.model, gpu=move.gpu, reason=move.reason, makes_room=move.evicts)
        if move.gives_up:
            self._give_up(move)
        elif move.evicts:
            self._counters.evictions[move.reason] += 1
        if move.evicts and (move.gpu, move.evicts) in self._on:
            await self._leave(move.gpu, move.evicts)
        if self._supervisor is not None and not self._winding_down:
            batcher = self._add(move.gpu, move.model)
            self._serving[batcher] = batcher.run(self._supervisor)

    def _give_up(self, move: Move) -> None:
        """Give up the overdue load of a model that makes room."""
        batcher = self._on.get((move.gpu, move.evicts))
        seconds = batcher.starting.seconds(self._clock()) if batcher is not None else 0.0
        self._placement.given_up(move.gpu, move.evicts, self._clock())
        self._faults[move.evicts] = f"its load was given up after {seconds:.0f} s, as {move.model} needed its place"
        log.warning("a load that is overdue is given up", model=move.evicts, gpu=move.gpu, seconds=round(seconds, 1))

    async def _leave(self, gpu: str, model: str) -> None:
        """Take a model off a GPU, once its batch is done."""
        batcher = self._on.pop((gpu, model))
        self._turns[gpu].evicted.add(model)
        self._told.add((gpu, model))
        self._last[model] = gpu
        self._placement.left(gpu, model)
        if model not in self._faults:  # One that is to be there counts as missing.
            self.slots.discard(batcher.slot.worker)
            self._reports[model] = batcher.figures.runs
        batcher.wind_down()
        await self._serving.finish(batcher)
        self._turns[gpu].leave(model)

    async def _tell_absent(self, models: Iterable[str]) -> None:
        """Send heartbeats for models where they have left a GPU, or did not load, and for those that are nowhere here.

        What is cold can be asked for all the same.
        """
        held = {model for _, model in self._on}
        for model in models:
            places = [gpu for gpu, other in self._told if other == model]
            if model not in held:
                places = places or [self._last.get(model) or next(iter(self._turns))]
            for gpu in places:
                await self._tell_absent_at(gpu, model)

    async def _tell_absent_at(self, gpu: str, model: str) -> None:
        async with self._telling:  # One that is under way when the process ends comes before the farewell.
            if not self._winding_down and (gpu, model) not in self._on:
                self._told.add((gpu, model))
                worker = self._line(gpu, model)
                (self.slots.add if model in self._faults else self.slots.discard)(worker.worker_id)
                await self._broker.heartbeat(self._absent(worker))

    async def _tell_gone(self) -> None:
        """Tell the fleet that what was cold here leaves."""
        async with self._telling:
            with contextlib.suppress(BrokerUnavailable):  # Then they are forgotten.
                for gpu, model in sorted(self._told):
                    await self._broker.heartbeat(self._line(gpu, model))
                self._told.clear()

    def _line(self, gpu: str, model: str) -> WorkerInfo:
        """Heartbeat of a model that is not on a GPU and leaves with its process."""
        one, runs = self._models[model], self._reports[model]
        worker = one.worker(self._numbers[gpu])
        status, version = WorkerStatus.OFFLINE, one.version
        load = self._placement.load_seconds(model)
        return WorkerInfo(
            worker_id=worker, model=model, status=status, runs=runs, gpu=gpu, version=version, load_seconds=load
        )

    def _absent(self, worker: WorkerInfo) -> WorkerInfo:
        """Heartbeat of a model that is not on a GPU and can be loaded there: it is cold, or did not load."""
        if self._held:
            return replace(worker, status=WorkerStatus.DRAINED, reason=BY_OPERATOR)
        fault = self._faults.get(worker.model)
        if fault is None:
            return replace(worker, status=WorkerStatus.COLD)
        rest = self._placement.rest(worker.model, self._clock())
        again = f"it is tried again in {rest:.0f} s" if rest >= 1.0 else "it is tried again when it is asked for"
        reason = f"{fault.rstrip('.')}; {again}"
        return replace(worker, status=WorkerStatus.FAILED, reason=reason, retry_in=rest)

    def _waiting(self, depths: Iterable[TierDepth], workers: Iterable[WorkerInfo]) -> Counter[str]:
        """Entries that wait for each model: in its queue, and in those of other versions that nobody serves."""
        served = {one.queue for one in workers if one.status is WorkerStatus.HEALTHY} - self._queues.keys()
        waiting = Counter[str]()
        for one in depths:
            if one.queue not in served:
                waiting[one.model] += one.depth
        return waiting

    def _elsewhere(self, workers: Iterable[WorkerInfo]) -> dict[str, tuple[float, bool]]:
        """GPUs that other processes give each model in its version, and whether one of them loads it and is not overdue."""
        others = [one for one in workers if one.worker_id not in self.slots and one.queue in self._queues]
        now, begun = self._clock(), self._others_begun
        starting = [one for one in others if one.status is WorkerStatus.STARTING]
        # One that ends at each start begins anew for ever, and never comes.
        begun = {one.worker_id: begun.get(one.worker_id, now - one.loading) for one in starting}
        self._others_begun = begun
        found: dict[str, tuple[float, bool]] = {}
        for worker in others:
            capacity, loads = found.get(worker.model, (0.0, False))
            capacity += worker.share * (worker.status is WorkerStatus.HEALTHY)
            in_time = now - begun.get(worker.worker_id, -math.inf) < self._placement.overdue_after(worker.model)
            found[worker.model] = capacity, loads or in_time
        return found


def _asked(load: Load | None, waiting: int, elsewhere: tuple[float, bool]) -> Asked:
    """Requests for a model, by what the broker knows of it, with the capacity and loads elsewhere."""
    capacity, loads = elsewhere
    if load is None:
        return Asked(waiting=waiting, capacity=capacity, loads=loads)
    found = pace(load)
    return Asked(load.rate, waiting, load.max_batch, 1.0 / found if found else 0.0, capacity, loads)
