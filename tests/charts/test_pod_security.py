"""Pods of the chart keep the Pod Security Standard `restricted`, and more; and the test of that finds what does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.charts.pod_security import violations
from tests.charts.rendering import SWITCHES, pods, render

GOOD: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {"name": "one", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
}


def test_all_pods_are_restricted_whatever_is_turned_on() -> None:
    found = {(switch, name): violations(pod["spec"]) for switch in SWITCHES for name, pod in pods(render(switch))}
    assert len(found) > 50
    assert {place: rules for place, rules in found.items() if rules} == {}


def test_the_root_of_each_container_is_read_only_with_a_place_to_write() -> None:
    for name, pod in pods(render("models")):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            [tmp] = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == "/tmp"]
            assert volumes[tmp]["emptyDir"]["sizeLimit"], name
            assert "runAsUser" in pod["spec"]["securityContext"], name


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("hostIPC", True, "hostIPC"),
        ("volumes", [{"name": "disk", "hostPath": {"path": "/"}}], "volume disk"),
        ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}], "sysctl kernel.msgmax"),
        ("securityContext.runAsNonRoot", False, "root"),
        ("securityContext.runAsUser", 0, "root"),
        ("securityContext.seccompProfile", {"type": "Unconfined"}, "seccomp"),
        ("securityContext.seccompProfile", {}, "seccomp"),
        ("securityContext.appArmorProfile", {"type": "Unconfined"}, "AppArmor"),
        ("securityContext.seLinuxOptions", {"type": "spc_t"}, "SELinux"),
        ("securityContext.seLinuxOptions", {"role": "admin"}, "SELinux"),
        ("containers.0.securityContext.privileged", True, "privileged"),
        ("containers.0.securityContext.allowPrivilegeEscalation", True, "privilege escalation"),
        ("containers.0.securityContext.capabilities", {}, "capabilities kept"),
        ("containers.0.securityContext.capabilities.add", ["SYS_ADMIN"], "capabilities added"),
        ("containers.0.securityContext.runAsUser", 0, "root"),
        ("containers.0.securityContext.runAsNonRoot", False, "root"),
        ("containers.0.securityContext.procMount", "Unmasked", "proc"),
        ("containers.0.securityContext.windowsOptions", {"hostProcess": True}, "host process"),
        ("containers.0.ports", [{"containerPort": 1, "hostPort": 1}], "host port"),
        ("containers.0.livenessProbe", {"httpGet": {"port": 1, "host": "10.0.0.1"}}, "host of a probe"),
        ("initContainers", [{"name": "two"}], "privilege escalation"),
    ],
)
def test_what_breaks_the_standard_is_found(place: str, value: Any, said: str) -> None:
    spec = copy.deepcopy(GOOD)
    assert violations(spec) == []
    *parents, last = place.split(".")
    where: Any = spec
    for part in parents:
        where = where[int(part)] if part.isdigit() else where[part]
    where[last] = value
    assert said in violations(spec)
