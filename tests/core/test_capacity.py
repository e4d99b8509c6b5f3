from __future__ import annotations

import msgspec
import pytest

from headway.core.capacity import capacity, pace
from headway.core.departure import Load
from headway.model import WorkerInfo, WorkerStatus

GPU = Load(rate=0.0, alpha=0.05, beta=0.0005, slots=3, max_batch=100)
"""100 ms for a full batch: 1,000 items/s."""


def workers(*statuses: WorkerStatus, model: str = "m") -> list[WorkerInfo]:
    return [WorkerInfo(worker_id=f"{model}-{n}", model=model, status=status) for n, status in enumerate(statuses)]


def test_only_healthy_slots_of_the_model_carry() -> None:
    fleet = workers(*WorkerStatus, WorkerStatus.HEALTHY, WorkerStatus.DEGRADED, WorkerStatus.DEGRADED)
    fleet += workers(WorkerStatus.HEALTHY, WorkerStatus.DEGRADED, model="other")
    found = capacity("m", fleet, GPU, 0.7)
    assert (found.model, found.healthy, found.degraded) == ("m", 2, 3)
    assert found.items_per_second == pytest.approx(2000)
    assert found.usable_per_second == pytest.approx(1400)


def test_each_slot_counts_for_what_it_does_itself() -> None:
    fleet = workers(*[WorkerStatus.HEALTHY] * 3, WorkerStatus.DEGRADED)
    slow = [msgspec.structs.replace(fleet[0], items_per_second=400.0), *fleet[1:]]
    assert capacity("m", slow, GPU, 1.0).items_per_second == pytest.approx(400 + 2 * 1000)
    own = [msgspec.structs.replace(worker, items_per_second=400.0) for worker in fleet]
    assert capacity("m", own, None, 1.0).items_per_second == pytest.approx(3 * 400)


def test_it_is_an_estimate_as_long_as_that_of_any_healthy_slot_is() -> None:
    sure = [
        msgspec.structs.replace(worker, items_per_second=400.0)
        for worker in workers(WorkerStatus.HEALTHY, WorkerStatus.HEALTHY)
    ]
    assert not capacity("m", sure, GPU, 1.0).estimated
    assert capacity("m", [sure[0], msgspec.structs.replace(sure[1], estimated=True)], GPU, 1.0).estimated
    assert capacity("m", [sure[0], *workers(WorkerStatus.HEALTHY)], GPU, 1.0).estimated
    gone = workers(WorkerStatus.OFFLINE)
    assert not capacity("m", [*sure, msgspec.structs.replace(gone[0], estimated=True)], GPU, 1.0).estimated


def test_half_the_workers_gone_is_half_the_capacity() -> None:
    whole = capacity("m", workers(*[WorkerStatus.HEALTHY] * 4), GPU, 0.8)
    half = capacity("m", workers(*[WorkerStatus.HEALTHY] * 2, *[WorkerStatus.OFFLINE] * 2), GPU, 0.8)
    assert half.usable_per_second == pytest.approx(whole.usable_per_second / 2)


def test_while_the_memory_of_the_broker_is_scarce_none_of_it_is_of_use() -> None:
    found = capacity("m", workers(WorkerStatus.HEALTHY), GPU, 0.7, scarce=True)
    assert found.items_per_second == pytest.approx(1000)
    assert (found.usable_per_second, found.scarce) == (0.0, True)


def test_a_line_through_small_batches_is_not_believed_far_beyond_them() -> None:
    """One of two small batches was slow by accident: by the line, a full batch would take ten seconds."""
    scarce = Load(rate=1.0, alpha=0.0, beta=0.1, slots=1, max_batch=100, largest=2.0)
    assert pace(scarce) == pytest.approx(100 / 0.4)
    assert pace(msgspec.structs.replace(scarce, largest=1.0)) == pytest.approx(100 / 0.2)
    assert pace(msgspec.structs.replace(scarce, largest=60.0)) == pytest.approx(100 / 10.0)


def test_nothing_is_promised_before_a_batch_was_measured() -> None:
    fresh = Load(rate=10.0, alpha=0.0, beta=0.0, slots=1, max_batch=32)
    assert pace(fresh) == 0.0
    for load in (fresh, None):
        found = capacity("m", workers(WorkerStatus.HEALTHY), load, 0.7)
        assert (found.healthy, found.items_per_second, found.usable_per_second) == (1, 0.0, 0.0)


def test_the_least_seconds_are_a_batch_of_one_less_two_deviations_and_at_least_half_of_it() -> None:
    known = msgspec.structs.replace(GPU, largest=10.0)
    assert capacity("m", [], GPU, 1.0).least_seconds == 0.0, "no batch was measured"
    assert capacity("m", [], None, 1.0).least_seconds == 0.0
    assert capacity("m", [], known, 1.0).least_seconds == pytest.approx(0.0505)
    assert capacity("m", [], msgspec.structs.replace(known, deviation=0.005), 1.0).least_seconds == pytest.approx(
        0.0405
    )
    for rough in (msgspec.structs.replace(known, deviation=1.0), msgspec.structs.replace(known, paces=(1, 1))):
        assert capacity("m", [], rough, 1.0).least_seconds == pytest.approx(0.02525)
    quick = msgspec.structs.replace(workers(WorkerStatus.HEALTHY)[0], items_per_second=10_000.0)
    found = capacity("m", [quick, *workers(WorkerStatus.HEALTHY)], known, 1.0).least_seconds
    assert found == pytest.approx(0.01), "a full batch of the fastest"
