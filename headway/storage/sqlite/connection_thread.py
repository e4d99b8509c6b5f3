"""A thread with a connection to an SQLite file, which notices that another file took the place of the open file.

the file is still there       ──▶ work
no file is there              ──▶ wait, because the file may come back, and a new file would get its log
another file is there         ──▶ switch to it, if it is a ledger
the file's log is gone        ──▶ corrupted, because whatever is written from now on would be lost

Never open the file or its log except through SQLite. Closing any descriptor of a file ends all POSIX locks that the process
holds on it, including SQLite's. Another process would then take itself for the last user and delete the log (`-wal`) to which
this process still writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from headway.errors import SettingError, StoreCorrupted, StoreUnavailable
from headway.runtime.logger import get_logger
from headway.runtime.shared_files import locked

T = TypeVar("T")

log = get_logger(__name__)

CALL_WITHIN = 10.0
"""Seconds that a call may take."""
CLOSE_WITHIN = 2.0
"""Seconds for which closing waits for the running call."""

MEND = "End all processes that use it, then put a copy in its place, or see what the .recover of sqlite3 can save."

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = "the ledger's file was moved or removed; put it back, or end all processes that use it and start again"
_NO_LOG = (
    "the log beside the ledger's file (-wal) was removed while it was in use. If you have just put another file in place of "
    f"the ledger's, do it again. Otherwise: {MEND}"
)
_OTHER = "the ledger's file was moved or removed, and the file in its place is no ledger"

_Inode = tuple[int, int]


class FileIdentity(NamedTuple):
    """Device and inode of a database's file and of its write-ahead log."""

    file: _Inode
    log: _Inode | None


class ConnectionThread:
    """Thread that runs one call at a time with its own connection. It starts with the first call, which raises errors of `connect`.

    `moves` counts how often another file took the place of the open file.
    """

    def __init__(self, name: str, path: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._name, self._path, self._connect = name, path, connect
        self._connection: sqlite3.Connection | None = None
        self.moves = 0
        self._identity: FileIdentity | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: asyncio.Future[Any] | None = None

    async def do(self, work: Callable[[sqlite3.Connection], T], within: float | None = None) -> T:
        """Run `work` in the thread, and return its result.

        A call is abandoned after `within` seconds (CALL_WITHIN by default), and the next call waits for its end.

        Raises:
            StoreUnavailable: the call failed, or its outcome is unknown.
            StoreCorrupted: the file is damaged.
        """
        limit = CALL_WITHIN if within is None else within
        try:
            async with asyncio.timeout(limit):
                if self._last is not None and not self._last.done():
                    await asyncio.wait({self._last})
                self._last = done = self._run_in_thread(lambda: work(self._ready()))
                await asyncio.wait({done})
        except TimeoutError:
            raise StoreUnavailable(f"the ledger's file did not answer within {limit:g} s") from None
        try:
            return done.result()
        except OSError as exc:
            raise StoreUnavailable(f"the ledger's file cannot be used: {exc}") from exc
        except sqlite3.DatabaseError as exc:
            if (error := _store_error(exc)) is None:
                raise
            raise error from exc

    async def end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        closed = self._run_in_thread(self._close, thread)
        self._jobs.put(None)
        await asyncio.wait({closed}, timeout=CLOSE_WITHIN)
        if closed.done():
            thread.join()

    def _run_in_thread(self, work: Callable[[], T], thread: threading.Thread | None = None) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # The caller may be gone.

        def job() -> None:
            try:
                outcome = work()
            except BaseException as exc:
                settle = partial(done.set_exception, exc)
            else:
                settle = partial(done.set_result, outcome)
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle)

        if thread is None and self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return done

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _ready(self) -> sqlite3.Connection:
        """Return a connection to the file that is at the path now."""
        if self._connection is None:
            self._connection = self._connect()
            self._identity = look(self._path)
        identity = look(self._path)
        if identity != self._identity:
            if identity is None:
                raise StoreUnavailable(_GONE)
            if self._identity is not None and identity.file == self._identity.file:
                raise StoreCorrupted(_NO_LOG)
            self._switch()
        return self._connection

    def _switch(self) -> None:
        with locked(Path(os.path.realpath(self._path)).parent):
            if (identity := look(self._path)) is None:
                raise StoreUnavailable(_GONE)
            _check_ledger(self._path)
            if self._identity is not None and identity.log == self._identity.log:
                # This log belongs to the former file, and would be applied to the new file.
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
            "another file has taken the place of the ledger's; using the new one",
            file=self._path, who=self._name,
        )  # fmt: skip

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _store_error(exc: sqlite3.DatabaseError) -> StoreUnavailable | None:
    """Return the error to raise about the file, or None if a statement is to blame."""
    if getattr(exc, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}")
    if isinstance(exc, sqlite3.OperationalError | sqlite3.InternalError) or type(exc) is sqlite3.DatabaseError:
        return StoreUnavailable(f"the ledger's file cannot be used: {exc}")
    return None


def _check_ledger(path: str) -> None:
    """Raise StoreUnavailable if a file isn't a ledger. Uses no locks, and not its log, which may be another file's."""
    uri = f"file:{quote(os.path.realpath(path))}?immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("SELECT 1 FROM headway_schema").fetchall()
    except sqlite3.DatabaseError as exc:
        raise StoreUnavailable(f"{_OTHER}: {exc}") from exc


def look(path: str) -> FileIdentity | None:
    """Return the identity of the files at a path, or None if there is no database."""
    real = os.path.realpath(path)
    file = _inode(real)
    return None if file is None else FileIdentity(file, _inode(f"{real}-wal"))


def make(path: str) -> None:
    """Create an empty file if there is none, without ever having it open. Raises OSError, or ValueError for an invalid path."""
    real = os.path.realpath(path)
    with contextlib.suppress(FileExistsError):
        try:
            os.mknod(real, 0o600 | stat.S_IFREG)
        except PermissionError:  # On some systems, only root may call mknod.
            _link_in(real)
    mode = Path(real).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "Is a directory")
    if not stat.S_ISREG(mode):  # To open a device or a pipe may have an effect.
        raise OSError(None, "is no regular file")
    if not os.access(real, os.R_OK | os.W_OK):
        raise PermissionError(None, "Permission denied")


def _link_in(path: str) -> None:
    """Create an empty file elsewhere, close it, and link it to the path."""
    descriptor, name = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
    os.close(descriptor)
    try:
        os.link(name, path)
    finally:
        Path(name).unlink()


def remove_log(path: str) -> None:
    """Remove the log and its index, because the database now at the path would take them for its own."""
    real = os.path.realpath(path)
    for suffix in ("-wal", "-shm"):
        Path(real + suffix).unlink(missing_ok=True)


def _inode(path: str) -> _Inode | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
