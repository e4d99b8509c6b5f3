"""Clients that are slow, huge or malformed get their refusal from the whole service, which keeps nothing of them, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Connection, request, wait_until
from tests.e2e.server import Server, serving

HEAD = b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("hostile"), lawful=False) as server:
        yield server
        wait_until(lambda: server.health()["pending"] == 0)
        assert server.metrics().value("requests_total", outcome="internal") == 0


def resident(server: Server) -> int:
    """MiB of the serving process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def sent(server: Server, piece: bytes) -> Connection:
    connection = server.connect()
    connection.send(piece)
    return connection


def test_slow_clients_are_cut_off_while_others_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, "--read-timeout-ms", "3000") as server:
        silent, half = sent(server, b""), sent(server, HEAD + b'Content-Length: 100\r\n\r\n{"input": "')
        trickling = sent(server, HEAD)
        trickling.sock.settimeout(0.05)
        while True:
            try:
                with contextlib.suppress(ConnectionError):  # It may be over before this hears of it.
                    trickling.send(b"X: 1\r\n")
                trickling.held = trickling.sock.recv(1 << 16)
                break
            except TimeoutError:
                server.ask("in between").output()
        for connection in (trickling, half):
            assert connection.answer().error == "REQUEST_TIMEOUT"
        for connection in (trickling, half, silent):
            assert connection.ended()
            connection.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", "PAYLOAD_TOO_LARGE"),
        (HEAD + b"X-Long: " + b"x" * 20_000, "HEADERS_TOO_LARGE"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "BAD_REQUEST"),
    ],
    ids=["huge", "a long header", "ambiguous"],
)
def test_oversized_and_ambiguous_requests_are_refused_and_hide_no_second_one(
    server: Server, data: bytes, code: str
) -> None:
    before = server.metrics().by("requests_total", "outcome")
    connection = sent(server, data + request(b'{"input": "smuggled"}'))
    assert connection.answer().error == code
    assert connection.ended(), "nothing behind it was answered"
    connection.close()
    assert server.metrics().by("requests_total", "outcome") == before


def test_nothing_is_kept_of_a_gzip_bomb_and_of_bodies_without_end(server: Server) -> None:
    before = resident(server)
    bomb = gzip.compress(b"0" * (1 << 28), 9)
    for _ in range(8):
        connection = sent(server, request(bomb, "/v1/inference", "Content-Encoding: gzip"))
        assert connection.answer().error == "BAD_REQUEST"
        connection.close()
    connections = [sent(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") for _ in range(8)]
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                connection.send(chunk)
        connection.close()
    server.ask("after").output()
    assert resident(server) - before < 64
    assert server.metrics().value("refusals_total", reason="payload_too_large") >= 8


def test_parameters_reach_the_target_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import json\ndef show(inputs, parameters):\n    return [json.dumps(p) for p in parameters]\n"
    )
    given: list[Any] = [{"n": 2**64 - 1}, {"n": -(2**63)}, {"n": 0.1}, {"deep": [[[[{"a": None}]]]]}, {"é\u2028": "𝄞"}]
    with serving(tmp_path, target="model.py:show", answer_to=lambda text: text) as server:
        for parameters in given:
            asked = server.ask(json.dumps(parameters), parameters=parameters)
            assert json.loads(asked.output()) == parameters
