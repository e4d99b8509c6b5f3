"""A service whose prints and log nobody takes serves on, and ends in order."""

from __future__ import annotations

import contextlib
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
    """Port that no other test is given."""
    held = Port()
    yield held.number
    held.close()


@contextlib.contextmanager
def unread_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def serve_through(server: Server, port: int) -> None:
    """Ask until it serves; have it log more than a pipe holds; end it."""
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


def test_a_banner_that_nobody_takes_does_not_end_the_service(tmp_path: Path, port: int) -> None:
    with broken_pipe() as stdout, launched(tmp_path, "--port", str(port), stdout=stdout) as server:
        serve_through(server, port)
        assert "the banner cannot be printed" in server.log_text()


def test_a_log_that_nobody_takes_does_not_hold_up_the_service_or_its_end(tmp_path: Path, port: int) -> None:
    with unread_pipe() as stderr, launched(tmp_path, "--port", str(port), stderr=stderr) as server:
        serve_through(server, port)


def test_a_service_without_a_standard_stream_serves(tmp_path: Path, port: int) -> None:
    with launched(tmp_path, "--port", str(port), before=lambda: os.close(2)) as server:
        serve_through(server, port)
