"""Identical requests of a running service: one run for a thousand at once, and none for a thousand later."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.e2e.client import Answer, Gate, request, wait_until
from tests.e2e.server import Server, serving
from tests.targets.counted import runs_in

MANY = 1000


def ask_all(server: Server, text: str, gate: Gate | None = None) -> list[Answer]:
    """The answers to as many requests at once; the gate is opened when all of them wait."""
    body = request(json.dumps({"input": text}).encode())
    connections = [server.connect() for _ in range(MANY)]
    for connection in connections:
        connection.send(body)
    if gate is not None:
        gate.reached()
        wait_until(lambda: server.health()["pending"] == MANY)
        gate.open()
    answers = []
    for connection in connections:
        answers.append(connection.answer())
        connection.close()
    return answers


def test_a_thousand_at_once_run_once_and_a_thousand_later_not_at_all(tmp_path: Path) -> None:
    with serving(tmp_path, "--cache", "--collapse", target="tests.targets.counted:Counted", lawful=False) as server:
        gate = Gate(tmp_path)
        at_once = ask_all(server, gate.text(), gate)
        assert {answer.status for answer in at_once} == {200}
        assert {answer.json["output"] for answer in at_once} == {gate.text().upper()}
        assert len({answer.json["request_id"] for answer in at_once}) == MANY
        marks = Counter(answer.header["x-headway-cache"] for answer in at_once)
        assert marks.pop(None) == 1
        assert marks["collapsed"] + marks["hit"] == MANY - 1, "the last ones may be on their way to the queue yet"
        assert marks["collapsed"] > MANY / 2
        later = ask_all(server, gate.text())
        assert {answer.json["output"] for answer in later} == {gate.text().upper()}
        assert Counter(answer.header["x-headway-cache"] for answer in later) == {"hit": MANY}
        assert runs_in(tmp_path) == [gate.text()]
        metrics = server.metrics()
        assert metrics.value("requests_total", outcome="ok") == 2 * MANY
