"""Malicious inputs and header fields are rejected or made harmless. Each writes at most one log line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.e2e.client import Answer, Connection, request, wait_until
from tests.e2e.server import Server, serving

BODY = b'{"input": "hello"}'
FORGED = "forged-by-a-client"
POISON = f"x\r\n2026-01-01T00:00:00Z [critical] {FORGED}\x1b[2J\x1b]0;{FORGED}\x07\u2028{FORGED}\x85{FORGED}\u202e"
"""Would start new log lines or move the cursor if logged or displayed without escaping."""


def ask(connection: Connection, data: bytes) -> Answer:
    connection.send(data)
    return connection.answer()


def head(*fields: bytes, line: bytes = b"POST /v1/inference HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: e2e", b"Content-Length: %d" % len(BODY), *fields, b"", b""]) + BODY


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


def test_no_client_writes_a_line_of_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "debug", logs_json=False, lawful=False) as server:
        poison(server)
        wait_until(lambda: server.health()["pending"] == 0)
        assert FORGED not in server.log_text(), "what clients send is not in the log"
        connection = server.connect()
        # Unless the model prints it.
        assert ask(connection, request(json.dumps({"input": f"print {POISON}"}).encode())).status == 200
        assert ask(connection, request(b'{"input": "raise"}')).error == "REJECTED_BY_MODEL"
        wait_until(lambda: FORGED in server.log_text() and "batch failed" in server.log_text())
    lines = [line for line in server.log_text().split("\n") if line]
    for line in lines:
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202e]", line), repr(line)
        assert re.match(r"\S+ \[(debug|info|warning) *\] |    \| ", line), line
    said = [line for line in lines if FORGED in line]
    assert said and all(" cpu-0 | " in line for line in said)
