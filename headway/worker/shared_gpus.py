"""Loads and evicts the models of GPUs that hold several models each, as `core.locality` decides.

    look, twice a second ──▶ placement ──▶ move: wind down the evicted model's batcher ──▶ stop it ──▶ start the new one

Each batcher starts its process and restarts it when it dies. If a start fails, the batcher gives up its place, and the GPU's
other models go on serving.
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

CHECK_LOADS_EVERY = 0.5  # Seconds between two looks at which models to load.
COLD_EVERY = 4  # Number of looks between two heartbeats for the models that are loaded nowhere.

CLAIMED = 5.0  # Upper bound on the seconds until a load's heartbeats tell other processes of it.

Started = Callable[[float | str], None]
"""Function called after each start of a batcher's process with its seconds or with the text of the error."""


class MakeBatcher(Protocol):
    """Builds the batcher for GPU number `index` over a broker."""

    def __call__(self, index: int, broker: WorkSource, started: Started = ...) -> Batcher: ...


class SharedModel(msgspec.Struct, frozen=True):
    """One of the models that share the GPUs. At least `min_warm` copies of it stay loaded.

    `worker` returns the id of its worker on a GPU, by number. `read_report` reads the report again after the model's code has
    changed. Its batchers claim from the queue for `version`, or if that is empty from the queue for any version.
    """

    make: MakeBatcher
    worker: Callable[[int], str]
    min_warm: int = 0
    report: ModelReport = msgspec.field(default_factory=ModelReport)
    version: str = ""
    read_report: Callable[[], Awaitable[ModelReport]] | None = None


class SharedGpus:
    """Workers of several models on the GPUs of one process, with the interface of a `WorkerPool`.

    One GPU has room for at most `room` models. `may_load` asks the fleet for the right to load a model for some seconds. It is
    None if no other process has workers.
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
        # Model of each queue that batchers claim from.
        self._queues = {QueueName(name, model.version): name for name, model in models.items()}
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
        self._last: dict[str, str] = {}
        self._reported = set[tuple[str, str]]()  # GPUs and models that heartbeats have reported as cold or failed.
        # Report on each model, from its last load or the last change of its files.
        self._reports = {name: model.report for name, model in models.items()}
        self._faults: dict[str, str] = {}  # Error text of each model whose last load failed.
        self._others_begun: dict[str, float] = {}
        self._telling = asyncio.Lock()
        self._serving = ServingBatchers()
        self._moving = set[asyncio.Task[None]]()
        self._supervisor: Supervisor | None = None
        self._winding_down = False
        self._looks = 0
        self._plan({})

    @property
    def batchers(self) -> Sequence[Batcher]:
        return list(self._on.values())

    @property
    def items_per_second(self) -> float:
        """Always 0, because rates of several models don't add up."""
        return 0.0

    @property
    def signature(self) -> Signature | None:
        first = next(iter(self._models))
        batchers = (batcher for (_, model), batcher in self._on.items() if model == first)
        return next((batcher.signature for batcher in batchers if batcher.signature is not None), None)

    async def start(self) -> None:
        """Load as many models as fit. If one fails, cancel the others and raise its TargetError. The other models are reported
        to the fleet first, so gateways know them once this process is ready."""
        with contextlib.suppress(BrokerUnavailable):
            if self._may_load is not None:
                await self._spread(self._may_load)
            await self._tell_absent(self._models)
        await start_all(batcher.start() for batcher in self.batchers)

    async def _spread(self, may_load: Callable[[str, float], Awaitable[bool]]) -> None:
        """Plan to load the models with the fewest copies in the fleet first, and claim them before other processes do."""
        active = (WorkerStatus.HEALTHY, WorkerStatus.STARTING)
        workers = [worker for worker in await self._broker.workers() if worker.queue in self._queues]
        elsewhere = Counter(worker.model for worker in workers if worker.status in active)
        asked = set[str]()
        while wanted := [model for model in self._plan(elsewhere) if model not in asked]:
            asked.add(wanted[0])
            if not await may_load(wanted[0], CLAIMED):
                elsewhere[wanted[0]] += 1

    def _plan(self, elsewhere: Mapping[str, int]) -> Sequence[str]:
        """Plan the first loads, given the copies in other processes. Return their models."""
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
        """Replace every backend as `replace_all` does, and report the new code of models that aren't loaded."""
        try:
            await replace_all(self.batchers)
        finally:
            await self._tell_changed()

    async def _tell_changed(self) -> None:
        """Report the new code of models that aren't loaded. A model that failed to load its old code becomes cold."""
        for name, model in self._models.items():
            if model.read_report is None or name in {loaded for _, loaded in self._on}:
                continue
            report = await model.read_report()
            if report != self._reports[name]:
                self._reports[name] = report
                self._faults.pop(name, None)
                with contextlib.suppress(BrokerUnavailable):  # The model's next heartbeat reports it.
                    await self._tell_absent([name])

    async def wind_down(self) -> None:
        """Claim no more batches and load nothing. Return once the running batches are done and all slots are offline."""
        self._end()
        for batcher in self.batchers:
            batcher.wind_down()
        await asyncio.gather(*map(self._serving.finish, self.batchers), *self._moving)
        await self._tell_gone()

    async def stop(self) -> None:
        self._end()
        await end(*self._moving, tidies=TIDIES)
        await asyncio.gather(*(batcher.stop() for batcher in {*self._on.values(), *self._serving}))
        await self._tell_gone()

    def _end(self) -> None:
        """Begin nothing more. Models that leave a GPU become offline, because this process won't load them again."""
        self._winding_down = True
        for turns in self._turns.values():
            turns.evicted.clear()

    def _share(self, gpu: str, model: str) -> float:
        return self._placement.share(gpu, model) or 1.0

    def _add(self, gpu: str, model: str) -> Batcher:
        self._turns[gpu].evicted.discard(model)
        self._reported.discard((gpu, model))
        source = TurnedSource(self._broker, self._turns[gpu], model)
        batcher = self._models[model].make(self._numbers[gpu], source, partial(self._started, gpu, model))
        self._on[gpu, model] = batcher
        self.slots.add(batcher.slot.worker)
        return batcher

    def _started(self, gpu: str, model: str, outcome: float | str) -> None:
        """Record the load time of a started process. A model whose start failed gives up its place."""
        if (gpu, model) not in self._on:
            return  # It is leaving.
        if not isinstance(outcome, str):
            self._placement.loaded(gpu, model, outcome, self._clock())
            if self._faults.pop(model, None):
                self._begin(self._tell_absent([model]))
        elif self._supervisor is not None and not self._winding_down:
            self._placement.failed(gpu, model, self._clock())
            self._faults[model] = outcome
            self._begin(self._leave(gpu, model))

    async def _look_on(self) -> None:
        while not self._winding_down:
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
        if self._held:  # While it is drained, this process loads nothing that others could load.
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
        """True while an operator drains every model that is loaded in this process."""
        return bool(self._on) and all(batcher.held for batcher in self._on.values())

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
        if self._supervisor is not None and not self._winding_down:
            batcher = self._add(move.gpu, move.model)
            self._serving[batcher] = batcher.run(self._supervisor)

    def _give_up(self, move: Move) -> None:
        batcher = self._on.get((move.gpu, move.evicts))
        seconds = batcher.starting.seconds(self._clock()) if batcher is not None else 0.0
        self._placement.given_up(move.gpu, move.evicts, self._clock())
        self._faults[move.evicts] = f"its load was given up after {seconds:.0f} s, as {move.model} needed its place"
        log.warning("a load that is overdue is given up", model=move.evicts, gpu=move.gpu, seconds=round(seconds, 1))

    async def _leave(self, gpu: str, model: str) -> None:
        batcher = self._on.pop((gpu, model))
        self._turns[gpu].evicted.add(model)
        self._reported.add((gpu, model))
        self._last[model] = gpu
        self._placement.left(gpu, model)
        if model not in self._faults:  # A model that failed to load still counts as a missing slot.
            self.slots.discard(batcher.slot.worker)
            self._reports[model] = batcher.figures.runs
        batcher.wind_down()
        await self._serving.finish(batcher)
        self._turns[gpu].leave(model)

    async def _tell_absent(self, models: Iterable[str]) -> None:
        """Send heartbeats for models from the GPUs that they left or failed to load on, or from any GPU if they are nowhere.
        These heartbeats make a cold model known to gateways, so clients can ask for it."""
        held = {model for _, model in self._on}
        for model in models:
            places = [gpu for gpu, other in self._reported if other == model]
            if model not in held:
                places = places or [self._last.get(model) or next(iter(self._turns))]
            for gpu in places:
                async with self._telling:  # The farewell of a process that ends must come after this heartbeat.
                    if not self._winding_down and (gpu, model) not in self._on:
                        self._reported.add((gpu, model))
                        worker = self._offline_info(gpu, model)
                        (self.slots.add if model in self._faults else self.slots.discard)(worker.worker_id)
                        await self._broker.heartbeat(self._absent(worker))

    async def _tell_gone(self) -> None:
        async with self._telling:
            with contextlib.suppress(BrokerUnavailable):  # Then the broker forgets them after a while.
                for gpu, model in sorted(self._reported):
                    await self._broker.heartbeat(self._offline_info(gpu, model))
                self._reported.clear()

    def _offline_info(self, gpu: str, model: str) -> WorkerInfo:
        shared, runs = self._models[model], self._reports[model]
        worker = shared.worker(self._numbers[gpu])
        status, version = WorkerStatus.OFFLINE, shared.version
        load = self._placement.load_seconds(model)
        return WorkerInfo(
            worker_id=worker, model=model, status=status, runs=runs, gpu=gpu, version=version, load_seconds=load
        )

    def _absent(self, worker: WorkerInfo) -> WorkerInfo:
        """Return the heartbeat of a model that can be loaded on the GPU again: it is cold, drained, or failed to load."""
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
        """Return the number of queued entries for each model, including those for other versions that no worker serves."""
        served = {worker.queue for worker in workers if worker.status is WorkerStatus.HEALTHY} - self._queues.keys()
        waiting = Counter[str]()
        for depth in depths:
            if depth.queue not in served:
                waiting[depth.model] += depth.depth
        return waiting

    def _elsewhere(self, workers: Iterable[WorkerInfo]) -> dict[str, tuple[float, bool]]:
        """Return the GPUs that other processes give each model, and True if one of them is loading it in time."""
        others = [worker for worker in workers if worker.worker_id not in self.slots and worker.queue in self._queues]
        now, begun = self._clock(), self._others_begun
        starting = [worker for worker in others if worker.status is WorkerStatus.STARTING]
        # A worker that dies at each start would otherwise begin its load time again and again, and never be overdue.
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
    """Return the demand for a model, from its load at the broker and the capacity and loads in other processes."""
    capacity, loads = elsewhere
    if load is None:
        return Asked(waiting=waiting, capacity=capacity, loads=loads)
    items_per_second = pace(load)
    seconds = 1.0 / items_per_second if items_per_second else 0.0
    return Asked(load.rate, waiting, load.max_batch, seconds, capacity, loads)
