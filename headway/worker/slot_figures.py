"""Stats of a slot for its heartbeats: utilisation, memory, speed, and the state of its GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from headway.core import health
from headway.core.slot_factors import DECAY, SlotPace
from headway.core.values import as_json
from headway.model import BatchFailure, GpuFigures, ItemResult, Lease, Octets, Slot, Value, WorkerInfo, WorkerStatus
from headway.ports import Backend, Gpu
from headway.runtime.counters import BULK, ITEM, OK, WorkerCounts
from headway.runtime.logger import get_logger
from headway.worker.starting import StartState

log = get_logger(__name__)

MOST_EXAMPLE = 500  # Longest example, in characters or octets, that heartbeats include.
FAILED_INPUTS = 200.0  # Number of inputs over which the failure rate is averaged, with exponentially decreasing weight.
BUSY_TIME = (
    2.87  # Time constant of the utilisation in seconds. The last half second has a weight of 0.16, the last second 0.3.
)
_OUTPUT = attrgetter("output")


def _shown(example: Value | None) -> str:
    """Return a short example as JSON, or "" if it is too long."""
    if example is None or len(example.content if isinstance(example, Octets) else example) > MOST_EXAMPLE:
        return ""
    return as_json(example).decode()


class SlotFigures:
    """Statistics of a slot. The argument `memory` is a function that returns the used share of the memory available to the slot.

    Attributes:
        batches: number of batches that returned outputs.
        utilisation: recent share of time spent running batches, from 0 to 1.
        memory: used share of memory at the last reading, from 0 to 1.
        failed: share of recent inputs that failed, from 0 to 1.
    """

    def __init__(self, slot: Slot, memory: Callable[[], float], gpu: Gpu | None = None) -> None:
        self.pace = SlotPace(slot.max_batch)
        self.batches = 0
        self.utilisation = 0.0
        self.memory = 0.0
        self.gpu_figures: GpuFigures | None = None
        self.failed = 0.0
        self._scarce = self._gpu_scarce = False
        self._xids: dict[int, int] = {}
        self._erred = False
        self._entries = self._sizes = 0.0
        self._slot, self.runs = slot, slot.runs
        self._memory, self._gpu = memory, gpu
        self._busy = 0.0
        self._updated_at: float | None = None
        self._busy_before = 0.0

    def ran(self, seconds: float) -> None:
        self._busy += seconds

    def succeeded(self, lease: Lease, seconds: float) -> None:
        """Record a batch that returned outputs and occupied the slot for `seconds`, not counting broker outages."""
        self.pace.observe(lease.size, seconds)
        self.batches += 1
        self._entries = self._entries * DECAY + len(lease.entries)
        self._sizes = self._sizes * DECAY + lease.size

    def answered(self, count: int, failed: int) -> None:
        if count:
            self.failed += (failed / count - self.failed) * min(count / FAILED_INPUTS, 1.0)

    @property
    def items_per_second(self) -> float:
        """Throughput of full batches, in entries of the recent mean size per second. 0 until known."""
        return self.pace.items_per_second * (self._entries / self._sizes if self._sizes else 1.0)

    def update_utilisation(self, now: float, running: float) -> None:
        """Update the utilisation. The current batch has been running for `running` seconds."""
        busy = self._busy + running
        if self._updated_at is not None:
            elapsed = max(now - self._updated_at, 1e-9)
            share = (busy - self._busy_before) / elapsed
            weight = 1.0 - math.exp(-elapsed / BUSY_TIME)
            self.utilisation += weight * (min(max(share, 0.0), 1.0) - self.utilisation)
        self._updated_at, self._busy_before = now, busy

    @property
    def scarce(self) -> str:
        """Message saying which memory was scarce at the last reading, or "" if there was enough."""
        if self._gpu_scarce and self.gpu_figures is not None:
            return f"{self.gpu_figures.memory_share:.0%} of the GPU's memory is in use"
        return f"{self.memory:.0%} of the memory is in use" if self._scarce else ""

    def read(self) -> None:
        """Read memory usage and GPU stats. Log GPU errors, and log when memory becomes scarce or ample again."""
        self.memory = self._memory()
        self._scarce = self._is_scarce("memory", self.memory, self._scarce)
        if self._gpu is not None:
            self._record_gpu(self._gpu, self._gpu.figures())

    async def look_at_gpu(self) -> None:
        if self._gpu is not None:
            self._record_gpu(self._gpu, await self._gpu.look())

    def loaded(self) -> None:
        self._erred = False
        if self._gpu is not None:
            self._gpu.loaded()

    def gpu_erred(self) -> bool:
        """Return True if the GPU has reported errors since the last call or since the model was loaded, whichever is later."""
        erred, self._erred = self._erred, False
        return erred

    def _record_gpu(self, gpu: Gpu, figures: GpuFigures | None) -> None:
        self.gpu_figures = figures
        if figures is None:
            return
        self._gpu_scarce = self._is_scarce("GPU memory", figures.memory_share, self._gpu_scarce, gpu.settled)
        if news := [xid for xid, count in figures.xids.items() if count > self._xids.get(xid, 0)]:
            log.warning(
                "the GPU reports errors",
                worker=self._slot.worker,
                gpu=figures.uuid,
                xids=", ".join(map(str, sorted(news))),
            )
            self._xids, self._erred = figures.xids, True

    def _is_scarce(self, what: str, used: float, before: bool, settled: float = 0.0) -> bool:
        scarce = health.scarce(used, before, settled)
        if scarce is not before:
            say = log.warning if scarce else log.info
            say(f"{what} is {'scarce' if scarce else 'ample again'}", worker=self._slot.worker, used=round(used, 3))
        return scarce

    def worker_info(
        self,
        status: WorkerStatus,
        reason: str,
        backend: Backend | None,
        starting: StartState,
        now: float,
        *,
        running: bool,
        restarts: int,
        every: float,
    ) -> WorkerInfo:
        """Return the slot's heartbeat. `reason` says why it isn't healthy. The next heartbeat follows after `every` seconds."""
        worker = WorkerInfo(
            worker_id=self._slot.worker,
            model=self._slot.model,
            status=status,
            utilisation=self.utilisation,
            in_flight=int(running),
            restarts=restarts,
            memory=self.memory,
            reason=reason,
            items_per_second=self.items_per_second,
            estimated=self.pace.estimated,
            runs=self.runs,
            version=self._slot.version,
            loading=starting.seconds(now),
            load_seconds=starting.took,
            start_failed=status is WorkerStatus.STARTING and bool(starting.trouble),
            retry_in=starting.retry_in(now),
            failed=self.failed,
            every=every,
            gpu_figures=self.gpu_figures,
            scarce=bool(reason) and reason == self.scarce,
        )
        if backend is None:
            return worker
        signature = backend.signature
        return replace(
            worker,
            pid=backend.pid,
            warm_up=tuple(backend.warm_up),
            takes=signature.takes.value,
            gives=signature.gives.value,
            example=_shown(signature.example),
            weight=signature.weight,
            inputs=signature.inputs,
            outputs=signature.outputs,
            together=signature.together,
            sees=signature.sees,
            per_call=signature.per_call,
            cost=signature.cost,
        )


class RunCounts:
    """Counts a slot's batches and the results of their inputs. Bulk entries, whose tier is at least `tiers`, are counted
    separately: a file may contain anything, so its failures say nothing about the worker's health."""

    def __init__(self, slot: Slot, counters: WorkerCounts, figures: SlotFigures, tiers: float = math.inf) -> None:
        self._slot, self._counters, self._figures, self._tiers = slot, counters, figures, tiers

    def came_back(self, lease: Lease, items: Sequence[ItemResult], seconds: float) -> None:
        """Count a batch that returned after `seconds`. Inputs pinned to another version aren't counted, because they didn't run."""
        if lease.entries[-1].tier >= self._tiers:
            items = self._came_back_with_bulk(lease, items)
        else:
            self._counters.batch_fill[self._slot.model].observe(lease.fill)
        elsewhere = sum(item.elsewhere for item in items) if lease.slot.helps else 0
        failed = [*map(_OUTPUT, items)].count(None) - elsewhere
        if failed and (again := sum(item.left_out > 0 for item in items)):
            elsewhere, failed = elsewhere + again, failed - again
        self._ran(lease, seconds)
        self._figures.answered(len(items) - elsewhere, failed)
        self._fared(len(items) - elsewhere, failed, ITEM)

    def _came_back_with_bulk(self, lease: Lease, items: Sequence[ItemResult]) -> Sequence[ItemResult]:
        """Count a batch's bulk entries. Record how full the batch is without them, and return the results of the other entries."""
        count = self._bulk(lease)
        others, bulk_items = items[:-count], items[-count:]
        self._fared(count, [*map(_OUTPUT, bulk_items)].count(None), BULK)
        if others:
            self._counters.batch_fill[self._slot.model].observe(lease.fill * len(others) / len(items))
        return others

    def failed(self, lease: Lease, failure: BatchFailure, seconds: float) -> None:
        """Count a failed batch. If only one of its calls failed, count only that call's inputs, because the others run again."""
        cause, ran = failure.cause.value, len(failure.places) or len(lease.entries)
        count, bulk = len(lease.entries), self._bulk(lease)
        why = (
            BULK if bulk else cause
        )  # The other entries are retried without the bulk entries before any of them is suspected.
        if bulk < count:
            self._counters.batch_fill[self._slot.model].observe(lease.fill * (count - bulk) / count)
        if not bulk:
            self._figures.answered(ran, ran)
        self._ran(lease, seconds)
        self._fared(ran, ran, why)
        self._counters.wasted_seconds[why] += seconds

    def killed(self, lease: Lease) -> None:
        if self._bulk(lease):
            self._counters.bulk_kills[self._slot.worker] += 1

    def _bulk(self, lease: Lease) -> int:
        """Return the number of bulk entries in a batch. They come last."""
        return sum(entry.tier >= self._tiers for entry in lease.entries)

    def _ran(self, lease: Lease, seconds: float) -> None:
        counters, model = self._counters, self._slot.model
        self._figures.ran(seconds)
        counters.batches[model, lease.reason] += 1
        counters.batch_size[model].observe(lease.rows)
        counters.gpu_seconds[model, self._slot.worker].observe(seconds)

    def _fared(self, count: int, failed: int, why: str) -> None:
        """Count the results of inputs; `why` is the outcome of those that failed."""
        inputs, model, version = self._counters.inputs, self._slot.model, self._slot.runs.version
        inputs[model, version, OK] += count - failed
        if failed:
            inputs[model, version, why] += failed
