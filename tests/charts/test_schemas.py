"""The chart's objects follow the schemas of Kubernetes and the operators, and the Pod Security Standard `restricted`."""

import copy
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config.settings import Settings
from headway.errors import SettingError
from tests.charts.pod_security import violations
from tests.charts.rendering import CHART, KEDA, MODELS, NAME, SWITCHES, Object, helm, of_kind, pods, refusal, render
from tests.clients.environments import run_client

VERSIONS = tuple(f"1.{minor}.0" for minor in range(30, 38))
"""From the oldest Kubernetes that the chart supports to the newest with published schemas."""
OPERATORS = ("gateway.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
MADE = runpy.run_path(str(CHART.parent / "schema.py"))
OPEN = {
    "global", "podSecurityContext", "securityContext", "affinity", "requests", "limits", "rollingUpdate", "tlsConfig",
}  # fmt: skip
"""Values with members that the chart doesn't define: parts of Kubernetes' objects."""


def ours(one: Object) -> bool:
    return not one["apiVersion"].startswith(OPERATORS)


def test_all_objects_keep_the_schemas_of_kubernetes_strictly(tmp_path: Path) -> None:
    seen: dict[str, str] = {}  # Most objects stay the same whatever is enabled.
    for switch in SWITCHES:
        for one in filter(ours, render(switch)):
            seen.setdefault(json.dumps(one), switch)
    found: dict[str, list[Object]] = {"wrong": [{**render()[0], "unknown": 1}]}
    for text, switch in seen.items():
        found.setdefault(switch, []).append(json.loads(text))
    file = tmp_path / "objects.json"
    file.write_text(json.dumps(found))
    wrong = run_client("kubernetes", "kubernetes_schemas.py", str(file), str(CHART), *VERSIONS)
    assert len(wrong) == len(VERSIONS), wrong
    assert all(one.startswith("wrong: ") and "unknown" in one for one in wrong)


def test_all_custom_resources_keep_the_definitions_of_their_operators(tmp_path: Path) -> None:
    found = [one for switch in SWITCHES for one in render(switch) if not ours(one)]
    kinds = {"GRPCRoute", "HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
    assert {one["kind"] for one in found} == kinds
    odd = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": "odd"}}
    file = tmp_path / "objects.json"
    file.write_text(
        json.dumps([*found, {**odd, "spec": {"scaleTargetRef": {"name": "x"}, "triggers": [], "unknown": 1}}])
    )
    [wrong] = run_client("helm", "custom_resources.js", str(file))
    assert "'\"unknown\"' does not exist" in wrong


@pytest.mark.parametrize("switch", ["defaults", "all of a pod"])
def test_the_chart_is_clean_to_helm(switch: str) -> None:
    code, output = helm("lint", SWITCHES[switch], "--strict")
    assert (code, "[ERROR]" in output, "[WARNING]" in output) == (0, False, False), output


def test_the_schema_knows_every_value_and_no_other() -> None:
    assert unknown(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, "") == []


def test_the_schema_has_the_bounds_of_the_settings() -> None:
    assert MADE["renewed"](SCHEMA) == SCHEMA, "run: python deploy/helm/schema.py"


@pytest.mark.parametrize("wrong", [{"max_batch_size": 16.5}, {"policy": "packed"}], ids=str)
def test_helm_refuses_what_is_no_value_of_a_setting(wrong: Object) -> None:
    [name] = wrong
    for values in ({"settings": wrong}, {"models": {"greeter": {"target": "model.py:Model", "settings": wrong}}}):
        assert name in refusal(**values)


TO_ZERO: dict[str, dict[str, Any]] = {
    "min_workers": {"scale_to_zero_after_s": 60.0},
    "scale_to_zero_after_s": {"min_workers": 0},
}
"""Settings that must be set together or not at all."""


def accepted(setting: str, value: float) -> bool:
    return any(fits({setting: value, **beside}) for beside in ({}, TO_ZERO.get(setting, {})))


def fits(given: dict[str, Any]) -> bool:
    try:
        Settings(**given)
    except SettingError:
        return False
    return True


@pytest.mark.parametrize("place", MADE["PLACES"], ids=".".join)
def test_a_value_that_becomes_a_setting_is_bounded_as_that_is(place: tuple[str, ...]) -> None:
    setting, units, _ = MADE["PLACES"][place]
    schema = SCHEMA
    for name in place:
        schema = resolved(schema["properties"][name])
    for bound, beyond in ((schema["minimum"], -1), (schema["maximum"], 1)):
        assert accepted(setting, bound * units), (setting, bound)
        assert beyond < 0 < bound <= 1 or not accepted(setting, (bound + beyond) * units), (setting, bound + beyond)


def unknown(values: Any, schema: Any, place: str) -> list[str]:
    """Return the places where values and schema differ: values missing from the schema, and the reverse."""
    schema = resolved(schema)
    if not isinstance(values, dict) or "properties" not in schema or place.endswith("settings"):
        return []
    found = [f"{place}.{name}" for name in values.keys() ^ schema["properties"].keys() if name != "global"]
    if place.endswith((".image", ".resources")):  # Parts left out of an image come from the chart's own.
        found = [name for name in found if name.rpartition(".")[2] in values]
    return found + [
        one
        for name in values.keys() & schema["properties"]
        for one in unknown(values[name], schema["properties"][name], f"{place}.{name}")
    ]


def resolved(schema: Any) -> Any:
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def closed(schema: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each object in a schema, and whether it rejects unknown members."""
    schema = resolved(schema)
    kind = schema.get("type")
    if "object" in ([kind] if isinstance(kind, str) else kind or []):
        yield name, schema.get("additionalProperties", True) is not True
    for below, one in {**schema.get("properties", {}), **schema.get("patternProperties", {})}.items():
        yield from closed(one, below)


def test_each_object_in_the_schema_refuses_what_it_does_not_know() -> None:
    found = list(closed(SCHEMA, ""))
    assert len(found) > 60
    assert {name for name, refuses in found if not refuses} == OPEN


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gatewy": {}}, "'gatewy' not allowed"),
        ({"models": {"greeter": {}}}, "missing property 'target'"),
        ({"models": {"Greeter": {"target": "x"}}}, "'Greeter' not allowed"),
        ({"settings": {"prot": 1}}, "'prot' not allowed"),
        ({"models": {"a": {"target": "x", "settings": {"port": 1}}}}, "'port' not allowed"),
        (
            {"settings": {"port": 8080}},
            "settings.port: has no effect, as the chart sets it for each pod. Set gateway.service",
        ),
        (
            {"settings": {"admin_port": 9100}},
            "settings.admin_port: has no effect, as the chart sets it for each pod. Leave",
        ),
        ({"settings": {"lame_duck_ms": 1}}, "Set gateway.lameDuckSeconds"),
        ({"settings": {"workers": 2}}, "Set worker.slots"),
        ({"tls": {"clientCertificates": True}}, "tls.clientCertificates: has no effect without tls.existingSecret"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 3}}},
            "gateway.autoscaling.minReplicas: is 4, and maxReplicas only 3",
        ),
        ({"scaling": KEDA, "models": MODELS}, "models.greeter.worker.scaling.max: set the most workers"),
        (
            {"scaling": KEDA, "models": {"a": {"target": "x", "worker": {"scaling": {"min": 3, "max": 2}}}}},
            "models.a.worker.scaling.min: is 3, and scaling.max only 2",
        ),
        (
            {"scaling": KEDA, "models": {"a": {"target": "x", "worker": {"scaling": {"min": 0, "max": 2}}}}},
            "models.a.worker.scaling: min is 0 and zeroAfterSeconds 0. A model goes to zero with",
        ),
        ({"settings": {"scale_to_zero_after_s": 60}}, "Set worker.scaling.zeroAfterSeconds"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts: name the hosts"),
        ({"gateway": {"routes": {"enabled": True}}}, "gateway.routes.parentRefs: name the Gateway"),
        ({"scaling": {"by": "keda"}}, "scaling.keda.serverAddress: name the Prometheus"),
        ({"redis": {"enabled": False}}, "broker.existingSecret: name a Secret"),
        (
            {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
            "both would count everything twice",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_with_what_is_wrong(values: dict[str, Any], said: str) -> None:
    assert said in refusal(**values)


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


def test_what_breaks_the_standard_is_found() -> None:
    pod = next(pods(render("models")))[1]["spec"]
    broken = copy.deepcopy(pod)
    broken["hostNetwork"] = True
    broken["volumes"].append({"name": "disk", "hostPath": {"path": "/"}})
    broken["securityContext"]["runAsUser"] = 0
    container = broken["containers"][0]
    container["securityContext"].update(privileged=True, allowPrivilegeEscalation=True, capabilities={})
    container["ports"][0]["hostPort"] = 1
    broken["initContainers"] = [{"name": "two"}]
    assert violations(broken) == [
        "capabilities", "host port", "hostNetwork", "privilege escalation", "privileged", "root", "volume disk",
    ]  # fmt: skip


def test_nobody_has_rights_or_a_token() -> None:
    for switch in SWITCHES:
        objects = render(switch)
        assert all(pod["spec"]["automountServiceAccountToken"] is False for _, pod in pods(objects)), switch
        for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
            assert of_kind(objects, kind) == {}, switch
        assert all(not one["automountServiceAccountToken"] for one in of_kind(objects, "ServiceAccount").values())


def test_each_account_is_made_unless_it_is_somebody_elses() -> None:
    made = {*of_kind(render("models"), "ServiceAccount")}
    assert made == {f"{NAME}-{part}" for part in ("gateway", "worker", "controller", "redis")}
    assert of_kind(render("accounts of others"), "ServiceAccount") == {}
    assert f"{NAME}-redis" not in of_kind(render("redis elsewhere"), "ServiceAccount")
