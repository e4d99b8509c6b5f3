"""Driver over a Kubernetes API server: what it asks, what it writes, and what each refusal tells an operator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog.testing
import uvloop

from headway.errors import ScalingRefused, ScalingUnavailable, SettingError
from headway.runtime.sockets import Sockets
from headway.scaling.kubernetes import KubernetesApi, KubernetesScaling, ServiceAccount, api_url, read_target
from headway.scaling.kubernetes.driver import CONFLICTS, DELETION_COST
from tests.authority import Authority
from tests.servers.kubernetes import EVERYTHING, Cluster, Refusal, Rules, account, serving

T = TypeVar("T")

SCALE = "/apis/apps/v1/namespaces/serving/deployments/workers/scale"
ROLE: Rules = [
    {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": ["workers"],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": ["autoscaling"], "resources": ["horizontalpodautoscalers"], "verbs": ["list"]},
    {"apiGroups": ["keda.sh"], "resources": ["scaledobjects"], "verbs": ["list"]},
]
"""Least rights that scaling needs."""
OF_PODS: Rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """API server with a Deployment of three replicas, and a service account with the least rights."""
    started.clear()
    started.users["first"] = "system:serviceaccount:serving:controller", ROLE
    started.workload("deployments", "workers", 3)
    return started


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    return account(tmp_path / "account", cluster)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def driver(
    cluster: Cluster, folder: Path, target: str = "deployment/workers", slots: int = 1, **options: Any
) -> KubernetesScaling:
    clock = options.pop("clock", Clock())
    api = KubernetesApi(cluster.url, ServiceAccount(folder), clock, **options)
    return KubernetesScaling(api, {"small": read_target(target, slots)})


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def refused(coroutine: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(ScalingRefused) as caught:
        run(coroutine)
    return str(caught.value)


def unavailable(coroutine: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(ScalingUnavailable) as caught:
        run(coroutine)
    return str(caught.value)


def autoscaler(name: str = "other", /, **reference: str) -> dict[str, Any]:
    return {"name": name, "spec": {"scaleTargetRef": {"name": "workers", **reference}}}


def asked(cluster: Cluster) -> Sequence[tuple[str, str]]:
    return [(one.method, one.path) for one in cluster.asked]


def test_replicas_are_read_and_changed_under_the_version_that_was_read(cluster: Cluster, folder: Path) -> None:
    scaling = driver(cluster, folder)
    assert run(scaling.current("small")) == 3
    run(scaling.scale("small", 5))
    assert cluster.replicas("deployments", "workers") == 5
    assert run(scaling.current("small")) == 5
    [patch] = [one for one in cluster.asked if one.method == "PATCH"]
    assert patch.path == SCALE
    assert patch.type == "application/merge-patch+json"
    assert patch.body["spec"] == {"replicas": 5}
    assert patch.body["metadata"].keys() == {"resourceVersion"}
    assert patch.token == "first" and patch.agent.startswith("headway/")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_call_does_not_wait_for_the_end_of_its_connection(
    cluster: Cluster, folder: Path, loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, end = list[int](), Sockets.end

    async def checked(sockets: Sockets) -> None:
        await end(sockets)
        left.append(len(sockets._open))

    monkeypatch.setattr(Sockets, "end", checked)
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(driver(cluster, folder).current("small")) == 3
    assert left and not any(left)


@pytest.mark.parametrize(("workers", "replicas"), [(8, 2), (9, 3), (1, 1), (0, 0)])
def test_a_replica_with_several_slots_counts_as_as_many_workers(
    cluster: Cluster, folder: Path, workers: int, replicas: int
) -> None:
    scaling = driver(cluster, folder, slots=4)
    assert run(scaling.current("small")) == 12
    run(scaling.scale("small", workers))
    assert cluster.replicas("deployments", "workers") == replicas
    assert run(scaling.current("small")) == 4 * replicas


def test_replicas_that_are_right_already_are_not_written(cluster: Cluster, folder: Path) -> None:
    run(driver(cluster, folder).scale("small", 3))
    assert {method for method, _ in asked(cluster)} == {"GET"}


def test_a_statefulset_of_another_namespace_is_scaled(cluster: Cluster, folder: Path) -> None:
    cluster.users["first"] = "controller", EVERYTHING
    cluster.workload("statefulsets", "w.1", 1, namespace="gpus")
    run(driver(cluster, folder, "gpus/statefulset/w.1").scale("small", 2))
    assert cluster.replicas("statefulsets", "w.1", "gpus") == 2


def test_what_somebody_changes_meanwhile_is_read_again(cluster: Cluster, folder: Path) -> None:
    def change() -> None:
        cluster.workload("deployments", "workers", 4)

    cluster.instead[:] = [nothing, nothing, nothing, change]  # Two lists of autoscalers, the scale, then its change.
    run(driver(cluster, folder).scale("small", 9))
    assert cluster.replicas("deployments", "workers") == 9
    assert asked(cluster)[2:] == [("GET", SCALE), ("PATCH", SCALE), ("GET", SCALE), ("PATCH", SCALE)]


def test_what_somebody_changes_all_the_time_is_left_for_later(cluster: Cluster, folder: Path) -> None:
    def conflict() -> None:
        raise Refusal(409, "Conflict", "the object has been modified")

    cluster.instead[:] = [nothing, nothing, *([nothing, conflict] * CONFLICTS)]
    assert f"{CONFLICTS} times" in unavailable(driver(cluster, folder).scale("small", 9))
    assert cluster.replicas("deployments", "workers") == 3


@pytest.mark.parametrize(
    ("rules", "needed"),
    [
        (
            ROLE[1:],
            '{apiGroups: ["apps"], resources: ["deployments/scale"], resourceNames: ["workers"], verbs: [get, patch]}',
        ),
        (
            [{**ROLE[0], "verbs": ["get"]}, *ROLE[1:]],
            '{apiGroups: ["apps"], resources: ["deployments/scale"], resourceNames: ["workers"], verbs: [get, patch]}',
        ),
        (
            [{**ROLE[0], "resourceNames": ["others"]}, *ROLE[1:]],
            '{apiGroups: ["apps"], resources: ["deployments/scale"], resourceNames: ["workers"], verbs: [get, patch]}',
        ),
        ([ROLE[0], ROLE[2]], '{apiGroups: ["autoscaling"], resources: ["horizontalpodautoscalers"], verbs: [list]}'),
        (ROLE[:2], '{apiGroups: ["keda.sh"], resources: ["scaledobjects"], verbs: [list]}'),
    ],
)
def test_a_right_that_is_missing_is_named_as_a_role_has_it(
    cluster: Cluster, folder: Path, rules: Rules, needed: str
) -> None:
    cluster.users["first"] = "system:serviceaccount:serving:controller", rules
    said = refused(driver(cluster, folder).scale("small", 5))
    assert needed in said and 'User "system:serviceaccount:serving:controller" cannot' in said
    assert cluster.replicas("deployments", "workers") == 3


def test_a_workload_that_is_not_there_is_named(cluster: Cluster, folder: Path) -> None:
    cluster.users["first"] = "controller", EVERYTHING
    scaling = driver(cluster, folder, "deployment/typo")
    for said in (refused(scaling.scale("small", 5)), refused(scaling.current("small"))):
        assert (
            said
            == "there is no such workload: the scale of deployments typo in namespace serving. Correct scale_target."
        )


def test_a_workload_that_goes_meanwhile_is_named(cluster: Cluster, folder: Path) -> None:
    def gone() -> None:
        raise Refusal(404, "NotFound", 'deployments.apps "workers" not found')

    cluster.instead[:] = [nothing, nothing, nothing, gone]
    assert "there is no such workload" in refused(driver(cluster, folder).scale("small", 5))


def test_a_model_without_a_workload_is_told_where_to_name_one(cluster: Cluster, folder: Path) -> None:
    scaling = driver(cluster, folder)
    assert '[models."large"]' in refused(scaling.scale("large", 5))
    assert '[models."large"]' in refused(scaling.current("large"))
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("version", "resource", "reference", "said"),
    [
        (
            "autoscaling/v2",
            "horizontalpodautoscalers",
            {"kind": "Deployment", "apiVersion": "apps/v1"},
            "HorizontalPod",
        ),
        ("keda.sh/v1alpha1", "scaledobjects", {}, "ScaledObject other"),
        ("keda.sh/v1alpha1", "scaledobjects", {"kind": "Deployment", "apiVersion": "apps/v1"}, "ScaledObject other"),
    ],
)
def test_replicas_that_another_autoscaler_owns_are_left_alone(
    cluster: Cluster, folder: Path, version: str, resource: str, reference: dict[str, str], said: str
) -> None:
    cluster.add(version, resource, **autoscaler(**reference))
    text = refused(driver(cluster, folder).scale("small", 5))
    assert said in text and "owns the replicas of Deployment workers" in text
    assert cluster.replicas("deployments", "workers") == 3
    assert run(driver(cluster, folder).current("small")) == 3


@pytest.mark.parametrize(
    "reference",
    [
        {"kind": "StatefulSet", "apiVersion": "apps/v1"},
        {"kind": "Deployment", "apiVersion": "apps/v1", "name": "gateways"},
        {"kind": "Deployment", "apiVersion": "example.com/v1"},
    ],
)
def test_an_autoscaler_of_something_else_is_none_of_ours(
    cluster: Cluster, folder: Path, reference: dict[str, str]
) -> None:
    cluster.add("autoscaling/v2", "horizontalpodautoscalers", **autoscaler(**reference))
    run(driver(cluster, folder).scale("small", 5))
    assert cluster.replicas("deployments", "workers") == 5


def test_an_autoscaler_on_a_later_page_is_found(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.scaling.kubernetes.driver.PAGE", 2)
    for number in range(4):
        cluster.add("autoscaling/v2", "horizontalpodautoscalers", **autoscaler(f"a{number}", name=f"gateways-{number}"))
    cluster.add("autoscaling/v2", "horizontalpodautoscalers", **autoscaler("z"))
    assert "HorizontalPodAutoscaler z " in refused(driver(cluster, folder).scale("small", 5))


def test_a_cluster_without_keda_is_scaled(cluster: Cluster, folder: Path) -> None:
    cluster.keda = False
    run(driver(cluster, folder).scale("small", 5))
    assert cluster.replicas("deployments", "workers") == 5


def test_the_token_is_read_again_for_each_call(cluster: Cluster, folder: Path) -> None:
    scaling = driver(cluster, folder)
    assert run(scaling.current("small")) == 3
    cluster.users["second"] = cluster.users.pop("first")
    assert "does not know the token" in refused(scaling.current("small"))
    (folder / "token").write_text("second\n")
    assert run(scaling.current("small")) == 3


def test_the_authority_is_read_again_for_each_call(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    scaling = driver(cluster, folder)
    own = (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes(Authority(tmp_path, "stranger").file.read_bytes())
    assert "certificate" in unavailable(scaling.current("small")).lower()
    (folder / "ca.crt").write_bytes(own)
    assert run(scaling.current("small")) == 3


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace"])
def test_a_file_that_is_missing_is_named_with_what_mounts_it(cluster: Cluster, folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    said = refused(driver(cluster, folder).scale("small", 5))
    assert str(folder / missing) in said and "automountServiceAccountToken: true" in said


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b"none", "holds no certificate"), (b"\xff", "no text")]
)
def test_a_file_with_nothing_of_use_is_named(cluster: Cluster, folder: Path, content: bytes, said: str) -> None:
    (folder / "ca.crt").write_bytes(content)
    assert said in refused(driver(cluster, folder).current("small"))


def test_an_api_server_that_does_not_answer_is_given_up(cluster: Cluster, folder: Path) -> None:
    late = threading.Event()
    cluster.instead[:] = [late.wait]
    assert "did not answer within 0.05 s" in unavailable(driver(cluster, folder, timeout=0.05).current("small"))
    late.set()


def test_an_api_server_that_is_away_is_told(cluster: Cluster, folder: Path) -> None:
    away = KubernetesApi("https://127.0.0.1:1", ServiceAccount(folder), Clock())
    said = unavailable(KubernetesScaling(away, {"small": read_target("deployment/workers")}).current("small"))
    assert said.startswith("the API server at https://127.0.0.1:1 cannot be asked: ClientConnectorError")


@pytest.mark.parametrize("code", [429, 503])
def test_an_api_server_that_asks_for_a_rest_gets_it(cluster: Cluster, folder: Path, code: int) -> None:
    def busy() -> None:
        raise Refusal(code, "TooManyRequests", "too many requests", {"Retry-After": "7"})

    clock = Clock()
    scaling = driver(cluster, folder, clock=clock)
    cluster.instead[:] = [busy]
    assert f"HTTP {code}: too many requests" in unavailable(scaling.current("small"))
    clock.now = 6.5
    assert "another 1 s" in unavailable(scaling.scale("small", 5))
    assert len(cluster.asked) == 1
    clock.now = 7.0
    assert run(scaling.current("small")) == 3


@pytest.mark.parametrize("header", [{}, {"Retry-After": "soon"}, {"Retry-After": "9" * 30}])
def test_a_rest_of_any_length_ends_within_a_minute(cluster: Cluster, folder: Path, header: dict[str, str]) -> None:
    def broken() -> None:
        raise Refusal(500, "InternalError", "etcd is away", header)

    clock = Clock()
    scaling = driver(cluster, folder, clock=clock)
    cluster.instead[:] = [broken]
    unavailable(scaling.current("small"))
    clock.now = 60.0
    assert run(scaling.current("small")) == 3


def test_what_an_admission_rule_objects_to_is_told_as_it_is(cluster: Cluster, folder: Path) -> None:
    def denied() -> None:
        raise Refusal(422, "Invalid", "no more than 4 replicas at night")

    cluster.instead[:] = [nothing, nothing, nothing, denied]
    assert "no more than 4 replicas at night. Correct" in refused(driver(cluster, folder).scale("small", 5))


def test_an_answer_of_something_else_is_told(cluster: Cluster, folder: Path) -> None:
    odd = cluster.add("apps/v1", "deployments", "workers", spec={"replicas": "three", "selector": {"matchLabels": {}}})
    odd["status"] = {"replicas": 0}
    assert "answers no Scale" in unavailable(driver(cluster, folder).current("small"))


def test_the_cost_of_each_pod_is_written_where_it_has_changed(cluster: Cluster, folder: Path) -> None:
    cluster.users["first"] = "controller", OF_PODS
    for pod in ("workers-a", "workers-b"):
        cluster.add("v1", "pods", pod, metadata={"annotations": {"mine": "1"}})
    scaling = driver(cluster, folder)
    run(scaling.mark({"workers-a": 100, "workers-b": 0}))
    assert cluster.annotations("workers-a") == {"mine": "1", DELETION_COST: "100"}
    assert cluster.annotations("workers-b") == {"mine": "1", DELETION_COST: "0"}
    cluster.asked.clear()
    run(scaling.mark({"workers-a": 100, "workers-b": -7}))
    assert [one.path for one in cluster.asked] == ["/api/v1/namespaces/serving/pods/workers-b"]
    assert cluster.annotations("workers-b")[DELETION_COST] == "-7"


def test_a_process_that_is_no_pod_costs_nothing(cluster: Cluster, folder: Path) -> None:
    cluster.users["first"] = "controller", OF_PODS
    scaling = driver(cluster, folder)
    run(scaling.mark({"../../gpu-a/14310": 1}))
    assert asked(cluster) == [("PATCH", "/api/v1/namespaces/serving/pods/..%2F..%2Fgpu-a%2F14310")]
    run(scaling.mark({"../../gpu-a/14310": 1}))
    assert len(cluster.asked) == 1


def test_pods_of_a_statefulset_get_no_cost_as_the_last_goes_first(cluster: Cluster, folder: Path) -> None:
    run(driver(cluster, folder, "statefulset/workers").mark({"workers-0": 1}))
    assert cluster.asked == []


def test_whoever_may_not_write_costs_is_told_once_which_right_that_takes(cluster: Cluster, folder: Path) -> None:
    scaling = driver(cluster, folder)
    with structlog.testing.capture_logs() as log:
        run(scaling.mark({"workers-a": 1, "workers-b": 2}))
        run(scaling.mark({"workers-a": 1, "workers-b": 2}))
    assert len(cluster.asked) == 2
    [line] = log
    assert '{apiGroups: [""], resources: ["pods"], verbs: [patch]}' in line["reason"]
    run(scaling.scale("small", 2))
    assert cluster.replicas("deployments", "workers") == 2


def test_a_cost_that_could_not_be_written_in_time_is_written_later(cluster: Cluster, folder: Path) -> None:
    def broken() -> None:
        raise Refusal(500, "InternalError", "etcd is away")

    cluster.users["first"] = "controller", OF_PODS
    cluster.add("v1", "pods", "workers-a")
    scaling = driver(cluster, folder)
    cluster.instead[:] = [broken]
    unavailable(scaling.mark({"workers-a": 1}))
    run(scaling.mark({"workers-a": 1}))
    assert cluster.annotations("workers-a") == {DELETION_COST: "1"}


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}, "https://10.96.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://10.96.0.1:443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443"),
    ],
)
def test_the_api_server_is_where_each_pod_is_told(environ: dict[str, str], url: str) -> None:
    assert api_url(environ) == url


def test_a_process_in_no_pod_is_told_so() -> None:
    with pytest.raises(SettingError, match="KUBERNETES_SERVICE_HOST is not set"):
        api_url({})


def nothing() -> None:
    """Let a request through."""
