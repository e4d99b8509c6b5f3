"""Thread with one connection to an SQLite file, which notices when another file has taken the place of that one.

file there, as it was opened ──▶ work
no file there                ──▶ wait: it may be put back, and a new one would get what lies beside the old one
another file there           ──▶ go by that one, if it is a ledger
its log is gone              ──▶ corrupted: what is written from now on would be lost
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from headway.errors import SettingError, StoreCorrupted, StoreUnavailable
from headway.runtime.folder_lock import locked
from headway.runtime.logger import get_logger
from headway.storage.sqlite.file_identity import FileIdentity, look, remove_log

T = TypeVar("T")

log = get_logger(__name__)

CALL_WITHIN = 10.0
"""Seconds after which a call counts as not answered."""
CLOSE_WITHIN = 2.0
"""Seconds to wait for the running call at the end."""

MEND = "End all processes that use it, then put a copy in its place, or see what the .recover of sqlite3 can save."
"""Advice about a damaged file."""

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = "the ledger's file was moved or removed; put it back, or end all processes that use it and start again"
_NO_LOG = (
    "the log beside the ledger's file (-wal) was removed while it was in use. If another file has just taken the place of "
    f"the ledger's, do it again. Else: {MEND}"
)
_OTHER = "the ledger's file was moved or removed, and what lies in its place is no ledger"


class ConnectionThread:
    """Thread that runs one call after the other with a connection of its own. It starts with the first call.

    Arguments:
        name: name of the thread.
        path: path of the file.
        connect: makes a connection whose file is ready for use; what it raises, a call raises.

    Attributes:
        moves: number of times that another file took the place of the open one.
    """

    def __init__(self, name: str, path: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._name = name
        self._path = path
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self.moves = 0
        self._identity: FileIdentity | None = None
        """File that `look` saw when the connection was made."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: asyncio.Future[Any] | None = None

    async def do(self, work: Callable[[sqlite3.Connection], T], within: float | None = None) -> T:
        """Run `work` in the thread, and return its result.

        A call that takes longer than `within` seconds, or CALL_WITHIN, is left to itself; the next call waits for it.

        Raises:
            StoreUnavailable: the call was not done, or its end is not known.
            StoreCorrupted: the file is damaged.
        """
        limit = CALL_WITHIN if within is None else within
        try:
            async with asyncio.timeout(limit):
                if self._last is not None and not self._last.done():
                    await asyncio.wait({self._last})
                self._last = done = self._hand_over(lambda: work(self._ready()))
                await asyncio.wait({done})
        except TimeoutError:
            raise StoreUnavailable(f"the ledger's file does not answer within {limit:g} s") from None
        try:
            return done.result()
        except OSError as exc:
            raise StoreUnavailable(f"the ledger's file cannot be used: {exc}") from exc
        except sqlite3.DatabaseError as exc:
            if (error := _told(exc)) is None:
                raise
            raise error from exc

    async def end(self) -> None:
        """Close the connection and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        closed = self._hand_over(self._shut, thread)
        self._jobs.put(None)
        await asyncio.wait({closed}, timeout=CLOSE_WITHIN)
        if closed.done():
            thread.join()

    def _hand_over(self, work: Callable[[], T], thread: threading.Thread | None = None) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # Nobody may be there to see it.

        def job() -> None:
            try:
                outcome = work()
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

    def _ready(self) -> sqlite3.Connection:
        """Connection to the file that lies at the path now."""
        if self._connection is None:
            self._connection = self._connect()
            self._identity = look(self._path)
        there = look(self._path)
        if there != self._identity:
            if there is None:
                raise StoreUnavailable(_GONE)
            if self._identity is not None and there.file == self._identity.file:
                raise StoreCorrupted(_NO_LOG)
            self._go_over()
        return self._connection

    def _go_over(self) -> None:
        """Change over to the file that has taken the place of the open one."""
        with locked(Path(os.path.realpath(self._path)).parent):
            if (there := look(self._path)) is None:
                raise StoreUnavailable(_GONE)
            _check_ledger(self._path)
            if self._identity is not None and there.log == self._identity.log:
                # What lies beside it is the log of the file that was there before, and would get into this one.
                remove_log(self._path)
            before = self._connection
            try:
                self._connection = self._connect()
            except SettingError as exc:
                raise StoreUnavailable(str(exc)) from exc
            self._identity = look(self._path)
        self.moves += 1
        if before is not None:
            before.close()
        log.warning(
            "another file has taken the place of the ledger's; going by the one that is there",
            file=self._path, who=self._name,
        )  # fmt: skip

    def _shut(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _told(exc: sqlite3.DatabaseError) -> StoreUnavailable | None:
    """SQLite's error about its file, in Headway's words; None for what is the fault of a statement."""
    if getattr(exc, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}")
    if isinstance(exc, sqlite3.OperationalError | sqlite3.InternalError) or type(exc) is sqlite3.DatabaseError:
        return StoreUnavailable(f"the ledger's file cannot be used: {exc}")
    return None


def _check_ledger(path: str) -> None:
    """Check that a file is a ledger, without its log, which may be another file's, and without any lock on it.

    Raises:
        StoreUnavailable: the file is no ledger.
    """
    uri = f"file:{quote(os.path.realpath(path))}?immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("SELECT 1 FROM headway_schema").fetchall()
    except sqlite3.DatabaseError as exc:
        raise StoreUnavailable(f"{_OTHER}: {exc}") from exc
