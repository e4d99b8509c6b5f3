"""Help of a slot for versions of its model that nobody serves any more.

A version has a queue of its own, and workers that claim from it. When the last of them has left, what still waits there
would wait for ever. So slots of other versions take turns: a batch of their own, then one of those. An entry that is
pinned to the other version does not run: it fails, as nobody is there who could answer it.
"""

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
from headway.model import Entry, ItemResult, Lease, NoWork, QueueName, Slot, WorkerInfo, WorkerStatus
from headway.ports import Backend, Registry, WorkSource
from headway.runtime.periodic import Periodic, PeriodicResource
from headway.runtime.race import end
from headway.worker.gpu_turns import NOT_ITS_TURN

if TYPE_CHECKING:
    from headway.worker.batch_traces import BatchTraces

FIND_UNSERVED_EVERY = 1.0
"""Seconds between two looks for queues that nobody serves, of a process alone."""
LOOKS = 50
"""Most looks of all processes in a second: the more workers there are, the more seldom each process looks."""
COMES_BACK = 5.0
"""Seconds for which a worker that says that it starts anew, or rests, serves its queue all the same; what waits there may not live longer."""


class Claims:
    """Claims of one slot: for its own queue, and for those where it helps.

    Arguments:
        slot: the slot.
        broker: broker that batches come from.
        policy: departure policy.
        clock: monotonic seconds.
        traces: recorder of the spans of batches; None where none are recorded.

    Attributes:
        slot: the slot, as its broker knows it.
    """

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
        self._asked_at = 0.0
        """Instant at which the last claim began."""
        self._strays: Sequence[Slot] = ()
        self._helped = self._barred = False
        self._waiting: asyncio.Future[None] | None = None

    def help(self, versions: Iterable[str]) -> None:
        """Help where entries wait for these versions, until none is left."""
        self._strays = [replace(self.slot, version=version, helps=True) for version in versions]
        if self._strays and self._waiting is not None:
            self._waiting.cancel()

    async def claim(self) -> Lease | NoWork:
        """Claim the batch that leaves now for the slot, or learn when to claim again."""
        self._asked_at = self._clock()
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
        """Run the batch that was claimed last; see `run_batch`."""
        if self._traces is None:
            return await run_batch(backend, lease, timeout)
        return await self._traces.run(partial(run_batch, backend, lease, timeout), lease, self._asked_at)

    async def wait(self, until: float | None) -> None:
        """Return when a claim is worth trying again; see `WorkSource.wait_for_work`."""
        if not self.slot.version:  # It has no versions to help.
            await self._broker.wait_for_work(self.slot, until)
            return
        self._waiting = waiting = asyncio.ensure_future(self._broker.wait_for_work(self.slot, until))
        try:
            if self._strays and not self._barred:  # It claims there next; its own queue is to wait for it no longer.
                await asyncio.sleep(0)
            else:
                await asyncio.wait({waiting})
            if waiting.done() and not waiting.cancelled():
                waiting.result()
        finally:
            self._waiting = None
            await end(waiting)


async def run_batch(backend: Backend, lease: Lease, timeout: float) -> Sequence[ItemResult]:
    """Run a batch on a backend; one item per entry. See `Backend.run`.

    Of a batch of another version the entries that are pinned to it do not run.
    """
    if not lease.slot.helps or not any(map(_is_elsewhere, lease.entries)):
        return await backend.run(lease.entries, timeout)
    own = [place for place, entry in enumerate(lease.entries) if not _is_elsewhere(entry)]
    try:
        items = iter(await backend.run([lease.entries[place] for place in own], timeout) if own else ())
    except BatchRaised as exc:
        exc.places = tuple(own[place] for place in exc.places)  # Those of what ran, and wanted are those of the lease.
        raise
    named = f"version {version!r} of the model" if (version := lease.slot.version) else "the version that was asked for"
    reason = f"no worker runs {named} any more"
    elsewhere = ItemResult(None, reason, elsewhere=True)
    return [elsewhere if _is_elsewhere(entry) else next(items) for entry in lease.entries]


def _is_elsewhere(entry: Entry) -> bool:
    return entry.pinned


_COMING = (WorkerStatus.STARTING, WorkerStatus.DEGRADED)
"""Statuses of a worker that is there and will claim again, unless it has been silent for long."""


class StrayWatcher(PeriodicResource):
    """Watcher for queues that nobody serves, as a resource of its process; see `headway.app.lifecycle.Resource`.

    Arguments:
        claims: returns the claims of the slots of the process.
        registry: broker that knows workers and depths.
        clock: monotonic seconds.
    """

    def __init__(self, claims: Callable[[], Iterable[Claims]], registry: Registry, clock: Callable[[], float]) -> None:
        self._claims, self._registry, self._clock = claims, registry, clock
        super().__init__(Periodic("strays", self._look_in_turn, clock, every=FIND_UNSERVED_EVERY))
        self._next_at = 0.0
        self._healthy_at: dict[QueueName, float] = {}
        """Instant at which each queue last had a healthy worker."""

    async def _look_in_turn(self) -> None:
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + await self.look() / LOOKS

    async def look(self) -> int:
        """Look once. Returns the number of workers that there are."""
        workers, depths = await asyncio.gather(self._registry.workers(), self._registry.depths())
        served = self._served(workers)
        strays: dict[str, set[str]] = {}
        for one in depths:
            if one.depth and one.queue not in served:
                strays.setdefault(one.model, set()).add(one.version)
        for claims in self._claims():
            slot = claims.slot
            if slot.version:
                claims.help(sorted(strays.get(slot.model, set()) - {slot.version}))
        return len(workers)

    def _served(self, workers: Sequence[WorkerInfo]) -> set[QueueName]:
        """Queues with a healthy worker, or lately with one and now with one that says that it will be healthy again."""
        now, newest = self._clock(), max((worker.last_heartbeat for worker in workers), default=0.0)
        healthy = {worker.queue for worker in workers if worker.status is WorkerStatus.HEALTHY}
        lately = {queue: at for queue, at in self._healthy_at.items() if now - at <= COMES_BACK}
        self._healthy_at = lately | dict.fromkeys(healthy, now)
        coming = {worker.queue for worker in workers if worker.status in _COMING and newest < degraded_at(worker)}
        return healthy | (coming & lately.keys())
