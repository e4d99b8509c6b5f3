"""SQLite file with two threads: one that writes to it and one that reads, each with a connection of its own.

SQLite waits for disks and for other processes, so it never runs on the event loop. In WAL mode readers and the writer
do not wait for each other. With synchronous=NORMAL a loss of power may take the last rows, but leaves the file whole.
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
from headway.storage.sqlite.connection_thread import MEND, ConnectionThread
from headway.storage.sqlite.file_identity import make

T = TypeVar("T")

BUSY_WITHIN = 5.0
"""Seconds for which SQLite waits while another process writes."""
OPEN_WITHIN = 30.0
"""Seconds for opening, as checking many keys takes some."""
BUSY_AGAIN = 0.01
"""Seconds after which SQLite is asked again where it does not wait by itself."""

_SCHEME = "sqlite:///"
_UNFIT = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
"""Codes of errors that do not pass by themselves."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Numbers of errors that pass by themselves."""
_SLASHES = f"an absolute path takes four slashes, {_SCHEME}/PATH"
_MEND = f"Name a file, new or made by Headway, in a folder that is there and may be written to; {_SLASHES}."


def existing(url: str) -> str:
    """Return the URL of a file that is there.

    Raises:
        SettingError: the file is not there.
    """
    path = url.removeprefix(_SCHEME)
    try:
        there = Path(path).exists()
    except OSError:  # Which is told when it is opened.
        there = True
    if not there:
        hint = f"Name the ledger's file, which headway serve or headway keys create makes; {_SLASHES}."
        raise SettingError("ledger", shown_url(url), f"no such file: {Path(path).absolute()}", hint)
    return url


class SqliteDatabase:
    """Database of one URL.

    Arguments:
        url: sqlite:///relative/path or sqlite:////absolute/path.
        checked: tables that are checked for damage whenever the file is opened.
    """

    def __init__(self, url: str, checked: Sequence[str] = ()) -> None:
        self.shown = shown_url(url)
        self._path = url.removeprefix(_SCHEME)
        self._checked = checked
        self._writer = ConnectionThread("ledger writer", self._path, self._connected)
        self._reader = ConnectionThread("ledger reader", self._path, self._checked_too)

    async def open(self) -> None:
        """Make the file if need be, and bring its tables up to date; of several processes one does so.

        Raises:
            SettingError: the file cannot be a database, is damaged, or is a later version's.
            StoreUnavailable: the file is locked, or its disk fails.
        """
        try:
            for hand in (self._writer, self._reader):
                await hand.do(lambda connection: None, OPEN_WITHIN)
        except StoreCorrupted as exc:
            raise self._unfit(str(exc).removesuffix(f". {MEND}"), MEND) from exc

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, all or nothing.

        Raises:
            StoreUnavailable: the work was not done, or its end is not known.
        """

        def in_transaction(connection: sqlite3.Connection) -> T:
            with _transaction(connection):
                return work(connection)

        return await self._done(self._writer, self._reader, in_transaction)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which only reads, at one instant of the file.

        Raises:
            StoreUnavailable: there is no answer.
        """

        def at_an_instant(connection: sqlite3.Connection) -> T:
            with _transaction(connection, "BEGIN"):
                return work(connection)

        return await self._done(self._reader, self._writer, at_an_instant)

    async def _done(
        self, hand: ConnectionThread, other: ConnectionThread, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """Result of `work` on thread `hand`.

        The other thread, which may be idle, lets go of a file that has been replaced, too.
        """
        moves = hand.moves
        outcome = await hand.do(work)
        if hand.moves != moves:
            with contextlib.suppress(StoreUnavailable):
                await other.do(lambda connection: None)
        return outcome

    async def close(self) -> None:
        """Close the file. Work that hangs is left to itself."""
        await self._reader.end()
        await self._writer.end()

    def _connected(self) -> sqlite3.Connection:
        self._make()
        connection = sqlite3.connect(
            self._path, timeout=BUSY_WITHIN, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        with self._fit(), contextlib.ExitStack() as undone:
            undone.callback(connection.close)
            connection.execute("PRAGMA synchronous = NORMAL")
            _use_wal(connection)
            _bring_up_to_date(connection, self.shown)
            undone.pop_all()
        return connection

    def _checked_too(self) -> sqlite3.Connection:
        connection = self._connected()
        with contextlib.ExitStack() as undone:
            undone.callback(connection.close)
            for table in self._checked:
                [found] = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
                if found != "ok":
                    raise StoreCorrupted(f"the ledger's file is corrupted: {found}. {MEND}")
            undone.pop_all()
        return connection

    def _make(self) -> None:
        """Make the file, readable by its owner only, as it tells the requests of all."""
        if self._path.startswith((":memory:", "file:")):
            raise self._unfit("it is no path")
        try:
            make(self._path)
        except (OSError, ValueError) as exc:
            if getattr(exc, "errno", None) in _PASSING:
                raise StoreUnavailable(f"the ledger cannot be opened: {exc}") from exc
            raise self._unfit(getattr(exc, "strerror", None) or str(exc)) from None

    @contextlib.contextmanager
    def _fit(self) -> Iterator[None]:
        """Raise SettingError for errors of SQLite that do not pass by themselves."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in _UNFIT:
                raise self._unfit(str(exc)) from None
            raise

    def _unfit(self, why: str, hint: str = _MEND) -> SettingError:
        return SettingError("ledger", self.shown, f"cannot open {Path(self._path).absolute()}: {why}", hint)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode. For this SQLite does not wait while others have the file."""
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
    """Number of the last step that was done; None where there is not even a table of them."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'headway_schema'").fetchone():
        return None
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM headway_schema").fetchone()
    return int(version)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in one transaction.

    Unless another `begin` says otherwise, it is the only writer from its beginning.
    """
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # Some errors have SQLite end it by itself.
            connection.execute("ROLLBACK")
        raise
