"""`headway rollout` over a real server: a canary that fails is gone in seconds, another leader goes on, and operators decide."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.app.background import BackgroundService
from headway.config import Settings
from headway.config.models import ModelSettings
from headway.controller import controller
from headway.core import rollout as core_rollout
from headway.model import Role
from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import Server, run_cli
from tests.e2e.test_rollout import Port, asked
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
CLIENTS = 16
"""Clients of an open load: what one waits for keeps no other waiting."""


@contextmanager
def load(server: Server | Port, rate: float, model: str = "m") -> Iterator[Counter[int]]:
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
[models."m@3"]
target = "both.py:old"
[models."m@4"]
target = "both.py:new"
"""


ALIKE = {"m": {"3": "old", "4": "slow"}, "n": {"3": "old", "4": "old"}}
"""Functions of the versions of two models."""


def test_a_version_that_is_slower_is_rolled_back_and_one_of_equal_speed_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, and with blocks of evidence that last a fifth of the time."""
    monkeypatch.setattr(controller, "PUBLISH_EVERY", 0.1)
    monkeypatch.setattr(core_rollout, "LATENCIES_BLOCK", 0.4)
    (tmp_path / "both.py").write_text(TARGETS)
    models = tuple(
        ModelSettings(
            name, versions=tuple(ModelSettings(each, f"{tmp_path}/both.py:{of}") for each, of in given.items())
        )
        for name, given in ALIKE.items()
    )
    settings = Settings(port=0, admin_port=0, models=models, user_rate=0.0)
    with BackgroundService(settings, Role.SERVE, {}) as service:

        def ask(path: str, method: str = "GET") -> Any:
            request = urllib.request.Request(f"{service.admin_url}/internal/{path}", method=method)
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)

        def rollouts() -> list[dict[str, Any]]:
            told: list[dict[str, Any]] = ask("rollouts")["rollouts"]
            return told

        assert service.process.public is not None
        port = Port(service.process.public.port)
        wait_until(lambda: len(ask("snapshot")["capacities"]) == len(ALIKE))
        for model in ALIKE:
            ask(f"rollouts/start?model={model}&version=4&steps=50&every=3600&rollback_on=p95", "POST")
        with load(port, 20.0, "m"), load(port, 20.0, "n"):
            slower = wait_until(lambda: [one for one in rollouts() if one["state"] == "rolled back"])
            wait_until(lambda: rollouts()[1]["new"]["answered"] > slower[0]["new"]["answered"])
        slow, equal = rollouts()
        assert (slow["model"], slow["state"]) == ("m", "rolled back")
        assert slow["reason"].startswith("slower, at the step of 50 %: P95 ")
        assert (equal["model"], equal["state"]) == ("n", "running"), "with as much of evidence"


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
            wait_until(lambda: server.admin("/internal/rollouts").json["rollouts"][0]["state"] == "promoted")
        wait_until(lambda: versions() == {"4"})
        cli(server, tmp_path, "abort", "m")
        wait_until(lambda: versions() == {"3"})
        cli(server, tmp_path, "promote", "m")
        wait_until(lambda: versions() == {"4"})
        assert "no worker serves version '9' of 'm'; those that serve are 3, 4" in refused("start", "m", "9")
        assert "model 'n' has no worker" in refused("start", "n", "9")
        assert "steps '5,5' must be increasing percentages" in refused(
            "start", "m", "3", "--steps", "5,5", "--beside", "4"
        )
        assert "'x' is not a number" in refused("start", "m", "3", "--steps", "x")
        shown = run_cli(server, tmp_path, "rollout", "status").stdout
        assert "m@4 promoted: by an operator" in shown
