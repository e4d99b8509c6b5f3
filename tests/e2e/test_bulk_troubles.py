"""Bulk jobs whose disk is full, or whose database is away: they say so and go on by themselves, and requests notice nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import Server, serving
from tests.e2e.test_bulk import BRIEF, TARGET, answers, done, feeder, job, meanwhile, submit
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer, lacking

LINES = 1000
FEW, SMALL = 150, "3"
"""Lines of a job, and most of one batch, with which it takes longer beside requests than its lease, for which it may run on
without the database."""
PAUSES = {"a bulk job pauses", "the ledger is out of reach", "bulk jobs is out of reach", "bulk files is out of reach"}
"""Log events of a process that feeds a job meanwhile."""


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A disk of 8 MiB at a path."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        lacking(f"no disk may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """Take all that is left of a disk. Returns the file to remove."""
    path = disk / "others"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.statvfs(disk).f_bsize))
    return path


def paused(server: Server, id: str) -> str:
    """Why a job pauses; empty while it does not."""
    faults = (job(server, id)["errors"] or {"data": []})["data"]
    return "".join(one["message"] for one in faults if one["code"] == "paused")


def check_ended(server: Server, id: str, lines: int) -> None:
    """Each line has one answer."""
    meanwhile(server, lambda: job(server, id)["status"] == "completed")
    assert answers(server, id) == Counter(map(str, range(lines)))
    assert not paused(server, id)


@pytest.mark.parametrize("ledger", ["beside", "on it"])
def test_a_job_waits_for_room_on_a_full_disk(tmp_path: Path, ledger: str) -> None:
    where = ("--ledger", "sqlite:///ledger.db") if ledger == "beside" else ()
    with (
        small_disk(tmp_path / "disk") as disk,
        serving(
            tmp_path, "--bulk-dir", str(disk), "--max-batch-size", "20", *where, target=TARGET, constants=BRIEF
        ) as server,
    ):
        server.expected |= PAUSES
        id = submit(server, [f"line {number}" for number in range(LINES)])
        wait_until(lambda: done(server, id) > LINES / 10)
        others = fill(disk)
        meanwhile(server, lambda: paused(server, id))
        assert paused(server, id) == "the disk of the folder of bulk jobs is full"
        assert server.metrics().value("bulk_paused") == 1
        assert done(server, id) < LINES
        others.unlink()
        check_ended(server, id, LINES)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL to do harm to."""
    with PostgresServer() as server:
        yield server


def test_a_job_of_a_fleet_waits_for_its_database(tmp_path: Path, postgres: PostgresServer) -> None:
    flags = (*PATIENT, "--bulk-dir", str(tmp_path / "jobs"), "--ledger", postgres.fresh())
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(
            tmp_path, redis, gateways=2, workers=1, gateway_flags=flags, worker_flags=(*FORGETFUL, "--max-batch-size", SMALL),
            target=TARGET, lawful=False, constants=BRIEF,
        ) as it,
    ):  # fmt: skip
        for gateway in it.gateways:
            gateway.expected |= {
                *PAUSES,
                "another process holds a bulk job now",
            }  # A lease may run out before the database is back.
        id = submit(it.gateways[0], [f"line {number}" for number in range(FEW)])
        wait_until(lambda: done(it.gateways[0], id) > FEW / 10)
        holder = feeder(it.gateways)
        postgres.kill()
        meanwhile(holder, lambda: paused(holder, id))
        assert "database is out of reach" in paused(holder, id)
        assert done(holder, id) < FEW
        postgres.start()
        for gateway in it.gateways:
            check_ended(gateway, id, FEW)


def test_a_job_waits_while_another_process_locks_the_database(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    flags = "--bulk-dir", "jobs", "--ledger", f"sqlite:///{ledger}", "--max-batch-size", SMALL
    with serving(tmp_path, *flags, target=TARGET, constants=BRIEF) as server:
        server.expected |= PAUSES
        id = submit(server, [f"line {number}" for number in range(FEW)])
        wait_until(lambda: done(server, id) > FEW / 10)
        with contextlib.closing(sqlite3.connect(ledger, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            meanwhile(server, lambda: paused(server, id))
            assert "database is out of reach" in paused(server, id)
            assert done(server, id) < FEW
        check_ended(server, id, FEW)
