"""The chart's workloads: settings of each process, how it is found, how it ends, and what scales it."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.app.roles import ROLES
from headway.config import Settings, load
from headway.model import Role
from tests.charts import rendering
from tests.charts.rendering import CHART, KEDA, MODELS, NAME, Object, of_kind, pods, render, rendered, workloads

GATEWAY, CONTROLLER, REDIS = f"{NAME}-gateway", f"{NAME}-controller", f"{NAME}-redis"
WORKERS = {key: f"{NAME}-worker-{key}" for key in MODELS}
FILES = {GATEWAY: "gateway.toml", CONTROLLER: "controller.toml"} | {
    name: f"worker-{key}.toml" for key, name in WORKERS.items()
}


def container(objects: list[Object], name: str) -> Object:
    [found] = workloads(objects)[name]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings(objects: list[Object], name: str, tmp_path: Any) -> Settings:
    file = tmp_path / "headway.toml"
    file.write_text(of_kind(objects, "ConfigMap")[NAME]["data"][FILES[name]])
    environ = rendering.environment(objects, name)
    assert environ.pop("HEADWAY_CONFIG") == "/etc/headway/headway.toml"
    role, *targets = container(objects, name)["args"]
    used = {f"HEADWAY_{setting}".upper() for setting in ROLES[Role(role)].settings}
    assert {one for one in environ if one.startswith("HEADWAY_")} <= used
    return load({}, environ, file, targets=targets or None)


def matches(selector: Object, labels: dict[str, str]) -> bool:
    found = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    return found and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def labels(objects: list[Object]) -> dict[str, dict[str, str]]:
    return {name: pod["metadata"]["labels"] for name, pod in pods(objects)}


def test_each_process_reads_its_settings_as_they_were_meant(tmp_path: Any) -> None:
    objects = render("models")
    for name in FILES:
        found = settings(objects, name, tmp_path)
        assert (found.max_batch_size, found.shed_depths, found.cache) == (100, "100,500", True)
        assert found.name.startswith(name)
        assert found.broker.startswith("redis://headway:") and found.broker.endswith(f"@{REDIS}:6379/0")
        assert (found.admin_host, found.admin_port, len(found.admin_token)) == ("0.0.0.0", 9000, 32)
    gateway, large = settings(objects, GATEWAY, tmp_path), settings(objects, WORKERS["large"], tmp_path)
    assert (gateway.host, gateway.port, gateway.lame_duck_ms) == ("0.0.0.0", 8000, 5000)
    assert [model.name for model in gateway.models] == ["greeter", "org/Large-2"]
    assert [(model.name, model.target) for model in large.models] == [("org/Large-2", "large.py:Model")]
    assert dict(large.models[0].values).items() >= {"max_batch_size": 16, "gpu_timeout_ms": 2500.5}.items()
    assert large.workers == 4


def test_the_controller_alone_is_told_what_to_scale(tmp_path: Any) -> None:
    objects = render("keda scales")
    found = settings(objects, CONTROLLER, tmp_path)
    assert found.autoscale == "none"
    large = dict(found.models[1].values)
    assert (large["min_workers"], large["max_workers"]) == (2, 10)
    for name in (GATEWAY, *WORKERS.values()):
        assert "scale" not in of_kind(objects, "ConfigMap")[NAME]["data"][FILES[name]]


def test_a_process_restarts_for_its_own_settings_alone() -> None:
    def sums(**values: Any) -> dict[str, str]:
        found = rendered(json.dumps({"models": MODELS, **values}))
        return {name: pod["metadata"]["annotations"]["checksum/settings"] for name, pod in pods(found) if name in FILES}

    before = sums()
    assert sums() == before
    changed = {name for name, one in sums(settings={"cache": True}).items() if one != before[name]}
    assert changed == {*FILES}
    more = sums(models={**MODELS, "third": {"target": "third.py:Model"}})
    assert {name for name, one in before.items() if more[name] != one} == {GATEWAY, CONTROLLER}
    scaled = sums(scaling=KEDA, worker={"scaling": {"max": 5}})
    assert {name for name, one in before.items() if scaled[name] != one} == {CONTROLLER}


@pytest.mark.parametrize("switch", ["models", "all of a pod", "tls of clients", "grpc"])
def test_services_budgets_and_policies_find_the_pods_that_they_mean(switch: str) -> None:
    objects = render(switch)
    all_labels = labels(objects)
    for name, one in of_kind(objects, "Service").items():
        found = {pod for pod, given in all_labels.items() if matches({"matchLabels": one["spec"]["selector"]}, given)}
        assert found == ({name} if name != f"{NAME}-admin" else {*all_labels}), name
        ports = {port["name"] for pod in found & {name} for port in container(objects, pod)["ports"]}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports | {"admin"}
    for name, one in of_kind(objects, "PodDisruptionBudget").items():
        assert [pod for pod, given in all_labels.items() if matches(one["spec"]["selector"], given)] == [name]
    for name, one in of_kind(objects, "NetworkPolicy").items():
        found = {pod for pod, given in all_labels.items() if matches(one["spec"]["podSelector"], given)}
        assert found == ({*WORKERS.values()} & {*all_labels} if name == f"{NAME}-worker" else {name})
    for name, one in workloads(objects).items():
        given = all_labels[name]
        assert [pod for pod, theirs in all_labels.items() if matches(one["spec"]["selector"], theirs)] == [name]
        for spread in one["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"], given)
            assert [pod for pod, theirs in all_labels.items() if matches(spread["labelSelector"], theirs)] == [name]
        assert given["app.kubernetes.io/part-of"] == "headway"


def test_pods_are_spread_over_zones_unless_told_otherwise() -> None:
    for name, one in workloads(render("models")).items():
        spread = one["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        assert [each["topologyKey"] for each in spread] == (
            [] if name == REDIS else ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        )
    for one in workloads(render("nothing of a pod")).values():
        assert "topologySpreadConstraints" not in one["spec"]["template"]["spec"]
    assert of_kind(render("nothing of a pod"), "PodDisruptionBudget") == {}


def test_a_pod_has_longer_to_end_than_it_takes() -> None:
    for switch in ("models", "keda scales"):
        objects = render(switch)
        for name in (GATEWAY, CONTROLLER, *WORKERS.values()):
            environ = rendering.environment(objects, name)
            pod = workloads(objects)[name]["spec"]["template"]["spec"]
            sleep = (
                container(objects, name).get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})["seconds"]
            )
            takes = Settings().drain_s + float(environ.get("HEADWAY_LAME_DUCK_MS", 0)) / 1000
            assert pod["terminationGracePeriodSeconds"] >= sleep + takes + 10
    assert container(render("models"), GATEWAY)["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    everything = workloads(render("all of a pod")).values()
    assert {one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for one in everything} == {77}


def test_each_process_has_three_probes_of_routes_that_its_ports_have() -> None:
    objects = render("models")
    for name in FILES:
        found = container(objects, name)
        probes = {kind: found[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        assert probes["startup"] == probes["liveness"] == {"path": "/livez", "port": "admin", "scheme": "HTTP"}
        public = "http" if name == GATEWAY else "admin"
        assert probes["readiness"] == {"path": "/readyz", "port": public, "scheme": "HTTP"}
        assert {probe["port"] for probe in probes.values()} <= {port["name"] for port in found["ports"]}


def test_probes_go_with_tls_and_see_an_open_port_where_certificates_are_asked_for() -> None:
    assert container(render("tls"), GATEWAY)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    asked = container(render("tls of clients"), GATEWAY)
    assert asked["readinessProbe"]["tcpSocket"] == {"port": "http"} and "httpGet" not in asked["livenessProbe"]
    environ = {one["name"]: one.get("value") for one in asked["env"]}
    assert environ["HEADWAY_TLS_CLIENT_CA"] == "/etc/headway-tls/ca.crt"


def test_each_worker_slot_has_a_gpu() -> None:
    objects = render("models")
    assert container(objects, WORKERS["large"])["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container(objects, WORKERS["greeter"])["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container(objects, GATEWAY)["resources"]["limits"] == {"memory": "512Mi"}
    cpu = render("on the cpu")
    assert container(cpu, WORKERS["large"])["resources"]["limits"] == {}
    assert rendering.environment(cpu, WORKERS["large"])["HEADWAY_DEVICES"] == "cpu"


def test_nobody_has_a_number_of_replicas_where_something_scales() -> None:
    def without(switch: str) -> set[str]:
        return {name for name, one in workloads(render(switch)).items() if "replicas" not in one["spec"]}

    assert without("models") == set()
    assert without("keda scales") == {*WORKERS.values()}
    assert without("gateways scale") == {GATEWAY}
    assert of_kind(render("models"), "HorizontalPodAutoscaler") == {}
    autoscaler = of_kind(render("gateways scale"), "HorizontalPodAutoscaler")[GATEWAY]["spec"]
    assert autoscaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": GATEWAY}
    assert autoscaler["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}
    assert container(render("gateways scale"), GATEWAY)["resources"]["requests"]["cpu"]


def test_keda_counts_pods_where_headway_counts_workers() -> None:
    found = of_kind(render("keda scales"), "ScaledObject")
    large = found[WORKERS["large"]]["spec"]
    assert (large["minReplicaCount"], large["maxReplicaCount"], large["fallback"]["replicas"]) == (1, 3, 3)
    [trigger] = large["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "4")
    assert trigger["metadata"]["query"] == 'max(headway_desired_workers{model="org/Large-2"})'
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert trigger["authenticationRef"] == {"name": "metrics"}
    assert found[WORKERS["greeter"]]["spec"]["maxReplicaCount"] == 8
    assert of_kind(render("models"), "ScaledObject") == {}


def test_keda_takes_the_longest_names() -> None:
    """Its webhook refuses objects and HPAs with names longer than 63 characters, and it prefixes the HPA with keda-hpa-."""
    model = {"target": "m.py:f", "worker": {"scaling": {"max": 2}}}
    found = rendered(json.dumps({"fullnameOverride": "f" * 60, "models": {"m" * 16: model}, "scaling": KEDA}))
    [(name, scaled)] = of_kind(found, "ScaledObject").items()
    assert len(name) <= 63
    assert scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"] == name


def test_a_model_may_go_to_zero(tmp_path: Path) -> None:
    found = render("to zero")
    for one in settings(found, CONTROLLER, tmp_path).served.values():
        assert (one.min_workers, one.scale_to_zero_after_s) == (0, 600.0)
    assert [*settings(found, GATEWAY, tmp_path).served] == [*settings(found, CONTROLLER, tmp_path).served]
    for scaled in of_kind(found, "ScaledObject").values():
        spec = scaled["spec"]
        assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 0)
        assert "activationThreshold" not in spec["triggers"][0]["metadata"], "any number above 0 brings the first pod"


def test_each_workload_takes_what_a_pod_may_be_given() -> None:
    for name, one in workloads(render("all of a pod")).items():
        template, [first] = one["spec"]["template"], one["spec"]["template"]["spec"]["containers"]
        assert rendering.POD["extraEnv"][0] in first["env"]
        assert first["envFrom"] == [{"secretRef": {"name": "own-secret"}}, *rendering.POD["envFrom"]]
        assert rendering.POD["extraVolumeMounts"][0] in first["volumeMounts"]
        assert rendering.POD["extraVolumes"][0] in template["spec"]["volumes"]
        assert first["image"].endswith(f"@sha256:{'a' * 64}"), name
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert template["metadata"]["annotations"]["own"] == "annotation"
        assert template["metadata"]["labels"]["own"] == "label" and template["metadata"]["labels"]["team"] == "serving"
        for member in ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"):
            assert template["spec"][member] == rendering.POD[member]
    assert container(render("all of a pod"), REDIS)["image"].startswith("redis@sha256:")


def test_an_image_has_the_tag_of_the_chart_unless_told_otherwise() -> None:
    assert container(render("models"), GATEWAY)["image"] == "headway:0.1.0"
    model = {"target": "x", "worker": {"image": {"repository": "registry.example/models", "tag": "7"}}}
    own = rendered(json.dumps({"models": {"own": model}, "image": {"digest": ""}}))
    assert container(own, f"{NAME}-worker-own")["image"] == "registry.example/models:7"


def test_no_pod_gets_a_variable_for_each_service() -> None:
    """A Service named headway would set HEADWAY_PORT, which the start-up rejects."""
    every = [pod for switch in rendering.SWITCHES for _, pod in pods(render(switch))]
    assert {pod["spec"]["enableServiceLinks"] for pod in every} == {False}


def test_the_test_of_helm_is_a_program_that_asks_the_service() -> None:
    for switch in ("defaults", "tls", "tls of clients"):
        [pod] = of_kind(render(switch), "Pod").values()
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        python, flag, program = pod["spec"]["containers"][0]["command"]
        assert (python, flag) == ("python3", "-c") and GATEWAY in program
        compile(program, "test", "exec")


def test_what_is_made_is_in_the_namespace_of_the_release() -> None:
    for switch in rendering.SWITCHES:
        for one in render(switch):
            assert one["metadata"].get("namespace", rendering.NAMESPACE) == rendering.NAMESPACE
            assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "prod"


def test_settings_are_written_as_toml_has_them() -> None:
    odd = {
        "fallback": 'quote " \\ <&> line\nend ü',
        "max_queue": 10_000_000,
        "reserved_share": 0.25,
        "cache": True,
        "scale_rules": [{"queue_above": 500, "for_s": 30.5}],
    }
    text = of_kind(rendered(json.dumps({"settings": odd})), "ConfigMap")[NAME]["data"]["gateway.toml"]
    assert tomllib.loads(text) == odd
    assert isinstance(tomllib.loads(text)["max_queue"], int)


def test_the_values_that_the_page_shows_are_good_ones() -> None:
    page = (CHART.parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    install, scale = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    objects = rendered(json.dumps(install))
    worker = workloads(objects)[WORKERS["greeter"]]
    assert container(objects, WORKERS["greeter"])["image"] == "registry.example/greeter:7"
    assert worker["spec"]["replicas"] == 2
    assert "replicas" not in workloads(rendered(json.dumps(install | scale)))[WORKERS["greeter"]]["spec"]


def test_no_pod_is_replaced_for_another_version_of_the_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def templates(objects: list[Object]) -> dict[str, Object]:
        return {name: workload["spec"]["template"] for name, workload in workloads(objects).items()}

    before = templates(rendered(json.dumps({"models": MODELS})))
    newer = tmp_path / "headway"
    shutil.copytree(CHART, newer)
    chart = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(re.sub(r"^version: .*$", "version: 9.9.9", chart, flags=re.MULTILINE))
    monkeypatch.setattr(rendering, "CHART", newer)
    bumped = [one for one in yaml.safe_load_all(rendering.helm("template", {"models": MODELS})[1]) if one]
    assert {one["metadata"]["labels"]["helm.sh/chart"] for one in workloads(bumped).values()} == {"headway-9.9.9"}
    assert templates(bumped) == before
