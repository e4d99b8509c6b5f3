"""Loads and evicts models on GPUs that hold several models each, as `core.locality` decides.

    look, twice a second ──▶ placement ──▶ move: wind down the evicted model's batcher ──▶ stop it ──▶ start the new one

Each batcher starts its process and restarts it if it dies. If a start fails, the batcher gives up its place, and the GPU's
other models keep serving."""

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
from headway.core.locality import Asked, Move, Placement
from headway.errors import BrokerUnavailable
from headway.model import ModelReport, QueueName, Signature, TierDepth, WorkerInfo, WorkerStatus
from headway.ports import Broker, WorkSource
from headway.runtime.counters import WorkerCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import until_tick
from headway.runtime.race import TIDIES, end, heed_cancellation
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import BY_OPERATOR, Batcher, ServingBatchers, replace_all
from headway.worker.gpu_turns import GpuTurns, TurnedSource
from headway.worker.starting import start_all

log = get_logger(__name__)

CHECK_LOADS_EVERY = 0.5  # Seconds between checks of which models to load.
COLD_EVERY = 4  # Number of checks between heartbeats for models that are loaded nowhere.

CLAIMED = 5.0  # Upper bound on the seconds until heartbeats tell other processes about a load.

Started = Callable[[float | str], None]  # Called after each start with the seconds it took, or the error message.


class MakeBatcher(Protocol):
    """Builds the batcher for GPU number `index`, which claims from `broker`."""

    def __call__(self, index: int, broker: WorkSource, started: Started = ...) -> Batcher: ...


class SharedModel(msgspec.Struct, frozen=True):
    """One of the models that share the GPUs. At least `min_warm` copies of it stay loaded.

    `worker` returns the id of its worker on a GPU, given the GPU's number. `read_report` rereads the report after the model's code has
    changed. The model's batchers claim from the queue for `version` or, if that is empty, from the queue for any version."""

    make: MakeBatcher
    worker: Callable[[int], str]
    min_warm: int = 0
    report: ModelReport = msgspec.field(default_factory=ModelReport)
    version: str = ""
    read_report: Callable[[], Awaitable[ModelReport]] | None = None


class AbsentModels:
    """Heartbeats for models that aren't loaded. They tell gateways that clients can ask for these models.

    `batchers` are those of the loaded models, by GPU and model; the pool adds and removes them. `faults` has the error
    of each model whose last load failed. Set `ended` once the process won't load any more models."""

    def __init__(
        self,
        gpus: Sequence[str],
        models: Mapping[str, SharedModel],
        batchers: Mapping[tuple[str, str], Batcher],
        placement: Placement,
        broker: Broker,
        clock: Callable[[], float],
        slots: set[str],
    ) -> None:
        self._numbers = {gpu: number for number, gpu in enumerate(gpus)}
        self._models, self._batchers, self._placement = models, batchers, placement
        self._broker, self._clock, self._slots = broker, clock, slots
        self.faults: dict[str, str] = {}
        self.ended = False
        self._reported = set[tuple[str, str]]()  # GPUs and models that heartbeats have reported as cold or failed.
        self._last: dict[str, str] = {}  # GPU that each model left last.
        # Report on each model, from its last load or the last change of its files.
        self._reports = {name: model.report for name, model in models.items()}
        self._sending = asyncio.Lock()

    @property
    def held(self) -> bool:
        """True while an operator drains every model that is loaded in this process."""
        return bool(self._batchers) and all(batcher.held for batcher in self._batchers.values())

    def added(self, gpu: str, model: str) -> None:
        """Record that a model is being loaded on a GPU."""
        self._reported.discard((gpu, model))

    def left(self, gpu: str, model: str, batcher: Batcher) -> None:
        """Record that a model leaves a GPU, where `batcher` ran it."""
        self._reported.add((gpu, model))
        self._last[model] = gpu
        if model not in self.faults:  # A model that failed to load still counts as a missing slot.
            self._slots.discard(batcher.slot.worker)
            self._reports[model] = batcher.figures.runs

    async def report(self, models: Iterable[str]) -> None:
        """Send heartbeats for models from the GPUs that they left or failed to load on. A model that is loaded nowhere and
        hasn't left a GPU is reported from the first one."""
        loaded = {model for _, model in self._batchers}
        for model in models:
            gpus = [gpu for gpu, other in self._reported if other == model]
            if model not in loaded:
                gpus = gpus or [self._last.get(model) or next(iter(self._numbers))]
            for gpu in gpus:
                async with self._sending:  # When the process ends, its last heartbeats must come after this one.
                    if not self.ended and (gpu, model) not in self._batchers:
                        self._reported.add((gpu, model))
                        worker = self._offline_info(gpu, model)
                        (self._slots.add if model in self.faults else self._slots.discard)(worker.worker_id)
                        await self._broker.heartbeat(self.heartbeat(worker))

    async def report_new_code(self) -> None:
        """Report the new code of models that aren't loaded. A model that failed to load its old code becomes cold."""
        for name, model in self._models.items():
            if model.read_report is None or name in {loaded for _, loaded in self._batchers}:
                continue
            report = await model.read_report()
            if report != self._reports[name]:
                self._reports[name] = report
                self.faults.pop(name, None)
                with contextlib.suppress(BrokerUnavailable):  # The model's next heartbeat reports it.
                    await self.report([name])

    async def report_offline(self) -> None:
        """Before the process ends, report as offline every model that isn't loaded."""
        async with self._sending:
            with contextlib.suppress(BrokerUnavailable):  # Then the broker forgets them after a while.
                for gpu, model in sorted(self._reported):
                    await self._broker.heartbeat(self._offline_info(gpu, model))
                self._reported.clear()

    def heartbeat(self, worker: WorkerInfo) -> WorkerInfo:
        """Return the heartbeat of an offline worker whose model can be loaded again. Its status is cold, drained or failed."""
        if self.held:
            return replace(worker, status=WorkerStatus.DRAINED, reason=BY_OPERATOR)
        fault = self.faults.get(worker.model)
        if fault is None:
            return replace(worker, status=WorkerStatus.COLD)
        rest = self._placement.rest(worker.model, self._clock())
        again = f"it is tried again in {rest:.0f} s" if rest >= 1.0 else "it is tried again on the next request for it"
        reason = f"{fault.rstrip('.')}; {again}"
        return replace(worker, status=WorkerStatus.FAILED, reason=reason, retry_in=rest)

    def _offline_info(self, gpu: str, model: str) -> WorkerInfo:
        shared = self._models[model]
        return WorkerInfo(
            worker_id=shared.worker(self._numbers[gpu]),
            model=model,
            status=WorkerStatus.OFFLINE,
            runs=self._reports[model],
            gpu=gpu,
            version=shared.version,
            load_seconds=self._placement.load_seconds(model),
        )


class SharedGpus:
    """A process's workers for several models that share its GPUs, with the interface of a `WorkerPool`. A GPU has room for
    at most `room` models. `may_load` asks the fleet for the right to load a model within a number of seconds; it is None if
    no other process has workers."""

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
        # Model of each queue that batchers claim from.
        self._queues = {QueueName(name, model.version): name for name, model in models.items()}
        room = min(room, len(models))
        self._placement = Placement(gpus, room, {name: model.min_warm for name, model in models.items()})
        self._numbers = {gpu: number for number, gpu in enumerate(gpus)}
        self._on: dict[tuple[str, str], Batcher] = {}  # By GPU and model.
        self._absent = absent = AbsentModels(gpus, models, self._on, self._placement, broker, clock, slots)
        load_seconds = self._placement.load_seconds
        self._turns = {
            gpu: GpuTurns(gpu, clock, broker.contenders, partial(self._share, gpu), load_seconds, absent.heartbeat)
            for gpu in gpus
        }
        self._others_begun: dict[str, float] = {}
        self._serving = ServingBatchers()
        self._moving = set[asyncio.Task[None]]()
        self._supervisor: Supervisor | None = None
        self._looks = 0
        self._plan({})

    @property
    def batchers(self) -> Sequence[Batcher]:
        return list(self._on.values())

    @property
    def items_per_second(self) -> float:
        """Always 0, because the rates of several models can't be added."""
        return 0.0

    @property
    def signature(self) -> Signature | None:
        first = next(iter(self._models))
        batchers = (batcher for (_, model), batcher in self._on.items() if model == first)
        return next((batcher.signature for batcher in batchers if batcher.signature is not None), None)

    async def start(self) -> None:
        """Load as many models as fit. If one fails, cancel the others and raise its TargetError. Models that don't fit are
        reported to the fleet first, so that gateways know about them once this process is ready."""
        with contextlib.suppress(BrokerUnavailable):
            if self._may_load is not None:
                await self._spread(self._may_load)
            await self._absent.report(self._models)
        await start_all(batcher.start() for batcher in self.batchers)

    async def _spread(self, may_load: Callable[[str, float], Awaitable[bool]]) -> None:
        """Plan to load the models with the fewest copies in the fleet first, and claim these loads before other processes do."""
        active = (WorkerStatus.HEALTHY, WorkerStatus.STARTING)
        workers = [worker for worker in await self._broker.workers() if worker.queue in self._queues]
        elsewhere = Counter(worker.model for worker in workers if worker.status in active)
        asked = set[str]()
        while wanted := [model for model in self._plan(elsewhere) if model not in asked]:
            asked.add(wanted[0])
            if not await may_load(wanted[0], CLAIMED):
                elsewhere[wanted[0]] += 1

    def _plan(self, elsewhere: Mapping[str, int]) -> Sequence[str]:
        """Plan the first loads, given the number of copies in other processes. Return the models to load."""
        self._on.clear()
        self.slots.difference_update(*(map(model.worker, self._numbers.values()) for model in self._models.values()))
        moves = self._placement.first(elsewhere)
        for move in moves:
            self._add(move.gpu, move.model)
        return [move.model for move in moves]

    def run(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        for batcher in self.batchers:
            self._serving[batcher] = batcher.run(supervisor)
        supervisor.start("look at what is to be loaded", self._look_on)

    async def replace(self) -> None:
        """Replace every backend; see `replace_all`. Report the new code of models that aren't loaded."""
        try:
            await replace_all(self.batchers)
        finally:
            await self._absent.report_new_code()

    async def wind_down(self) -> None:
        """Stop claiming batches and loading models. Return once the running batches have finished and all slots are offline."""
        self._end()
        for batcher in self.batchers:
            batcher.wind_down()
        await asyncio.gather(*map(self._serving.finish, self.batchers), *self._moving)
        await self._absent.report_offline()

    async def stop(self) -> None:
        self._end()
        await end(*self._moving, tidies=TIDIES)
        await asyncio.gather(*(batcher.stop() for batcher in {*self._on.values(), *self._serving}))
        await self._absent.report_offline()

    def _end(self) -> None:
        """Start no more loads. Models that leave a GPU become offline, because this process won't load them again."""
        self._absent.ended = True
        for turns in self._turns.values():
            turns.evicted.clear()

    def _share(self, gpu: str, model: str) -> float:
        return self._placement.share(gpu, model) or 1.0

    def _add(self, gpu: str, model: str) -> Batcher:
        self._turns[gpu].evicted.discard(model)
        self._absent.added(gpu, model)
        source = TurnedSource(self._broker, self._turns[gpu], model)
        batcher = self._models[model].make(self._numbers[gpu], source, partial(self._started, gpu, model))
        self._on[gpu, model] = batcher
        self.slots.add(batcher.slot.worker)
        return batcher

    def _started(self, gpu: str, model: str, outcome: float | str) -> None:
        """Record the load time of a process that was started. If the start failed, the model gives up its place."""
        if (gpu, model) not in self._on:
            return  # It is leaving.
        if not isinstance(outcome, str):
            self._placement.loaded(gpu, model, outcome, self._clock())
            if self._absent.faults.pop(model, None):
                self._begin(self._absent.report([model]))
        elif self._supervisor is not None and not self._absent.ended:
            self._placement.failed(gpu, model, self._clock())
            self._absent.faults[model] = outcome
            self._begin(self._leave(gpu, model))

    async def _look_on(self) -> None:
        while not self._absent.ended:
            await asyncio.sleep(until_tick(CHECK_LOADS_EVERY))
            with contextlib.suppress(BrokerUnavailable):
                await self._look()
            heed_cancellation()

    async def _look(self) -> None:
        loads, depths = await self._broker.loads(), await self._broker.depths()
        workers = [] if self._may_load is None else await self._broker.workers()
        waiting, elsewhere = self._waiting(depths, workers), self._elsewhere(workers)
        asked = {
            model: _asked(loads.get(queue), waiting[model], elsewhere.get(model, (0.0, False)))
            for queue, model in self._queues.items()
        }
        if self._absent.held:  # While it is drained, this process loads nothing that others could load.
            await self._absent.report(self._models)
            return
        used = {place: batcher.figures.utilisation for place, batcher in self._on.items()}
        if self._absent.ended:
            return
        for gpu in {gpu for (gpu, _), batcher in self._on.items() if batcher.lost}:
            self._placement.lose(gpu)
        for move in self._placement.look(asked, used, self._clock()):
            if await self._is_first(move):
                self._begin(self._move(move))
            else:
                self._placement.undo(move)
        held = {model for _, model in self._on} if self._looks % COLD_EVERY == 0 else self._models
        await self._absent.report(
            [model for model in self._models if model not in held or model in self._absent.faults]
        )
        self._looks += 1

    async def _is_first(self, move: Move) -> bool:
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
            log.error("loading or evicting a model failed unexpectedly", error=repr(error), exc_info=error)

    async def _move(self, move: Move) -> None:
        log.info("loading a model", model=move.model, gpu=move.gpu, reason=move.reason, makes_room=move.evicts)
        if move.gives_up:
            self._give_up(move)
        elif move.evicts:
            self._counters.evictions[move.reason] += 1
        if move.evicts and (move.gpu, move.evicts) in self._on:
            await self._leave(move.gpu, move.evicts)
        if self._supervisor is not None and not self._absent.ended:
            batcher = self._add(move.gpu, move.model)
            self._serving[batcher] = batcher.run(self._supervisor)

    def _give_up(self, move: Move) -> None:
        batcher = self._on.get((move.gpu, move.evicts))
        seconds = batcher.starting.seconds(self._clock()) if batcher is not None else 0.0
        self._placement.given_up(move.gpu, move.evicts, self._clock())
        self._absent.faults[move.evicts] = (
            f"its load was given up after {seconds:.0f} s because {move.model} needed its place"
        )
        log.warning("giving up an overdue load", model=move.evicts, gpu=move.gpu, seconds=round(seconds, 1))

    async def _leave(self, gpu: str, model: str) -> None:
        batcher = self._on.pop((gpu, model))
        self._turns[gpu].evicted.add(model)
        self._absent.left(gpu, model, batcher)
        self._placement.left(gpu, model)
        batcher.wind_down()
        await self._serving.finish(batcher)
        self._turns[gpu].leave(model)

    def _waiting(self, depths: Iterable[TierDepth], workers: Iterable[WorkerInfo]) -> Counter[str]:
        """Return the number of queued entries for each model, including those for versions that no worker serves."""
        served = {worker.queue for worker in workers if worker.status is WorkerStatus.HEALTHY} - self._queues.keys()
        waiting = Counter[str]()
        for depth in depths:
            if depth.queue not in served:
                waiting[depth.model] += depth.depth
        return waiting

    def _elsewhere(self, workers: Iterable[WorkerInfo]) -> dict[str, tuple[float, bool]]:
        """Return, for each model, how many GPUs serve it in other processes (shared ones count in part), and True if one of
        them is loading it and isn't overdue."""
        others = [worker for worker in workers if worker.worker_id not in self.slots and worker.queue in self._queues]
        now, begun = self._clock(), self._others_begun
        starting = [worker for worker in others if worker.status is WorkerStatus.STARTING]
        # Otherwise, a worker that dies during each start would always appear to have just begun, and never be overdue.
        begun = {worker.worker_id: begun.get(worker.worker_id, now - worker.loading) for worker in starting}
        self._others_begun = begun
        capacities: dict[str, tuple[float, bool]] = {}
        for worker in others:
            capacity, loads = capacities.get(worker.model, (0.0, False))
            capacity += worker.share * (worker.status is WorkerStatus.HEALTHY)
            in_time = now - begun.get(worker.worker_id, -math.inf) < self._placement.overdue_after(worker.model)
            capacities[worker.model] = capacity, loads or in_time
        return capacities


def _asked(load: Load | None, waiting: int, elsewhere: tuple[float, bool]) -> Asked:
    """Return the demand for a model, given its load at the broker and what `_elsewhere` returns for it."""
    capacity, loads = elsewhere
    if load is None:
        return Asked(waiting=waiting, capacity=capacity, loads=loads)
    items_per_second = pace(load)
    seconds = 1.0 / items_per_second if items_per_second else 0.0
    return Asked(load.rate, waiting, load.max_batch, seconds, capacity, loads)
