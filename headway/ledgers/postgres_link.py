"""The way to a PostgreSQL: a connection that writes and one that asks, made when they are needed and anew when they fail.

A server that stands still answers nothing, not even that a statement is to be given up. So a call has its time, and a
connection on which one failed, whatever the reason, is cut and not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from headway.config import shown_url
from headway.errors import SettingError, StoreUnavailable
from headway.ledgers.schema import POSTGRES, VERSIONS, missing

CALL_WITHIN = 5.0
"""Seconds after which a call counts as not answered."""
OPEN_WITHIN = 30.0
"""Seconds for opening, as another process may be bringing the tables up to date."""
CLOSE_WITHIN = 1.0
"""Seconds in which a connection is closed in good order."""
LOCK = 0x4865616477617931
"""Number of the advisory lock under which tables are changed."""

_MISFITS = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)
"""What a server says of an option, all of which that asyncpg does not know are its."""
_REFUSALS = (
    *_MISFITS,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    ssl.SSLCertVerificationError,
)
"""What a server says that will say the same next time."""
_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, EOFError)
_MEND = "Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, of a user who may make tables there."
_MEND_OPTION = "Mend or remove what follows the ? in the URL."
_MEND_FILE = "Name a file in PEM format that this process may read."
_REMEDY = "see that it runs, that host and port are right, and that it lets this host in"


class PostgresLink:
    """The database of one URL.

    Arguments:
        url: as asyncpg takes it; TLS by its options, as in ?sslmode=verify-full&sslrootcert=/path.
    """

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self._url = url
        self._writer = _Line(url)
        self._asker = _Line(url)

    async def open(self) -> None:
        """Reach the server, and bring the tables up to date; of several processes one does so.

        Raises:
            SettingError: the URL or what it names will not do, or the tables are a later version's.
            StoreUnavailable: the server does not answer.
        """
        try:
            _check_files(self._url)
            async with self._writer.use(OPEN_WITHIN) as connection, connection.transaction():
                await connection.execute("SET LOCAL statement_timeout = 0")
                await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
                await _bring_up_to_date(connection, self.shown)
            async with self.asking():
                pass
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, _REFUSALS):
                mend = _MEND_OPTION if isinstance(exc.__cause__, _MISFITS) else _MEND
                raise SettingError("ledger", self.shown, _said(exc.__cause__), mend) from None
            raise StoreUnavailable(f"{exc}; {_REMEDY}") from exc
        except ValueError as exc:
            if "root certificate" in str(exc):
                mend = "Name one in the URL: ?sslmode=verify-full&sslrootcert=FILE."
                raise SettingError("ledger", self.shown, f"has no certificate to trust: {_said(exc)}", mend) from None
            # Of the URL. Its text may show parts of it.
            raise SettingError("ledger", self.shown, "is no URL that asyncpg understands", _MEND) from None

    def writing(self) -> contextlib.AbstractAsyncContextManager[asyncpg.Connection]:
        """The connection that writes, for the one statement or transaction of the block.

        Raises:
            StoreUnavailable: the server does not answer, or does not do it.
            ValueError: it is asked for what it cannot understand.
        """
        return self._writer.use(CALL_WITHIN)

    def asking(self) -> contextlib.AbstractAsyncContextManager[asyncpg.Connection]:
        """The other connection; what it does holds up no writing."""
        return self._asker.use(CALL_WITHIN)

    async def close(self) -> None:
        """Let go of the server."""
        await asyncio.gather(self._writer.close(), self._asker.close())


class _Line:
    """One connection, used by one at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._who = f"PostgreSQL at {shown_url(url)}"
        self._turn = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        """What still takes leave of connections that are used no more."""

    @contextlib.asynccontextmanager
    async def use(self, within: float) -> AsyncIterator[asyncpg.Connection]:
        """The connection, which is made if need be; all in so many seconds."""
        try:
            async with asyncio.timeout(within), self._turn:
                try:
                    yield await self._connected()
                except BaseException:
                    self._cut()
                    raise
        except TimeoutError:
            raise StoreUnavailable(f"{self._who} does not answer within {within:g} s") from None
        except asyncpg.DataError:
            raise ValueError("PostgreSQL cannot store one of the values") from None
        except _FAULTS as exc:
            if isinstance(exc, ValueError):  # asyncpg's own are both.
                raise
            raise self._unavailable(exc) from exc

    async def close(self) -> None:
        """Close the connection, if there is one."""
        self._cut()
        await asyncio.gather(*self._leaving)

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            limits = {"application_name": "headway", "statement_timeout": f"{CALL_WITHIN * 1000:.0f}"}
            try:
                self._connection = await asyncpg.connect(self._url, server_settings=limits)
            except OverflowError:
                raise ValueError("a port beyond 65535") from None
            except asyncpg.InvalidParameterValueError as exc:
                raise self._unavailable(exc) from exc
        return self._connection

    def _unavailable(self, exc: Exception) -> StoreUnavailable:
        what = "does not answer" if isinstance(exc, OSError) else "does not do"
        return StoreUnavailable(f"{self._who} {what}: {_said(exc)}")

    def _cut(self) -> None:
        """Use the connection no more."""
        if self._connection is not None:
            leaving = asyncio.ensure_future(_leave(self._connection))
            self._connection = None
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)


async def _leave(connection: asyncpg.Connection) -> None:
    """Close a connection. What the server still does for it is undone: its rows would be held against those who bring
    them again."""
    try:
        await connection.close(timeout=CLOSE_WITHIN)
    except (*_FAULTS, TimeoutError):
        connection.terminate()


def _check_files(url: str) -> None:
    """Try the files for TLS that a URL names: asyncpg says of none which it is, and looks for them again and again.

    Raises:
        SettingError: one will not do.
        ValueError: it is no URL.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    name = "sslrootcert"
    try:
        for name in ("sslrootcert", "sslcrl", "sslcert"):
            if name in given:
                ssl.create_default_context(cafile=given[name])
        if "sslcert" in given and "sslkey" in given:
            name = "sslkey"
            own = ssl.create_default_context()
            own.load_cert_chain(given["sslcert"], given["sslkey"], given.get("sslpassword", ""))
    except OSError as exc:  # of which SSLError is one
        reason = f"names a file that cannot be used, {name} {given[name]!r}: {exc.strerror or exc}"
        raise SettingError("ledger", shown_url(url), reason, _MEND_FILE) from exc


async def _bring_up_to_date(connection: asyncpg.Connection, shown: str) -> None:
    # Who may not make tables is not even to ask for them, if they are there.
    if not await connection.fetchval("SELECT to_regclass('headway_schema')"):
        await connection.execute(VERSIONS)
    version = await connection.fetchval("SELECT coalesce(max(version), 0) FROM headway_schema")
    for number, statements in missing(POSTGRES, version, shown):
        for statement in statements:
            await connection.execute(statement)
        await connection.execute("INSERT INTO headway_schema VALUES ($1)", number)


def _said(exc: Exception) -> str:
    """The first line of an error: further ones may quote what was to be stored."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
