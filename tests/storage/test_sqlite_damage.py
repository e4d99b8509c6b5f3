"""A damaged SQLite file is told as that, and nobody is let in by keys from it."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
import structlog.testing

from headway.cli import EXIT_SETTING
from headway.config import Settings
from headway.errors import RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys.cache import ApiKeyCache
from headway.runtime.availability import Availability
from headway.runtime.counters import StoreCounts
from headway.storage.sqlite.keys import SqliteKeys
from headway.storage.sqlite.ledger import SqliteLedger
from tests.cli.command import code_of
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import record
from tests.identity.writing import key_of

_OVERWRITE = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(b'x' * 20_000)"


def overwrite(path: Path, offset: int) -> None:
    """Write nonsense into the file, by another process: this one would lose its locks by opening it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    subprocess.run([sys.executable, "-c", _OVERWRITE, str(path), str(offset)], check=True)


def senseless_row(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE headway_keys SET models = '[', revision = revision + 100")


def log_removed(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def made(path: Path) -> None:
    async def main() -> None:
        keys, ledger = SqliteKeys(f"sqlite:///{path}"), SqliteLedger(f"sqlite:///{path}")
        await keys.open()
        for letter in "abcdefghij":
            await keys.add(key(letter))
        await ledger.open()
        await ledger.write([record()])
        await keys.close()
        await ledger.close()

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("offset", [0, 4096])
def test_a_damaged_file_ends_the_start_and_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offset: int
) -> None:
    path = tmp_path / "ledger.db"
    made(path)
    overwrite(path, offset)
    for action in (("list",), ("revoke", key("a").id), ("create", "--user", "u", "--tenant", "t", "--tier", "paid")):
        assert code_of(["keys", *action, "--ledger", f"sqlite:///{path}"]) == EXIT_SETTING
        told = capsys.readouterr()
        assert "corrupted" in told.err and "put a copy in its place" in told.err
        assert told.out == ""


@pytest.mark.parametrize("damage", [senseless_row, log_removed])
def test_damage_of_a_file_in_use_lets_nobody_in(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "ledger.db"
    made(path)

    async def main() -> None:
        keys = SqliteKeys(f"sqlite:///{path}")
        ring = ApiKeyCache(keys, Settings(), StoreCounts(), lambda: 0.0, lambda: 0.0)
        await ring.open()
        credential = f"Bearer {key_of('a')}".encode()
        assert ring.identify(credential) is not None
        damage(path)
        for _ in range(2):
            with pytest.raises(StoreCorrupted):
                await ring.refresh()
            with pytest.raises(RequestError, match="cannot be checked") as refused:
                ring.identify(credential)
            assert refused.value.code == "SERVICE_OVERLOADED"
        await ring.close()

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize(
    "work",
    [lambda ledger: ledger.write([record()]), lambda ledger: ledger.find(record().id)],
    ids=["write", "find"],
)
def test_a_ledger_that_is_damaged_while_it_is_in_use_takes_no_more_rows(
    tmp_path: Path, work: Callable[[SqliteLedger], Awaitable[object]]
) -> None:
    path = tmp_path / "ledger.db"
    made(path)

    async def main() -> None:
        ledger = SqliteLedger(f"sqlite:///{path}")
        await ledger.open()
        await asyncio.to_thread(overwrite, path, 4096)
        with pytest.raises(StoreCorrupted):
            await work(ledger)
        await ledger.close()

    asyncio.run(main())


def test_damage_is_told_loudly_and_once() -> None:
    with structlog.testing.capture_logs() as logged:
        outage = Availability("keys", lambda: 9.0, "store of keys")
        outage.failed(1.0, StoreUnavailable("away"))
        for _ in range(2):
            outage.failed(2.0, StoreCorrupted("no sense"))
            outage.failed(3.0, StoreUnavailable("away"))
        assert outage.over()
    assert [(line["log_level"], line["event"]) for line in logged] == [
        ("warning", "the store of keys is out of reach"),
        ("error", "the store of keys is damaged"),
        ("info", "the store of keys is back"),
    ]
