"""The chart as rendered by Helm: objects by kind and name, for values that differ from the defaults."""

import base64
import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.clients.environments import run_tool

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "headway"
RELEASE, NAMESPACE = "prod", "serving"
NAME = f"{RELEASE}-headway"

Object = dict[str, Any]
Values = Mapping[str, Any]

MODELS = {
    "greeter": {"target": "model.py:Model"},
    "large": {
        "name": "org/Large-2",
        "target": "large.py:Model",
        "settings": {"max_batch_size": 16, "gpu_timeout_ms": 2500.5},
        "worker": {"slots": 4, "replicas": 2, "scaling": {"min": 2, "max": 10}},
    },
}
"""Two models, one with mostly defaults and one with few."""
KEDA = {"by": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}
BOUNDED = {"scaling": {"max": 8}}
MONITORED = {"interval": "30s", "labels": {"release": "prometheus"}}
POD: Object = {
    "existingSecret": "own-secret",
    "extraEnv": [{"name": "HF_HOME", "value": "/models"}],
    "envFrom": [{"configMapRef": {"name": "own-map"}}],
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    "podAnnotations": {"own": "annotation"},
    "podLabels": {"own": "label"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "image": {"digest": f"sha256:{'a' * 64}"},
    "serviceAccount": {"annotations": {"own": "account"}},
    "terminationGracePeriodSeconds": 77,
}
"""Optional parts of each workload."""
UNSPREAD = {"topologySpread": {"enabled": False}, "podDisruptionBudget": {"enabled": False}}

INGRESS: Object = {
    "enabled": True,
    "className": "nginx",
    "hosts": ["ask.example.com"],
    "tlsSecret": "edge",
    "annotations": {"own": "1"},
    "grpc": {"hosts": ["grpc.example.com"], "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}},
}

SWITCHES: dict[str, Values] = {
    "defaults": {},
    "models": {"models": MODELS, "settings": {"max_batch_size": 100, "shed_depths": "100,500", "cache": True}},
    "keda scales": {
        "models": MODELS,
        "worker": BOUNDED,
        "scaling": {"by": "keda", "keda": {"serverAddress": "http://prometheus:9090", "authenticationRef": "metrics"}},
    },
    "to zero": {
        "models": {"greeter": MODELS["greeter"]},
        "worker": {"scaling": {"min": 0, "max": 8, "zeroAfterSeconds": 600}},
        "scaling": KEDA,
    },
    "gateways scale": {"gateway": {"autoscaling": {"enabled": True}}},
    "pods are watched": {
        "monitoring": {
            "podMonitor": {"enabled": True, **MONITORED},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True, "annotations": {"folder": "GPUs"}},
        },
    },
    "services are watched": {"monitoring": {"serviceMonitor": {"enabled": True, **MONITORED}}},
    "tls": {"tls": {"existingSecret": "pair"}, "monitoring": {"podMonitor": {"enabled": True}}},
    "tls of clients": {
        "models": MODELS,
        "tls": {"existingSecret": "pair", "clientCertificates": True},
        "monitoring": {"serviceMonitor": {"enabled": True}, "tlsConfig": {"serverName": "other"}},
    },
    "redis elsewhere": {"redis": {"enabled": False}, "broker": {"existingSecret": "url"}, "admin": {"existingSecret": "token"}},
    "redis remembers": {"redis": {"persistence": {"enabled": True}}},
    "no network policy": {"networkPolicy": {"enabled": False}},
    "narrow network policy": {
        "networkPolicy": {"monitoring": [], "clients": [{"podSelector": {"matchLabels": {"app": "ingress"}}}]},
    },
    "all of a pod": {
        "models": MODELS, "gateway": POD, "worker": POD, "controller": POD, "redis": POD, "test": {"podAnnotations": {"own": "1"}},
        "imagePullSecrets": [{"name": "registry"}], "commonLabels": {"team": "serving"},
    },
    "nothing of a pod": {"models": MODELS, "gateway": UNSPREAD, "worker": UNSPREAD, "controller": UNSPREAD},
    "accounts of others": {
        part: {"serviceAccount": {"name": f"own-{part}"}} for part in ("gateway", "worker", "controller", "redis")
    } | {"models": MODELS},
    "grpc": {"gateway": {"grpc": {"enabled": True}, "service": {"type": "LoadBalancer", "annotations": {"own": "1"}}}},
    "ingress": {"gateway": {"grpc": {"enabled": True}, "ingress": INGRESS}},
    "routes": {
        "gateway": {
            "grpc": {"enabled": True},
            "routes": {
                "enabled": True, "parentRefs": [{"name": "public", "namespace": "edge"}], "hostnames": ["ask.example.com"],
                "grpcHostnames": ["grpc.example.com"], "annotations": {"own": "1"},
            },
        },
    },
    "two fleets": {"monitoring": {"fleet": "eu"}, "models": MODELS, "worker": BOUNDED, "scaling": KEDA},
    "on the cpu": {"models": MODELS, "worker": {"gpuResource": ""}},
}  # fmt: skip
"""Values for each switch of the chart, by what they turn on."""


def helm(command: str, values: Values, *arguments: str) -> tuple[int, str]:
    """Run a Helm command on the chart. Returns the exit code and output, without the notes about symbolic links."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "values.json"
        file.write_text(json.dumps(values))
        settled = ("--values", str(file), "--kube-version", "1.35.0", "--namespace", NAMESPACE)
        named = (RELEASE, str(CHART)) if command == "template" else (str(CHART),)
        done = run_tool("helm", "helm", command, *named, *settled, *arguments)
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def render(switch: str = "defaults") -> list[Object]:
    return rendered(json.dumps(SWITCHES[switch]))


@cache
def rendered(values: str) -> list[Object]:
    code, output = helm("template", json.loads(values))
    assert code == 0, output
    # Ten times as fast as safe_load_all.
    return [one for one in yaml.load_all(output, yaml.CSafeLoader) if one is not None]


def refusal(**values: Any) -> str:
    code, output = helm("template", values)
    assert code != 0, output
    return output


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    found = {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}
    assert len(found) == sum(one["kind"] == kind for one in objects)
    return found


def workloads(objects: list[Object]) -> dict[str, Object]:
    return of_kind(objects, "Deployment") | of_kind(objects, "StatefulSet")


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the name and pod template of every object that has pods."""
    for name, one in workloads(objects).items():
        yield name, one["spec"]["template"]
    yield from of_kind(objects, "Pod").items()


def environment(objects: list[Object], name: str) -> dict[str, str]:
    """Return the environment of a workload's first container, including values from Secrets that the chart creates."""
    secrets = of_kind(objects, "Secret")
    found = {}
    for one in workloads(objects)[name]["spec"]["template"]["spec"]["containers"][0]["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = f"{name}-7c9d-x2x5v"
        elif "secretKeyRef" in source:
            data = secrets[source["secretKeyRef"]["name"]]["data"][source["secretKeyRef"]["key"]]
            found[one["name"]] = base64.b64decode(data).decode()
        else:
            found[one["name"]] = one["value"]
    return found
