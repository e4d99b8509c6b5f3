import msgspec
import pytest

from headway.core.capacity import capacity, pace
from headway.core.departure import Load
from headway.core.health import HEARTBEAT_EVERY, REST_EVERY, grace, heard, judged, scarce
from headway.model import ProcessInfo, Role, WorkerInfo, WorkerStatus

HEALTHY, DEGRADED, OFFLINE, STARTING = map(WorkerStatus, ("healthy", "degraded", "offline", "starting"))
GPU = Load(rate=0.0, alpha=0.05, beta=0.0005, slots=3, max_batch=100)
"""100 ms for a full batch: 1,000 items/s."""


def workers(*statuses: WorkerStatus, model: str = "m") -> list[WorkerInfo]:
    return [WorkerInfo(worker_id=f"{model}-{n}", model=model, status=status) for n, status in enumerate(statuses)]


def test_only_healthy_slots_of_the_model_carry() -> None:
    fleet = workers(*WorkerStatus, HEALTHY, DEGRADED, DEGRADED)
    fleet += workers(HEALTHY, DEGRADED, model="other")
    found = capacity("m", fleet, GPU, 0.7)
    assert (found.model, found.healthy, found.degraded) == ("m", 2, 3)
    assert found.items_per_second == pytest.approx(2000)
    assert found.usable_per_second == pytest.approx(1400)


def test_each_slot_counts_for_what_it_does_itself() -> None:
    fleet = workers(*[HEALTHY] * 3, DEGRADED)
    slow = [msgspec.structs.replace(fleet[0], items_per_second=400.0), *fleet[1:]]
    assert capacity("m", slow, GPU, 1.0).items_per_second == pytest.approx(400 + 2 * 1000)
    own = [msgspec.structs.replace(worker, items_per_second=400.0) for worker in fleet]
    assert capacity("m", own, None, 1.0).items_per_second == pytest.approx(3 * 400)


def test_it_is_an_estimate_as_long_as_that_of_any_healthy_slot_is() -> None:
    sure = [msgspec.structs.replace(worker, items_per_second=400.0) for worker in workers(HEALTHY, HEALTHY)]
    assert not capacity("m", sure, GPU, 1.0).estimated
    assert capacity("m", [sure[0], msgspec.structs.replace(sure[1], estimated=True)], GPU, 1.0).estimated
    assert capacity("m", [sure[0], *workers(HEALTHY)], GPU, 1.0).estimated
    gone = workers(OFFLINE)
    assert not capacity("m", [*sure, msgspec.structs.replace(gone[0], estimated=True)], GPU, 1.0).estimated


def test_while_the_memory_of_the_broker_is_scarce_none_of_it_is_of_use() -> None:
    found = capacity("m", workers(HEALTHY), GPU, 0.7, scarce=True)
    assert found.items_per_second == pytest.approx(1000)
    assert (found.usable_per_second, found.scarce) == (0.0, True)


def test_a_line_through_small_batches_is_not_believed_far_beyond_them() -> None:
    """One of two small batches was slow by chance. By the line, a full batch would take ten seconds."""
    scarce = Load(rate=1.0, alpha=0.0, beta=0.1, slots=1, max_batch=100, largest=2.0)
    assert pace(scarce) == pytest.approx(100 / 0.4)
    assert pace(msgspec.structs.replace(scarce, largest=1.0)) == pytest.approx(100 / 0.2)
    assert pace(msgspec.structs.replace(scarce, largest=60.0)) == pytest.approx(100 / 10.0)


def test_nothing_is_promised_before_a_batch_was_measured() -> None:
    fresh = Load(rate=10.0, alpha=0.0, beta=0.0, slots=1, max_batch=32)
    assert pace(fresh) == 0.0
    for load in (fresh, None):
        found = capacity("m", workers(HEALTHY), load, 0.7)
        assert (found.healthy, found.items_per_second, found.usable_per_second) == (1, 0.0, 0.0)


def test_the_least_seconds_are_a_batch_of_one_less_two_deviations_and_at_least_half_of_it() -> None:
    known = msgspec.structs.replace(GPU, largest=10.0)
    assert capacity("m", [], GPU, 1.0).least_seconds == 0.0, "no batch was measured"
    assert capacity("m", [], None, 1.0).least_seconds == 0.0
    assert capacity("m", [], known, 1.0).least_seconds == pytest.approx(0.0505)
    steady = msgspec.structs.replace(known, deviation=0.005)
    assert capacity("m", [], steady, 1.0).least_seconds == pytest.approx(0.0405)
    for rough in (msgspec.structs.replace(known, deviation=1.0), msgspec.structs.replace(known, paces=(1, 1))):
        assert capacity("m", [], rough, 1.0).least_seconds == pytest.approx(0.02525)
    quick = msgspec.structs.replace(workers(HEALTHY)[0], items_per_second=10_000.0)
    found = capacity("m", [quick, *workers(HEALTHY)], known, 1.0).least_seconds
    assert found == pytest.approx(0.01), "a full batch of the fastest"


@pytest.mark.parametrize(
    ("said", "age", "believed"),
    [
        (HEALTHY, 0.0, HEALTHY),
        (HEALTHY, 1.49, HEALTHY),
        (HEALTHY, 1.5, DEGRADED),
        (HEALTHY, 10.0, OFFLINE),
        (STARTING, 9.0, STARTING),
        (STARTING, 10.0, OFFLINE),
        (DEGRADED, 1.0, DEGRADED),
        (OFFLINE, 0.0, OFFLINE),
    ],
)
def test_a_silent_worker_is_not_believed_healthy(said: WorkerStatus, age: float, believed: WorkerStatus) -> None:
    assert judged(said, age) is believed


def test_a_worker_that_rests_may_be_silent_for_as_much_longer_as_it_beats_more_seldom() -> None:
    assert [judged(HEALTHY, age, REST_EVERY) for age in (1.99, 2.0, 10.0)] == [HEALTHY, DEGRADED, OFFLINE]
    assert judged(HEALTHY, 1.5, every=0.1) is DEGRADED, "who beats more often is judged as usual"
    assert grace(REST_EVERY) == REST_EVERY - HEARTBEAT_EVERY


@pytest.mark.parametrize(
    ("own", "uses", "told"),
    [
        (0.0, [0.5, 0.89, 0.91, 0.89, 0.86, 0.91, 0.85, 0.84, 0.86, 0.9, 0.95], [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]),
        (0.95, [0.95, 0.969, 0.971, 0.965, 0.961, 0.959, 0.969], [0, 0, 1, 1, 1, 0, 0]),
        (0.5, [0.91], [1]),
        (0.99, [1.0], [0]),
    ],
)
def test_memory_that_swings_around_a_mark_or_was_in_use_from_the_start_does_not_swing_the_capacity(
    own: float, uses: list[float], told: list[int]
) -> None:
    before = False
    for used, expected in zip(uses, told, strict=True):
        before = scarce(used, before, own)
        assert before == bool(expected), used


def test_a_process_that_is_silent_for_three_heartbeats_no_longer_counts() -> None:
    members = [
        ProcessInfo(id=id, role=Role.WORKER, host="h", pid=1, admin="", version="1", last_seen=seen)
        for id, seen in (("a", 100.0), ("b", 97.1), ("gone", 97.0))
    ]
    assert [member.id for member in heard(members)] == ["a", "b"]
    assert heard([]) == []
