"""SQLite's locks stay on the file for as long as a process has it open, whatever else the process does.

Closing any descriptor of a file ends all locks that the process has on it. Another process then takes itself for the last
one, and deletes the log that this one writes on into.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.storage.sqlite.keys import SqliteKeys
from headway.storage.sqlite.ledger import SqliteLedger
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import record

_watched: list[tuple[str, list[str]]] = []
_hooked = False


@contextmanager
def opened_by_python(folder: Path) -> Iterator[list[str]]:
    """Files that Python itself opens in a folder, in the order in which it does."""
    global _hooked
    if not _hooked:  # A hook cannot be taken away again.
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
    """POSIX locks of a process on a file; of this one, if none is named."""
    inode = str(path.stat().st_ino)
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(
        row[1] == "POSIX" and row[4] == str(pid or os.getpid()) and row[5].split(":")[2] == inode for row in rows
    )


def descriptors(path: Path, pid: int | None = None) -> int:
    """Descriptors of a file in a process; in this one, if none is named."""
    found = 0
    for entry in Path(f"/proc/{pid or os.getpid()}/fd").iterdir():
        try:
            found += os.path.samestat(entry.stat(), path.stat())
        except OSError:
            continue
    return found


def test_the_locks_outlast_whatever_opens_and_closes_the_file_beside(tmp_path: Path) -> None:
    """A service with `--keys ledger` has a ledger and a store of keys, one opened after the other."""
    path = tmp_path / "ledger.db"

    async def main() -> None:
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

    with opened_by_python(tmp_path) as opened:
        asyncio.run(main())
    assert opened == []


def test_a_new_file_is_made_without_being_opened_by_several_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    async def main() -> None:
        stores = [SqliteKeys(f"sqlite:///{path}") for _ in range(4)]
        await asyncio.gather(*(store.open() for store in stores))
        assert locks(path)
        assert (path.stat().st_mode & 0o777) == 0o600
        for store in stores:
            await store.close()

    with opened_by_python(tmp_path) as opened:
        asyncio.run(main())
    assert opened == []


def test_a_system_where_only_root_makes_nodes_has_the_file_linked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    path = tmp_path / "ledger.db"

    async def main() -> None:
        stores = [SqliteKeys(f"sqlite:///{path}") for _ in range(4)]
        await asyncio.gather(*(store.open() for store in stores))
        assert locks(path)
        assert {one.name for one in await asyncio.to_thread(lambda: list(tmp_path.iterdir()))} == {
            "ledger.db",
            "ledger.db-shm",
            "ledger.db-wal",
        }
        for store in stores:
            await store.close()

    with opened_by_python(tmp_path) as opened:
        asyncio.run(main())
    assert str(path) not in opened


def test_a_link_to_no_file_yet_has_one_made_for_its_owner_only(tmp_path: Path) -> None:
    target, path = tmp_path / "target.db", tmp_path / "link.db"
    path.symlink_to(target)

    async def main() -> None:
        keys = SqliteKeys(f"sqlite:///{path}")
        await keys.open()
        await keys.add(key("a"))
        await keys.close()

    asyncio.run(main())
    assert target.stat().st_mode & 0o777 == 0o600
