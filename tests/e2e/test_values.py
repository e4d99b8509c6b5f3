"""Services whose inputs and outputs are no texts: JSON values and octets, in one process and in a fleet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, request, wait_until
from tests.e2e.server import ROOT, Server, launched, run_cli, serving
from tests.servers.redis import RedisServer

SCORES = "tests.targets.values:Scores"
PATIENT = "--broker-timeout-ms", "20000"


def ask(server: Server, input: Any, *fields: str) -> Answer:
    connection = server.connect()
    connection.send(request(json.dumps({"input": input}).encode(), "/v1/inference", *fields))
    return connection.answer()


def outcome(server: Server, task: Answer) -> Any:
    def found() -> Any:
        result = server.get(str(task.header["location"])).json
        return result if result["status"] != "PENDING" else None

    return wait_until(found)


def test_json_values_are_asked_kept_replayed_and_checked(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    with serving(tmp_path, "--cache", lawful=False, target=SCORES) as server:
        server.expected = {"batch failed"}
        right = {"sum": 6, "of": {"numbers": [1, 2, 3]}}
        for cached in (None, "hit"):
            answer = ask(server, {"numbers": [1, 2, 3]})
            assert (answer.status, answer.json["output"]) == (200, right)
            assert answer.header["x-headway-cache"] == cached
        assert server.workers()[0]["takes"] == "json"
        task = ask(server, {"numbers": []}, "Prefer: respond-async")
        result = outcome(server, task)
        assert (result["status"], result["output"]["sum"]) == ("SUCCESS", 0)

        refused = ask(server, [1])
        assert (refused.status, refused.json["error"]) == (422, "REJECTED_BY_MODEL")
        assert refused.json["message"] == "this model takes an object as an input, and this one is of type array"
        nan = ask(server, {"nan": True})
        assert (nan.status, nan.json["error"]) == (502, "BACKEND_ERROR")
        assert "NaN" in nan.json["message"]

        bad = ask(server, {"unless": str(obstacle)})
        assert (bad.status, bad.json["error"]) == (422, "REJECTED_BY_MODEL")
        shown = json.loads(run_cli(server, tmp_path, "dlq", "show", str(server.letters()[0]["id"])).stdout)
        assert shown["input"] == {"unless": str(obstacle)}
        obstacle.unlink()
        replayed = server.admin(f"/internal/dlq/{shown['id']}/replay", "POST")
        assert (replayed.status, replayed.json["output"]["sum"]) == (200, 0)

        assert server.get("/openapi.json").json["components"]["schemas"].get("JsonValue") is not None


def test_gateways_of_a_fleet_learn_the_kinds_from_the_workers_and_show_what_is_kept(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        launched(tmp_path, "--broker", redis.url, *PATIENT, target=SCORES, role="worker") as worker,
        launched(tmp_path, "--broker", redis.url, *PATIENT, role="gateway") as first,
        launched(tmp_path, "--broker", redis.url, *PATIENT, role="gateway") as second,
    ):
        for one in (worker, first, second):
            one.ready()
        wait_until(lambda: first.get("/readyz").status == second.get("/readyz").status == 200)
        right = {"sum": 3, "of": {"numbers": [1, 2], "é": None}}
        task = ask(first, right["of"], "Prefer: respond-async", "Idempotency-Key: k")
        result = outcome(second, task)
        assert result["output"] == right
        many = second.connect()
        many.send(request(json.dumps({"inputs": [{"numbers": [n]} for n in range(200)]}).encode()))
        assert [one["sum"] for one in many.answer().json["outputs"]] == list(range(200))
        again = ask(second, right["of"], "Idempotency-Key: k")
        assert (again.json["output"], again.header["idempotency-replayed"]) == (right, "true")
        wait_until(lambda: second.get("/openapi.json").json["components"]["schemas"].get("JsonValue") is not None)
        for one in (second, first, worker):
            one.signal()
            one.check_end()


def test_a_target_without_an_example_starts_and_is_restarted_when_its_breaker_opens(tmp_path: Path) -> None:
    with serving(tmp_path, target="tests.targets.values:NoExample", lawful=False) as server:
        server.expected = {"batch failed", "starts without a warm-up batch, as no input is known to fit"}
        server.logged("starts without a warm-up batch, as no input is known to fit")
        assert ask(server, {"a": 1}).json["output"] == {"a": 1}
        first = server.workers()[0]["pid"]
        for number in range(5):
            assert ask(server, "kill", f"X-Request-Timeout-Ms: {20_000 + number}").status == 422
            if server.workers()[0]["pid"] != first:
                break
        wait_until(lambda: server.workers()[0]["status"] == "healthy")
        assert ask(server, [2]).json["output"] == [2]


def check(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "headway", "check", *arguments, "--max-batch-size", "2", "--repeats", "1"]
    return subprocess.run(
        program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )


def test_check_sends_the_example_or_json_that_is_given(tmp_path: Path) -> None:
    good = check(tmp_path, SCORES)
    assert good.returncode == 0, good.stdout + good.stderr
    given = check(tmp_path, "tests.targets.values:NoExample", "--input", '{"a": 1}', "--input", "[2]")
    assert given.returncode == 0, given.stdout + given.stderr
    assert "no warm-up batch, as it has no example" in given.stdout
    none = check(tmp_path, "tests.targets.values:NoExample")
    assert none.returncode == 3
    assert "takes JSON values and has no example" in none.stderr
    assert "--input '{\"a\": 1}'" in none.stderr
