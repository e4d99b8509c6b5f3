"""Bodies that are huge are refused by the whole service, which keeps nothing of them; what is good reaches the target as it was."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
from pathlib import Path
from typing import Any

from tests.e2e.client import Connection, request, wait_until
from tests.e2e.server import Server, serving

HEAD = b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\n"


def resident(server: Server) -> int:
    """MiB of the serving process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def sent(server: Server, piece: bytes) -> Connection:
    connection = server.connect()
    connection.send(piece)
    return connection


def test_nothing_is_kept_of_a_gzip_bomb_and_of_bodies_without_end(tmp_path: Path) -> None:
    with serving(tmp_path, lawful=False) as server:
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
        wait_until(lambda: server.health()["pending"] == 0)
        assert server.metrics().value("requests_total", outcome="internal") == 0


def test_parameters_reach_the_target_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import json\ndef show(inputs, parameters):\n    return [json.dumps(p) for p in parameters]\n"
    )
    given: list[Any] = [{"n": 2**64 - 1}, {"n": -(2**63)}, {"n": 0.1}, {"deep": [[[[{"a": None}]]]]}, {"é\u2028": "𝄞"}]
    with serving(tmp_path, target="model.py:show", answer_to=lambda text: text) as server:
        for parameters in given:
            asked = server.ask(json.dumps(parameters), parameters=parameters)
            assert json.loads(asked.output()) == parameters
