"""Services whose inputs and outputs are no texts: JSON values, in one process and in a fleet, and arrays."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, request, wait_until
from tests.e2e.server import Server, launched, run_cli, serving
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


def test_dead_letters_and_the_ledger_tell_shapes_and_a_replay_runs_the_same_numbers(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    target = f"tests.targets.arrays:Sums({str(obstacle)!r})"
    with serving(
        tmp_path, "--ledger", "sqlite:///ledger.db", "--ledger-content", lawful=False, target=target
    ) as server:
        server.expected = {"batch failed"}
        wait_until(lambda: "TensorInput" in server.get("/openapi.json").json["components"]["schemas"])
        rows = [[0.125, 2, 3, 4], [-8191.5, 0, 0, 0]]
        bad = ask(server, rows)
        assert (bad.status, bad.json["error"]) == (422, "REJECTED_BY_MODEL")
        [letter] = server.letters()
        assert "8191" not in json.dumps(letter)
        whole = server.admin(f"/internal/dlq/{letter['id']}").json
        assert (whole["tensors"], whole["input"]) == ("`INPUT`, FP32 of shape [2, 4]", rows)
        obstacle.unlink()
        again = server.admin(f"/internal/dlq/{letter['id']}/replay", "POST")
        assert (again.status, again.json["output"]) == (200, [[9.125], [-8191.5]])
        status = server.admin(f"/internal/requests/{bad.json['request_id']}").json
        assert status["status"] == "failed"
        nan = ask(server, [99, 0, 0, 0])
        assert (nan.status, nan.json["error"]) == (502, "BACKEND_ERROR")
        assert "NaN" in nan.json["message"]
        assert "8191" not in server.log_text()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        kept = database.execute("SELECT input, output FROM headway_requests").fetchall()
    assert ("`INPUT`, FP32 of shape [2, 4]", "`OUTPUT`, FP32 of shape [2, 1]") in [
        tuple(str(one).removeprefix("tensors: ") for one in row) for row in kept
    ]
    assert "8191" not in str(kept)
