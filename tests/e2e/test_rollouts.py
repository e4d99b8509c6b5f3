"""Versions of a model side by side: each request is answered by its own, and `headway rollout` takes a canary back that fails."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.server import Server, run_cli
from tests.servers.redis import RedisServer

TARGETS = """
import pathlib, time

def old(inputs: list[str]) -> list[str]:
    time.sleep(0.01)
    return inputs

def new(inputs: list[str]) -> list[str]:
    if inputs != ["warm-up"] and pathlib.Path("bad").exists():
        raise ValueError("no good")
    return old(inputs)

def marked_3(inputs: list[str]) -> list[str]:
    return [f"3:{text}" for text in old(inputs)]

def marked_4(inputs: list[str]) -> list[str]:
    return [f"4:{text}" for text in new(inputs)]
"""
CLIENTS = 16
"""Clients of an open load: what one waits for keeps no other waiting."""


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


@contextmanager
def load(server: Server, rate: float) -> Iterator[Counter[int]]:
    """Requests at an even rate; their answers by status, as they come."""
    answers: Counter[int] = Counter()
    ended, begun = threading.Event(), time.monotonic()

    def run(number: int) -> None:
        due = begun + number / rate
        while not ended.wait(max(due - time.monotonic(), 0.0)):
            due += CLIENTS / rate
            status, _ = asked(server, {"input": f"{number} {due}", "model": "m"})
            answers[status] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for one in threads:
        one.start()
    try:
        yield answers
    finally:
        ended.set()
        for one in threads:
            one.join()


def cli(server: Server, folder: Path, *words: str) -> Any:
    done = run_cli(server, folder, "rollout", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_canary_that_fails_everything_is_gone_in_seconds_and_another_leader_goes_on(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    with RedisServer("valkey", tmp_path / "redis") as redis, contextlib.ExitStack() as stack:

        def launch(role: str, target: str, *flags: str) -> Server:
            server = Server(tmp_path, target, ["--broker", redis.url, *flags], role=role)
            stack.callback(server.kill)
            return server

        workers = [
            launch("worker", f"m=both.py:{name}", "--model-version", version, "--name", name)
            for version, name in (("3", "old"), ("4", "new"))
        ]
        first, gateway = launch("controller", "", "--name", "first"), launch("gateway", "")
        for server in (*workers, first, gateway):
            server.ready()
        first.logged("leads the fleet")
        second = launch("controller", "", "--name", "second")
        second.ready()
        wait_until(lambda: len({one["version"] for one in gateway.workers()}) == 2)
        [begun] = cli(gateway, tmp_path, "start", "m", "4", "--steps", "10,50", "--every", "1h")
        assert (begun["beside"], begun["percent"]) == ("3", 10.0)

        def status() -> Any:
            return second.admin("/internal/rollouts").json["rollouts"][0]

        first.logged("a rollout is at 10 %")
        wait_until(lambda: "at 10 %" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
        with load(gateway, 40.0) as answers:

            def more(count: int) -> Counter[int]:
                before = answers.copy()
                wait_until(lambda: answers.total() - before.total() >= count)
                return answers - before

            wait_until(lambda: status()["old"]["answered"] > 50 and status()["new"]["answered"] > 2)
            first.signal(signal.SIGKILL)
            second.logged("leads the fleet")
            counted = status()
            assert (counted["state"], counted["new"]["failed"]) == ("running", 0)
            wait_until(lambda: status()["old"]["answered"] > counted["old"]["answered"] > 50)
            (tmp_path / "bad").touch()
            second.logged("a rollout is rolled back")
            wait_until(lambda: "rolled back" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
            wait_until(lambda: more(50).keys() == {200})
        assert 0 < answers.total() - answers[200] < 50, "four a second"
        [told] = cli(gateway, tmp_path, "status")
        assert told["reason"].startswith("fails more, at the step of 10 %: ")
        assert "version 4 rolled back: fails more" in run_cli(gateway, tmp_path, "status").stdout
        assert {one["version"]: one["status"] for one in gateway.workers()}["4"] == "healthy", "it stays for a look"
        assert second.metrics().value("rollout_rolled_back", model="m", version="4") == 1.0
        assert second.metrics().value("rollout_share", model="m", version="4") == 0.0
        assert cli(gateway, tmp_path, "abort", "m")[0]["state"] == "aborted"
        wait_until(lambda: second.metrics().value("rollout_rolled_back", model="m", version="4") == 0.0)


TOGETHER = """
queue_timeout_ms = 30000
request_timeout_ms = 30000
[models.m]
version_weights = "{}"
[models."m@3"]
target = "both.py:marked_3"
[models."m@4"]
target = "both.py:marked_4"
"""


def test_two_versions_in_one_process_are_drawn_by_their_weights_which_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    config = tmp_path / "headway.toml"
    config.write_text(TOGETHER.format("3=1,4=1"))
    server = Server(tmp_path, "m")
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        server.ready()

        def versions(count: int, **body: str) -> set[tuple[int, str, str]]:
            return {told(*asked(server, {"input": f"{number}", **body})) for number in range(count)}

        both = {(200, "3", "3"), (200, "4", "4")}
        assert versions(60) == both, "each is drawn half of the time"
        assert versions(5, version="3") == {(200, "3", "3")}
        assert asked(server, {"input": "x", "version": "9"})[0] == 404
        assert [one["version"] for one in asked(server, {}, path="/v2/repository/index")[1]] == ["3", "4"]
        assert server.metrics().by("inputs_total", "version").keys() == {"3", "4"}
        config.write_text(TOGETHER.format("3=0,4=1"))
        server.signal(signal.SIGHUP)
        wait_until(lambda: versions(20) == {(200, "4", "4")})
        # As it ends, the worker of version 4 may leave before the other.
        server.expected |= {"versions of a model have a weight and no worker"}
        server.signal()
        server.check_end()
