"""Replacement of a ledger's file that is in use, as by a copy that is put back: all go by the one that is there."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import structlog.testing

from headway.errors import StoreUnavailable
from headway.storage.sqlite import connection_thread
from headway.storage.sqlite.keys import SqliteKeys
from headway.storage.sqlite.ledger import SqliteLedger
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import record
from tests.storage.test_sqlite_locks import locks

AT = 1.0


def copied(path: Path) -> Path:
    """A copy, made as the documentation says."""
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def put_in_place(copy: Path, path: Path) -> None:
    """The file alone: the log of the one that was there stays beside it."""
    copy.replace(path)


def put_in_place_of_all(copy: Path, path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()
    copy.replace(path)


def put_in_place_by_steps(copy: Path, path: Path) -> None:
    path.rename(path.with_name("before.db"))
    shutil.copy(copy, path)


@pytest.mark.parametrize("put", [put_in_place, put_in_place_of_all, put_in_place_by_steps])
def test_readers_and_writers_go_over_to_the_file_that_is_there(
    tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "ledger.db"
    early, late, after = record(), record(), record()

    async def main() -> None:
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

    with structlog.testing.capture_logs() as logged:
        asyncio.run(main())
    assert {(line["log_level"], line["event"]) for line in logged} == {
        ("warning", "another file has taken the place of the ledger's; using the new one")
    }
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM headway_keys").fetchone() == (2,)


async def test_several_that_go_over_at_once_share_one_log(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
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


async def test_a_file_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    path, away = tmp_path / "ledger.db", tmp_path / "away.db"
    keys = SqliteKeys(f"sqlite:///{path}")
    await keys.open()
    path.rename(away)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="moved or removed"):
            await keys.keys()
    assert not path.exists()
    away.rename(path)
    assert list(await keys.keys()) == []
    await keys.close()


async def test_a_copy_that_is_restored_into_the_file_in_use_is_another_history(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
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


async def test_a_system_that_is_short_of_descriptors_while_a_file_is_replaced_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    keys = SqliteKeys(f"sqlite:///{path}")
    await keys.open()
    copied(path).replace(path)
    with monkeypatch.context() as patched:
        patched.setattr(connection_thread, "locked", refuse)
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            await keys.keys()
    assert list(await keys.keys()) == []
    await keys.close()
