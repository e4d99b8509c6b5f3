"""Pools of batchers, one per slot, that can grow and shrink while serving; and the collection of a process's pools.

    run ──▶ slot 0, slot 1, … ── grow ──▶ a new slot, which starts its own backend
                              ── shrink ─▶ the last slot stops claiming, finishes its batch, goes offline

No request is lost when a slot is removed: its running batch is answered, and entries not yet claimed wait for other slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from headway.model import Signature
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher, ServingBatchers, replace_all
from headway.worker.shared_gpus import SharedGpus
from headway.worker.starting import start_all

log = get_logger(__name__)


class Places:
    """Slot numbers shared by several pools. When one becomes free, the `takers` are called in order, so that a pool can take it."""

    def __init__(self, most: int) -> None:
        self._most, self._free = most, set(range(most))
        self.takers: list[Callable[[], None]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return self._most - len(self._free)

    def take(self) -> int | None:
        """Take the lowest free number, or None if all are in use."""
        if not self._free:
            return None
        number = min(self._free)
        self._free.discard(number)
        return number

    def give(self, number: int) -> None:
        self._free.add(number)
        for take in self.takers:
            take()


class WorkerPool:
    """A process's batchers for one broker, oldest first.

    `make` builds the batcher for a slot number, starting at 0. Pools may share `places` and `slots`, the set of their slot ids.
    A pool has fewer than `wanted` slots while other pools occupy the places. `held` is True while an operator drains the whole
    process. `drains` names everything being drained in the fleet. A new slot that is drained doesn't start a backend."""

    def __init__(
        self,
        make: Callable[[int], Batcher],
        size: int,
        most: int,
        slots: set[str] | None = None,
        places: Places | None = None,
    ) -> None:
        self._make = make
        self.most, self.wanted = most, size
        self.places = Places(most) if places is None else places
        self.batchers: list[Batcher] = []
        self.slots = set[str]() if slots is None else slots
        self.held, self.drains = False, frozenset[str]()
        self._numbers: dict[Batcher, int] = {}
        self._leaving: list[Batcher] = []
        self._serving = ServingBatchers()
        self._supervisor: Supervisor | None = None
        self._resizing = asyncio.Lock()
        self._winding_down = False
        self.places.takers.append(self._grow)
        self._grow()
        self.wanted = len(self.batchers)

    @property
    def size(self) -> int:
        return len(self.batchers)

    @property
    def serving(self) -> bool:
        """True while the pool is serving and can be resized."""
        return self._supervisor is not None and not self._winding_down

    @property
    def items_per_second(self) -> float:
        """Measured throughput of all slots when they run full batches."""
        return sum(batcher.figures.pace.items_per_second for batcher in self.batchers)

    @property
    def signature(self) -> Signature | None:
        return next((batcher.signature for batcher in self.batchers if batcher.signature is not None), None)

    async def start(self) -> None:
        """Start all backends. If one fails, cancel the others and raise its TargetError."""
        await start_all(batcher.start() for batcher in self.batchers)

    def run(self, supervisor: Supervisor) -> None:
        """Start serving. Batchers without a backend start one, retrying until it succeeds."""
        self._supervisor = supervisor
        for batcher in self.batchers:
            self._serving[batcher] = batcher.run(supervisor)

    async def resize(self, size: int) -> None:
        """Grow or shrink the pool to `size` slots. Do nothing once the pool is winding down. The newest slots are removed
        first; the call returns once their batches have finished. New slots start their backends in the background, as slot
        numbers become free. Raises ValueError if `size` is out of range or the pool isn't serving yet."""
        if not 0 <= size <= self.most:
            raise ValueError(f"{size} slots: must lie between 0 and {self.most}")
        if self._supervisor is None:
            raise ValueError("the pool is not serving yet, so it cannot be resized")
        async with self._resizing:
            if self._winding_down or size == self.wanted:
                return
            log.info("resizing the worker pool", slots=size, before=len(self.batchers))
            self.wanted = size
            self._grow()
            self._leaving.extend(self.batchers[size:])
            del self.batchers[size:]
            for batcher in self._leaving:
                self.slots.discard(batcher.slot.worker)
                batcher.wind_down()
            await asyncio.gather(*map(self._serving.finish, self._leaving))
            freed = [self._numbers.pop(batcher) for batcher in self._leaving]
            self._leaving.clear()
            for number in freed:
                self.places.give(number)

    def _grow(self) -> None:
        while (
            len(self.batchers) < self.wanted and not self._winding_down and (number := self.places.take()) is not None
        ):
            batcher = self._make(number)
            batcher.held = self.held or batcher.slot.worker in self.drains
            self._numbers[batcher] = number
            self.batchers.append(batcher)
            self.slots.add(batcher.slot.worker)
            if self._supervisor is not None:
                self._serving[batcher] = batcher.run(self._supervisor)

    async def replace(self) -> None:
        """Replace every backend as `replace_all` does."""
        await replace_all(tuple(self.batchers))

    async def wind_down(self) -> None:
        """Stop claiming batches. Return once the running batches have finished and all slots are offline."""
        self._winding_down = True
        everyone = [*self.batchers, *self._leaving]
        for batcher in everyone:
            batcher.wind_down()
        await asyncio.gather(*map(self._serving.finish, everyone))

    async def stop(self) -> None:
        """Stop all backends. Call this after the loops have stopped."""
        self._winding_down = True
        await asyncio.gather(*(batcher.stop() for batcher in (*self.batchers, *self._leaving)))


class WorkerPools:
    """All pools of a process by model. Models that share GPUs share one pool. `slots` holds the ids of all slots."""

    def __init__(self, of_models: Mapping[str, WorkerPool | SharedGpus], slots: set[str]) -> None:
        self.of_models = of_models
        self.slots = slots

    @property
    def batchers(self) -> Sequence[Batcher]:
        return [batcher for pool in self.of_models.values() for batcher in pool.batchers]

    @property
    def items_per_second(self) -> float:
        """Throughput with full batches, if there is only one model. Otherwise 0, because the models' rates can't be added."""
        return next(iter(self.of_models.values())).items_per_second if len(self.of_models) == 1 else 0.0

    @property
    def signature(self) -> Signature | None:
        return next(iter(self.of_models.values())).signature

    async def start(self) -> None:
        await start_all(pool.start() for pool in self.of_models.values())

    def run(self, supervisor: Supervisor) -> None:
        for pool in self.of_models.values():
            pool.run(supervisor)

    async def replace(self) -> None:
        for pool in self.of_models.values():
            await pool.replace()

    async def wind_down(self) -> None:
        await asyncio.gather(*(pool.wind_down() for pool in self.of_models.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(pool.stop() for pool in self.of_models.values()))


Workers = WorkerPool | WorkerPools | SharedGpus


async def carry_out(names: Collection[str], process: str, pool: Workers) -> None:
    """Stop a process's drained slots from claiming, and let the rest claim. `names` is everything drained in the fleet."""
    whole = process in names
    for of_model in pool.of_models.values() if isinstance(pool, WorkerPools) else (pool,):
        if isinstance(of_model, WorkerPool):
            of_model.held, of_model.drains = whole, frozenset(names)
    await asyncio.gather(*(batcher.hold(whole or batcher.slot.worker in names) for batcher in pool.batchers))
