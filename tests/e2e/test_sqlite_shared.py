"""Two services and commands that share one SQLite file, while one service is killed. The long drill is bench/sqlite_drill.py."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from tests.cli.command import code_of
from tests.e2e.sqlite_drill import Drill

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
        drill.round(requests=2)
    seen = drill.seen
    assert (seen.kills, seen.lost, seen.damaged, seen.unknown) == (2, 0, False, 0)
    assert seen.slowest < KNOWN_WITHIN
