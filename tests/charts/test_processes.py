"""Real processes with the settings, secrets and rights of the chart, around a Redis with its settings: the controller scales."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from bench.stand.stand import free_port
from tests.charts.rendering import NAME, NAMESPACE, environment, of_kind, rendered, workloads
from tests.charts.test_around import chart_redis
from tests.e2e.client import PATIENCE
from tests.servers.kubernetes import account, serving
from tests.servers.ports import LOOPBACK

ROOT = Path(__file__).parents[2]
CONTROLLER, WORKER = f"{NAME}-controller", f"{NAME}-worker-greeter"
VALUES = {
    "models": {
        "greeter": {
            "target": f"{ROOT / 'examples' / 'emulated_gpu.py'}:EmulatedGPU",
            "worker": {"gpuResource": "", "slots": 2, "scaling": {"min": 5, "max": 8}},
        }
    },
    "scaling": {"by": "controller"},
}


@contextmanager
def process(folder: Path, name: str, file: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Process of a workload, until it has been told to end and has ended well."""
    objects = rendered(json.dumps(VALUES))
    settings = folder / file
    settings.write_text(of_kind(objects, "ConfigMap")[NAME]["data"][file])
    [container] = workloads(objects)[name]["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "tests.charts.in_a_pod", str(folder / "account"), *container["args"]]
    given = {**environment(objects, name), "HEADWAY_CONFIG": str(settings), "HEADWAY_ADMIN_HOST": LOOPBACK, **environ}
    with (folder / f"{name}.log").open("w") as log:
        running = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **given}, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield
        running.terminate()
        assert running.wait(PATIENCE) == 0, (folder / f"{name}.log").read_text()
    finally:
        running.kill()
        running.wait(PATIENCE)


def test_the_controller_scales_the_workers_of_the_chart(tmp_path: Path) -> None:
    objects = rendered(json.dumps(VALUES))
    admin = free_port()
    with ExitStack() as stack:
        server = stack.enter_context(chart_redis(tmp_path / "redis", objects))
        cluster = stack.enter_context(serving(tmp_path))
        [role] = of_kind(objects, "Role").values()
        cluster.users["first"] = CONTROLLER, role["rules"]
        cluster.workload("deployments", WORKER, 1, NAMESPACE)
        account(tmp_path / "account", cluster)
        host, _, port = cluster.url.removeprefix("https://").partition(":")
        where = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT_HTTPS": port, "HEADWAY_BROKER": server.url}
        own = {**where, "HEADWAY_ADMIN_PORT": str(admin)}
        stack.enter_context(process(tmp_path, CONTROLLER, "controller.toml", own))
        free = {**where, "HEADWAY_ADMIN_PORT": "0"}
        stack.enter_context(process(tmp_path, WORKER, "worker-greeter.toml", free))
        cluster.until(lambda: cluster.replicas("deployments", WORKER, NAMESPACE) == 3, PATIENCE)
        token = environment(objects, CONTROLLER)["HEADWAY_ADMIN_TOKEN"]
        asked = Request(f"http://{LOOPBACK}:{admin}/internal/scaling", headers={"Authorization": f"Bearer {token}"})
        with urlopen(asked, timeout=PATIENCE) as answer:
            told = json.load(answer)
        assert (told["driver"], told["desired"], told["trouble"]) == ("kubernetes", 5, "")
    assert {one.token for one in cluster.asked} == {"first"}
