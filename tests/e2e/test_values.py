"""A fleet whose inputs and outputs are not strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, wait_until
from tests.e2e.server import Server, launched
from tests.servers.redis import RedisServer

SCORES = "tests.targets.values:Scores"
PATIENT = "--broker-timeout-ms", "20000"


def outcome(server: Server, task: Answer) -> Any:
    def found() -> Any:
        result = server.get(str(task.header["location"])).json
        return result if result["status"] != "PENDING" else None

    return wait_until(found)


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
        asked = {"input": right["of"]}
        task = first.post("/v1/inference", asked, "Prefer: respond-async", "Idempotency-Key: k")
        result = outcome(second, task)
        assert result["output"] == right
        many = second.post("/v1/inference", {"inputs": [{"numbers": [n]} for n in range(200)]})
        assert [one["sum"] for one in many.json["outputs"]] == list(range(200))
        again = second.post("/v1/inference", asked, "Idempotency-Key: k")
        assert (again.json["output"], again.header["idempotency-replayed"]) == (right, "true")
        wait_until(lambda: second.get("/openapi.json").json["components"]["schemas"].get("JsonValue") is not None)
        for one in (second, first, worker):
            one.signal()
            one.check_end()
