"""One tenant takes all that it can get at the door of a running service, and another notices nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.client import Answer, request, wait_until
from tests.e2e.server import Server, serving
from tests.identity.writing import entry, key_of

BODY = b'{"input": "a"}'
HEAVY, SLOW, GOOD = (f"Authorization: Bearer {key_of(name)}" for name in ("heavy", "slow", "good"))
BOUNDS = ("--max-connections", "40", "--max-bodies-mb", "4", "--max-body-bytes", "1048576")
SHARE = 36
"""Nine tenths of the connections."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three keys of two tenants; one of them may send one request a minute."""
    folder = tmp_path_factory.mktemp("neighbours")
    keys = [
        entry("heavy", tenant="bad", more="rate = 0"),
        entry("slow", tenant="bad", more="rate = 1\nburst = 1"),
        entry("good", tenant="good", more="rate = 0"),
    ]
    (folder / "keys.toml").write_text("\n".join(keys))
    with serving(folder, *BOUNDS, "--keys", "keys.toml", lawful=False, target="tests.targets.kinds:plain") as server:
        yield server
        assert server.metrics().value("requests_total", outcome="internal") == 0


@pytest.fixture(autouse=True)
def nobody_stays(server: Server) -> Iterator[None]:
    """Each test begins without any connection."""
    yield
    server.check_descriptors()


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


def test_connections_of_one_tenant_leave_room(server: Server) -> None:
    kept = [server.connect() for _ in range(SHARE - 1)]
    for connection in kept:
        connection.send(request(BODY, "/v1/inference", HEAVY))
        assert connection.answer().status == 200
    last = server.connect()
    last.send(request(BODY, "/v1/inference", HEAVY))
    assert last.answer().status == 200
    refused = told(server, HEAVY)
    assert (refused.status, refused.header["x-headway-dropped-reason"]) == (429, "connections")
    is_well(server)
    for connection in kept:
        connection.send(request(BODY, "/v1/inference", HEAVY))
        assert connection.answer().status == 200, "what it has it keeps"


def test_silent_connections_make_room(server: Server) -> None:
    silent = []
    for _ in range(3):
        silent += [server.connect() for _ in range(20)]
        is_well(server)
    assert silent[0].ended()


def test_unfinished_bodies_leave_room(server: Server) -> None:
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


def test_what_is_wrong_is_answered_at_the_callers_rate(server: Server) -> None:
    wrong = (b'{"model": "nowhere", "input": "a"}', b"{", b'{"input": 3}')
    statuses = [told(server, SLOW, body=wrong[number % 3]).status for number in range(30)]
    assert statuses == [404] + [429] * 29
    connection = server.connect()
    connection.send(f"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\nContent-Length: 900000\r\n{SLOW}\r\n\r\n".encode())
    assert connection.answer().error == "RATE_LIMITED", "its body is not waited for"
    is_well(server)
