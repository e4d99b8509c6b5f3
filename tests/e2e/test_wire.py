"""Out of file descriptors: who cannot be served is told so, or cut off, and the service recovers."""

from __future__ import annotations

import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.client import Connection, request, wait_until
from tests.e2e.server import Server, serving

LIMIT = 128
BODY = json.dumps({"input": "abc"}).encode()


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def fate(connection: Connection) -> str:
    """Fate of a client, which stays: `200`, `503`, or `cut`."""
    try:
        with contextlib.suppress(ConnectionError):  # It may have had its answer, and be closed.
            connection.send(request(BODY))
        return str(connection.answer().status)
    except ConnectionError:
        return "cut"


def served_again(server: Server) -> bool:
    connection = server.connect()
    try:
        return fate(connection) == "200"
    finally:
        connection.close()


def descriptors(server: Server) -> list[int]:
    return sorted(int(entry.name) for entry in Path(f"/proc/{server.process.pid}/fd").iterdir())


@contextmanager
def limited(server: Server, limit: int) -> Iterator[None]:
    """Let the running service have no descriptor number from `limit` on."""
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
    yield
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_clients_for_which_there_are_no_descriptors_are_told_so_and_the_server_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, before=few_descriptors, lawful=False) as server:
        at_rest = len(descriptors(server))
        for _ in range(2):
            # Who is refused is cut off after a moment, and makes room: all must be there by then.
            connections = [server.connect() for _ in range(2 * LIMIT)]
            fates = Counter(map(fate, connections))
            assert set(fates) == {"200", "503"}
            assert fates["200"] <= LIMIT
            served = next(connection for connection in connections if not connection.held)
            served.send(request(BODY))
            assert served.answer().status == 200, "who is in is served on"
            for connection in connections:
                connection.close()
            wait_until(lambda: len(descriptors(server)) <= at_rest)
            assert served_again(server)


def test_the_last_descriptor_goes_to_something_else(tmp_path: Path) -> None:
    with serving(tmp_path, lawful=False) as server:
        inside = server.connect()
        inside.send(request(BODY))
        assert inside.answer().status == 200
        with limited(server, descriptors(server)[-1] + 1):
            connections: list[Connection] = []
            fates = set()
            for _ in range(20):
                connections.append(server.connect())
                fates.add(fate(connections[-1]))
            assert "cut" in fates
            assert fates <= {"200", "503", "cut"}
            inside.send(request(BODY))
            assert inside.answer().status == 200
        wait_until(lambda: served_again(server))
        for connection in (inside, *connections):
            connection.close()


def test_who_comes_when_there_is_no_descriptor_at_all_is_served_when_there_is(tmp_path: Path) -> None:
    with serving(tmp_path, lawful=False) as server:
        inside = server.connect()
        inside.send(request(BODY))
        assert inside.answer().status == 200
        with limited(server, 4):
            waiting = [server.connect() for _ in range(5)]
            for connection in waiting:
                connection.send(request(BODY))
            inside.send(request(BODY))
            assert inside.answer().status == 200
        for connection in waiting:
            assert connection.answer().status == 200
        for connection in (inside, *waiting):
            connection.close()
