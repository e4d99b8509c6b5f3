"""Connection to a PostgreSQL, made when it is needed and anew when a call on it failed.

All is done in transactions that state what they go by. So it does not matter what the database has as its defaults, and
PgBouncer may give each transaction another connection of its own: nothing is left on one, no setting and no statement.

    BEGIN, isolation, time-out ──calls──▶ COMMIT, and it says so: done
                                     └──▶ a row is refused: undone, and the connection goes on
                                     └──▶ anything else: unknown, and the connection is given up

Only what the server itself says of a row is the row's fault. Whatever else goes wrong on the way is an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import asyncpg

from headway.config import shown_url
from headway.errors import StoreUnavailable

T = TypeVar("T")

_OF_ROWS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.WithCheckOptionViolationError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.RaiseError,
)
"""Errors of the server that blame a row; the last one is what triggers raise."""


class RowRefused(ValueError):
    """The server refuses one of the values; the exception's cause is the server's error."""


class Session:
    """One transaction.

    Arguments:
        connection: connection that it is on.
        who: name of the server, as it may be shown.
    """

    def __init__(self, connection: asyncpg.Connection, who: str) -> None:
        self._connection = connection
        self._who = who

    async def execute(self, sql: str, *values: object) -> str:
        """Run a statement; returns the server's word on what it did.

        This and the other methods raise:
            RowRefused: the server refuses one of the values.
            ValueError: a text cannot be sent at all.
            StoreUnavailable: anything else went wrong.
        """
        done: str = await self._told(self._connection.execute(sql, *values))
        return done

    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        """The rows of a query."""
        rows: Sequence[Any] = await self._told(self._connection.fetch(sql, *values))
        return rows

    async def fetchrow(self, sql: str, *values: object) -> Any:
        """The first row of a query; None without any."""
        return await self._told(self._connection.fetchrow(sql, *values))

    async def fetchval(self, sql: str, *values: object) -> Any:
        """The first value of the first row of a query; None without any."""
        return await self._told(self._connection.fetchval(sql, *values))

    async def copy(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Copy rows into a table, all or none."""
        await self._told(self._connection.copy_records_to_table(table, records=rows, columns=list(columns)))

    async def _told(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except UnicodeEncodeError:
            raise ValueError("PostgreSQL cannot store one of the values") from None
        except Exception as exc:
            if isinstance(exc.__cause__ or exc.__context__, UnicodeEncodeError):
                raise ValueError("PostgreSQL cannot store one of the values") from None
            if isinstance(exc, _OF_ROWS) and "severity" in vars(exc):  # Which asyncpg's own have not.
                raise RowRefused("PostgreSQL does not take one of the values") from exc
            raise unavailable(self._who, exc) from exc


class PostgresConnection:
    """Connection to a PostgreSQL, used by one task at a time.

    Arguments:
        url: URL as asyncpg takes it.
        closing: seconds in which a connection is closed in good order.
    """

    def __init__(self, url: str, closing: float) -> None:
        self._url = url
        self._closing = closing
        self._who = f"PostgreSQL at {shown_url(url)}"
        self._turn = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None
        self._reached = False
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that close connections no longer used."""

    @contextlib.asynccontextmanager
    async def use(self, within: float) -> AsyncIterator[Session]:
        """Run a transaction for the block, within `within` seconds. It is undone if the block raises.

        Raises:
            ValueError: the URL cannot be used.
            StoreUnavailable: the server does not answer, or does not do it.
        """
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
                        raise StoreUnavailable(f"{self._who} does not say that it has done what was asked")
                except RowRefused:
                    raise
                except BaseException:
                    self._cut()
                    raise
        except TimeoutError:
            raise StoreUnavailable(f"{self._who} does not answer within {within:g} s") from None

    async def close(self) -> None:
        """Close the connection, if there is one."""
        self._cut()
        await asyncio.gather(*self._leaving)

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            try:
                # Statements that are kept by name would be on one of PgBouncer's connections, and missing on the next.
                self._connection = await asyncpg.connect(
                    self._url, server_settings={"application_name": "headway"}, statement_cache_size=0
                )
            except OverflowError:
                raise ValueError("a port beyond 65535") from None
            except Exception as exc:
                of_url = isinstance(exc, ValueError) and not isinstance(exc, (asyncpg.PostgresError, UnicodeError))
                if of_url and not self._reached:
                    raise
                raise unavailable(self._who, exc) from exc
            self._reached = True
        return self._connection

    def _cut(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            leaving = asyncio.ensure_future(_leave(self._connection, self._closing))
            self._connection = None
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)


async def _leave(connection: asyncpg.Connection, within: float) -> None:
    """Close a connection.

    What the server still does for it is undone, as a second try to write the rows would fail on them.
    """
    try:
        await connection.close(timeout=within)
    except Exception:
        connection.terminate()


def unavailable(who: str, exc: Exception) -> StoreUnavailable:
    """Error for anything that is no row's fault."""
    if isinstance(exc, OSError):
        return StoreUnavailable(f"{who} does not answer: {said(exc)}")
    if isinstance(exc, (asyncpg.PostgresError, asyncpg.InterfaceError)):
        return StoreUnavailable(f"{who} refuses: {said(exc)}")
    return StoreUnavailable(f"{who} sends what makes no sense: {type(exc).__name__}")


def said(exc: BaseException) -> str:
    """First line of an error. Further lines may quote what was to be stored."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
