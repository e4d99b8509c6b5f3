"""Lets slots help with versions of their model that no worker serves any more.

Each version has its own queue. Entries that remain in it after the version's last worker has left would wait forever. So slots
of other versions alternate between their own queue and such queues. An entry pinned to the abandoned version isn't run; it
fails, because no worker can answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headway.core.departure import Policy
from headway.core.health import degraded_at
from headway.errors import BatchRaised
from headway.model import ItemResult, Lease, NoWork, QueueName, Slot, WorkerInfo, WorkerStatus
from headway.ports import Backend, Registry, WorkSource
from headway.runtime.periodic import Periodic, PeriodicResource
from headway.runtime.race import end
from headway.worker.gpu_turns import NOT_ITS_TURN

if TYPE_CHECKING:
    from headway.worker.batch_traces import BatchTraces

FIND_UNSERVED_EVERY = 1.0  # Seconds between searches for unserved queues if this process is the only one in the fleet.
LOOKS = 50  # Maximum searches per second in the fleet. With more workers, each process searches less often.
COMES_BACK = 5.0  # Seconds for which a restarting or resting worker counts as serving. Entries may not wait longer.


class Claims:
    """Claims a slot's batches, from its own queue and from the queues that it helps with."""

    def __init__(
        self,
        slot: Slot,
        broker: WorkSource,
        policy: Policy,
        clock: Callable[[], float] = monotonic,
        traces: BatchTraces | None = None,
    ) -> None:
        self.slot, self._broker, self._policy = slot, broker, policy
        self._clock, self._traces = clock, traces
        self._claimed_at = 0.0  # When the last claim started.
        self._strays: Sequence[Slot] = ()
        self._helped = self._barred = False
        self._waiting: asyncio.Future[None] | None = None

    def help(self, versions: Iterable[str]) -> None:
        """Also claim from the queues of these versions until they are empty."""
        self._strays = [replace(self.slot, version=version, helps=True) for version in versions]
        if self._strays and self._waiting is not None:
            self._waiting.cancel()

    async def claim(self) -> Lease | NoWork:
        """Claim a batch that is due. Otherwise return when to claim again."""
        self._claimed_at = self._clock()
        claimed = await self._claim_in_turn()
        self._barred = claimed is NOT_ITS_TURN
        return claimed

    async def _claim_in_turn(self) -> Lease | NoWork:
        if self._strays and not self._helped:
            for stray in self._strays:
                claimed = await self._broker.claim(stray, self._policy)
                if isinstance(claimed, Lease):
                    self._helped = True
                if isinstance(claimed, Lease) or claimed is NOT_ITS_TURN:
                    return claimed
            self._strays = ()
        claimed = await self._broker.claim(self.slot, self._policy)
        if claimed is not NOT_ITS_TURN:
            self._helped = False
        return claimed

    async def run(self, backend: Backend, lease: Lease, timeout: float) -> Sequence[ItemResult]:
        """Run the claimed batch; see `run_batch`."""
        if self._traces is None:
            return await run_batch(backend, lease, timeout)
        return await self._traces.run(partial(run_batch, backend, lease, timeout), lease, self._claimed_at)

    async def wait(self, until: float | None) -> None:
        """Return when another claim is worthwhile; see `WorkSource.wait_for_work`."""
        if not self.slot.version:  # Without versions there are no other queues to help with.
            await self._broker.wait_for_work(self.slot, until)
            return
        self._waiting = waiting = asyncio.ensure_future(self._broker.wait_for_work(self.slot, until))
        try:
            if self._strays and not self._barred:  # Claim from a stray queue next instead of waiting at our own.
                await asyncio.sleep(0)
            else:
                await asyncio.wait({waiting})
            if waiting.done() and not waiting.cancelled():
                waiting.result()
        finally:
            self._waiting = None
            await end(waiting)


async def run_batch(backend: Backend, lease: Lease, timeout: float) -> Sequence[ItemResult]:
    """See `Backend.run`. In a batch from another version's queue, entries pinned to that version fail without running."""
    if not lease.slot.helps or not any(entry.pinned for entry in lease.entries):
        return await backend.run(lease.entries, timeout)
    runnable = [place for place, entry in enumerate(lease.entries) if not entry.pinned]
    try:
        items = iter(await backend.run([lease.entries[place] for place in runnable], timeout) if runnable else ())
    except BatchRaised as exc:
        exc.places = tuple(runnable[place] for place in exc.places)  # Translate them to places in the lease.
        raise
    named = f"version {version!r} of the model" if (version := lease.slot.version) else "the requested version"
    elsewhere = ItemResult(None, f"no worker runs {named} any more", elsewhere=True)
    return [elsewhere if entry.pinned else next(items) for entry in lease.entries]


_COMING = (WorkerStatus.STARTING, WorkerStatus.DEGRADED)  # Expected to claim again, unless the last heartbeat is old.


class StrayWatcher(PeriodicResource):
    """Searches periodically for queues that no worker serves. `claims` returns the `Claims` of this process's slots."""

    def __init__(self, claims: Callable[[], Iterable[Claims]], registry: Registry, clock: Callable[[], float]) -> None:
        self._claims, self._registry, self._clock = claims, registry, clock
        super().__init__(Periodic("strays", self._look_in_turn, clock, every=FIND_UNSERVED_EVERY))
        self._next_at = 0.0
        self._healthy_at: dict[QueueName, float] = {}  # When each queue last had a healthy worker.

    async def _look_in_turn(self) -> None:
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + await self.look() / LOOKS

    async def look(self) -> int:
        """Search once. Return the number of workers in the fleet."""
        workers, depths = await asyncio.gather(self._registry.workers(), self._registry.depths())
        served = self._served(workers)
        strays: dict[str, set[str]] = {}
        for depth in depths:
            if depth.depth and depth.queue not in served:
                strays.setdefault(depth.model, set()).add(depth.version)
        for claims in self._claims():
            slot = claims.slot
            if slot.version:
                claims.help(sorted(strays.get(slot.model, set()) - {slot.version}))
        return len(workers)

    def _served(self, workers: Sequence[WorkerInfo]) -> set[QueueName]:
        """Return the queues that have a healthy worker, or one that was healthy recently and is recovering."""
        now, newest = self._clock(), max((worker.last_heartbeat for worker in workers), default=0.0)
        healthy = {worker.queue for worker in workers if worker.status is WorkerStatus.HEALTHY}
        lately = {queue: at for queue, at in self._healthy_at.items() if now - at <= COMES_BACK}
        self._healthy_at = lately | dict.fromkeys(healthy, now)
        coming = {worker.queue for worker in workers if worker.status in _COMING and newest < degraded_at(worker)}
        return healthy | (coming & lately.keys())
