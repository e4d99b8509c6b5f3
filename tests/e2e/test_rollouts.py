"""Versions of a model side by side: each answers its requests, and `headway rollout` rolls back a failing canary."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, wait_until
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
"""Clients of an open load. None waits for another's answer."""


def told(answer: Answer) -> tuple[int, str, str]:
    """Return an answer's status, the version that ran, and the version that the answer gives."""
    found = answer.json
    ran = str(found.get("output", "")).partition(":")[0]
    return answer.status, ran, str(found.get("metadata", {}).get("model_version"))


@contextmanager
def load(server: Server, rate: float) -> Iterator[Counter[int]]:
    """Send requests at a steady rate. Yields a live count of answers by status."""
    answers: Counter[int] = Counter()
    ended, begun = threading.Event(), time.monotonic()

    def run(number: int) -> None:
        due = begun + number / rate
        while not ended.wait(max(due - time.monotonic(), 0.0)):
            due += CLIENTS / rate
            answers[server.post("/v1/inference", {"input": f"{number} {due}", "model": "m"}).status] += 1

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


def test_a_canary_that_fails_everything_is_gone_in_seconds(tmp_path: Path) -> None:
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
        controller, gateway = launch("controller", ""), launch("gateway", "")
        for server in (*workers, controller, gateway):
            server.ready()
        controller.logged("leads the fleet")
        wait_until(lambda: len({one["version"] for one in gateway.workers()}) == 2)
        [begun] = cli(gateway, tmp_path, "start", "m", "4", "--steps", "50,100", "--every", "1h")
        assert (begun["beside"], begun["percent"]) == ("3", 50.0)

        def status() -> Any:
            return controller.admin("/internal/rollouts").json["rollouts"][0]

        controller.logged("a rollout is at 50 %")
        wait_until(lambda: "at 50 %" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
        with load(gateway, 60.0) as answers:

            def more(count: int) -> Counter[int]:
                before = answers.copy()
                wait_until(lambda: answers.total() - before.total() >= count)
                return answers - before

            wait_until(lambda: min(status()[name]["answered"] for name in ("old", "new")) > 20)
            assert (status()["state"], status()["new"]["failed"]) == ("running", 0)
            (tmp_path / "bad").touch()
            controller.logged("a rollout is rolled back")
            wait_until(lambda: "rolled back" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
            wait_until(lambda: more(50).keys() == {200})
        assert answers.total() > answers[200]
        [told] = cli(gateway, tmp_path, "status")
        assert told["reason"].startswith("fails more, at the step of 50 %: ")
        assert "version 4 rolled back: fails more" in run_cli(gateway, tmp_path, "status").stdout
        assert {one["version"]: one["status"] for one in gateway.workers()}["4"] == "healthy", "it stays for a look"
        assert controller.metrics().value("rollout_rolled_back", model="m", version="4") == 1.0
        assert controller.metrics().value("rollout_share", model="m", version="4") == 0.0
        assert cli(gateway, tmp_path, "abort", "m")[0]["state"] == "aborted"
        wait_until(lambda: controller.metrics().value("rollout_rolled_back", model="m", version="4") == 0.0)


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
            return {told(server.post("/v1/inference", {"input": f"{number}", **body})) for number in range(count)}

        both = {(200, "3", "3"), (200, "4", "4")}
        assert versions(60) == both, "each is drawn half of the time"
        assert versions(5, version="3") == {(200, "3", "3")}
        assert server.post("/v1/inference", {"input": "x", "version": "9"}).status == 404
        assert [one["version"] for one in server.post("/v2/repository/index", {}).json] == ["3", "4"]
        assert server.metrics().by("inputs_total", "version").keys() == {"3", "4"}
        config.write_text(TOGETHER.format("3=0,4=1"))
        server.signal(signal.SIGHUP)
        wait_until(lambda: versions(20) == {(200, "4", "4")})
        # During shutdown, version 4's worker may leave before the other.
        server.expected |= {"versions of a model have a weight but no worker"}
        server.signal()
        server.check_end()
