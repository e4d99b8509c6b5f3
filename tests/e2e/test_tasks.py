"""A task of a running service, from its request to its being forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import serving

ASYNC = "Prefer: respond-async"
COUNTED: dict[str, Any] = {"target": "tests.targets.counted:Counted", "lawful": False}
PATIENT = "--request-timeout-ms", "30000", "--gpu-timeout-ms", "30000", "--task-timeout-ms", "30000"


def ask(connection: Connection, text: str, *fields: str) -> Answer:
    connection.send(request(json.dumps({"input": text}).encode(), "/v1/inference", *fields))
    return connection.answer()


def task(connection: Connection, text: str, *fields: str) -> str:
    """Path of a new task's outcome."""
    answer = ask(connection, text, ASYNC, *fields)
    assert answer.status == 202, answer.body
    assert answer.json == {"task_id": answer.header["x-request-id"], "status": "PENDING"}
    assert answer.header["location"] == f"/v1/result/{answer.json['task_id']}"
    return str(answer.header["location"])


def poll(connection: Connection, path: str, method: str = "GET") -> Answer:
    connection.send(request(b"", path, method=method))
    return connection.answer()


def test_from_the_request_to_its_being_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, **COUNTED) as server:
        gate, line, watcher = Gate(tmp_path), server.connect(), server.connect()
        path = task(line, gate.text())
        gate.reached()
        assert poll(line, path).json["status"] == "PENDING"
        watcher.send(request(b"", f"{path}?wait=30", method="GET"))
        wait_until(lambda: server.health()["pending"] == 2)
        gate.open()
        done = watcher.answer().json
        metadata = {"tokens_used": None, "model_version": "1"}
        told = {"task_id": path.rpartition("/")[2], "status": "SUCCESS", "output": gate.text().upper()}
        assert done == {**told, "metadata": metadata}
        assert poll(line, path).json == done
        assert poll(line, path, "DELETE").status == 204
        assert poll(line, path).error == "NOT_FOUND"
        failed = poll(line, task(line, "exception") + "?wait=30").json
        assert (failed["status"], failed["error"]["error"]) == ("FAILED", "REJECTED_BY_MODEL")
        outcomes = server.metrics().by("requests_total", "outcome")
        assert outcomes == {"ok": 1, "rejected_by_model": 1}, "who only waits for a task is no request"
