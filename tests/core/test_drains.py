"""Which workers the name in a drain refers to, and which drains are left after an undrain."""

import pytest

from headway.admin.drains import NoDrain, UnknownName, bared, covered, ended, outlived, wanted
from headway.model import Drain, ProcessInfo, Role, WorkerInfo, WorkerStatus

MEMBERS = [
    ProcessInfo(id="w1", role=Role.WORKER, host="node-a", pid=1),
    ProcessInfo(id="w2", role=Role.WORKER, host="node-a", pid=2),
    ProcessInfo(id="w3", role=Role.WORKER, host="node-b", pid=3),
    ProcessInfo(id="g1", role=Role.GATEWAY, host="node-g", pid=4),
]


def worker(id: str, status: WorkerStatus = WorkerStatus.HEALTHY, version: str = "") -> WorkerInfo:
    return WorkerInfo(worker_id=id, model="m", status=status, version=version)


WORKERS = [worker("w1/gpu-0"), worker("w1/gpu-1"), worker("w2/gpu-0"), worker("w3/gpu-0")]
ALONE = [ProcessInfo(id="here-1", role=Role.SERVE, host="here", pid=1)]
ONE = Drain(name="w1/gpu-0", process="w1", host="node-a")
WHOLE = Drain(name="w2", process="w2", host="node-a")


def test_a_name_is_that_of_a_worker_a_process_or_a_host_and_without_a_fleet_of_all_workers() -> None:
    assert wanted("w1/gpu-0", WORKERS, MEMBERS) == [ONE]
    assert wanted("w2", WORKERS, MEMBERS) == [WHOLE]
    assert [one.name for one in wanted("node-a", WORKERS, MEMBERS)] == ["w1", "w2"]
    assert covered(wanted("node-a", WORKERS, MEMBERS), WORKERS, MEMBERS) == {"w1/gpu-0", "w1/gpu-1", "w2/gpu-0"}
    assert covered([ONE], WORKERS, MEMBERS) == {"w1/gpu-0"}
    workers = [worker("gpu-0"), worker("gpu-1")]
    assert [one.process for one in wanted("gpu-1", workers, ALONE)] == ["here-1"]
    assert covered(wanted("here", workers, ALONE), workers, ALONE) == {"gpu-0", "gpu-1"}


@pytest.mark.parametrize("workers", [[worker("cpu-0", WorkerStatus.OFFLINE)], []])
def test_a_process_that_is_at_zero_has_the_workers_that_it_can_bring_back(workers: list[WorkerInfo]) -> None:
    alone = [ProcessInfo(id="here-1", role=Role.SERVE, host="here", pid=1, scalable={"m": (0, 2)})]
    whole = [Drain(name="here-1", process="here-1", host="here")]
    assert wanted("here", workers, alone) == wanted("here-1", workers, alone) == whole
    if workers:
        assert wanted("cpu-0", workers, alone) == [Drain(name="cpu-0", process="here-1", host="here")]
    assert ended("here", whole, workers, alone) == whole


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "w1/gpu-9",
            "no worker, process or host 'w1/gpu-9' is in the fleet; similar names are w1/gpu-1, w1/gpu-0, w3/gpu-0",
        ),
        ("nodea", "similar names are node-a, node-b"),
        ("zzz", "similar names are node-a, node-b, w1"),
        ("g1", "'g1' is a gateway and has no workers to drain"),
        ("w3/gpu-1", "similar names are"),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(name: str, said: str) -> None:
    gone = worker("w3/gpu-1", WorkerStatus.OFFLINE)
    with pytest.raises(UnknownName, match=said):
        wanted(name, [*WORKERS, gone], MEMBERS)


def test_a_drain_ends_by_any_of_its_names() -> None:
    for name, found in {"w1/gpu-0": [ONE], "w1": [ONE], "w2": [WHOLE], "node-a": [ONE, WHOLE]}.items():
        assert ended(name, [ONE, WHOLE], WORKERS, MEMBERS) == found
    with pytest.raises(UnknownName, match="nothing named 'node-b' is drained; similar names are node-a"):
        ended("node-b", [ONE, WHOLE], WORKERS, MEMBERS)
    with pytest.raises(UnknownName, match=r"nothing named 'w1' is drained$"):
        ended("w1", [], WORKERS, MEMBERS)


@pytest.mark.parametrize("own", [[], [Drain(name="w2/gpu-0", process="w2", host="node-a")]])
def test_a_worker_whose_whole_process_is_drained_is_not_undrained_alone(own: list[Drain]) -> None:
    for workers in (WORKERS, []):  # A drained worker may be gone.
        with pytest.raises(NoDrain, match="worker 'w2/gpu-0' is drained with its entire process; undrain 'w2'"):
            ended("w2/gpu-0", [*own, WHOLE], workers, MEMBERS)
    assert ended("w2", [*own, WHOLE], WORKERS, MEMBERS) == [*own, WHOLE]


def test_without_a_fleet_around_it_a_worker_is_of_the_process_there_is() -> None:
    whole = Drain(name="here-1", process="here-1", host="here")
    with pytest.raises(NoDrain, match="worker 'gpu-0' is drained with its entire process; undrain 'here-1'"):
        ended("gpu-0", [whole], [worker("gpu-0")], ALONE)
    assert ended("here", [whole], [worker("gpu-0")], ALONE) == [whole]


def test_a_model_or_version_is_bare_without_a_healthy_worker_where_it_had_one() -> None:
    two = [worker("a", version="1"), worker("b", version="2"), worker("c"), worker("d", WorkerStatus.STARTING)]
    assert bared({"a"}, two) == ["version 1 of model m"]
    assert bared({"c", "d"}, two) == ["model m"]
    assert bared({"a"}, [worker("a"), worker("b")]) == []
    assert bared({"a"}, [worker("a", WorkerStatus.DEGRADED)]) == []


def test_a_drain_outlives_a_process_that_is_gone_without_a_word() -> None:
    assert outlived([ONE, WHOLE], MEMBERS[:1]) == ["w2"]
