"""Worker pools of one process that serves several models: one for each, and all of them as one to whoever starts and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from headway.model import Signature
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.pool import WorkerPool
from headway.worker.shared_gpus import SharedGpus
from headway.worker.starting import start_all


class WorkerPools:
    """Pools of one process.

    Arguments:
        of_models: pool of each model, by its name, or of those that share GPUs, by all of theirs; at least one.
        slots: set that all of these pools keep their slots in.

    Attributes:
        of_models: the pools.
        slots: ids of all slots; the same set for as long as the pools live.
    """

    def __init__(self, of_models: Mapping[str, WorkerPool | SharedGpus], slots: set[str]) -> None:
        self.of_models = of_models
        self.slots = slots

    @property
    def batchers(self) -> Sequence[Batcher]:
        """Batchers that serve."""
        return [batcher for pool in self.of_models.values() for batcher in pool.batchers]

    @property
    def items_per_second(self) -> float:
        """Items per second that the slots of a model do in full batches; 0 for several models, which have no sum."""
        return next(iter(self.of_models.values())).items_per_second if len(self.of_models) == 1 else 0.0

    @property
    def signature(self) -> Signature | None:
        """Signature of the first model's target; None while no slot has loaded it."""
        return next(iter(self.of_models.values())).signature

    async def start(self) -> None:
        """Start all backends; the first that fails ends the attempt.

        Raises:
            TargetError: a backend does not start.
        """
        await start_all(pool.start() for pool in self.of_models.values())

    def run(self, supervisor: Supervisor) -> None:
        """Start serving."""
        for pool in self.of_models.values():
            pool.run(supervisor)

    async def replace(self) -> None:
        """Swap every backend for a fresh one, one after the other; the first that fails ends it, the rest go on."""
        for pool in self.of_models.values():
            await pool.replace()

    async def wind_down(self) -> None:
        """Begin no other batch; returns when those that run are done and all slots are offline."""
        await asyncio.gather(*(pool.wind_down() for pool in self.of_models.values()))

    async def stop(self) -> None:
        """Stop all backends, after the loops have been stopped or have ended."""
        await asyncio.gather(*(pool.stop() for pool in self.of_models.values()))


Workers = WorkerPool | WorkerPools | SharedGpus
"""Workers of one process, as whoever starts and stops them sees them."""


async def carry_out(names: Collection[str], process: str, pool: Workers) -> None:
    """Have the slots of a process claim nothing that are drained, and all others claim.

    Arguments:
        names: names of all drains of the fleet.
        process: id of the process.
        pool: its workers.
    """
    whole = process in names
    for one in pool.of_models.values() if isinstance(pool, WorkerPools) else (pool,):
        if isinstance(one, WorkerPool):
            one.held, one.drains = whole, frozenset(names)
    await asyncio.gather(*(one.hold(whole or one.slot.worker in names) for one in pool.batchers))
