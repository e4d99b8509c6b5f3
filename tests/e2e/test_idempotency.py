"""Idempotency keys at a running service: one run for one key, whoever sends it again, and whenever."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import Server, serving
from tests.targets.counted import runs_in


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    with serving(folder, target="tests.targets.counted:Counted", lawful=False) as server:
        yield server


@pytest.fixture
def gate(server: Server) -> Iterator[Gate]:
    """Gate whose text is also the key of what is asked; in the end, it has run once."""
    gate = Gate(server.folder)
    yield gate
    assert runs_in(server.folder).count(gate.text()) == 1


def send(connection: Connection, gate: Gate, *fields: str) -> None:
    body = json.dumps({"input": gate.text()}).encode()
    connection.send(request(body, "/v1/inference", f"Idempotency-Key: {gate.text()}", *fields))


def ask(connection: Connection, gate: Gate) -> Answer:
    send(connection, gate)
    return connection.answer()


def test_one_key_sent_by_many_at_once_is_one_run(server: Server, gate: Gate) -> None:
    connections = [server.connect() for _ in range(50)]
    for connection in connections:
        send(connection, gate)
    gate.reached()
    wait_until(lambda: server.health()["pending"] == len(connections))
    gate.open()
    answers = [connection.answer() for connection in connections]
    assert {answer.json["output"] for answer in answers} == {gate.text().upper()}
    assert Counter(answer.header["idempotency-replayed"] for answer in answers) == {None: 1, "true": 49}
    again = ask(connections[0], gate)
    assert (again.json["output"], again.header["idempotency-replayed"]) == (gate.text().upper(), "true")


def test_a_client_that_was_cut_off_gets_its_answer_by_the_key(server: Server, gate: Gate) -> None:
    first, second = server.connect(), server.connect()
    send(first, gate)
    gate.reached()
    send(second, gate)
    wait_until(lambda: server.health()["pending"] == 2)
    first.reset()
    gate.open()
    assert second.answer().json["output"] == gate.text().upper()


@pytest.mark.parametrize("field", [(), ("X-Request-Id: 0192c8a4-5f6e-7d01-9abc-1234567890ab",)])
def test_a_client_that_leaves_and_asks_again_under_its_key_gets_the_one_run(
    server: Server, gate: Gate, field: tuple[str, ...]
) -> None:
    first, again = server.connect(), server.connect()
    send(first, gate, *field)
    gate.reached()
    first.reset()
    wait_until(lambda: server.health()["pending"] == 0)
    send(again, gate, *field)
    wait_until(lambda: server.health()["pending"] == 1)
    gate.open()
    assert again.answer().json["output"] == gate.text().upper()
    assert ask(server.connect(), gate).header["idempotency-replayed"] == "true"


def test_a_request_that_got_its_504_is_answered_under_its_key_by_the_run_that_went_on(
    server: Server, gate: Gate
) -> None:
    late, again = server.connect(), server.connect()
    send(late, gate, "X-Request-Timeout-Ms: 1000")
    gate.reached()
    assert late.answer().error == "DEADLINE_EXCEEDED"
    send(again, gate)
    wait_until(lambda: server.health()["pending"] == 1)
    gate.open()
    assert again.answer().json["output"] == gate.text().upper()
