"""An SQLite file with a thread that writes and another that reads, each with its own connection.

SQLite waits for disks and other processes, so it never runs on the event loop. In WAL mode, readers and the writer don't wait
for each other. With synchronous=NORMAL, a power cut may lose the last rows but never damages the file.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from headway.config import shown_url
from headway.errors import SettingError, StoreCorrupted, StoreUnavailable
from headway.storage.schema import SQLITE, VERSIONS, missing
from headway.storage.sqlite.connection_thread import MEND, ConnectionThread, make

T = TypeVar("T")

BUSY_WITHIN = 5.0
"""Seconds for which SQLite waits while another process writes."""
OPEN_WITHIN = 30.0
"""Seconds that opening may take, because it checks all keys."""
BUSY_AGAIN = 0.01
"""Seconds between two tries where SQLite doesn't wait by itself."""

_SCHEME = "sqlite:///"
_PERMANENT = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
"""Errors of SQLite that waiting doesn't cure."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors of the system that may pass."""
_SLASHES = f"an absolute path takes four slashes, {_SCHEME}/PATH"
_MEND = f"Name a file, new or made by Headway, in an existing folder that may be written to; {_SLASHES}."


def existing(url: str) -> str:
    """Return the URL if its file exists, or raise SettingError."""
    path = url.removeprefix(_SCHEME)
    try:
        exists = Path(path).exists()
    except OSError:  # Opening the file will say what is wrong.
        exists = True
    if not exists:
        hint = f"Name the ledger's file, which headway serve or headway keys create makes; {_SLASHES}."
        raise SettingError("ledger", shown_url(url), f"no such file: {Path(path).absolute()}", hint)
    return url


class SqliteStore:
    """Store in an SQLite file, by a URL sqlite:///relative/path or sqlite:////absolute/path.

    The tables in `checked` are checked for damage when the file is opened.
    """

    def __init__(self, url: str, checked: Sequence[str] = ()) -> None:
        self.shown = shown_url(url)
        self._path = url.removeprefix(_SCHEME)
        self._checked = checked
        self._writer = ConnectionThread("ledger writer", self._path, self._connected)
        self._reader = ConnectionThread("ledger reader", self._path, self._connected_and_checked)

    async def open(self) -> None:
        """Create the file if need be, and bring its tables up to date, which only one of several processes does.

        Raises:
            SettingError: the file can't be a database, is damaged, or is a later version's.
            StoreUnavailable: the file is locked, or its disk fails.
        """
        try:
            for thread in (self._writer, self._reader):
                await thread.do(lambda connection: None, OPEN_WITHIN)
        except StoreCorrupted as exc:
            raise self._unusable(str(exc).removesuffix(f". {MEND}"), MEND) from exc

    async def _change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, all or nothing. Raises StoreUnavailable if it failed or its outcome is unknown."""

        def in_transaction(connection: sqlite3.Connection) -> T:
            with _transaction(connection):
                return work(connection)

        return await self._do(self._writer, self._reader, in_transaction)

    async def _query(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which only reads, on one snapshot of the file. Raises StoreUnavailable."""

        def on_snapshot(connection: sqlite3.Connection) -> T:
            with _transaction(connection, "BEGIN"):
                return work(connection)

        return await self._do(self._reader, self._writer, on_snapshot)

    async def _do(
        self, thread: ConnectionThread, other: ConnectionThread, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """Run `work` on a thread. If the file was replaced, the other thread must let go of it too, although it may be idle."""
        moves = thread.moves
        outcome = await thread.do(work)
        if thread.moves != moves:
            with contextlib.suppress(StoreUnavailable):
                await other.do(lambda connection: None)
        return outcome

    async def close(self) -> None:
        """Close the file. A call that hangs is abandoned."""
        await self._reader.end()
        await self._writer.end()

    def _connected(self) -> sqlite3.Connection:
        self._make()
        connection = sqlite3.connect(
            self._path, timeout=BUSY_WITHIN, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        with self._usable(), contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            connection.execute("PRAGMA synchronous = NORMAL")
            _use_wal(connection)
            _bring_up_to_date(connection, self.shown)
            on_error.pop_all()
        return connection

    def _connected_and_checked(self) -> sqlite3.Connection:
        connection = self._connected()
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            for table in self._checked:
                [verdict] = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
                if verdict != "ok":
                    raise StoreCorrupted(f"the ledger's file is corrupted: {verdict}. {MEND}")
            on_error.pop_all()
        return connection

    def _make(self) -> None:
        """Create the file. Only its owner may read it, because it contains everyone's requests."""
        if self._path.startswith((":memory:", "file:")):
            raise self._unusable("it is no path")
        try:
            make(self._path)
        except (OSError, ValueError) as exc:
            if getattr(exc, "errno", None) in _PASSING:
                raise StoreUnavailable(f"the ledger cannot be opened: {exc}") from exc
            raise self._unusable(getattr(exc, "strerror", None) or str(exc)) from None

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn lasting errors of SQLite into SettingError."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in _PERMANENT:
                raise self._unusable(str(exc)) from None
            raise

    def _unusable(self, reason: str, hint: str = _MEND) -> SettingError:
        return SettingError("ledger", self.shown, f"cannot open {Path(self._path).absolute()}: {reason}", hint)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode. SQLite itself doesn't wait for other users of the file here."""
    until = time.monotonic() + BUSY_WITHIN
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
        time.sleep(BUSY_AGAIN)


def _bring_up_to_date(connection: sqlite3.Connection, shown: str) -> None:
    if _version(connection) == len(SQLITE):
        return
    with _transaction(connection):
        version = _version(connection)
        if version is None:
            connection.execute(VERSIONS)
        for number, statements in missing(SQLITE, version or 0, shown):
            for statement in statements:
                connection.execute(statement)
            connection.execute("INSERT INTO headway_schema VALUES (?)", (number,))


def _version(connection: sqlite3.Connection) -> int | None:
    """Return the number of the last step done, or None in a database without a table of steps."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'headway_schema'").fetchone():
        return None
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM headway_schema").fetchone()
    return int(version)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in a transaction. It is the only writer from its beginning, unless `begin` says otherwise."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back by itself on some errors.
            connection.execute("ROLLBACK")
        raise
