"""Rights that the chart gives: to the controller alone, no more than its driver needs, and enough for that."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest

from headway.errors import ScalingRefused
from headway.scaling.kubernetes import KubernetesApi, KubernetesScaling, ScaleTarget, ServiceAccount, read_target
from headway.scaling.kubernetes.driver import DELETION_COST
from tests.charts.rendering import MODELS, NAME, NAMESPACE, SWITCHES, Object, of_kind, pods, render
from tests.servers.kubernetes import account, serving

CONTROLLER = f"{NAME}-controller"
SCALERS = {switch for switch, values in SWITCHES.items() if values.get("scaling", {}).get("by") == "controller"}


def test_only_a_controller_that_scales_has_rights_and_a_token() -> None:
    assert len(SCALERS) == 2
    for switch in SWITCHES:
        objects = render(switch)
        tokens = {name for name, pod in pods(objects) if pod["spec"]["automountServiceAccountToken"] is not False}
        rights = {
            kind: {*of_kind(objects, kind)} for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        }
        own = {CONTROLLER} if switch in SCALERS else set()
        assert tokens == own, switch
        assert rights == {"Role": own, "RoleBinding": own, "ClusterRole": set(), "ClusterRoleBinding": set()}, switch
        assert all(not one["automountServiceAccountToken"] for one in of_kind(objects, "ServiceAccount").values())


def test_the_rights_are_those_of_scaling_its_own_workers() -> None:
    [role] = of_kind(render("controller scales"), "Role").values()
    scale, *lists, marks = role["rules"]
    workers = [f"{NAME}-worker-{key}" for key in MODELS]
    assert scale == {
        "apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": workers, "verbs": ["get", "patch"],
    }  # fmt: skip
    assert [rule["verbs"] for rule in lists] == [["list"], ["list"]]
    assert marks == {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    [without] = of_kind(render("accounts of others"), "Role").values()
    assert without["rules"] == [scale, *lists]


def test_the_rights_go_to_the_account_of_the_controllers_pods() -> None:
    for switch, name in (("controller scales", CONTROLLER), ("accounts of others", "own-controller")):
        objects = render(switch)
        [binding] = of_kind(objects, "RoleBinding").values()
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}]
        assert binding["roleRef"]["name"] == CONTROLLER
        accounts = {pod: one["spec"].get("serviceAccountName") for pod, one in pods(objects)}
        assert [pod for pod, given in accounts.items() if given == name] == [CONTROLLER]


def test_each_account_is_made_unless_it_is_somebody_elses() -> None:
    made = {*of_kind(render("models"), "ServiceAccount")}
    assert made == {f"{NAME}-{part}" for part in ("gateway", "worker", "controller", "redis")}
    assert of_kind(render("accounts of others"), "ServiceAccount") == {}
    assert f"{NAME}-redis" not in of_kind(render("redis elsewhere"), "ServiceAccount")


def test_with_these_rights_and_settings_the_driver_scales(tmp_path: Path) -> None:
    objects = render("controller scales")
    [role] = of_kind(objects, "Role").values()
    with serving(tmp_path) as cluster:
        cluster.users["first"] = CONTROLLER, role["rules"]
        for name in of_kind(objects, "Deployment"):
            cluster.workload("deployments", name, 1, NAMESPACE)
        cluster.add("v1", "pods", "one", NAMESPACE)
        api = KubernetesApi(cluster.url, ServiceAccount(account(tmp_path / "account", cluster)), lambda: 0.0)
        asyncio.run(drive(KubernetesScaling(api, targets(objects)), api))
        assert cluster.replicas("deployments", f"{NAME}-worker-large", NAMESPACE) == 2
        assert cluster.replicas("deployments", f"{NAME}-worker-greeter", NAMESPACE) == 3
        assert cluster.annotations("one", NAMESPACE) == {DELETION_COST: "3"}


def targets(objects: list[Object]) -> dict[str, ScaleTarget]:
    """Workload of each model, as the controller's file names it."""
    models = tomllib.loads(of_kind(objects, "ConfigMap")[NAME]["data"]["controller.toml"])["models"]
    return {name: read_target(one["scale_target"], one["scale_slots"]) for name, one in models.items()}


async def drive(scaling: KubernetesScaling, api: KubernetesApi) -> None:
    assert await scaling.current("org/Large-2") == 4
    await scaling.scale("org/Large-2", 7)
    await scaling.scale("greeter", 3)
    await scaling.mark({"one": 3})
    with pytest.raises(ScalingRefused):
        await KubernetesScaling(api, {"gateway": read_target(f"deployment/{NAME}-gateway")}).scale("gateway", 5)
