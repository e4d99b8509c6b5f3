"""Counts of a worker's batches with bulk entries: a file of bad lines makes no worker look bad."""

from __future__ import annotations

import pytest

from headway.model import BatchFailure, Cause, Entry, ItemResult, Lease, Slot
from headway.runtime.counters import BULK, ITEM, OK, WorkerCounts
from headway.worker.slot_figures import RunCounts, SlotFigures

SLOT = Slot("gpu-0", "m", 8)
CRASHED = BatchFailure(Cause.CRASHED, "gone", "gpu-0")


class Counted:
    """Counts of one slot, after batches of so many requests and lines."""

    def __init__(self) -> None:
        self.counters, self.figures = WorkerCounts(), SlotFigures(SLOT, lambda: 0.0)
        self.counts = RunCounts(SLOT, self.counters, self.figures, tiers=2)

    def lease(self, requests: int, lines: int) -> Lease:
        tiers = [0] * requests + [2] * lines
        entries = [Entry(f"{at}", "m", "a", tier, "t", "g", 1.0, 1.0) for at, tier in enumerate(tiers)]
        return Lease(1, SLOT, entries, "full", 0.0, 1.0, 1.0)

    @property
    def inputs(self) -> dict[str, int]:
        return {outcome: count for (_, _, outcome), count in self.counters.inputs.items() if count}


def test_lines_that_fail_are_counted_apart() -> None:
    one, bad = Counted(), ItemResult(None, "no")
    one.counts.came_back(one.lease(2, 3), [ItemResult("a"), bad, bad, bad, ItemResult("a")], 0.1)
    assert one.inputs == {OK: 2, ITEM: 1, BULK: 2}
    assert one.figures.failed == pytest.approx(1 / 200)
    one.counts.came_back(one.lease(0, 3), [bad] * 3, 0.1)
    assert one.inputs == {OK: 2, ITEM: 1, BULK: 5}
    fill = one.counters.batch_fill["m"]
    assert sum(fill.counts) == 1 and fill.sum == pytest.approx(2 / 8)


def test_a_batch_that_fails_with_lines_in_it_speaks_against_no_worker() -> None:
    one = Counted()
    for requests, lines in ((2, 3), (0, 3)):
        one.counts.failed(one.lease(requests, lines), CRASHED, 0.5)
        one.counts.killed(one.lease(requests, lines))
    assert one.inputs == {BULK: 8} and one.figures.failed == 0.0
    assert dict(one.counters.wasted_seconds) == {BULK: 1.0}
    assert one.counters.bulk_kills["gpu-0"] == 2
    one.counts.failed(one.lease(2, 0), CRASHED, 0.5)
    one.counts.killed(one.lease(2, 0))
    assert one.inputs == {BULK: 8, Cause.CRASHED.value: 2} and one.figures.failed > 0.0
    assert one.counters.bulk_kills["gpu-0"] == 2


def test_outputs_that_were_left_out_are_no_failures() -> None:
    one = Counted()
    one.counts.came_back(one.lease(3, 0), [ItemResult("a"), ItemResult(None, left_out=9), ItemResult(None, "no")], 0.1)
    assert one.inputs == {OK: 1, ITEM: 1}


def test_of_a_batch_in_several_calls_only_the_inputs_of_the_one_that_raised_count() -> None:
    """The others run again beyond suspicion, and say nothing of the worker."""
    one = Counted()
    one.counts.failed(one.lease(8, 0), BatchFailure(Cause.RAISED, "no good", "gpu-0", places=(2, 5)), 0.5)
    assert one.inputs == {Cause.RAISED.value: 2}
    assert one.figures.failed == pytest.approx(2 / 200)
    assert sum(one.counters.batch_fill["m"].counts) == 1
