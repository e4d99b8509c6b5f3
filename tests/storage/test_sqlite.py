"""SQLite files: their locks, damage that is reported as such, and replacement while they are in use. Closing any
descriptor of a file releases all locks that the process has on it. Another process then thinks that it is the last one,
and deletes the log that this one still writes to."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import structlog.testing

from headway.cli import EXIT_SETTING
from headway.config import Settings
from headway.errors import RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys.cache import ApiKeyCache
from headway.runtime.availability import Availability
from headway.runtime.counters import StoreCounts
from headway.storage import sqlite as sqlite_store
from headway.storage.sqlite import SqliteKeys, SqliteLedger
from tests.cli.command import code_of
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import record
from tests.identity.writing import key_of

_watched: list[tuple[str, list[str]]] = []
_hooked = False


@contextmanager
def opened_by_python(folder: Path) -> Iterator[list[str]]:
    """Files in a folder that Python itself opens, in order."""
    global _hooked
    if not _hooked:  # A hook can't be removed.
        _hooked = True
        sys.addaudithook(_note)
    found: list[str] = []
    _watched.append((str(folder), found))
    try:
        yield found
    finally:
        _watched.remove((str(folder), found))


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = os.path.realpath(os.fspath(arguments[0]))
        for folder, found in _watched:
            if path.startswith(f"{folder}/"):
                found.append(path)


def locks(path: Path, pid: int | None = None) -> int:
    """POSIX locks of a process on a file; by default, of this one."""
    inode = str(path.stat().st_ino)
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(
        row[1] == "POSIX" and row[4] == str(pid or os.getpid()) and row[5].split(":")[2] == inode for row in rows
    )


def descriptors(path: Path, pid: int | None = None) -> int:
    """Descriptors of a file in a process; by default, in this one."""
    found = 0
    for entry in Path(f"/proc/{pid or os.getpid()}/fd").iterdir():
        try:
            found += os.path.samestat(entry.stat(), path.stat())
        except OSError:
            continue
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


async def test_the_locks_outlast_whatever_opens_and_closes_the_file_beside(path: Path) -> None:
    """A service with `--keys ledger` opens a ledger and then a store of keys."""
    with opened_by_python(path.parent) as opened:
        ledger = SqliteLedger(f"sqlite:///{path}")
        await ledger.open()
        held = locks(path)
        assert held
        keys = SqliteKeys(f"sqlite:///{path}")
        await keys.open()
        assert (locks(path), descriptors(path)) == (held, 4), "two connections each, and SQLite's descriptors alone"
        for number in range(3):
            await ledger.write([record()])
            await keys.add(key(f"key{number}"))
            beside = SqliteKeys(f"sqlite:///{path}")
            await beside.open()
            assert len(await beside.keys()) == number + 1
            await beside.close()
            assert locks(path) == held
        await keys.close()
        assert locks(path) == held
        await ledger.close()
        assert (locks(path), descriptors(path)) == (0, 0)
    assert opened == []


@pytest.mark.parametrize("root", [True, False])
async def test_a_new_file_is_made_for_its_owner_only_by_several_at_once_who_do_not_open_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    """If only root can make nodes, it is linked into place."""
    if not root:
        monkeypatch.setattr(os, "mknod", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    before = os.umask(0o022)
    try:
        with opened_by_python(path.parent) as opened:
            stores = [SqliteKeys(f"sqlite:///{path}") for _ in range(4)]
            await asyncio.gather(*(store.open() for store in stores))
            await stores[0].add(key("a"))
            assert locks(path)
            files = await asyncio.to_thread(
                lambda: {one.name: one.stat().st_mode & 0o777 for one in path.parent.iterdir()}
            )
            assert files == dict.fromkeys(("ledger.db", "ledger.db-shm", "ledger.db-wal"), 0o600)
            for store in stores:
                await store.close()
    finally:
        os.umask(before)
    assert str(path) not in opened
    assert opened == [] or not root


async def test_a_link_to_no_file_yet_has_one_made_for_its_owner_only(tmp_path: Path) -> None:
    target, path = tmp_path / "target.db", tmp_path / "link.db"
    path.symlink_to(target)
    keys = SqliteKeys(f"sqlite:///{path}")
    await keys.open()
    await keys.add(key("a"))
    await keys.close()
    assert target.stat().st_mode & 0o777 == 0o600


_OVERWRITE = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(b'x' * 20_000)"


def overwrite(path: Path, offset: int) -> None:
    """Overwrite part of the file with garbage, in another process: this one would lose its locks by opening it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    subprocess.run([sys.executable, "-c", _OVERWRITE, str(path), str(offset)], check=True)


def senseless_row(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE headway_keys SET models = '[', revision = revision + 100")


def log_removed(path: Path) -> None:
    Path(f"{path}-wal").unlink()


async def made(path: Path) -> None:
    keys, ledger = SqliteKeys(f"sqlite:///{path}"), SqliteLedger(f"sqlite:///{path}")
    await keys.open()
    for letter in "abcdefghij":
        await keys.add(key(letter))
    await ledger.open()
    await ledger.write([record()])
    await keys.close()
    await ledger.close()


@pytest.mark.processes
@pytest.mark.parametrize("offset", [0, 4096])
def test_a_damaged_file_ends_every_command(path: Path, capsys: pytest.CaptureFixture[str], offset: int) -> None:
    asyncio.run(made(path))
    overwrite(path, offset)
    for action in (("list",), ("revoke", key("a").id), ("create", "--user", "u", "--tenant", "t", "--tier", "paid")):
        assert code_of(["keys", *action, "--ledger", f"sqlite:///{path}"]) == EXIT_SETTING
        told = capsys.readouterr()
        assert "corrupted" in told.err and "replace it with a backup" in told.err
        assert told.out == ""


@pytest.mark.parametrize("damage", [senseless_row, log_removed])
async def test_damage_of_a_file_in_use_lets_nobody_in(path: Path, damage: Callable[[Path], None]) -> None:
    await made(path)
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


@pytest.mark.processes
@pytest.mark.parametrize(
    "work", [lambda ledger: ledger.write([record()]), lambda ledger: ledger.find(record().id)], ids=["write", "find"]
)
async def test_a_ledger_damaged_in_use_is_closed(path: Path, work: Callable[[SqliteLedger], Awaitable[object]]) -> None:
    await made(path)
    ledger = SqliteLedger(f"sqlite:///{path}")
    await ledger.open()
    await asyncio.to_thread(overwrite, path, 4096)
    with pytest.raises(StoreCorrupted):
        await work(ledger)
    await ledger.close()


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


AT = 1.0


def copied(path: Path) -> Path:
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def put_in_place(copy: Path, path: Path) -> None:
    """Replace only the file: the log of the old one stays beside it."""
    copy.replace(path)


def put_in_place_of_all(copy: Path, path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()
    copy.replace(path)


def put_in_place_by_steps(copy: Path, path: Path) -> None:
    path.rename(path.with_name("before.db"))
    shutil.copy(copy, path)


@pytest.mark.parametrize("put", [put_in_place, put_in_place_of_all, put_in_place_by_steps])
async def test_readers_and_writers_go_over_to_the_new_file(path: Path, put: Callable[[Path, Path], None]) -> None:
    early, late, after = record(), record(), record()
    with structlog.testing.capture_logs() as logged:
        keys, ledger = SqliteKeys(f"sqlite:///{path}"), SqliteLedger(f"sqlite:///{path}")
        await ledger.open()
        await keys.open()
        await keys.add(key("a"))
        await ledger.write([early])
        copy = copied(path)
        await keys.add(key("b"))
        await ledger.write([late])
        put(copy, path)
        assert [one.id for one in await keys.keys()] == [key("a").id]
        beside = SqliteKeys(f"sqlite:///{path}")
        await beside.open()
        assert await beside.expire(key("a").id, AT)
        await beside.close()
        assert await keys.get(key("a").id) == key("a", expires_at=AT)
        assert await ledger.find(late.id) == []
        await ledger.write([after])
        assert [len(await ledger.find(one.id)) for one in (early, late, after)] == [1, 0, 1]
        await keys.add(key("c"))
        assert locks(path)
        await keys.close()
        await ledger.close()
    assert {(line["log_level"], line["event"]) for line in logged} == {
        ("warning", "the ledger's file was replaced; using the new one")
    }
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM headway_keys").fetchone() == (2,)


async def test_several_that_go_over_at_once_share_one_log(path: Path) -> None:
    stores = [SqliteKeys(f"sqlite:///{path}") for _ in range(4)]
    for store in stores:
        await store.open()
    copy = copied(path)
    await stores[0].add(key("lost"))
    put_in_place(copy, path)
    await asyncio.gather(*(store.add(key(letter)) for store, letter in zip(stores, "abcd", strict=True)))
    for store in stores:
        assert len(await store.keys()) == 4
    for store in stores:
        await store.close()


async def test_a_copy_that_is_restored_into_the_file_in_use_is_another_history(path: Path) -> None:
    keys = SqliteKeys(f"sqlite:///{path}")
    await keys.open()
    await keys.add(key("a"))
    copy = copied(path)
    await keys.add(key("b"))
    late = await keys.latest()
    with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(path)) as target:
        source.backup(target)
    assert await keys.changes(late, 10) is None
    await keys.add(key("c"))
    assert (await keys.latest()).revision == late.revision
    assert await keys.changes(late, 10) is None
    assert [one.id for one in await keys.keys()] == [key("a").id, key("c").id]
    await keys.close()


async def test_out_of_descriptors_a_new_file_is_unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    keys = SqliteKeys(f"sqlite:///{path}")
    await keys.open()
    copied(path).replace(path)
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_store, "locked", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            await keys.keys()
    assert list(await keys.keys()) == []
    await keys.close()
