"""What surrounds the chart's processes: Redis, its secrets, network policies, Prometheus and Grafana."""

import base64
import json
import tarfile
from pathlib import Path

import pytest
import redis
import yaml

from tests.charts.rendering import CHART, NAME, NAMESPACE, Object, of_kind, render, rendered, workloads
from tests.clients.environments import run_tool
from tests.servers.redis import RedisServer, client

DEPLOY = CHART.parents[1]
SOURCES = {
    "rules.yml": DEPLOY / "prometheus" / "rules.yml",
    "alerts.yml": DEPLOY / "prometheus" / "alerts.yml",
    "dashboard.json": DEPLOY / "grafana" / "headway.json",
}
"""Files of the chart that link to files outside its folder."""


def test_a_packed_chart_holds_the_files_themselves(tmp_path: Path) -> None:
    done = run_tool("helm", "helm", "package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.iterdir()
    assert {path.name for path in (CHART / "files").iterdir()} == SOURCES.keys()
    with tarfile.open(archive) as members:
        for name, source in SOURCES.items():
            member = members.extractfile(f"headway/files/{name}")
            assert member
            assert member.read() == source.read_bytes()


def test_rules_alerts_and_dashboard_are_those_of_prometheus_and_grafana() -> None:
    objects = render("pods are watched")
    groups = [
        group for name in ("rules.yml", "alerts.yml") for group in yaml.safe_load(SOURCES[name].read_text())["groups"]
    ]
    [rules] = of_kind(objects, "PrometheusRule").values()
    assert rules["spec"]["groups"] == groups
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    board = of_kind(objects, "ConfigMap")[f"{NAME}-dashboard"]
    assert json.loads(board["data"]["headway.json"]) == json.loads(SOURCES["dashboard.json"].read_text())
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    for kind in ("PrometheusRule", "PodMonitor", "ServiceMonitor", "ScaledObject"):
        assert of_kind(render("models"), kind) == {}


def test_prometheus_scrapes_each_process_under_the_job_that_alerts_know() -> None:
    [pods] = of_kind(render("pods are watched"), "PodMonitor").values()
    [services] = of_kind(render("services are watched"), "ServiceMonitor").values()
    [endpoint] = pods["spec"]["podMetricsEndpoints"]
    assert services["spec"]["endpoints"] == [endpoint]
    assert endpoint["authorization"] == {"credentials": {"name": f"{NAME}-admin", "key": "token"}}
    assert (endpoint["port"], endpoint["scheme"], endpoint["interval"]) == ("admin", "http", "30s")
    assert {"targetLabel": "job", "replacement": "headway"} in endpoint["relabelings"]
    admin = of_kind(render("services are watched"), "Service")[f"{NAME}-admin"]
    assert admin["spec"]["clusterIP"] == "None"
    assert admin["metadata"]["labels"].items() >= services["spec"]["selector"]["matchLabels"].items()


def test_one_prometheus_tells_two_fleets_apart() -> None:
    [pods] = of_kind(render("pods are watched"), "PodMonitor").values()
    told = {"targetLabel": "fleet", "replacement": f"{NAMESPACE}/{NAME}"}
    assert told in pods["spec"]["podMetricsEndpoints"][0]["relabelings"]
    queries = {
        switch: [
            one["spec"]["triggers"][0]["metadata"]["query"] for one in of_kind(render(switch), "ScaledObject").values()
        ]
        for switch in ("keda scales", "two fleets")
    }
    assert queries == {
        "keda scales": [f'max(headway_desired_workers{{model="{model}"}})' for model in ("greeter", "org/Large-2")],
        "two fleets": [
            f'max(headway_desired_workers{{model="{model}",fleet="eu"}})' for model in ("greeter", "org/Large-2")
        ],
    }


def test_clients_outside_the_cluster_come_in_by_an_ingress_or_by_routes() -> None:
    assert not {"Ingress", "HTTPRoute", "GRPCRoute"} & {one["kind"] for one in render("grpc")}
    ingresses = of_kind(render("ingress"), "Ingress")
    asked = {
        name: [
            (rule["host"], rule["http"]["paths"][0]["backend"]["service"]["port"]["name"])
            for rule in one["spec"]["rules"]
        ]
        for name, one in ingresses.items()
    }
    assert asked == {
        f"{NAME}-gateway": [("ask.example.com", "http")],
        f"{NAME}-gateway-grpc": [("grpc.example.com", "grpc")],
    }
    assert ingresses[f"{NAME}-gateway"]["spec"]["tls"] == [{"secretName": "edge", "hosts": ["ask.example.com"]}]
    routes = render("routes")
    for kind, port, host in (("HTTPRoute", 8000, "ask.example.com"), ("GRPCRoute", 8081, "grpc.example.com")):
        [route] = of_kind(routes, kind).values()
        assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "edge"}]
        assert route["spec"]["hostnames"] == [host]
        assert route["spec"]["rules"] == [{"backendRefs": [{"name": f"{NAME}-gateway", "port": port}]}]


def test_prometheus_checks_the_certificate_of_a_process() -> None:
    [pods] = of_kind(render("tls"), "PodMonitor").values()
    [endpoint] = pods["spec"]["podMetricsEndpoints"]
    authority = {"secret": {"name": "pair", "key": "ca.crt"}}
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {"ca": authority, "serverName": f"{NAME}-gateway"}
    [services] = of_kind(render("tls of clients"), "ServiceMonitor").values()
    assert services["spec"]["endpoints"][0]["tlsConfig"] == {"ca": authority, "serverName": "other"}


def test_admin_ports_are_closed_to_all_but_monitoring() -> None:
    found = of_kind(render("grpc"), "NetworkPolicy")
    assert {*found} == {f"{NAME}-{part}" for part in ("gateway", "worker", "controller", "redis")}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    admin = {"ports": [{"port": "admin"}], "from": [monitoring]}
    assert found[f"{NAME}-worker"]["spec"]["ingress"] == found[f"{NAME}-controller"]["spec"]["ingress"] == [admin]
    assert found[f"{NAME}-gateway"]["spec"]["ingress"] == [{"ports": [{"port": "http"}, {"port": "grpc"}]}, admin]
    [ours] = found[f"{NAME}-redis"]["spec"]["ingress"]
    assert ours["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["gateway", "worker", "controller"]
    narrow = of_kind(render("narrow network policy"), "NetworkPolicy")
    assert narrow[f"{NAME}-worker"]["spec"]["ingress"] == []
    clients = [{"podSelector": {"matchLabels": {"app": "ingress"}}}]
    [asks] = of_kind(render("narrow network policy"), "Pod").values()
    names = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}
    tester = {"podSelector": {"matchLabels": {name: asks["metadata"]["labels"][name] for name in names}}}
    assert narrow[f"{NAME}-gateway"]["spec"]["ingress"] == [{"ports": [{"port": "http"}], "from": [*clients, tester]}]
    assert of_kind(render("no network policy"), "NetworkPolicy") == {}


def test_secrets_are_made_unless_they_are_named() -> None:
    assert {*of_kind(render("models"), "Secret")} == {f"{NAME}-admin", f"{NAME}-broker"}
    objects = render("redis elsewhere")
    assert of_kind(objects, "Secret") == {}
    assert {*workloads(objects)} == {f"{NAME}-gateway", f"{NAME}-controller"}
    environ = {
        one["name"]: one
        for one in workloads(objects)[f"{NAME}-gateway"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environ["HEADWAY_BROKER"]["valueFrom"] == {"secretKeyRef": {"name": "url", "key": "url"}}
    assert environ["HEADWAY_ADMIN_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "token", "key": "token"}}


def test_redis_writes_nobody_s_inputs_to_a_disk_unless_it_is_told_to_keep_them_on_one_of_its_own() -> None:
    kept = workloads(render("redis remembers"))[f"{NAME}-redis"]["spec"]
    [claim] = kept["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data" and claim["spec"]["resources"]["requests"] == {"storage": "8Gi"}
    assert "appendonly yes" in of_kind(render("redis remembers"), "ConfigMap")[f"{NAME}-redis"]["data"]["redis.conf"]
    forgetful = workloads(render("models"))[f"{NAME}-redis"]["spec"]
    assert "volumeClaimTemplates" not in forgetful
    assert {"name": "data", "emptyDir": {}} in forgetful["template"]["spec"]["volumes"]
    assert "appendonly no" in of_kind(render("models"), "ConfigMap")[f"{NAME}-redis"]["data"]["redis.conf"]


class ChartRedis(RedisServer):
    def answers(self) -> bool:
        try:
            return bool(self.command("TIME"))
        except redis.ConnectionError:
            return False


def chart_redis(folder: Path, objects: list[Object]) -> ChartRedis:
    """Start Redis with the chart's settings and users. Its URL is that of Headway's user."""
    folder.mkdir()
    data = of_kind(objects, "Secret")[f"{NAME}-broker"]["data"]
    secret = {key: base64.b64decode(value).decode() for key, value in data.items()}
    (folder / "users.acl").write_text(secret["users.acl"])
    text = of_kind(objects, "ConfigMap")[f"{NAME}-redis"]["data"]["redis.conf"]
    text = text.replace("/etc/redis-users/users.acl", str(folder / "users.acl")).replace("dir /data", f"dir {folder}")
    lines = [line for line in text.splitlines() if not line.startswith(("port ", "bind "))]
    server = ChartRedis("redis", folder, *lines)
    server.url = secret["url"].replace(f"@{NAME}-redis:6379/", f"@127.0.0.1:{server.port}/")
    return server


def test_a_real_redis_takes_the_charts_settings_and_lets_headway_in_alone(tmp_path: Path) -> None:
    objects = rendered(json.dumps({"settings": {"broker_prefix": "fleet"}}))
    with chart_redis(tmp_path / "redis", objects) as server:
        assert server.command("CONFIG", "GET", "maxmemory-policy") == {b"maxmemory-policy": b"noeviction"}
        assert server.command("CONFIG", "GET", "appendonly") == {b"appendonly": b"no"}
        server.command("SET", "fleet:queue", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            server.command("SET", "other:queue", "1")
        with pytest.raises(redis.exceptions.AuthenticationError), client(f"redis://127.0.0.1:{server.port}") as anybody:
            anybody.get("fleet:queue")
