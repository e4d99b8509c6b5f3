"""Two services and commands that share one SQLite file, while one service is killed."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from pathlib import Path

from tests.cli.command import code_of
from tests.e2e.client import wait_until
from tests.e2e.server import serving
from tests.e2e.sqlite_drill import WHO, Drill, good

KNOWN_WITHIN = 30.0
"""Seconds after which a busy machine must have heard of a revocation; an idle one has within 5 s."""


def command(*arguments: str) -> str:
    """`headway keys …` in this process, which has nothing else of the file open."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert code_of(["keys", *arguments]) == 0
    return out.getvalue().strip()


def test_nothing_is_lost_while_commands_come_and_go_and_a_service_is_killed(tmp_path: Path) -> None:
    with Drill(tmp_path, command) as drill:
        drill.round()
    seen = drill.seen
    assert (seen.kills, seen.lost, seen.damaged, seen.unlocked, seen.unknown) == (1, 0, False, 0, 0)
    assert seen.slowest < KNOWN_WITHIN


def test_a_key_that_is_revoked_in_a_copy_that_took_the_files_place_is_refused(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.db", tmp_path / "copy.db"
    url = f"sqlite:///{path}"
    key = command("create", *WHO, "--ledger", url)
    with serving(tmp_path, "--keys", "ledger", "--user-rate", "0", "--ledger", url) as server:
        server.expected = {"another file has taken the place of the ledger's; using the new one"}
        assert good(server, key)
        with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        copy.replace(path)
        server.logged("another file has taken the place of the ledger's; using the new one")
        command("revoke", key.split("_")[2], "--ledger", url)
        wait_until(lambda: not good(server, key))
