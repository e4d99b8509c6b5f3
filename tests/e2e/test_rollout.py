"""A new version beside the old one, over a real server and under load: no request fails, and each is answered by its version."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import wait_until
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

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
WEIGHTS = '[models.m]\nversion_weights = "{}"\ncache = true\n'


class Load:
    """Clients that ask on until they are told to end; every second one asks what others ask, too."""

    def __init__(self, ask: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]], clients: int = 4) -> None:
        self._ask = ask
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.answers: Counter[tuple[int, str, str]] = Counter()
        """Answers by status, version that ran, and version that the answer tells."""
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            text = f"common {count % 5}" if number % 2 else f"{number} {count}"
            status, answer = self._ask({"input": text})
            ran = str(answer.get("output", "")).partition(":")[0]
            with self._lock:
                self.answers[status, ran, str(answer.get("metadata", {}).get("model_version"))] += 1

    def more(self, count: int) -> Counter[tuple[int, str, str]]:
        """Wait for so many further answers; what they were."""
        with self._lock:
            before = self.answers.copy()
        wait_until(lambda: (self.answers - before).total() >= count)
        with self._lock:
            return self.answers - before

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


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


def asked(server: Server, body: dict[str, Any], path: str = "/v1/inference") -> tuple[int, Any]:
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


def test_a_rollout_under_load_fails_no_request_and_answers_by_the_versions_that_the_weights_say(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    config = tmp_path / "gateway.toml"
    config.write_text(WEIGHTS.format("3=1"))
    with RedisServer("valkey", tmp_path / "redis") as redis, contextlib.ExitStack() as stack:

        def up(role: str, target: str, *flags: str) -> Server:
            server = Server(
                tmp_path, target, ["--broker", redis.url, "--broker-timeout-ms", "20000", *flags], role=role
            )
            stack.callback(server.kill)
            server.ready()
            return server

        old = up("worker", "m=both.py:old", "--model-version", "3", "--name", "old")
        gateway = up("gateway", "", "--config", str(config))

        def ask(body: dict[str, Any], key: str = "") -> tuple[int, dict[str, Any]]:
            address = f"http://127.0.0.1:{gateway.port}/v1/inference"
            fields = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
            request = urllib.request.Request(address, json.dumps(body).encode(), fields)
            try:
                with urllib.request.urlopen(request, timeout=60.0) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as refused:
                return refused.code, json.load(refused)

        def weigh(weights: str) -> None:
            config.write_text(WEIGHTS.format(weights))
            gateway.signal(signal.SIGHUP)

        def versions(body: dict[str, Any]) -> str:
            status, answer = ask(body)
            return answer["metadata"]["model_version"] if status == 200 else f"{status} {answer['message']}"

        keyed = ask({"input": "keyed"}, "k")
        load = Load(ask)
        stack.callback(load.end)
        assert set(load.more(30)) == {(200, "3", "3")}
        up("worker", "m=both.py:new", "--model-version", "4", "--name", "new")
        wait_until(lambda: versions({"input": "x", "version": "4"}) == "4")
        assert versions({"input": "x", "version": "3"}) == "3", "the cache keeps each version's answer to itself"
        assert versions({"input": "x", "version": "4"}) == "4"
        assert versions({"input": "x", "version": "9"}).endswith("no version '9' that takes requests; there is: 3, 4")
        weigh("3=50,4=50")
        wait_until(lambda: set(load.more(50)) == {(200, "3", "3"), (200, "4", "4")})
        weigh("3=0,4=100")
        wait_until(lambda: set(load.more(20)) == {(200, "4", "4")})
        assert versions({"input": "x", "version": "3"}).startswith("404 ")
        again = ask({"input": "keyed"}, "k")
        assert (again[0], again[1]["output"]) == (keyed[0], keyed[1]["output"]) == (200, "3:keyed"), (
            "a key is a model's"
        )
        old.signal()
        old.check_end()
        assert set(load.more(50)) == {(200, "4", "4")}
        load.end()
        assert {status for status, _, _ in load.answers} == {200}
        assert all(ran == told for _, ran, told in load.answers)
        depths = gateway.health()["queues"]
        assert {queue["version"] for queue in depths} == {"", "3", "4"}
        assert not sum(queue["depth"] for queue in depths)
