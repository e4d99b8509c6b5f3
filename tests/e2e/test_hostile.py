"""Clients that are slow, huge or malformed get their refusal from the whole service, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.e2e.client import Answer, Connection, request, wait_until
from tests.e2e.server import Server, serving

QUICK = "--read-timeout-ms", "5000"
HEAD = b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    with serving(folder, target="tests.targets.kinds:plain", lawful=False) as server:
        server.expected.add("a client speaks TLS to a plain port")
        yield server
        wait_until(lambda: server.health()["pending"] == 0)
        assert server.metrics().value("requests_total", outcome="internal") == 0


def resident(server: Server) -> int:
    """MiB of the serving process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def sent(server: Server, *pieces: bytes) -> Connection:
    connection = server.connect()
    for piece in pieces:
        connection.send(piece)
    return connection


SLOW = {
    "no header at all": (b"", None),
    "half a header": (HEAD + b"X-Slow: ", "REQUEST_TIMEOUT"),
    "no body": (HEAD + b"Content-Length: 100\r\n\r\n", "REQUEST_TIMEOUT"),
    "half a body": (HEAD + b'Content-Length: 100\r\n\r\n{"input": "', "REQUEST_TIMEOUT"),
    "half a chunk": (HEAD + b'Transfer-Encoding: chunked\r\n\r\nff\r\n{"in', "REQUEST_TIMEOUT"),
}


def test_slow_clients_are_cut_off_while_others_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, *QUICK) as server:
        slow = {name: sent(server, piece) for name, (piece, _) in SLOW.items()}
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
        assert trickling.answer().error == "REQUEST_TIMEOUT"
        for name, connection in slow.items():
            if (code := SLOW[name][1]) is not None:
                assert connection.answer().error == code, name
            assert connection.ended(), name
            connection.close()
        trickling.close()


HUGE = {
    "announced": (HEAD + b"Content-Length: 99999999999\r\n\r\n", "PAYLOAD_TOO_LARGE"),
    "beyond any number": (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", "BAD_REQUEST"),
    "one long header": (HEAD + b"X-Long: " + b"x" * 20_000, "HEADERS_TOO_LARGE"),
    "many headers": (HEAD + b"X-Many: 1\r\n" * 2_000, "HEADERS_TOO_LARGE"),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", "BAD_REQUEST"),
    "length and chunked": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "BAD_REQUEST"),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", "BAD_REQUEST"),
    "a space before the colon": (HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", "BAD_REQUEST"),
    "a folded header": (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "BAD_REQUEST"),
    "a bare line feed": (HEAD + b"X: 1\nContent-Length: 0\r\n\r\n", "BAD_REQUEST"),
    "two hosts": (HEAD + b"Host: other\r\nContent-Length: 0\r\n\r\n", "BAD_REQUEST"),
    "two keys": (HEAD + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", "BAD_REQUEST"),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "BAD_REQUEST"),
}


@pytest.mark.parametrize("shape", HUGE)
def test_oversized_and_ambiguous_requests_are_refused_and_hide_no_second_one(server: Server, shape: str) -> None:
    data, code = HUGE[shape]
    before = server.metrics().by("requests_total", "outcome")
    hidden = request(b'{"input": "smuggled"}')
    connection = server.connect()
    try:
        connection.send(data + hidden)
        answer = connection.answer()
        assert answer.error == code
        assert connection.ended(), "nothing behind it was answered"
    finally:
        connection.close()
    assert server.metrics().by("requests_total", "outcome") == before


def test_a_gzip_bomb_is_refused_unopened(server: Server) -> None:
    before = resident(server)
    bomb = gzip.compress(b"0" * (1 << 28), 9)
    for _ in range(8):
        connection = sent(server, request(bomb, "/v1/inference", "Content-Encoding: gzip"))
        assert connection.answer().error == "BAD_REQUEST"
        connection.close()
    assert resident(server) - before < 64


def test_a_body_without_a_length_is_cut_off_at_the_limit_and_not_kept(server: Server) -> None:
    before = resident(server)
    connections = [sent(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") for _ in range(8)]
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for connection in connections:
        try:
            for _ in range(400):
                connection.send(chunk)
        except ConnectionError:
            pass
        connection.close()
    server.ask("after").output()
    assert resident(server) - before < 64
    assert server.metrics().value("refusals_total", reason="payload_too_large") >= 8


class Line:
    """A connection that is opened anew when the server has closed it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection = server.connect()

    def ask(self, data: bytes) -> Answer:
        self._connection.send(data)
        answer = self._connection.answer()
        if answer.header["connection"] == "close":
            self._connection.close()
            self._connection = self._server.connect()
        return answer

    def close(self) -> None:
        self._connection.close()


ANY_TEXT = st.text(st.characters(), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
MEMBERS = st.sampled_from(["input", "model", "parameters", "model_id", "input_data", "client_id"])
BODIES = st.one_of(
    st.binary(max_size=60),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(MEMBERS, JSON, max_size=6).map(lambda value: json.dumps(value).encode()),
    st.tuples(st.binary(max_size=8), st.integers(0, 22)).map(
        lambda cut: b'{"input": "hello hello"}'[: cut[1]] + cut[0] + b'{"input": "hello hello"}'[cut[1] :]
    ),
    st.tuples(st.sampled_from(["[", '{"a":', '{"parameters":', '{"input":']), st.integers(1, 1_500)).map(
        lambda nest: (nest[0] * nest[1]).encode()
    ),
)
ROUTES = st.sampled_from(["/v1/inference", "/api/inference", "/v1/predict"])
KINDS = st.sampled_from(["application/json", "application/octet-stream", "text/plain; charset=utf-16", "*"])
DEEP = b'{"input": "x", "parameters": {"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
LONE = b'{"input": "\\ud800"}'
NUMBER = b'{"input": "x", "parameters": {"n": ' + b"9" * 100_000 + b"}}"


def test_no_body_makes_the_service_fail(server: Server) -> None:
    line = Line(server)

    @settings(max_examples=400)
    @given(ROUTES, KINDS, BODIES)
    @example("/v1/inference", "application/json", DEEP)
    @example("/v1/inference", "application/json", LONE)
    @example("/v1/inference", "application/json", NUMBER)
    @example("/v1/inference", "application/json", b'{"input": "x", "parameters": {"n": 1e999999}}')
    @example("/v1/inference", "application/json", b'{"input": "x", "parameters": {"n": NaN}}')
    @example("/v1/inference", "application/json", b'{"input": "\\u0000"}')
    @example("/v1/inference", "application/json", b'{"input": "\xff"}')
    def check(route: str, kind: str, body: bytes) -> None:
        answer = line.ask(request(body, route, f"Content-Type: {kind}"))
        if answer.status != 200:
            assert answer.error in {"BAD_REQUEST", "NOT_FOUND"}, body

    check()
    line.close()


def test_any_proper_text_comes_back_as_the_answer_to_itself(server: Server) -> None:
    line = Line(server)

    @settings(max_examples=200)
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60), st.booleans())
    def check(text: str, escaped: bool) -> None:
        body = json.dumps({"input": text}, ensure_ascii=escaped).encode()
        answer = line.ask(request(body))
        assert (answer.status, answer.json["output"]) == (200, text.upper())

    check()
    line.close()


def test_numbers_in_parameters_do_not_lose_their_way(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    target.write_text("import json\ndef show(inputs, parameters):\n    return [json.dumps(p) for p in parameters]\n")
    given: list[Any] = [{"n": 2**64 - 1}, {"n": -(2**63)}, {"n": 0.1}, {"deep": [[[[{"a": None}]]]]}, {"é\u2028": "𝄞"}]
    with serving(tmp_path, target="model.py:show", answer_to=lambda text: text) as server:
        for parameters in given:
            asked = server.ask(json.dumps(parameters), parameters=parameters)
            assert json.loads(asked.output()) == parameters
        assert math.isclose(server.metrics().value("requests_total", outcome="ok"), len(given))
