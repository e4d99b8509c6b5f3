"""Counts of the batches that a slot has run, and of how their inputs fared."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from headway.model import ItemResult, Lease, Slot
from headway.runtime.counters import ITEM, OK, Counters
from headway.worker.slot_figures import SlotFigures

_output = attrgetter("output")


class RunCounts:
    """Counts of one slot.

    Arguments:
        slot: the slot.
        counters: counters of the process.
        figures: figures that its heartbeats tell.
    """

    def __init__(self, slot: Slot, counters: Counters, figures: SlotFigures) -> None:
        self._slot, self._counters, self._figures = slot, counters, figures

    def came_back(self, lease: Lease, items: Sequence[ItemResult], seconds: float) -> None:
        """Count a batch that came back after `seconds`; inputs that did not run, as they are for another version, are left out."""
        elsewhere = sum(item.elsewhere for item in items) if lease.slot.helps else 0
        failed = [*map(_output, items)].count(None) - elsewhere
        self._ran(lease, seconds)
        self._fared(len(items) - elsewhere, failed, ITEM)

    def failed(self, lease: Lease, cause: str, seconds: float) -> None:
        """Count a batch that failed as a whole."""
        self._ran(lease, seconds)
        self._fared(len(lease.entries), len(lease.entries), cause)
        self._counters.wasted_seconds[cause] += seconds

    def _ran(self, lease: Lease, seconds: float) -> None:
        counters, model = self._counters, self._slot.model
        self._figures.ran(seconds)
        counters.batches[model, lease.reason] += 1
        counters.batch_size[model].observe(lease.rows)
        counters.batch_fill[model].observe(lease.fill)
        counters.gpu_seconds[model, self._slot.worker].observe(seconds)

    def _fared(self, count: int, failed: int, why: str) -> None:
        """Count how the runs of so many inputs went. `why`: outcome of those that failed."""
        inputs, model, version = self._counters.inputs, self._slot.model, self._slot.runs.version
        self._figures.answered(count, failed)
        inputs[model, version, OK] += count - failed
        if failed:
            inputs[model, version, why] += failed
