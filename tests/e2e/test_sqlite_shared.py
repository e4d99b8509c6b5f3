"""Two services and several commands share one SQLite file, and one service is killed."""

from __future__ import annotations

import contextlib
import io
import signal
import sqlite3
from pathlib import Path

from tests.cli.command import code_of
from tests.e2e.client import wait_until
from tests.e2e.server import Server, launched, serving
from tests.storage.test_sqlite import descriptors, locks

CONNECTIONS = 4
"""Connections of a service: its ledger and its keys each have one for reading and one for writing."""
WHO = ("--user", "alice", "--tenant", "acme", "--tier", "paid")
ROWS = "SELECT count(*) FROM headway_requests"


def command(*arguments: str) -> str:
    """Run `headway keys …` in this process, which has no other connection to the file."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert code_of(["keys", *arguments]) == 0
    return out.getvalue().strip()


def good(service: Server, key: str) -> bool:
    """Return True if a service accepts this key; otherwise it must report the key as invalid."""
    line = service.asked[-1].connection if service.asked else None
    asked = service.ask("hello", f"Authorization: Bearer {key}", on=line)
    answer = asked.answer()
    assert answer.status == 200 or asked.outcome == "UNAUTHENTICATED", answer.body
    return answer.status == 200


def test_nothing_is_lost_while_commands_come_and_go_and_a_service_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    url = f"sqlite:///{path}"
    flags = ("--keys", "ledger", "--user-rate", "0", "--ledger", url)

    def query(text: str) -> object:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
            return connection.execute(text).fetchone()[0]

    def is_locked(service: Server) -> bool:
        """Return True if a service holds SQLite's locks on the file, and only its connections have it open."""
        pid = service.process.pid
        return bool(locks(path, pid)) and descriptors(path, pid) <= CONNECTIONS

    first = command("create", *WHO, "--ledger", url)
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(launched(tmp_path, *flags)) for _ in range(2)]
        for service in services:
            service.ready()
        second = command("create", *WHO, "--ledger", url)
        command("list", "--ledger", url)
        for service in services:
            wait_until(lambda service=service: good(service, first) and good(service, second))  # type: ignore[misc]
            assert is_locked(service)
        command("revoke", first.split("_")[2], "--ledger", url)
        for service in services:
            wait_until(lambda service=service: not good(service, first))  # type: ignore[misc]
            assert is_locked(service)
        answered = sum(asked.outcome == "ok" for service in services for asked in service.asked)
        rows = wait_until(lambda: found if (found := int(str(query(ROWS)))) >= answered else None)
        services[0].signal(signal.SIGKILL)
        services[0].kill()
        command("list", "--ledger", url)
        assert int(str(query(ROWS))) >= rows
        services[0] = stack.enter_context(launched(tmp_path, *flags))
        services[0].ready()
        for service in services:
            assert good(service, second) and not good(service, first)
        assert query("PRAGMA integrity_check") == "ok"


def test_keys_that_nobody_is_asked_for_are_told_at_the_start(tmp_path: Path) -> None:
    ledger = "--ledger", f"sqlite:///{tmp_path}/headway.db"
    command("create", *WHO, *ledger)
    with serving(tmp_path, *ledger) as server:
        server.expected = {"API keys in the ledger are not used"}
        told = server.logged("API keys in the ledger are not used")
        assert (told["keys"], told["let_in"]) == (1, "everybody")
        assert "--keys ledger" in told["hint"]
        server.ask("anybody").output()
