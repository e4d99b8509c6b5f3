"""Idempotency keys at a running service: one run for one key, whoever sends it again, and whenever."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Connection, Gate, request, wait_until
from tests.e2e.server import serving
from tests.identity.writing import entry, key_of
from tests.targets.counted import runs_in

TARGET = "tests.targets.counted:Counted"
PATIENT = "--request-timeout-ms", "30000", "--queue-timeout-ms", "30000", "--gpu-timeout-ms", "30000"


def send(connection: Connection, text: str, key: str, *fields: str, **members: object) -> None:
    body = json.dumps({"input": text, **members}).encode()
    connection.send(request(body, "/v1/inference", f"Idempotency-Key: {key}", *fields))


def ask(connection: Connection, text: str, key: str, *fields: str, **members: object) -> Answer:
    send(connection, text, key, *fields, **members)
    return connection.answer()


def test_one_key_sent_by_many_at_once_is_one_run(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, target=TARGET, lawful=False) as server:
        gate = Gate(tmp_path)
        connections = [server.connect() for _ in range(50)]
        for connection in connections:
            send(connection, gate.text(), '"one"')
        gate.reached()
        wait_until(lambda: server.health()["pending"] == len(connections))
        gate.open()
        answers = [connection.answer() for connection in connections]
        assert {answer.json["output"] for answer in answers} == {gate.text().upper()}
        assert Counter(answer.header["idempotency-replayed"] for answer in answers) == {None: 1, "true": 49}
        again = ask(connections[0], gate.text(), "one")
        assert (again.json["output"], again.header["idempotency-replayed"]) == (gate.text().upper(), "true")
        assert runs_in(tmp_path) == [gate.text()]


def test_a_client_that_was_cut_off_gets_its_answer_by_the_key(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, target=TARGET, lawful=False) as server:
        gate, first, second = Gate(tmp_path), server.connect(), server.connect()
        send(first, gate.text(), "k")
        gate.reached()
        send(second, gate.text(), "k")
        wait_until(lambda: server.health()["pending"] == 2)
        first.reset()
        gate.open()
        assert second.answer().json["output"] == gate.text().upper()
        assert runs_in(tmp_path) == [gate.text()]


@pytest.mark.parametrize("field", [(), ("X-Request-Id: 0192c8a4-5f6e-7d01-9abc-1234567890ab",)])
def test_a_client_that_leaves_and_asks_again_under_its_key_gets_the_one_run(
    tmp_path: Path, field: tuple[str, ...]
) -> None:
    with serving(tmp_path, *PATIENT, target=TARGET, lawful=False) as server:
        gate, first = Gate(tmp_path), server.connect()
        send(first, gate.text(), "k", *field)
        gate.reached()
        first.reset()
        wait_until(lambda: server.health()["pending"] == 0)
        again = server.connect()
        send(again, gate.text(), "k", *field)
        wait_until(lambda: server.health()["pending"] == 1)
        gate.open()
        assert again.answer().json["output"] == gate.text().upper()
        assert ask(server.connect(), gate.text(), "k").header["idempotency-replayed"] == "true"
        assert runs_in(tmp_path) == [gate.text()]


def test_a_request_that_got_its_504_is_answered_under_its_key_by_the_run_that_went_on(tmp_path: Path) -> None:
    with serving(tmp_path, *PATIENT, target=TARGET, lawful=False) as server:
        gate, late, again = Gate(tmp_path), server.connect(), server.connect()
        send(late, gate.text(), "k", "X-Request-Timeout-Ms: 1000")
        gate.reached()
        assert late.answer().error == "DEADLINE_EXCEEDED"
        send(again, gate.text(), "k")
        wait_until(lambda: server.health()["pending"] == 1)
        gate.open()
        assert again.answer().json["output"] == gate.text().upper()
        assert runs_in(tmp_path) == [gate.text()]


def test_another_request_under_the_key_is_a_conflict_whatever_differs(tmp_path: Path) -> None:
    with serving(tmp_path, target=TARGET, lawful=False) as server:
        line = server.connect()
        assert ask(line, "a", "k", parameters={"x": 1, "y": 2}).status == 200
        same = ask(line, "a", "k", parameters={"y": 2, "x": 1}, client_id="me", more=[1])
        assert (same.status, same.header["idempotency-replayed"]) == (200, "true")
        for text, parameters in (("b", {"x": 1, "y": 2}), ("a", {"x": 1}), ("a", None)):
            other = ask(line, text, "k", parameters=parameters)
            assert (other.status, other.json["error"]) == (422, "IDEMPOTENCY_CONFLICT")
            assert other.header["x-should-retry"] == "false"
        assert runs_in(tmp_path) == ["a"]


def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, target=TARGET, lawful=False) as server:
        line = server.connect()
        for _ in range(2):
            assert ask(line, "exception", "rejected").error == "REJECTED_BY_MODEL"
        assert ask(line, "none", "broken").error == "BACKEND_ERROR"
        assert ask(line, "none", "broken").header["idempotency-replayed"] is None
        assert Counter(runs_in(tmp_path))["exception"] == 1
        assert Counter(runs_in(tmp_path))["none"] >= 2


def test_keys_of_two_tenants_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("".join(entry(name, tenant=name) for name in ("mine", "yours")))
    with serving(tmp_path, "--keys", "keys.toml", target=TARGET, lawful=False) as server:
        line = server.connect()
        for name in ("mine", "yours"):
            answer = ask(line, name, "k", f"Authorization: Bearer {key_of(name)}")
            assert (answer.status, answer.header["idempotency-replayed"]) == (200, None)
            assert answer.header["ratelimit-policy"] == '"user";q=1000;w=60'
            assert answer.header["ratelimit"].startswith('"user";r=')
        assert runs_in(tmp_path) == ["mine", "yours"]
