"""Two gateways around one Redis: what one of them took in, the other tells of, repeats, and does not run again."""

from __future__ import annotations

import json
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import Server, launched
from tests.servers.redis import RedisServer
from tests.targets.counted import runs_in

PATIENT = "--broker-timeout-ms", "20000", "--cache", "--collapse"
"""A lease is longer than any machine stands still: what runs runs once."""


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
        launched(tmp_path, "--broker", redis.url, *PATIENT, target=target) as first,
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


def test_a_change_of_workers_one_by_one_never_brings_an_old_answer_back(tmp_path: Path) -> None:
    part, flags = tmp_path / "part.py", ("--cache", "--collapse")
    (tmp_path / "model.py").write_text(
        "from part import WORD\n\ndef answer(inputs):\n    return [text + WORD for text in inputs]\n"
    )
    part.write_text("WORD = ' old'\n")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer("valkey", tmp_path / "redis"))

        def up(role: str, *flags: str) -> Server:
            how = {"target": "model.py:answer"} if role == "worker" else {}
            broker = "--broker", redis.url
            server = stack.enter_context(launched(tmp_path, *broker, *flags, role=role, **how))
            server.ready()
            return server

        old = [up("worker", "--name", name) for name in ("one", "two")]
        gateways = [up("gateway", *flags).connect() for _ in range(2)]

        def asked(*fields: str) -> list[tuple[str, str | None]]:
            answers = [ask(gateway, "a", *fields) for gateway in gateways]
            return [(answer.json["output"], answer.header.get("x-headway-cache")) for answer in answers]

        assert asked() == [("a old", None), ("a old", "hit")]
        part.write_text("WORD = ' new'\n")
        up("worker", "--name", "three")
        for _ in range(10):
            assert ("a old", "hit") not in asked()
        for server in old:
            server.signal()
            server.check_end()
        assert {output for output, _ in asked()} == {"a new"}
        assert asked() == [("a new", "hit")] * 2
        assert asked("Cache-Control: no-cache") == [("a new", None)] * 2
