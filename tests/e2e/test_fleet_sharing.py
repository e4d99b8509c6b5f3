"""Two gateways around one Redis: what one of them took in, the other tells of, repeats, and does not run again."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import Server, launched
from tests.servers.redis import RedisServer
from tests.targets.counted import runs_in

PATIENT = (
    *("--request-timeout-ms", "30000", "--gpu-timeout-ms", "30000", "--queue-timeout-ms", "30000"),
    *("--broker-timeout-ms", "20000"),
)
LEASE = ("--lease-ms", "60000")
"""Longer than any machine stands still: what runs runs once."""


@contextmanager
def two_gateways(folder: Path, *flags: str) -> Iterator[tuple[Server, Server]]:
    """One with a worker, one without."""
    target, flags = "tests.targets.counted:Counted", (*PATIENT, *flags)
    with (
        RedisServer("valkey", folder / "redis") as redis,
        launched(folder, "--broker", redis.url, *flags, *LEASE, target=target) as first,
        launched(folder, "--broker", redis.url, *flags, role="gateway") as second,
    ):
        first.ready()
        second.ready()
        wait_until(lambda: second.get("/readyz").status == 200)
        yield first, second
        for server in (second, first):
            if server.process.poll() is None:
                server.signal()
                server.check_end()


def send(connection: Connection, text: str, *fields: str) -> None:
    connection.send(request(json.dumps({"input": text}).encode(), "/v1/inference", *fields))


def ask(connection: Connection, text: str, *fields: str) -> Answer:
    send(connection, text, *fields)
    return connection.answer()


def poll(connection: Connection, path: str, method: str = "GET") -> Answer:
    connection.send(request(b"", path, method=method))
    return connection.answer()


def test_any_gateway_tells_of_a_task(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as servers:
        here, there = (server.connect() for server in servers)
        gate = Gate(tmp_path)
        path = ask(here, gate.text(), "Prefer: respond-async").header["location"]
        gate.reached()
        assert poll(there, path).json["status"] == "PENDING"
        there.send(request(b"", f"{path}?wait=30", method="GET"))
        wait_until(lambda: servers[1].health()["pending"] == 1)
        gate.open()
        outcome = there.answer().json
        assert (outcome["status"], outcome["output"]) == ("SUCCESS", gate.text().upper())
        assert poll(here, path).json == outcome
        assert poll(there, path, "DELETE").status == 204
        assert poll(here, path).error == "NOT_FOUND"


def test_a_task_is_cancelled_at_any_gateway(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as servers:
        here, there = (server.connect() for server in servers)
        gate = Gate(tmp_path)
        send(here, gate.text())
        gate.reached()
        path = ask(there, "cancelled", "Prefer: respond-async").header["location"]
        other = servers[0].connect()
        assert poll(other, path, "DELETE").status == 204
        assert poll(there, path).error == "NOT_FOUND"
        wait_until(lambda: servers[1].health()["pending"] == 0)
        gate.open()
        assert here.answer().status == 200
        assert ask(there, "next").status == 200
        assert runs_in(tmp_path) == [gate.text(), "next"]


def test_what_is_the_same_runs_once_whichever_gateways_it_came_by(tmp_path: Path) -> None:
    with two_gateways(tmp_path, "--cache", "--collapse") as servers:
        gate = Gate(tmp_path)
        connections = [server.connect() for server in servers for _ in range(20)]
        for connection in connections:
            send(connection, gate.text())
        gate.reached()
        wait_until(lambda: sum(server.health()["pending"] for server in servers) == len(connections))
        gate.open()
        answers = [connection.answer() for connection in connections]
        assert {answer.json["output"] for answer in answers} == {gate.text().upper()}
        marks = Counter(answer.header["x-headway-cache"] for answer in answers)
        assert (marks[None], marks.total()) == (1, len(connections))
        for connection in (connections[0], connections[-1]):
            assert ask(connection, gate.text()).header["x-headway-cache"] == "hit"
        assert runs_in(tmp_path) == [gate.text()]


def test_a_key_means_the_same_at_every_gateway(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as servers:
        here, there = (server.connect() for server in servers)
        assert ask(here, "a", "Idempotency-Key: k").header["idempotency-replayed"] is None
        again = ask(there, "a", 'Idempotency-Key: "k"')
        assert (again.json["output"], again.header["idempotency-replayed"]) == ("A", "true")
        assert ask(there, "b", "Idempotency-Key: k").status == 422
        assert runs_in(tmp_path) == ["a"]


def test_what_a_killed_gateway_had_is_answered_under_its_key_by_another_and_runs_once(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as (first, second):
        gate, key = Gate(tmp_path), "Idempotency-Key: k"
        held = second.connect()
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
        assert runs_in(tmp_path) == [gate.text()]
