"""One SQLite file: a thread that writes to it, another that reads, each with a connection of its own.

SQLite waits for disks and for other processes, so it never runs on the event loop. In WAL mode readers and the writer do
not wait for each other. With synchronous=NORMAL a loss of power may take the last rows, but leaves the file whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.config import shown_url
from headway.errors import SettingError, StoreUnavailable
from headway.ledgers.schema import SQLITE, VERSIONS, missing

T = TypeVar("T")

BUSY_WITHIN = 5.0
"""Seconds for which SQLite waits while another process writes."""
BUSY_AGAIN = 0.01
"""Seconds after which it is asked again where it does not wait by itself."""
CALL_WITHIN = 10.0
"""Seconds after which a call counts as not answered."""
CLOSE_WITHIN = 2.0
"""Seconds for which the end of what is under way is waited for."""

_SCHEME = "sqlite:///"
_UNFIT = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
"""Codes of errors that do not pass by themselves."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Numbers of errors that do."""


def existing(url: str) -> str:
    """The URL as it is, of a file that is there.

    Raises:
        SettingError: it is not.
    """
    try:
        there = Path(url.removeprefix(_SCHEME)).exists()
    except OSError:  # Which is told when it is opened.
        there = True
    if not there:
        mend = "Name the ledger's file; headway serve and headway keys create make one."
        raise SettingError("ledger", shown_url(url), "no such file", mend)
    return url


class SqliteFile:
    """The database of one URL.

    Arguments:
        url: sqlite:///relative/path or sqlite:////absolute/path.
    """

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self._path = url.removeprefix(_SCHEME)
        self._opened: tuple[int, int] | None = None
        """Which file that was, by device and inode."""
        self._writer = _Hand("ledger writer", self._connected)
        self._reader = _Hand("ledger reader", self._connected)

    async def open(self) -> None:
        """Make the file if need be, and bring its tables up to date; of several processes one does so.

        Raises:
            SettingError: it cannot be such a file, or is a later version's.
            StoreUnavailable: it is locked, or its disk does not do.
        """
        await self._writer.do(self._prepare)
        await self._reader.do(lambda connection: connection.execute("SELECT 1 FROM headway_schema").fetchall())

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in a transaction, all or nothing.

        Raises:
            StoreUnavailable: it was not done, or its end is not known.
        """

        def in_transaction(connection: sqlite3.Connection) -> T:
            self._check_place()
            with _transaction(connection):
                return work(connection)

        return await self._writer.do(in_transaction)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work`, which only reads.

        Raises:
            StoreUnavailable: there is no answer.
        """
        return await self._reader.do(work)

    async def close(self) -> None:
        """Let go of the file. Work that hangs is left to itself."""
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
            undone.pop_all()
        self._opened = self._there()
        return connection

    def _there(self) -> tuple[int, int] | None:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _check_place(self) -> None:
        """A file that was moved takes rows on, where nobody looks for them. It is not made anew: what belongs to the one
        that was moved lies beside it still, and would get into it."""
        if self._there() != self._opened:
            raise StoreUnavailable(
                "the ledger's file was moved or removed; put it back, or end all processes that use it and start again"
            )

    def _make(self) -> None:
        """Make the file, readable by its owner only, as it tells who asked what."""
        if self._path.startswith((":memory:", "file:")):
            raise self._unfit("is no path")
        try:
            path = Path(self._path)
            if path.exists() and not (path.is_file() or path.is_dir()):  # To open a device or a pipe may do something.
                raise self._unfit("is no regular file")
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except (OSError, ValueError) as exc:
            if getattr(exc, "errno", None) in _PASSING:
                raise StoreUnavailable(f"the ledger cannot be opened: {exc}") from exc
            raise self._unfit(getattr(exc, "strerror", None) or str(exc)) from None

    def _prepare(self, connection: sqlite3.Connection) -> None:
        with self._fit():
            _use_wal(connection)
            with _transaction(connection):
                _bring_up_to_date(connection, self.shown)

    @contextlib.contextmanager
    def _fit(self) -> Iterator[None]:
        """Tell errors that pass from those that do not."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in _UNFIT:
                raise self._unfit(str(exc)) from None
            raise

    def _unfit(self, why: str) -> SettingError:
        mend = "Name a file, new or made by Headway, in a folder that is there and may be written to."
        return SettingError("ledger", self.shown, f"cannot be opened: {why}", mend)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Have the file kept in WAL mode from now on. For this SQLite does not wait while others have the file."""
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
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'headway_schema'").fetchone():
        connection.execute(VERSIONS)
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM headway_schema").fetchone()
    for number, statements in missing(SQLITE, version, shown):
        for statement in statements:
            connection.execute(statement)
        connection.execute("INSERT INTO headway_schema VALUES (?)", (number,))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """What is done in the block is done wholly or not at all. It is the only writer from its beginning."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # Some errors have SQLite end it by itself.
            connection.execute("ROLLBACK")
        raise


class _Hand:
    """A thread that does one thing after the other with a connection of its own. It starts with the first.

    Arguments:
        name: of the thread.
        connect: makes the connection.
    """

    def __init__(self, name: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._name = name
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: asyncio.Future[Any] | None = None

    async def do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Its outcome. What takes too long is left to itself; what comes next waits for it."""
        try:
            async with asyncio.timeout(CALL_WITHIN):
                if self._last is not None and not self._last.done():
                    await asyncio.wait({self._last})
                self._last = done = self._hand_over(work)
                await asyncio.wait({done})
        except TimeoutError:
            raise StoreUnavailable(f"the ledger's file does not answer within {CALL_WITHIN:g} s") from None
        try:
            return done.result()
        except (sqlite3.OperationalError, sqlite3.InternalError) as exc:
            raise StoreUnavailable(f"the ledger's file does not do: {exc}") from exc
        except sqlite3.DatabaseError as exc:
            if type(exc) is not sqlite3.DatabaseError:
                raise
            raise StoreUnavailable(f"the ledger's file does not do: {exc}") from exc

    async def end(self) -> None:
        """Close the connection and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        closed = self._hand_over(lambda _: self._shut(), thread)
        self._jobs.put(None)
        await asyncio.wait({closed}, timeout=CLOSE_WITHIN)
        if closed.done():
            thread.join()

    def _hand_over(
        self, work: Callable[[sqlite3.Connection], T], thread: threading.Thread | None = None
    ) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # Nobody may be there to see it.

        def job() -> None:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                outcome = work(self._connection)
            except BaseException as exc:
                settle = partial(done.set_exception, exc)
            else:
                settle = partial(done.set_result, outcome)
            with contextlib.suppress(RuntimeError):  # The loop has been closed.
                loop.call_soon_threadsafe(settle)

        if thread is None and self._thread is None:
            self._thread = threading.Thread(target=self._work_on, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return done

    def _work_on(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _shut(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
