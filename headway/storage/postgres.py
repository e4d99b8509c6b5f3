"""Ledger, API keys and bulk jobs in PostgreSQL. One connection writes, and another one reads, so that readers don't wait for writers.

A connection is opened when it is needed, and reopened after a failed call. Every transaction sets its own isolation and
time limit. Connections keep neither settings nor prepared statements, so PgBouncer can pool transactions.

    BEGIN, isolation, timeout ──calls──▶ COMMIT succeeds: done
                                    └──▶ a row is refused: roll back, keep the connection
                                    └──▶ anything else: the outcome is unknown, drop the connection

A row is only to blame if the server says so. Anything else is an outage. A frozen server doesn't even cancel statements, so every
call also has a time limit here.

The ledger's rows are written with COPY. If one of them already exists, COPY writes none, so they are then written with an
INSERT that skips existing rows. A change of keys holds a lock from when its revision is assigned until its transaction
is visible, so readers never miss a lower revision."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import asyncpg
from asyncpg.pgproto.pgproto import UUID
from msgspec.structs import astuple

from headway.config import shown_url
from headway.errors import SettingError, StoreUnavailable
from headway.model import ApiKey, LedgerRecord
from headway.model.identity import check_new
from headway.ports import KeyChanges, KeyMark, KeyStore, Ledger
from headway.runtime.logger import get_logger
from headway.storage import rows as shared
from headway.storage.schema import POSTGRES, VERSIONS, missing

log = get_logger(__name__)

T = TypeVar("T")

CALL_WITHIN = 5.0  # Maximum seconds for a call.
CLOSE_WITHIN = 1.0  # Maximum seconds for closing a connection properly.
OPEN_WITHIN = 30.0  # Maximum seconds for opening, because another process may be creating the tables.
TABLES_LOCK = 0x4865616477617931  # Number of the advisory lock for schema changes.

_MISFITS = (asyncpg.UndefinedObjectError, asyncpg.InvalidParameterValueError, asyncpg.CantChangeRuntimeParamError)
"""Server errors about an option in the URL, since asyncpg passes unknown options to the server."""
_REFUSALS = (  # Permanent errors.
    *_MISFITS,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    ssl.SSLCertVerificationError,
)
_POOLING_HINTS = {  # Permanent PgBouncer errors, and what to do about them.
    "unsupported startup parameter": "Make PgBouncer ignore it, with ignore_startup_parameters.",
    "statement pooling mode": "Make PgBouncer pool sessions or transactions.",
}
_HINT = "Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with a user who may create tables there."
_OPTION_HINT = "Correct or remove the options after the ? in the URL."
_FILE_HINT = "Name a file in PEM format that this process may read."
_UNAVAILABLE_HINT = "check that it is running, that host and port are correct, and that it lets this host connect"
_ROW_ERRORS = (  # Server errors that blame a row. The last one is raised by triggers.
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.WithCheckOptionViolationError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.RaiseError,
)


class RowRefused(ValueError):
    """The server refuses a value. `__cause__` is the server's error."""


class Session:
    """One transaction, with the methods of an asyncpg connection. `who` names the server in errors. All methods raise
    RowRefused if the server refuses a value, ValueError if a string can't be sent at all, and StoreUnavailable for
    any other failure."""

    def __init__(self, connection: asyncpg.Connection, who: str) -> None:
        self._connection, self._who = connection, who

    async def execute(self, sql: str, *values: object) -> str:
        """Run a statement, and return the server's command tag."""
        tag: str = await self._checked(self._connection.execute(sql, *values))
        return tag

    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        rows: Sequence[Any] = await self._checked(self._connection.fetch(sql, *values))
        return rows

    async def fetchrow(self, sql: str, *values: object) -> Any:
        return await self._checked(self._connection.fetchrow(sql, *values))

    async def fetchval(self, sql: str, *values: object) -> Any:
        return await self._checked(self._connection.fetchval(sql, *values))

    async def copy(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Copy rows into a table, either all or none."""
        await self._checked(self._connection.copy_records_to_table(table, records=rows, columns=list(columns)))

    async def _checked(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except UnicodeEncodeError:
            raise ValueError("PostgreSQL cannot store one of the values") from None
        except Exception as exc:
            if isinstance(exc.__cause__ or exc.__context__, UnicodeEncodeError):
                raise ValueError("PostgreSQL cannot store one of the values") from None
            if isinstance(exc, _ROW_ERRORS) and "severity" in vars(exc):  # asyncpg's own errors have no severity.
                raise RowRefused("PostgreSQL rejects one of the values") from exc
            raise _unavailable(self._who, exc) from exc


class PostgresConnection:
    """Connection to a PostgreSQL server, used by one task at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._who = f"PostgreSQL at {shown_url(url)}"
        self._turn = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None
        self._reached = False
        self._leaving: set[asyncio.Task[None]] = set()  # Tasks that are closing dropped connections.

    @contextlib.asynccontextmanager
    async def use(self, within: float) -> AsyncIterator[Session]:
        """Run the block in a transaction that may take `within` seconds. Roll back if the block raises an exception. Raises
        ValueError if the URL can't be used, and StoreUnavailable if the server fails or doesn't respond."""
        begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {within * 1000:.0f}"
        try:
            async with asyncio.timeout(within), self._turn:
                try:
                    session = Session(await self._connected(), self._who)
                    await session.execute(begin)
                    try:
                        yield session
                    except RowRefused:
                        await session.execute("ROLLBACK")
                        raise
                    if await session.execute("COMMIT") != "COMMIT":
                        raise StoreUnavailable(f"{self._who} did not confirm the transaction")
                except RowRefused:
                    raise
                except BaseException:
                    self._cut()
                    raise
        except TimeoutError:
            raise StoreUnavailable(f"{self._who} did not respond within {within:g} s") from None

    async def close(self) -> None:
        self._cut()
        await asyncio.gather(*self._leaving)

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            try:
                # Prepared statements would stay on one of PgBouncer's connections, and be missing on another.
                self._connection = await asyncpg.connect(
                    self._url, server_settings={"application_name": "headway"}, statement_cache_size=0
                )
            except OverflowError:
                raise ValueError("a port above 65535") from None
            except Exception as exc:
                of_url = isinstance(exc, ValueError) and not isinstance(exc, (asyncpg.PostgresError, UnicodeError))
                if of_url and not self._reached:
                    raise
                raise _unavailable(self._who, exc) from exc
            self._reached = True
        return self._connection

    def _cut(self) -> None:
        if self._connection is not None:
            leaving = asyncio.ensure_future(_leave(self._connection))
            self._connection = None
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)


class PostgresStore:
    """Store in PostgreSQL. The URL may have TLS options, such as ?sslmode=verify-full&sslrootcert=/path."""

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self._url = url
        self._writer = PostgresConnection(url)
        self._reader = PostgresConnection(url)

    async def open(self) -> None:
        """Connect, and apply missing migrations, in one process at a time. Raises SettingError if the URL or a file that it
        names is unusable, or the tables are from a later version, and StoreUnavailable if the server doesn't respond."""
        try:
            _check_files(self._url)
            async with self._writer.use(OPEN_WITHIN) as session:
                await session.execute("SELECT pg_advisory_xact_lock($1)", TABLES_LOCK)
                await _bring_up_to_date(session, self.shown)
            async with self.reading():
                pass
        except StoreUnavailable as exc:
            if exc.__cause__ is not None and (hint := _permanent_hint(exc.__cause__)):
                raise SettingError("ledger", self.shown, _first_line(exc.__cause__), hint) from None
            raise StoreUnavailable(f"{exc}; {_UNAVAILABLE_HINT}") from exc
        except RowRefused as exc:  # A trigger on table creation may raise this.
            raise SettingError(
                "ledger", self.shown, f"does not let tables be created: {_first_line(exc.__cause__ or exc)}", _HINT
            ) from exc
        except ValueError as exc:
            if "root certificate" in str(exc):
                hint = "Name one in the URL: ?sslmode=verify-full&sslrootcert=FILE."
                raise SettingError(
                    "ledger", self.shown, f"does not say which certificates to trust: {_first_line(exc)}", hint
                ) from None
            # The error may quote the URL's password, so it isn't shown.
            raise SettingError("ledger", self.shown, "is not a URL that asyncpg understands", _HINT) from None

    def writing(self) -> contextlib.AbstractAsyncContextManager[Session]:
        return self._writer.use(CALL_WITHIN)

    def reading(self) -> contextlib.AbstractAsyncContextManager[Session]:
        return self._reader.use(CALL_WITHIN)

    async def close(self) -> None:
        await asyncio.gather(self._writer.close(), self._reader.close())


async def _leave(connection: asyncpg.Connection) -> None:
    """Close a connection, so that the server rolls back its transaction, which would otherwise conflict with a retry."""
    try:
        await connection.close(timeout=CLOSE_WITHIN)
    except Exception:
        connection.terminate()


def _unavailable(who: str, exc: Exception) -> StoreUnavailable:
    if isinstance(exc, OSError):
        return StoreUnavailable(f"{who} does not respond: {_first_line(exc)}")
    if isinstance(exc, (asyncpg.PostgresError, asyncpg.InterfaceError)):
        return StoreUnavailable(f"{who} reports an error: {_first_line(exc)}")
    return StoreUnavailable(f"{who} sent an invalid response: {type(exc).__name__}")


def _first_line(exc: BaseException) -> str:
    """Return the first line of an error. Other lines may quote the values to be stored."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]


def _check_files(url: str) -> None:
    """Check the TLS files, because asyncpg's errors don't name them. Raises SettingError, or ValueError if `url` isn't a URL."""
    options = dict(parse_qsl(urlsplit(url).query))
    name = "sslrootcert"
    try:
        for name in ("sslrootcert", "sslcrl", "sslcert"):
            if name in options:
                ssl.create_default_context(cafile=options[name])
        if "sslcert" in options and "sslkey" in options:
            name = "sslkey"
            own = ssl.create_default_context()
            own.load_cert_chain(options["sslcert"], options["sslkey"], options.get("sslpassword", ""))
    except OSError as exc:  # SSLError is an OSError.
        reason = f"names a file that cannot be used, {name} {options[name]!r}: {exc.strerror or exc}"
        raise SettingError("ledger", shown_url(url), reason, _FILE_HINT) from exc


def _permanent_hint(cause: BaseException) -> str:
    for text, hint in _POOLING_HINTS.items():
        if text in str(cause):
            return hint
    if isinstance(cause, _MISFITS):
        return _OPTION_HINT
    return _HINT if isinstance(cause, _REFUSALS) else ""


async def _bring_up_to_date(session: Session, shown: str) -> None:
    # CREATE TABLE IF NOT EXISTS needs the privilege even if the table exists.
    if not await session.fetchval("SELECT to_regclass('headway_schema')"):
        await session.execute(VERSIONS)
    version = await session.fetchval("SELECT coalesce(max(version), 0) FROM headway_schema")
    for number, statements in missing(POSTGRES, version, shown):
        for statement in statements:
            await session.execute(statement)
        await session.execute("INSERT INTO headway_schema VALUES ($1)", number)


KEYS_LOCK = 0x4865616477617932  # Number of the advisory lock for key changes.

_ALIKE = f"{shared.SELECT} WHERE id = $1 OR (replaces = $2 AND replaces <> '')"
_ADD = f"""
INSERT INTO headway_keys ({shared.KEY_COLUMNS}, revision, changed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, extract(epoch FROM now()))
"""  # noqa: S608
_THERE = "SELECT EXISTS (SELECT FROM headway_keys WHERE id = $1)"
_EXPIRE = """
UPDATE headway_keys SET expires_at = least(expires_at, $1), revision = $2, changed_at = extract(epoch FROM now()) WHERE id = $3
"""
_AFTER = f"{shared.CHANGES} WHERE revision > $1 ORDER BY revision LIMIT $2"
_KNOWN = "SELECT EXISTS (SELECT FROM headway_key_changes WHERE revision = $1 AND mark = $2)"
_REMOVE = """
DELETE FROM headway_keys WHERE id IN (
    SELECT id FROM headway_keys WHERE expires_at < $1 AND coalesce(changed_at, created_at) < $1 LIMIT $2
)
"""


class PostgresKeys(PostgresStore, KeyStore):
    """Key store in PostgreSQL. See `headway.ports.KeyStore`."""

    async def add(self, key: ApiKey) -> None:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", KEYS_LOCK)
            check_new(key, _keys_of(await session.fetch(_ALIKE, key.id, key.replaces)))
            await session.execute(_ADD, *shared.row_of(key), await _next(session))

    async def get(self, id: str) -> ApiKey | None:
        async with self.reading() as session:
            row = await session.fetchrow(f"{shared.SELECT} WHERE id = $1", id)
        keys = [] if row is None else _keys_of([row])
        return keys[0] if keys else None

    async def expire(self, id: str, at: float) -> bool:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", KEYS_LOCK)
            if not await session.fetchval(_THERE, id):
                return False
            await session.execute(_EXPIRE, at, await _next(session), id)
        return True

    async def keys(self) -> Sequence[ApiKey]:
        async with self.reading() as session:
            return _keys_of(await session.fetch(shared.IN_ORDER))

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        async with self.reading() as session:
            if since.mark and not await session.fetchval(_KNOWN, since.revision, since.mark):
                return None
            rows = await session.fetch(_AFTER, since.revision, limit)
        return shared.changes_of(_keys_of(rows), rows, since, limit)

    async def latest(self) -> KeyMark:
        async with self.reading() as session:
            revision, mark = await session.fetchrow(shared.LATEST)
        return KeyMark(revision, mark)

    async def remove_ended(self, before: float, limit: int) -> int:
        async with self.writing() as session:
            tag: str = await session.execute(_REMOVE, before, limit)
        return int(tag.rpartition(" ")[2])


async def _next(session: Session) -> int:
    revision: int = await session.fetchval(shared.NEXT)
    await session.execute("INSERT INTO headway_key_changes VALUES ($1, $2)", revision, shared.new_mark())
    await session.execute("DELETE FROM headway_key_changes WHERE revision <= $1", revision - shared.MARKS)
    return revision


def _keys_of(rows: Sequence[Any]) -> list[ApiKey]:
    """Convert rows to keys. Skip rows that aren't keys, which may have been written by hand."""
    try:
        return shared.keys_of(rows)
    except ValueError as exc:
        if len(rows) > 1:
            return [key for row in rows for key in _keys_of([row])]
        log.error("a key is refused", key=rows[0]["id"], error=str(exc))
        return []


BULK_LOCK = 0x4865616477617933  # Number of the advisory lock for changes to jobs and files.


class PostgresBulkStore(PostgresStore, shared.BulkRows):
    """Bulk store in PostgreSQL. See `headway.ports.BulkStore`."""

    now = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", BULK_LOCK)
            return await session.fetch(sql, *map(_stored, values))

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        async with self.reading() as session:
            return await session.fetch(sql, *map(_stored, values))


def _stored(value: object) -> object:
    """Replace NUL characters, which PostgreSQL can't store. An id that contains one is then never found."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


_TYPES = {
    "id": "uuid", "user_id": "text", "tenant": "text", "tier": "text", "model": "text", "status": "text",
    "created_at": "timestamptz", "completed_at": "timestamptz", "latency_ms": "real", "batch_size": "smallint", "worker": "text",
    "version": "text", "error": "text", "requests": "integer", "batch_id": "text", "part_of": "text", "tokens": "integer",
    "input": "text", "output": "text",
}  # fmt: skip
_COLUMNS = ", ".join(_TYPES)
_ARRAYS = ", ".join(f"${number}::{type}[]" for number, type in enumerate(_TYPES.values(), 1))
_INSERT = f"""
INSERT INTO headway_requests ({_COLUMNS}) SELECT * FROM unnest({_ARRAYS}) ON CONFLICT DO NOTHING
"""  # noqa: S608
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = $1 ORDER BY completed_at DESC"  # noqa: S608
_NOTE = f"""
INSERT INTO headway_open_requests ({", ".join(shared.OPEN_COLUMNS)})
SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::timestamptz[], $9::timestamptz[])
ON CONFLICT (id, tenant) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in shared.OPEN_COLUMNS[1:])}
"""  # noqa: S608
_FORGET = """
DELETE FROM headway_open_requests AS open USING unnest($1::uuid[], $2::text[]) AS gone (id, tenant)
WHERE open.id = gone.id AND open.tenant = gone.tenant
"""
_FIND_OPEN = f"SELECT {', '.join(shared.OPEN_COLUMNS)} FROM headway_open_requests WHERE id = $1"  # noqa: S608
_PRUNE_OPEN = "DELETE FROM headway_open_requests WHERE due_at < $1"
_PRUNE = """
WITH removed AS (DELETE FROM headway_requests WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM headway_requests WHERE completed_at < $1 ORDER BY completed_at LIMIT $2
)) RETURNING 1) SELECT count(*) FROM removed
"""  # FOR UPDATE would need another privilege, and isn't needed, because the second of two removals waits.

_from_unix = datetime.fromtimestamp


class PostgresLedger(PostgresStore, Ledger):
    """Ledger in PostgreSQL. See `headway.ports.Ledger`."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        rows = [_row(record) for record in records]
        try:
            async with self.writing() as session:
                await session.copy("headway_requests", list(_TYPES), rows)
                return
        except RowRefused as exc:
            if not isinstance(exc.__cause__, asyncpg.UniqueViolationError):
                raise
        async with self.writing() as session:
            await session.execute(_INSERT, *zip(*rows, strict=True))

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        async with self.writing() as session:
            if ended:
                await session.execute(_FORGET, [UUID(id) for _, id in ended], [tenant for tenant, _ in ended])
            if records:
                await session.execute(_NOTE, *zip(*map(_open_row, records), strict=True))

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        try:
            key = uuid.UUID(id)
        except ValueError:
            return ()
        async with self.reading() as session:
            ended = [_record(row) for row in await session.fetch(_FIND, key)]
            waiting = [_open_record(row) for row in await session.fetch(_FIND_OPEN, key)]
        return shared.together(ended, waiting)

    async def prune(self, before: float, limit: int) -> int:
        async with self.reading() as session:
            await session.execute(_PRUNE_OPEN, _from_unix(before, UTC))
            removed = await session.fetchval(_PRUNE, _from_unix(before, UTC), limit)
        return int(removed)


def _row(record: LedgerRecord) -> tuple[Any, ...]:
    row = astuple(record)
    return (UUID(row[0]), *row[1:6], _from_unix(row[6], UTC), _from_unix(row[7], UTC), *row[8:])


def _open_row(record: LedgerRecord) -> tuple[Any, ...]:
    id, *texts, created_at, due_at = shared.open_row(record)
    return UUID(id), *texts, _from_unix(created_at, UTC), _from_unix(due_at, UTC)


def _open_record(row: Sequence[Any]) -> LedgerRecord:
    return shared.open_record([str(row[0]), *tuple(row)[1:7], row[7].timestamp(), row[8].timestamp()])


def _record(row: Sequence[Any]) -> LedgerRecord:
    values = [str(row[0]), *row[1:6], row[6].timestamp(), row[7].timestamp(), *row[8:]]
    return LedgerRecord(**dict(zip(LedgerRecord.__struct_fields__, values, strict=True)))
