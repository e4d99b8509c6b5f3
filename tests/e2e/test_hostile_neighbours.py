"""One tenant takes all that it can get at the door of a running service, and another notices nothing."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import Answer, request, wait_until
from tests.e2e.server import Server, serving
from tests.identity.writing import entry, key_of

BODY = b'{"input": "a"}'
HEAVY, GOOD = (f"Authorization: Bearer {key_of(name)}" for name in ("heavy", "good"))
BOUNDS = ("--max-connections", "40", "--memory-mb", "16", "--max-body-bytes", "1048576")
SHARE = 36
"""Nine tenths of the connections."""


def told(server: Server, *fields: str, body: bytes = BODY) -> Answer:
    """The answer on a new connection, which is closed at once."""
    connection = server.connect()
    connection.send(request(body, "/v1/inference", *fields))
    answer = connection.answer()
    connection.close()
    return answer


def is_well(server: Server) -> None:
    """The good neighbour gets its answers."""
    assert {told(server, GOOD).status for _ in range(20)} == {200}


def test_connections_and_bodies_of_one_tenant_leave_room(tmp_path: Path) -> None:
    keys = [entry(name, tenant=name, more="rate = 0") for name in ("heavy", "good")]
    (tmp_path / "keys.toml").write_text("\n".join(keys))
    with serving(tmp_path, *BOUNDS, "--keys", "keys.toml", lawful=False) as server:
        kept = [server.connect() for _ in range(SHARE)]
        for connection in kept:
            connection.send(request(BODY, "/v1/inference", HEAVY))
            assert connection.answer().status == 200
        refused = told(server, HEAVY)
        assert (refused.status, refused.header["x-headway-dropped-reason"]) == (429, "connections")
        is_well(server)
        for connection in kept:
            connection.send(request(BODY, "/v1/inference", HEAVY))
            assert connection.answer().status == 200, "what it has it keeps"
        server.check_descriptors()

        head = b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\nContent-Length: 1048576\r\n"
        uploads = [server.connect() for _ in range(20)]
        for connection in uploads:
            connection.send(head + HEAVY.encode() + b"\r\n\r\n{")
        large = request(b" " * 400_000 + BODY, "/v1/inference", GOOD)
        for _ in range(5):
            connection = server.connect()
            connection.send(large[:1000])
            connection.send(large[1000:])
            assert connection.answer().status == 200
            connection.close()
        wait_until(lambda: server.metrics().value("refusals_total", reason="bodies", tier="paid") == 17)
        for connection in uploads:
            connection.reset()
        wait_until(lambda: told(server, HEAVY, body=b" " * 300_000 + BODY).status == 200)
        is_well(server)
        assert server.metrics().value("requests_total", outcome="internal") == 0
