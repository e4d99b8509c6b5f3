"""Our driver beside Kubernetes' own client and kubectl, against one API server: what they send, and what they read of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.scaling.kubernetes import KubernetesApi, KubernetesScaling, ServiceAccount, read_target
from headway.scaling.kubernetes.driver import DELETION_COST
from tests.clients.environments import run_client, run_tool
from tests.servers.kubernetes import EVERYTHING, Cluster, account, serving


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with serving(tmp_path) as cluster:
        cluster.users["first"] = "controller", EVERYTHING
        cluster.workload("deployments", "workers", 3)
        cluster.add("v1", "pods", "workers-a")
        reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gateways"}
        spec = {"scaleTargetRef": reference, "maxReplicas": 3}
        cluster.add("autoscaling/v2", "horizontalpodautoscalers", "gateways", spec=spec)
        yield cluster


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    return account(tmp_path / "account", cluster)


def driver(cluster: Cluster, folder: Path) -> KubernetesScaling:
    api = KubernetesApi(cluster.url, ServiceAccount(folder), lambda: 0.0)
    return KubernetesScaling(api, {"small": read_target("deployment/workers")})


async def scale(scaling: KubernetesScaling) -> None:
    await scaling.scale("small", 5)
    await scaling.mark({"workers-a": 7})


def requests(cluster: Cluster) -> list[Any]:
    """Requests that came, but for who sent them and which version they mean."""
    found = [replace(one, agent="", body=json.loads(json.dumps(one.body))) for one in cluster.asked]
    for one in found:
        if one.body is not None and "resourceVersion" in one.body["metadata"]:
            one.body["metadata"]["resourceVersion"] = "…"
    return [one if one.method == "PATCH" else replace(one, type="") for one in found]


def test_the_driver_sends_what_kubernetes_own_client_sends(cluster: Cluster, folder: Path) -> None:
    told = run_client("kubernetes", "kubernetes_program.py", cluster.url, str(folder))
    assert told == {"owners": ["gateways"], "before": 3, "after": 5, "again": 409, "cost": "7"}
    theirs = requests(cluster)
    conflict = theirs.pop(4)
    assert conflict == theirs[3]
    cluster.asked.clear()
    cluster.workload("deployments", "workers", 3)
    cluster.add("v1", "pods", "workers-a")
    asyncio.run(scale(driver(cluster, folder)))
    assert requests(cluster) == theirs
    assert cluster.replicas("deployments", "workers") == 5
    assert cluster.annotations("workers-a") == {DELETION_COST: "7"}


def test_the_driver_and_kubectl_read_what_the_other_wrote(cluster: Cluster, folder: Path) -> None:
    asyncio.run(scale(driver(cluster, folder)))
    assert kubectl(cluster, folder, "get", "deployment", "workers", "-o", "jsonpath={.spec.replicas}") == "5"
    annotation = DELETION_COST.replace(".", "\\.")
    shown = kubectl(
        cluster, folder, "get", "pod", "workers-a", "-o", f"jsonpath={{.metadata.annotations.{annotation}}}"
    )
    assert shown == "7"
    assert "scaled" in kubectl(cluster, folder, "scale", "deployment/workers", "--replicas", "9")
    assert asyncio.run(driver(cluster, folder).current("small")) == 9


def kubectl(cluster: Cluster, folder: Path, *arguments: str) -> str:
    whom = ("--server", cluster.url, "--certificate-authority", str(folder / "ca.crt"), "--token", "first")
    cache = ("--cache-dir", str(folder / "cache"), "--namespace", "serving")
    done = run_tool("helm", "kubectl", *whom, *cache, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
