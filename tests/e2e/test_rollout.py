"""A new version beside the old one, over a real server and under load: no request fails, and each is answered by its version."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.client import wait_until
from tests.e2e.server import Server

pytestmark = pytest.mark.processes

TARGETS = """
import time

def _slow(version, inputs):
    time.sleep(0.02)
    return [f"{version}:{text}" for text in inputs]

def old(inputs: list[str]) -> list[str]:
    return _slow("3", inputs)

def new(inputs: list[str]) -> list[str]:
    return _slow("4", inputs)
"""


TOGETHER = """
queue_timeout_ms = 30000
request_timeout_ms = 30000
[models.m]
version_weights = "{}"
[models."m@3"]
target = "both.py:old"
[models."m@4"]
target = "both.py:new"
max_batch_size = 4
"""
MORTAL = """
import os, pathlib
kept_alive, new = new, lambda inputs: os._exit(1) if pathlib.Path("dead").exists() else kept_alive(inputs)
"""


def test_two_versions_in_one_process_are_as_two_of_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS + MORTAL)
    config = tmp_path / "headway.toml"
    config.write_text(TOGETHER.format("3=1,4=1"))
    with contextlib.ExitStack() as stack:
        server = Server(tmp_path, "m")
        stack.callback(server.kill)
        server.ready()
        ask = partial(asked, server)

        def versions(count: int, **body: str) -> Counter[tuple[int, str, str]]:
            return Counter(told(*ask({"input": f"{number}", **body})) for number in range(count))

        both = {(200, "3", "3"), (200, "4", "4")}
        assert set(versions(60)) == both, "each is drawn half of the time"
        assert set(versions(5, version="3")) == {(200, "3", "3")}
        assert set(versions(5, version="4")) == {(200, "4", "4")}
        assert ask({"input": "x", "version": "9"})[0] == 404
        assert [one["version"] for one in ask({}, path="/v2/repository/index")[1]] == ["3", "4"]
        assert [worker["version"] for worker in server.workers()] == ["3", "4"]
        assert server.metrics().by("inputs_total", "version").keys() == {"3", "4"}

        config.write_text(TOGETHER.format("3=0,4=1"))
        server.signal(signal.SIGHUP)
        wait_until(lambda: set(versions(20)) == {(200, "4", "4")})
        config.write_text(TOGETHER.format("3=1,4=1"))
        server.signal(signal.SIGHUP)
        wait_until(lambda: set(versions(20)) == both)

        (tmp_path / "dead").touch()
        wait_until(lambda: set(versions(30)) == {(200, "3", "3")})
        assert ask({"input": "pinned", "version": "4"})[0] == 503, "nobody else may answer it"
        (tmp_path / "dead").unlink()
        wait_until(lambda: set(versions(20)) == both)
        assert not sum(queue["depth"] for queue in server.health()["queues"])
        server.signal()
        assert server.process.wait(60) == 0


class Port(NamedTuple):
    """Public port of a service in this process."""

    port: int


def asked(server: Server | Port, body: dict[str, Any], path: str = "/v1/inference") -> tuple[int, Any]:
    """Status and JSON of an answer."""
    address = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def told(status: int, answer: dict[str, Any]) -> tuple[int, str, str]:
    """Status, version that ran, and version that an answer tells."""
    return status, str(answer.get("output", "")).partition(":")[0], str(answer.get("metadata", {}).get("model_version"))
