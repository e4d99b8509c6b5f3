"""`headway rollout` over a real server: a canary that fails is gone in seconds, another leader goes on, and operators decide."""

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

import pytest

from tests.e2e.client import wait_until
from tests.e2e.server import Server, run_cli
from tests.e2e.test_rollout import asked
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.processes

TARGETS = """
import pathlib, time

def old(inputs: list[str]) -> list[str]:
    time.sleep(0.01)
    return inputs

def new(inputs: list[str]) -> list[str]:
    if inputs != ["warm-up"] and pathlib.Path("bad").exists():
        raise ValueError("no good")
    return old(inputs)

def slow(inputs: list[str]) -> list[str]:
    time.sleep(0.2)
    return inputs
"""
CLIENTS = 40
"""Clients of an open load: what one waits for keeps no other waiting."""


@contextmanager
def load(server: Server, rate: float, model: str = "m") -> Iterator[Counter[int]]:
    """Requests at an even rate; their answers by status, as they come."""
    answers: Counter[int] = Counter()
    ended, begun = threading.Event(), time.monotonic()

    def run(number: int) -> None:
        due = begun + number / rate
        while not ended.wait(max(due - time.monotonic(), 0.0)):
            due += CLIENTS / rate
            status, _ = asked(server, {"input": f"{number} {due}", "model": model})
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

        def up(role: str, target: str, *flags: str) -> Server:
            server = Server(tmp_path, target, ["--broker", redis.url, *flags], role=role)
            stack.callback(server.kill)
            server.ready()
            return server

        for version, name in (("3", "old"), ("4", "new")):
            up("worker", f"m=both.py:{name}", "--model-version", version, "--name", name)
        first, gateway = up("controller", "", "--name", "first"), up("gateway", "")
        first.logged("leads the fleet")
        second = up("controller", "", "--name", "second")
        wait_until(lambda: len({one["version"] for one in gateway.workers()}) == 2)
        [begun] = cli(gateway, tmp_path, "start", "m", "4", "--steps", "1,50", "--every", "1h")
        assert (begun["beside"], begun["percent"]) == ("3", 1.0)

        def rollout() -> Any:
            return cli(second, tmp_path, "status")[0]

        first.logged("a rollout is at 1 %")
        wait_until(lambda: "at 1 %" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
        with load(gateway, 200.0) as answers:

            def more(count: int) -> Counter[int]:
                before = answers.copy()
                wait_until(lambda: answers.total() - before.total() >= count)
                return answers - before

            wait_until(lambda: rollout()["old"]["answered"] > 200 and rollout()["new"]["answered"] > 2)
            first.signal(signal.SIGKILL)
            second.logged("leads the fleet")
            counted = rollout()
            assert (counted["state"], counted["new"]["failed"]) == ("running", 0)
            wait_until(lambda: rollout()["old"]["answered"] > counted["old"]["answered"] > 200)
            failing = time.monotonic()
            (tmp_path / "bad").touch()
            second.logged("a rollout is rolled back")
            took = time.monotonic() - failing
            wait_until(lambda: "rolled back" in gateway.admin("/internal/snapshot").json["capacities"][0]["rollout"])
            wait_until(lambda: more(200).keys() == {200})
        assert took < 15.0, "10 s, and what a busy machine takes for the load"
        assert 0 < answers.total() - answers[200] < 50
        [told] = cli(gateway, tmp_path, "status")
        assert told["reason"].startswith("fails more, at the step of 1 %: ")
        assert "version 4 rolled back: fails more" in run_cli(gateway, tmp_path, "status").stdout
        assert {one["version"]: one["status"] for one in gateway.workers()}["4"] == "healthy", "it stays for a look"
        assert second.metrics().value("rollout_rolled_back", model="m", version="4") == 1.0
        assert second.metrics().value("rollout_share", model="m", version="4") == 0.0
        assert cli(gateway, tmp_path, "abort", "m")[0]["state"] == "aborted"
        wait_until(lambda: second.metrics().value("rollout_rolled_back", model="m", version="4") == 0.0)


TOGETHER = """
[models."m@3"]
target = "both.py:old"
[models."m@4"]
target = "both.py:new"
"""


ALIKE = """
[models."m@3"]
target = "both.py:old"
[models."m@4"]
target = "both.py:slow"
[models."n@3"]
target = "both.py:old"
[models."n@4"]
target = "both.py:old"
"""


def test_a_version_that_is_slower_is_rolled_back_and_one_of_equal_speed_beside_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    (tmp_path / "headway.toml").write_text(ALIKE)
    server = Server(tmp_path, "m", ["n"])
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        server.ready()
        for model in ("m", "n"):
            cli(server, tmp_path, "start", model, "4", "--steps", "50", "--every", "1h", "--rollback-on", "p95")
        with load(server, 40.0), load(server, 40.0, "n"):
            server.logged("a rollout is rolled back")
            slower = cli(server, tmp_path, "status")[0]
            wait_until(lambda: cli(server, tmp_path, "status")[1]["new"]["answered"] > slower["new"]["answered"])
        slower, equal = cli(server, tmp_path, "status")
        assert slower["reason"].startswith("slower, at the step of 50 %: P95 ")
        assert equal["state"] == "running", "with as much of evidence"


def test_a_process_alone_moves_a_rollout_on_and_operators_promote_and_abort(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    (tmp_path / "headway.toml").write_text(TOGETHER)
    server = Server(tmp_path, "m")
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        server.ready()

        def versions() -> set[str]:
            answers = [asked(server, {"input": f"{number}"}) for number in range(20)]
            return {answer["metadata"]["model_version"] for _, answer in answers}

        def refused(*words: str) -> str:
            done = run_cli(server, tmp_path, "rollout", *words)
            assert done.returncode == 1
            return done.stderr

        assert versions() == {"3", "4"}
        cli(server, tmp_path, "start", "m", "4", "--steps", "40,100", "--every", "2s")
        assert "is under way" in refused("start", "m", "4")
        with load(server, 50.0):
            wait_until(lambda: cli(server, tmp_path, "status")[0]["state"] == "promoted")
        wait_until(lambda: versions() == {"4"})
        cli(server, tmp_path, "abort", "m")
        wait_until(lambda: versions() == {"3"})
        cli(server, tmp_path, "promote", "m")
        wait_until(lambda: versions() == {"4"})
        assert "no worker serves version '9' of 'm'; those that serve are 3, 4" in refused("start", "m", "9")
        assert "model 'n' has no worker" in refused("start", "n", "9")
        assert "steps '5,5' are not percentages that grow" in refused(
            "start", "m", "3", "--steps", "5,5", "--beside", "4"
        )
        assert "'x' is not a number" in refused("start", "m", "3", "--steps", "x")
        shown = run_cli(server, tmp_path, "rollout", "status").stdout
        assert "m@4 promoted: by an operator" in shown
