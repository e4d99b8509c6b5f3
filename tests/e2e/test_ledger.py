"""The ledger of a running service: what it records, and what happens if its database or disk fails."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import Server, run_cli, serving
from tests.servers.postgres import PostgresServer

AWAY = {"the ledger is out of reach"}
"""Log events of a process whose database is too slow, for example because the disk is busy."""
COUNT = "SELECT count(*) FROM headway_requests"
LEAST = 100
"""Number of records that wait for a database with `--max-queue` 20."""
OUTCOMES = "SELECT CASE status WHEN 'completed' THEN 'ok' ELSE error END FROM headway_requests"


def sqlite(path: Path, query: str) -> list[tuple[str | int, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def ask_some(server: Server, count: int) -> None:
    first = len(server.asked)
    for number in range(first, first + count):
        server.ask(f"number {number}").output()


@contextlib.contextmanager
def recording(folder: Path, *flags: str, **how: Any) -> Iterator[Server]:
    """Run a service with a ledger. It may be slow to write."""
    with serving(folder, *flags, **how) as server:
        server.expected |= AWAY
        yield server


def dropped(server: Server) -> int:
    return int(server.metrics().value("ledger_dropped_total"))


@pytest.fixture
def own() -> Iterator[PostgresServer]:
    """Run a PostgreSQL server that the test may break."""
    with PostgresServer() as server:
        yield server


def test_every_request_is_recorded_without_its_input_and_found_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    url = f"sqlite:///{path}"
    with recording(tmp_path, "--ledger", url, "--max-queue", "1") as server:
        with server.held_back():
            queued = server.ask("canary-input")
            server.queued(1)
            assert server.ask("no room").refusal() == "SERVICE_OVERLOADED"
        queued.output()
        unknown = server.ask("canary-input", model="nobody")
        assert unknown.refusal() == "NOT_FOUND"
        gate = Gate(tmp_path)
        left = server.ask(gate.text("canary-input"))
        gate.reached()
        left.leave()
        wait_until(lambda: server.metrics().value("requests_total", outcome="cancelled") == 1)
        gate.open()
        server.ask("the last one").output()
    outcomes = sorted(str(outcome) for (outcome,) in sqlite(path, OUTCOMES))
    assert outcomes == sorted(asked.outcome.replace("cancelled", "CANCELLED") for asked in server.asked)
    assert "canary" not in str(sqlite(path, "SELECT * FROM headway_requests"))
    told = "SELECT tier, model, batch_size, worker, completed_at > created_at FROM headway_requests"
    id = queued.id.replace("-", "")
    assert sqlite(path, f"{told} WHERE id = x'{id}'") == [("paid", "default", 1, "cpu-0", 1)]
    with recording(tmp_path, "--ledger", url) as again:
        for asked, status in ((queued, "completed"), (unknown, "failed"), (left, "failed")):
            known = again.admin(f"/internal/requests/req_{asked.id}")
            assert (known.status, known.json["status"]) == (200, status)
        assert again.admin(f"/internal/requests/req_{unknown.id}").json["error"]["error"] == "NOT_FOUND"


def test_a_database_that_is_killed_fails_no_request(tmp_path: Path, own: PostgresServer) -> None:
    url = own.fresh()

    def rows() -> int:
        return int(own.query(COUNT, url=url)[0][0])

    def written() -> int:
        """Return the number of rows in the ledger, or 0 while the service may not know that they have been written."""
        busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headway' AND state <> 'idle'"
        found = rows()
        return 0 if own.query(busy)[0][0] else found

    with recording(tmp_path, "--ledger", url, "--max-queue", str(LEAST // 5)) as server:
        ask_some(server, 20)
        wait_until(lambda: written() == 20)
        own.kill()
        ask_some(server, LEAST + 50)
        wait_until(lambda: dropped(server) == 50)
        server.logged("the ledger is out of reach")
        lost = server.admin("/internal/requests/00000000-0000-7000-8000-000000000000")
        assert (lost.status, lost.error) == (503, "SERVICE_OVERLOADED")
        wait_until(lambda: server.get("/readyz").status == 200)
        own.start()
        wait_until(lambda: written() == 20 + LEAST)
        server.logged("the ledger is back")
        ask_some(server, 20)
        wait_until(lambda: rows() == 40 + LEAST)
        assert dropped(server) == 50
    assert rows() + 50 == len(server.asked)


def test_a_full_disk_fails_no_request(tmp_path: Path) -> None:
    """A limit on the file size makes writes fail, and is then lifted."""
    most, hard = 128 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))

    flags = ("--ledger", "sqlite:///ledger.db", "--max-queue", str(LEAST // 5))
    with recording(tmp_path, *flags, before=small_disk) as server:

        def is_full() -> bool:
            ask_some(server, 10)
            return bool(server.log("the ledger is out of reach")) and dropped(server) > 0

        wait_until(is_full)
        wait_until(lambda: server.get("/readyz").status == 200)
        health = server.admin("/internal/health").json
        assert (health["status"], health["ledger"].partition(": ")[0]) == ("degraded", "accepts no records")
        told = run_cli(server, tmp_path, "status")
        assert (told.returncode, "ledger        accepts no records: " in told.stdout) == (0, True)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        server.logged("the ledger is back")
        wait_until(lambda: server.admin("/internal/health").json["status"] == "ok")
        before = dropped(server)
        ask_some(server, 10)
        assert dropped(server) == before
    assert sqlite(tmp_path / "ledger.db", COUNT) == [(len(server.asked) - before,)]
