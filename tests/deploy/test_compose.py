"""deploy/compose.yaml: Docker Compose can read it, its commands are ours, and its Redis suits Headway."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headway.config import Settings
from tests.clients.environments import run_tool
from tests.deploy.containerfile import ROOT, stages
from tests.docs.parsing import parse_headway
from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import launched
from tests.servers.ports import Port
from tests.servers.reaper import the_reaper
from tests.servers.redis import lacking

FILE = ROOT / "deploy" / "compose.yaml"
PASSWORD = "of-this-test"
pytestmark = pytest.mark.processes


def config(variables: Path) -> subprocess.CompletedProcess[str]:
    """Return Docker Compose's reading of the file, with variables from another file."""
    return run_tool("deploy", "docker-compose", f"--env-file={variables}", f"--file={FILE}", "config", "--format=json")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variables = tmp_path_factory.mktemp("compose") / "variables"
    variables.write_text(f"REDIS_PASSWORD={PASSWORD}\n")
    read = config(variables)
    assert (read.returncode, read.stderr) == (0, "")
    found: dict[str, Any] = json.loads(read.stdout)["services"]
    return found


def test_compose_asks_for_the_password_of_redis(tmp_path: Path) -> None:
    (tmp_path / "none").touch()
    assert "REDIS_PASSWORD is missing a value: the password of Redis" in config(tmp_path / "none").stderr


def test_every_process_of_ours_is_one_that_the_command_line_knows(
    services: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = {name: one for name, one in services.items() if "headway" in one["image"]}
    assert set(ours) == {"gateway-1", "gateway-2", "worker", "controller"}
    lame_duck = float(stages()[-1].environment["HEADWAY_LAME_DUCK_MS"])
    for one in ours.values():
        parse_headway(one["command"])
        minutes, seconds = re.fullmatch(r"(\d+)m(\d+)s", one["stop_grace_period"]).groups()  # type: ignore[union-attr]
        assert 60 * int(minutes) + int(seconds) > Settings().drain_s + lame_duck / 1000


def test_no_container_may_do_more_than_it_must_or_has_a_secret_on_its_command_line(services: dict[str, Any]) -> None:
    for name, one in services.items():
        limits = one["read_only"], one["cap_drop"], one["security_opt"], one.get("privileged", False)
        assert limits == (True, ["ALL"], ["no-new-privileges:true"], False), name
        words = [*(one["command"] or ()), *(one["entrypoint"] or ()), *one.get("healthcheck", {}).get("test", ())]
        assert not [word for word in words if PASSWORD in word], name
    assert [name for name, one in services.items() if one.get("ports")] == ["proxy"]


def test_its_proxy_finds_the_gateways_where_they_are(services: dict[str, Any]) -> None:
    text = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
    for name in ("gateway-1", "gateway-2"):
        [network] = services[name]["networks"].values()
        assert f"server {name} {network['ipv4_address']}:8000\n" in text
        assert f"server {name} {network['ipv4_address']}:8081 " in text
        assert services[name]["environment"]["HEADWAY_GRPC_PORT"] == "8081"


def test_its_redis_will_do_and_is_healthy_as_the_file_asks(services: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        lacking("redis-server is not on the path")
    held = Port()
    port = held.number
    redis = services["redis"]
    command = [word.replace("$$", "$") for word in redis["command"]]
    environ = {**redis["environment"], "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [*command, "--port", str(port), "--bind", "127.0.0.1"], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL
    )
    the_reaper().watch(process.pid)
    try:
        _, *check = redis["healthcheck"]["test"]
        check[1:1] = ["-p", str(port)]
        wait_until(lambda: subprocess.run(check, env=environ, capture_output=True, text=True).stdout == "PONG\n")
        url = services["worker"]["environment"]["HEADWAY_BROKER"].replace("redis:6379", f"127.0.0.1:{port}")
        with launched(tmp_path, "--broker", url) as server:
            server.ready()
            server.ask("through it").output()
            server.signal()
            server.check_end()
    finally:
        process.terminate()
        process.wait(PATIENCE)
        the_reaper().forget(process.pid)
        held.close()
