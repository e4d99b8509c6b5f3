"""Two gateways around one Redis: what one of them took in, the other tells of, repeats, and does not run again."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import Server, launched
from tests.servers.redis import RedisServer
from tests.targets.counted import runs_in

PATIENT = "--broker-timeout-ms", "20000", "--cache", "--collapse"
LEASE = ("--lease-ms", "60000")
"""Longer than any machine stands still: what runs runs once."""


def send(connection: Connection, text: str, *fields: str) -> None:
    connection.send(request(json.dumps({"input": text}).encode(), "/v1/inference", *fields))


def ask(connection: Connection, text: str, *fields: str) -> Answer:
    send(connection, text, *fields)
    return connection.answer()


def poll(connection: Connection, path: str, method: str = "GET") -> Answer:
    connection.send(request(b"", path, method=method))
    return connection.answer()


def test_what_one_gateway_took_in_the_other_tells_repeats_and_does_not_run_again(tmp_path: Path) -> None:
    target = "tests.targets.counted:Counted"
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        launched(tmp_path, "--broker", redis.url, *PATIENT, *LEASE, target=target) as first,
        launched(tmp_path, "--broker", redis.url, *PATIENT, role="gateway") as second,
    ):
        first.ready()
        second.ready()
        wait_until(lambda: second.get("/readyz").status == 200)
        a_task_is_told_of_by_either(first, second, tmp_path)
        what_is_the_same_runs_once(first, second, tmp_path)
        what_a_killed_gateway_had_is_answered_under_its_key(first, second, tmp_path)
        first.signal()
        first.check_end()


def a_task_is_told_of_by_either(first: Server, second: Server, folder: Path) -> None:
    here, there, gate = first.connect(), second.connect(), Gate(folder)
    path = ask(here, gate.text(), "Prefer: respond-async").header["location"]
    gate.reached()
    assert poll(there, path).json["status"] == "PENDING"
    there.send(request(b"", f"{path}?wait=30", method="GET"))
    wait_until(lambda: second.health()["pending"] == 1)
    gate.open()
    outcome = there.answer().json
    assert (outcome["status"], outcome["output"]) == ("SUCCESS", gate.text().upper())
    assert poll(here, path).json == outcome
    assert poll(there, path, "DELETE").status == 204
    assert poll(here, path).error == "NOT_FOUND"


def what_is_the_same_runs_once(first: Server, second: Server, folder: Path) -> None:
    gate, before = Gate(folder), len(runs_in(folder))
    connections = [server.connect() for server in (first, second) for _ in range(20)]
    for connection in connections:
        send(connection, gate.text())
    gate.reached()
    wait_until(lambda: sum(server.health()["pending"] for server in (first, second)) == len(connections))
    gate.open()
    answers = [connection.answer() for connection in connections]
    assert {answer.json["output"] for answer in answers} == {gate.text().upper()}
    marks = Counter(answer.header["x-headway-cache"] for answer in answers)
    assert (marks[None], marks.total()) == (1, len(connections))
    for connection in (connections[0], connections[-1]):
        assert ask(connection, gate.text()).header["x-headway-cache"] == "hit"
    assert runs_in(folder)[before:] == [gate.text()]


def what_a_killed_gateway_had_is_answered_under_its_key(first: Server, second: Server, folder: Path) -> None:
    gate, key, held, before = Gate(folder), "Idempotency-Key: k", second.connect(), len(runs_in(folder))
    send(held, gate.text(), key)
    gate.reached()
    second.signal(signal.SIGKILL)
    assert second.ended() == -signal.SIGKILL
    with pytest.raises(ConnectionError):
        held.answer()
    again = first.connect()
    send(again, gate.text(), key)
    wait_until(lambda: first.health()["pending"] == 1)
    gate.open()
    answer = again.answer()
    assert (answer.status, answer.header["idempotency-replayed"]) == (200, "true")
    later = ask(first.connect(), gate.text(), key)
    assert (later.status, later.json["output"]) == (200, answer.json["output"])
    assert runs_in(folder)[before:] == [gate.text()]
