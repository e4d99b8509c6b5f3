"""Tasks of a running service: handed over, waited for, cancelled, expired, and kept apart from its shutdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import Server, launched, serving
from tests.targets.counted import runs_in

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


def test_a_slow_request_is_handed_over_under_its_id(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, **COUNTED) as server:
        gate, line = Gate(tmp_path), server.connect()
        quick = ask(line, "quick", f"{ASYNC}, wait=30")
        assert (quick.status, quick.json["output"]) == (200, "QUICK")
        id = "0189f7a4-1111-7222-8333-444455556666"
        slow = ask(line, gate.text(), f"{ASYNC}, wait=1", f"X-Request-Id: {id}")
        assert (slow.status, slow.json["task_id"]) == (202, f"req_{id}")
        assert slow.header["preference-applied"] == "respond-async, wait=1"
        gate.reached()
        gate.open()
        done = poll(line, f"{slow.header['location']}?wait=30")
        assert done.json["output"] == gate.text().upper()
        assert runs_in(tmp_path) == ["quick", gate.text()]


def test_what_is_cancelled_or_left_never_runs(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, "--workers", "1", **COUNTED) as server:
        gate, line = Gate(tmp_path), server.connect()
        running = task(line, gate.text())
        gate.reached()
        cancelled = task(line, "cancelled")
        kept = task(line, "kept")
        leaver = server.connect()
        leaver.send(request(b'{"input": "left"}', "/v1/inference", f"{ASYNC}, wait=60"))
        server.queued(3)
        assert poll(line, cancelled, "DELETE").status == 204
        leaver.close()
        server.queued(1)
        gate.open()
        assert poll(line, f"{kept}?wait=30").json["output"] == "KEPT"
        assert poll(line, running).json["status"] == "SUCCESS"
        assert poll(line, cancelled).error == "NOT_FOUND"
        assert runs_in(tmp_path) == [gate.text(), "kept"]


def test_a_task_has_a_deadline_and_its_outcome_an_end(tmp_path: Path) -> None:
    flags = *PATIENT, "--task-timeout-ms", "5000", "--queue-timeout-ms", "4000", "--result-ttl-s", "5"
    with serving(tmp_path, *flags, **COUNTED) as server:
        gate, line = Gate(tmp_path), server.connect()
        line.send(request(json.dumps({"input": gate.text()}).encode()))
        gate.reached()
        other = server.connect()
        late = task(other, "late")
        error = poll(other, f"{late}?wait=60").json["error"]
        assert (error["error"], error["status"]) == ("DEADLINE_EXCEEDED", 504)
        wait_until(lambda: poll(other, late).status == 404)
        gate.open()
        assert line.answer().status == 200
        assert runs_in(tmp_path) == [gate.text()]


def test_a_shutdown_ends_waits_and_not_tasks(tmp_path: Path) -> None:
    with launched(tmp_path, *PATIENT, "--drain-timeout-ms", "30000", target=COUNTED["target"]) as server:
        server.ready()
        gate, line = Gate(tmp_path), server.connect()
        path = task(line, gate.text())
        gate.reached()
        line.send(request(b"", f"{path}?wait=60", method="GET"))
        wait_until(lambda: server.health()["pending"] == 2)
        server.signal()
        answer = line.answer()
        assert (answer.json["status"], answer.header["connection"]) == ("PENDING", "close")
        assert server.health()["pending"] == 1, "the task is finished, whoever may still ask for it"
        gate.open()
        server.check_end()


def test_only_who_may_finds_a_task_and_a_refusal_is_no_task(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-queue", "1", *PATIENT, **COUNTED) as server:
        gate, line = Gate(tmp_path), server.connect()
        task(line, gate.text())
        gate.reached()
        refused: Answer | None = None

        def full(server: Server = server) -> bool:
            nonlocal refused
            refused = ask(line, "more", ASYNC)
            return refused.status != 202

        wait_until(full)
        assert refused is not None and refused.error in {"SERVICE_OVERLOADED", "SHED"}
        assert int(refused.header["retry-after"]) >= 1
        assert poll(line, f"/v1/result/{refused.header['x-request-id']}").error == "NOT_FOUND"
        gate.open()
