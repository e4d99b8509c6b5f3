"""Inputs and header fields that mean harm: refused or made harmless, and never more than a line of the log each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Connection, request, wait_until
from tests.e2e.server import Server, serving

BODY = b'{"input": "hello"}'
FORGED = "forged-by-a-client"
POISON = f"x\r\n2026-01-01T00:00:00Z [critical] {FORGED}\x1b[2J\x1b]0;{FORGED}\x07\u2028{FORGED}\x85{FORGED}\u202e"
"""What would begin lines of its own, or move the cursor, in a log that is written or shown without care."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("fields"), lawful=False) as server:
        yield server
        assert server.metrics().value("requests_total", outcome="internal") == 0


def ask(connection: Connection, data: bytes) -> Answer:
    connection.send(data)
    return connection.answer()


def head(*fields: bytes, line: bytes = b"POST /v1/inference HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: e2e", b"Content-Length: %d" % len(BODY), *fields, b"", b""]) + BODY


REFUSED = {
    "two idempotency keys": (head(b"Idempotency-Key: a", b"Idempotency-Key: a"), "BAD_REQUEST"),
    "an empty one": (head(b"Idempotency-Key:"), "BAD_REQUEST"),
    "a long one": (head(b"Idempotency-Key: " + b"k" * 256), "BAD_REQUEST"),
    "one that is no ASCII": (head("Idempotency-Key: schlüssel".encode()), "BAD_REQUEST"),
    "one with a bare CR": (head(b"Idempotency-Key: a\rb"), "BAD_REQUEST"),
    "one with a bare LF": (head(b"Idempotency-Key: a\nX-A: b"), "BAD_REQUEST"),
    "one with a NUL": (head(b"Idempotency-Key: a\0b"), "BAD_REQUEST"),
    "a folded one": (head(b"Idempotency-Key: a\r\n b"), "BAD_REQUEST"),
    "a huge one": (head(b"Idempotency-Key: " + b"k" * 20_000), "HEADERS_TOO_LARGE"),
    "a huge preference": (head(b"Prefer: " + b"respond-async, " * 2_000), "HEADERS_TOO_LARGE"),
    "a preference with a CR": (head(b"Prefer: respond-async\rX-A: b"), "BAD_REQUEST"),
    "a space before the colon": (head(b"Prefer : respond-async"), "BAD_REQUEST"),
    "a task's id with a line end": (head(line=b"GET /v1/result/req_\r\nX-A: b HTTP/1.1"), "BAD_REQUEST"),
    "a task's id that is huge": (head(line=b"GET /v1/result/" + b"a" * 20_000 + b" HTTP/1.1"), "HEADERS_TOO_LARGE"),
    "a task with two lengths": (
        head(b"Content-Length: 3", line=b"DELETE /v1/result/x HTTP/1.1"),
        "BAD_REQUEST",
    ),
    "a task with length and chunks": (
        head(b"Transfer-Encoding: chunked", line=b"GET /v1/result/x HTTP/1.1"),
        "BAD_REQUEST",
    ),
    "a wait in digits of elsewhere": (request(b"", "/v1/result/x?wait=%D9%A3", method="GET"), "BAD_REQUEST"),
    "a wait with a line end": (request(b"", "/v1/result/x?wait=1%0d%0aX-A:b", method="GET"), "BAD_REQUEST"),
    "an id with a line end": (request(b"", "/v1/result/x%0d%0aX-Forged:%20b", method="GET"), "NOT_FOUND"),
    "an id that leaves its place": (request(b"", "/v1/result/..%2f..%2fdocs", method="GET"), "BAD_REQUEST"),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_hostile_fields_are_refused_and_hide_nothing(server: Server, shape: str) -> None:
    data, code = REFUSED[shape]
    before = server.metrics().by("requests_total", "outcome")
    connection = server.connect()
    answer = ask(connection, data)
    assert answer.error == code
    assert answer.header["x-forged"] is answer.header["x-a"] is None
    connection.close()
    assert server.metrics().by("requests_total", "outcome") == before


@pytest.mark.parametrize(
    "fields",
    [
        (b"Prefer: respond-async", b"Prefer: wait=5", b"Prefer: respond-async"),
        (b"Prefer: " + b'respond-async;x="' + b'\\"' * 3_000 + b'"',),
        (b"Prefer: " + b"," * 8_000 + b"respond-async",),
        (b'Prefer: "' + b"a=" * 4_000, b"Prefer: respond-async"),
        (b"Prefer: respond-async, wait=" + b"9" * 8_000,),
        (b"Cache-Control: " + b"no-cache," * 1_000,),
    ],
)
def test_odd_preferences_are_read_or_passed_over(server: Server, fields: tuple[bytes, ...]) -> None:
    connection = server.connect()
    answer = ask(connection, head(*fields))
    assert answer.status in (200, 202)
    assert ask(connection, head()).status == 200
    connection.close()


def test_who_does_not_finish_a_question_about_a_task_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--read-timeout-ms", "5000", lawful=False) as server:
        half = server.connect()
        half.send(b"GET /v1/result/req_0189f7a4-1111-7222-8333-444455556666?wait=60 HTTP/1.1\r\nHost: e2e\r\nX-Slow:")
        assert half.answer().error == "REQUEST_TIMEOUT"
        assert half.ended()
        half.close()


POLICIES = {"keep": "A\x07B\tC\n\x85D", "strip": "AB\tC\nD", "refuse": None}


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_are_checked_as_told(policy: str, tmp_path: Path) -> None:
    flags = "--control-chars", policy, "--max-input-chars", "40"
    with serving(tmp_path, *flags, lawful=False) as server:
        line, expected = server.connect(), POLICIES[policy]
        shapes = {
            "/v1/inference": {"input": "a\x07b\tc\n\x85d"},
            "/api/inference": {"input": "a\x07b\tc\n\x85d"},
            "/v1/predict": {"model_id": "default", "input_data": "a\x07b\tc\n\x85d"},
        }
        for path, body in shapes.items():
            answer = ask(line, request(json.dumps(body).encode(), path))
            if expected is None:
                assert (answer.error, "U+0007 at character 1" in answer.message) == ("BAD_REQUEST", True)
            else:
                assert answer.json["output"] == expected
        assert ask(line, request(json.dumps({"input": "é" * 40}).encode())).status == 200
        assert ask(line, request(json.dumps({"input": "é" * 41}).encode())).error == "PAYLOAD_TOO_LARGE"
        assert ask(line, request(b'{"input": "a\\u0000"}')).error == "BAD_REQUEST"
        for count, status in ((64, 200), (65, 400)):
            parameters = {str(number): number for number in range(count)}
            assert ask(line, request(json.dumps({"input": "a", "parameters": parameters}).encode())).status == status


def poison(server: Server) -> None:
    """Send the poison in every place where a client can put text."""
    text = json.dumps(POISON).encode()
    raw = POISON.encode()
    quoted = "".join(f"%{byte:02x}" for byte in raw)
    for data in (
        request(b'{"input": %b}' % text),
        request(b'{"input": "a", "model": %b}' % text),
        request(b'{"input": "a", "client_id": %b, %b: 1, "parameters": {%b: %b}}' % (text, text, text, text)),
        request(b'{"model_id": %b, "input_data": %b}' % (text, text), "/v1/predict"),
        request(b"x", f"/v1/predict?model_id={quoted}", "Content-Type: application/octet-stream"),
        request(b"", f"/v1/result/{quoted}?wait={quoted}", method="GET"),
        request(b"", f"/{quoted}", method="DELETE"),
        request(raw),
        b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % raw,
        head(b"X-Request-Id: " + raw, b"User-Agent: " + raw),
        head(b"Authorization: Bearer \x1b[31m" + FORGED.encode()),
        head(b"X-Request-Tier: \xc2\x85\x1b[31m" + FORGED.encode()),
        head(b"Idempotency-Key: \x1b" + FORGED.encode()),
        head(b"Prefer: \x1b]0;" + FORGED.encode() + b", respond-async"),
        raw,
    ):
        connection = server.connect()
        connection.send(data)
        connection.answer()
        connection.close()


@pytest.mark.parametrize("logs_json", [True, False], ids=["json", "text"])
def test_no_client_writes_a_line_of_the_log(logs_json: bool, tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "debug", logs_json=logs_json, lawful=False) as server:
        poison(server)
        wait_until(lambda: server.health()["pending"] == 0)
        assert FORGED not in server.log_text(), "what clients send is not in the log"
        connection = server.connect()
        # Unless the model says it.
        assert ask(connection, request(json.dumps({"input": f"print {POISON}"}).encode())).status == 200
        assert ask(connection, request(b'{"input": "raise"}')).error == "REJECTED_BY_MODEL"
        wait_until(lambda: FORGED in server.log_text() and "batch failed" in server.log_text())
        server.expected.add("batch failed")
    lines = [line for line in server.log_text().split("\n") if line]
    for line in lines:
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202e]", line), repr(line)
        if logs_json:
            assert json.loads(line)["level"] != "critical"
        else:
            assert re.match(r"\S+ \[(debug|info|warning) *\] |    \| ", line), line
    said = [line for line in lines if FORGED in line]
    assert said and all('"worker output"' in line if logs_json else " cpu-0 | " in line for line in said)
