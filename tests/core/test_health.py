"""Freshness of a worker."""

from __future__ import annotations

import pytest

from headway.core.health import HEARTBEAT_EVERY, REST_EVERY, believed, grace, heard, judged, scarce
from headway.model import ProcessInfo, Role, WorkerInfo, WorkerStatus

HEALTHY, DEGRADED, OFFLINE, STARTING = (
    WorkerStatus.HEALTHY,
    WorkerStatus.DEGRADED,
    WorkerStatus.OFFLINE,
    WorkerStatus.STARTING,
)


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


def test_the_reason_is_the_silence() -> None:
    worker = WorkerInfo(worker_id="gpu-0", model="m", status=HEALTHY, last_heartbeat=10.0)
    assert believed(worker, 11.0) is worker
    silent = believed(worker, 12.0)
    assert (silent.status, silent.reason) == (DEGRADED, "no heartbeat")


def test_memory_that_swings_around_a_mark_does_not_swing_the_capacity() -> None:
    told, before = [], False
    for used in (0.5, 0.89, 0.91, 0.89, 0.86, 0.91, 0.85, 0.84, 0.86, 0.9, 0.95):
        before = scarce(used, before)
        told.append(before)
    assert told == [False, False, True, True, True, True, True, False, False, False, True]


def test_memory_that_was_in_use_from_the_start_is_not_scarce_but_what_comes_to_it_is() -> None:
    told, before = [], False
    for used in (0.95, 0.969, 0.971, 0.965, 0.961, 0.959, 0.969):
        before = scarce(used, before, 0.95)
        told.append(before)
    assert told == [False, False, True, True, True, False, False]
    assert scarce(0.91, False, 0.5), "a small model's own"
    assert not scarce(1.0, False, 0.99)


def test_a_process_that_is_silent_for_three_heartbeats_no_longer_counts() -> None:
    members = [
        ProcessInfo(id=id, role=Role.WORKER, host="h", pid=1, admin="", version="1", last_seen=seen)
        for id, seen in (("a", 100.0), ("b", 97.1), ("gone", 97.0))
    ]
    assert [member.id for member in heard(members)] == ["a", "b"]
    assert heard([]) == []
