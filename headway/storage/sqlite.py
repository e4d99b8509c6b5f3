"""Ledger, API keys and bulk jobs in an SQLite file. One thread writes and another one reads, each with its own connection.

SQLite waits for disks and other processes, so it never runs on the event loop. In WAL mode, readers and the writer don't
wait for each other. With synchronous=NORMAL, a power failure may lose the last rows, but never damages the file. Python
releases the GIL for every statement and every row read, which delays the event loop. So key changes are read as a single
row of JSON, and ledger rows are written fifty at a time.

Both threads notice if the open file is replaced:

the file is still there       ──▶ work
there is no file              ──▶ wait, because the file may come back, and a new file would get the old file's log
another file is there         ──▶ switch to it, if it is a ledger
the file's log is missing     ──▶ corrupted, because everything written from now on would be lost

Never open the file or its log except through SQLite. Closing any descriptor of a file releases all POSIX locks that the
process holds on it, including SQLite's. Another process might then delete the log (`-wal`) that this one is writing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import sqlite3
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import astuple

from headway.config import shown_url
from headway.errors import SettingError, StoreCorrupted, StoreUnavailable
from headway.model import ApiKey, LedgerRecord
from headway.model.identity import check_new
from headway.ports import KeyChanges, KeyMark, KeyStore, Ledger
from headway.runtime.logger import get_logger
from headway.runtime.shared_files import locked
from headway.storage import rows as shared
from headway.storage.schema import SQLITE, VERSIONS, missing

log = get_logger(__name__)

CALL_WITHIN = 10.0  # Maximum seconds for a call.
CLOSE_WITHIN = 2.0  # Maximum seconds for which closing waits for the current call.

MEND = "Stop all processes that use it. Then replace it with a backup, or see what sqlite3's .recover can save."

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = "the ledger's file was moved or removed; put it back, or stop all processes that use it and start again"
_NO_LOG = (
    "the log next to the ledger's file (-wal) was removed while it was in use. If you have just replaced the ledger's file, "
    f"do it again. Otherwise: {MEND}"
)
_OTHER = "the ledger's file was moved or removed, and the file in its place is not a ledger"

_Inode = tuple[int, int]


class FileIdentity(NamedTuple):
    """Device and inode of a database file and of its write-ahead log."""

    file: _Inode
    log: _Inode | None


class ConnectionThread:
    """Thread that runs one call at a time on its own connection. It starts on the first call, which raises any error of
    `connect`. `moves` counts how often the open file was replaced."""

    def __init__(self, name: str, path: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._name, self._path, self._connect = name, path, connect
        self._connection: sqlite3.Connection | None = None
        self.moves = 0
        self._identity: FileIdentity | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: asyncio.Future[Any] | None = None

    async def do(self, work: Callable[[sqlite3.Connection], T], within: float | None = None) -> T:
        """Run `work` in the thread, and return its result. Give up after `within` seconds (by default CALL_WITHIN), but let
        the next call wait until `work` has ended. Raises StoreUnavailable if the call fails or its outcome is unknown, and
        StoreCorrupted if the file is damaged."""
        limit = CALL_WITHIN if within is None else within
        try:
            async with asyncio.timeout(limit):
                if self._last is not None and not self._last.done():
                    await asyncio.wait({self._last})
                self._last = done = self._run_in_thread(lambda: work(self._ready()))
                await asyncio.wait({done})
        except TimeoutError:
            raise StoreUnavailable(f"the ledger's file did not respond within {limit:g} s") from None
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
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # The caller may have given up.

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
                # This log belongs to the previous file, and would be applied to the new one.
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
            "the ledger's file was replaced; using the new one",
            file=self._path, who=self._name,
        )  # fmt: skip

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _store_error(exc: sqlite3.DatabaseError) -> StoreUnavailable | None:
    """Return the error for a problem with the file, or None if a statement is to blame."""
    if getattr(exc, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}")
    if isinstance(exc, sqlite3.OperationalError | sqlite3.InternalError) or type(exc) is sqlite3.DatabaseError:
        return StoreUnavailable(f"the ledger's file cannot be used: {exc}")
    return None


def _check_ledger(path: str) -> None:
    """Raise StoreUnavailable if a file isn't a ledger. Takes no locks. Ignores the log, which may belong to another file."""
    uri = f"file:{quote(os.path.realpath(path))}?immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("SELECT 1 FROM headway_schema").fetchall()
    except sqlite3.DatabaseError as exc:
        raise StoreUnavailable(f"{_OTHER}: {exc}") from exc


def look(path: str) -> FileIdentity | None:
    """Return the identity of the database at a path, or None if there is none."""
    real = os.path.realpath(path)
    file = _inode(real)
    return None if file is None else FileIdentity(file, _inode(f"{real}-wal"))


def make(path: str) -> None:
    """Create an empty file without opening it, if there is none. Raises OSError, or ValueError if the path is invalid."""
    real = os.path.realpath(path)
    with contextlib.suppress(FileExistsError):
        try:
            os.mknod(real, 0o600 | stat.S_IFREG)
        except PermissionError:  # On some systems, only root may call mknod.
            _link_in(real)
    mode = Path(real).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "Is a directory")
    if not stat.S_ISREG(mode):  # Opening a device or a pipe may have side effects.
        raise OSError(None, "is not a regular file")
    if not os.access(real, os.R_OK | os.W_OK):
        raise PermissionError(None, "Permission denied")


def _link_in(path: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
    os.close(descriptor)
    try:
        os.link(name, path)
    finally:
        Path(name).unlink()


def remove_log(path: str) -> None:
    """Remove a log and its index that don't belong to the database at the path, which would treat them as its own."""
    real = os.path.realpath(path)
    for suffix in ("-wal", "-shm"):
        Path(real + suffix).unlink(missing_ok=True)


def _inode(path: str) -> _Inode | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


T = TypeVar("T")

BUSY_WITHIN = 5.0  # Maximum seconds for which SQLite waits while another process writes.
OPEN_WITHIN = 30.0  # Maximum seconds for opening, which checks all keys.
BUSY_AGAIN = 0.01  # Seconds between attempts where SQLite doesn't wait.

_SCHEME = "sqlite:///"
_PERMANENT = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)  # Waiting doesn't help.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)  # System errors that may go away.
_SLASHES = f"an absolute path takes four slashes, {_SCHEME}/PATH"
_MEND = f"Name a new file, or one created by Headway, in an existing writable folder; {_SLASHES}."


def existing(url: str) -> str:
    """Return the URL if its file exists. Otherwise, raise SettingError."""
    path = url.removeprefix(_SCHEME)
    try:
        exists = Path(path).exists()
    except OSError:  # Opening the file will show what is wrong.
        exists = True
    if not exists:
        hint = f"Name the ledger's file, which headway serve and headway keys create create; {_SLASHES}."
        raise SettingError("ledger", shown_url(url), f"no such file: {Path(path).absolute()}", hint)
    return url


class SqliteStore:
    """Store in an SQLite file. `url` is sqlite:///relative/path or sqlite:////absolute/path. When the file is opened, the tables
    in `checked` are checked for damage."""

    def __init__(self, url: str, checked: Sequence[str] = ()) -> None:
        self.shown = shown_url(url)
        self._path = url.removeprefix(_SCHEME)
        self._checked = checked
        self._writer = ConnectionThread("ledger writer", self._path, self._connected)
        self._reader = ConnectionThread("ledger reader", self._path, self._connected_and_checked)

    async def open(self) -> None:
        """Create the file if necessary, and apply missing migrations, in one process at a time. Raises SettingError if it
        isn't a database, is damaged, or is from a later version, and StoreUnavailable if it is locked or its disk fails."""
        try:
            for thread in (self._writer, self._reader):
                await thread.do(lambda connection: None, OPEN_WITHIN)
        except StoreCorrupted as exc:
            raise self._unusable(str(exc).removesuffix(f". {MEND}"), MEND) from exc

    async def _change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction. Raises StoreUnavailable if it fails or its outcome is unknown."""

        def in_transaction(connection: sqlite3.Connection) -> T:
            with _transaction(connection):
                return work(connection)

        return await self._do(self._writer, self._reader, in_transaction)

    async def _query(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which only reads, on a snapshot of the file. Raises StoreUnavailable."""

        def on_snapshot(connection: sqlite3.Connection) -> T:
            with _transaction(connection, "BEGIN"):
                return work(connection)

        return await self._do(self._reader, self._writer, on_snapshot)

    async def _do(
        self, thread: ConnectionThread, other: ConnectionThread, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """Run `work` on a thread. If the file was replaced, the other thread then also releases the old file, even if it is
        idle."""
        moves = thread.moves
        outcome = await thread.do(work)
        if thread.moves != moves:
            with contextlib.suppress(StoreUnavailable):
                await other.do(lambda connection: None)
        return outcome

    async def close(self) -> None:
        """Close the file. Abandon a call that hangs."""
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
        """Create the file. Only its owner can read it, because it contains everyone's requests."""
        if self._path.startswith((":memory:", "file:")):
            raise self._unusable("it is not a path")
        try:
            make(self._path)
        except (OSError, ValueError) as exc:
            if getattr(exc, "errno", None) in _PASSING:
                raise StoreUnavailable(f"the ledger cannot be opened: {exc}") from exc
            raise self._unusable(getattr(exc, "strerror", None) or str(exc)) from None

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn permanent SQLite errors into SettingError."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in _PERMANENT:
                raise self._unusable(str(exc)) from None
            raise

    def _unusable(self, reason: str, hint: str = _MEND) -> SettingError:
        return SettingError("ledger", self.shown, f"cannot open {Path(self._path).absolute()}: {reason}", hint)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode. SQLite doesn't wait for other users of the file here, so retry."""
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
    """Return the number of the last migration applied, or None if the database has no migrations table."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'headway_schema'").fetchone():
        return None
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM headway_schema").fetchone()
    return int(version)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in a transaction. By default, it excludes other writers from the start."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has already rolled back after some errors.
            connection.execute("ROLLBACK")
        raise


_ALIKE = f"{shared.SELECT} WHERE id = ? OR (replaces = ? AND replaces <> '')"
_ADD = f"INSERT INTO headway_keys ({shared.KEY_COLUMNS}, revision, changed_at) VALUES ({', '.join('?' * 14)})"  # noqa: S608
_THERE = "SELECT 1 FROM headway_keys WHERE id = ?"
_EXPIRE = """
UPDATE headway_keys SET expires_at = min(coalesce(expires_at, ?1), ?1), revision = ?2, changed_at = ?3 WHERE id = ?4
"""
_EXACT = "CASE WHEN {0} IS NOT NULL THEN printf('%!.17g', {0}) END"  # Keeps all digits. SQLite's JSON keeps fifteen.
_VALUES = ", ".join(
    "hex(digest)" if name == "digest" else _EXACT.format(name) if name in shared.NUMBERS else name
    for name in (*shared.KEY_COLUMNS.split(", "), "revision", "mark")
)
_AFTER = f"""
SELECT json_group_array(json_array({_VALUES}))
FROM ({shared.CHANGES} WHERE revision > ? ORDER BY revision LIMIT ?)
"""  # noqa: S608
_Row = tuple[str, str, str, str, str, str, float | None, float | None, float, float | None, str, str, int, str]
_KNOWN = "SELECT 1 FROM headway_key_changes WHERE revision = ? AND mark = ?"
_REMOVE = """
DELETE FROM headway_keys WHERE id IN (
    SELECT id FROM headway_keys WHERE expires_at < ?1 AND coalesce(changed_at, created_at) < ?1 LIMIT ?2
)
"""


class SqliteKeys(SqliteStore, KeyStore):
    """Key store in an SQLite file. See `headway.ports.KeyStore`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, checked=("headway_keys",))

    async def add(self, key: ApiKey) -> None:
        def work(connection: sqlite3.Connection) -> None:
            check_new(key, _keys_of(connection.execute(_ALIKE, (key.id, key.replaces))))
            connection.execute(_ADD, (*shared.row_of(key), _next(connection), time.time()))

        await self._change(work)

    async def get(self, id: str) -> ApiKey | None:
        rows = await self._keys(f"{shared.SELECT} WHERE id = ?", id)
        return rows[0] if rows else None

    async def expire(self, id: str, at: float) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            if not connection.execute(_THERE, (id,)).fetchone():
                return False
            connection.execute(_EXPIRE, (at, _next(connection), time.time(), id))
            return True

        return await self._change(work)

    async def keys(self) -> Sequence[ApiKey]:
        return await self._keys(shared.IN_ORDER)

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        def work(connection: sqlite3.Connection) -> KeyChanges | None:
            if since.mark and not connection.execute(_KNOWN, (since.revision, since.mark)).fetchone():
                return None
            [text] = connection.execute(_AFTER, (since.revision, limit)).fetchone()
            try:
                exact = msgspec.json.decode(text, type=list[_Row], strict=False)
                rows = [(row[0], bytes.fromhex(row[1]), *row[2:]) for row in exact]
            except (msgspec.MsgspecError, ValueError) as exc:
                raise StoreCorrupted(f"the ledger's file is corrupted: the key rows are invalid. {MEND}") from exc
            return shared.changes_of(_keys_of(rows), rows, since, limit)

        return await self._query(work)

    async def latest(self) -> KeyMark:
        revision, mark = await self._query(lambda connection: connection.execute(shared.LATEST).fetchone())
        return KeyMark(revision, mark)

    async def remove_ended(self, before: float, limit: int) -> int:
        return await self._change(lambda connection: connection.execute(_REMOVE, (before, limit)).rowcount)

    async def _keys(self, query: str, *values: object) -> list[ApiKey]:
        return await self._query(lambda connection: _keys_of(connection.execute(query, values)))


def _next(connection: sqlite3.Connection) -> int:
    [revision] = connection.execute(shared.NEXT).fetchone()
    connection.execute("INSERT INTO headway_key_changes VALUES (?, ?)", (revision, shared.new_mark()))
    connection.execute("DELETE FROM headway_key_changes WHERE revision <= ?", (revision - shared.MARKS,))
    return int(revision)


def _keys_of(rows: Iterable[Any]) -> list[ApiKey]:
    """Convert rows to keys. Raises StoreCorrupted if a row isn't a key, because only Headway writes to this table."""
    try:
        return shared.keys_of(rows)
    except ValueError as exc:
        raise StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}") from None


class SqliteBulkStore(SqliteStore, shared.BulkRows):
    """Bulk store in an SQLite file. See `headway.ports.BulkStore`."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._change(lambda connection: connection.execute(sql, _numbered(values)).fetchall())

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._query(lambda connection: connection.execute(sql, _numbered(values)).fetchall())


def _numbered(values: Sequence[object]) -> dict[str, object]:
    """Number values from 1, because to SQLite `$1` is a name."""
    return {str(number): value for number, value in enumerate(values, 1)}


ROWS = 50  # Rows per statement. Any SQLite accepts 999 values.

_NAMES = (
    "id", "user_id", "tenant", "tier", "model", "status", "created_at", "completed_at", "latency_ms", "batch_size",
    "worker", "version", "error", "requests", "batch_id", "part_of", "tokens", "input", "output",
)  # fmt: skip
_COLUMNS = ", ".join(_NAMES)
_ALL = len(_NAMES)
_WITHOUT_CONTENT = _ALL - 2  # Number of columns to write if neither input nor output is stored. Each value takes time.


def _insert(rows: int, width: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT OR IGNORE INTO headway_requests ({', '.join(_NAMES[:width])}) VALUES {', '.join([row] * rows)}"  # noqa: S608


_FULL = {width: _insert(ROWS, width) for width in (_WITHOUT_CONTENT, _ALL)}
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = ? ORDER BY completed_at DESC"  # noqa: S608
_NOTE = f"INSERT OR REPLACE INTO headway_open_requests VALUES ({', '.join('?' * len(shared.OPEN_COLUMNS))})"  # noqa: S608
_FORGET = "DELETE FROM headway_open_requests WHERE id = ? AND tenant = ?"
_FIND_OPEN = "SELECT * FROM headway_open_requests WHERE id = ?"
_PRUNE_OPEN = "DELETE FROM headway_open_requests WHERE due_at < ?"
_PRUNE = """
DELETE FROM headway_requests WHERE (id, tenant, completed_at) IN (
    SELECT id, tenant, completed_at FROM headway_requests WHERE completed_at < ? ORDER BY completed_at LIMIT ?
)
"""


class SqliteLedger(SqliteStore, Ledger):
    """Ledger in an SQLite file. See `headway.ports.Ledger`."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            content = any(record.input is not None or record.output is not None for record in records)
            for start in range(0, len(records), ROWS):
                _write(connection, records[start : start + ROWS], _ALL if content else _WITHOUT_CONTENT)

        await self._change(work)

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_FORGET, [(_key(id), tenant) for tenant, id in ended])
            connection.executemany(_NOTE, [(_key(record.id), *shared.open_row(record)[1:]) for record in records])

        await self._change(work)

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        try:
            key = uuid.UUID(id).bytes
        except ValueError:
            return ()
        ended, waiting = await self._query(
            lambda connection: [connection.execute(sql, (key,)).fetchall() for sql in (_FIND, _FIND_OPEN)]
        )
        still_open = [shared.open_record((str(uuid.UUID(bytes=row[0])), *row[1:])) for row in waiting]
        return shared.together([_record(row) for row in ended], still_open)

    async def prune(self, before: float, limit: int) -> int:
        def work(connection: sqlite3.Connection) -> int:
            connection.execute(_PRUNE_OPEN, (before,))
            return connection.execute(_PRUNE, (before, limit)).rowcount

        return await self._change(work)


def _write(connection: sqlite3.Connection, records: Sequence[LedgerRecord], width: int) -> None:
    values: list[object] = []
    for record in records:
        values.append(_key(record.id))
        values += astuple(record)[1:width]
    connection.execute(_FULL[width] if len(records) == ROWS else _insert(len(records), width), values)


def _key(id: str) -> bytes:
    return bytes.fromhex(id.replace("-", ""))


def _record(row: tuple[Any, ...]) -> LedgerRecord:
    values = str(uuid.UUID(bytes=row[0])), *row[1:]
    return LedgerRecord(**dict(zip(LedgerRecord.__struct_fields__, values, strict=True)))
