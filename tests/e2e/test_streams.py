"""A service keeps running, and exits cleanly, if nothing reads its output and log."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import wait_until
from tests.e2e.server import Server, launched
from tests.servers.ports import Port


@pytest.fixture
def port() -> Iterator[int]:
    """Reserve a port that no other test gets."""
    held = Port()
    yield held.number
    held.close()


def serve_through(server: Server, port: int) -> None:
    """Wait until it serves, make it log more than a pipe holds, and end it."""
    server.port = port
    wait_until(lambda: listening(port) and server.get("/readyz").status == 200)
    line = server.connect()
    for number in range(40):
        server.ask(f"print {number}" + " and so on" * 300, on=line).output()
    line.close()
    server.signal()
    assert server.ended() == 0
    wait_until(lambda: not server.processes())


def listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_banner_and_a_log_that_nobody_takes_hold_up_neither_the_service_nor_its_end(
    tmp_path: Path, port: int
) -> None:
    (broken, stdout), (unread, stderr) = os.pipe(), os.pipe()
    os.close(broken)
    with launched(tmp_path, "--port", str(port), stdout=stdout, stderr=stderr) as server:
        serve_through(server, port)
    assert b"the banner cannot be printed" in os.read(unread, 1 << 16)
    for descriptor in (stdout, unread, stderr):
        os.close(descriptor)


def test_a_service_without_a_standard_stream_serves(tmp_path: Path, port: int) -> None:
    with launched(tmp_path, "--port", str(port), before=lambda: os.close(2)) as server:
        serve_through(server, port)
