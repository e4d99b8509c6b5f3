"""Connections to a PostgreSQL: one that writes and one that asks.

A server that stands still answers nothing, not even that a statement is to be given up. So each call has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from headway.config import shown_url
from headway.errors import SettingError, StoreUnavailable
from headway.storage.postgres.connection import PostgresConnection, RowRefused, Session, said
from headway.storage.schema import POSTGRES, VERSIONS, missing

CALL_WITHIN = 5.0
"""Seconds after which a call counts as not answered."""
CLOSE_WITHIN = 1.0
"""Seconds in which a connection is closed in good order."""
OPEN_WITHIN = 30.0
"""Seconds for opening, as another process may be bringing the tables up to date."""
LOCK = 0x4865616477617931
"""Number of the advisory lock under which tables are changed."""

_MISFITS = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)
"""Errors of the server about an option. Options that asyncpg does not know are passed to the server."""
_REFUSALS = (
    *_MISFITS,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    ssl.SSLCertVerificationError,
)
"""Errors of the server that would come again at a second try."""
_OF_POOLING = {
    "unsupported startup parameter": "Have PgBouncer pass over it, by ignore_startup_parameters.",
    "statement pooling mode": "Have PgBouncer pool sessions or transactions.",
}
"""Errors of a PgBouncer that would come again at a second try, with what to do about each."""
_MEND = "Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, of a user who may make tables there."
_MEND_OPTION = "Mend or remove what follows the ? in the URL."
_MEND_FILE = "Name a file in PEM format that this process may read."
_REMEDY = "see that it runs, that host and port are right, and that it lets this host in"


class ConnectionPair:
    """Database of one URL.

    Arguments:
        url: URL as asyncpg takes it; TLS by its options, as in ?sslmode=verify-full&sslrootcert=/path.
    """

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self._url = url
        self._writer = PostgresConnection(url, CLOSE_WITHIN)
        self._asker = PostgresConnection(url, CLOSE_WITHIN)

    async def open(self) -> None:
        """Connect, and bring the tables up to date; of several processes one does so.

        Raises:
            SettingError: the URL or what it names cannot be used, or the tables are a later version's.
            StoreUnavailable: the server does not answer.
        """
        try:
            _check_files(self._url)
            async with self._writer.use(OPEN_WITHIN) as session:
                await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
                await _bring_up_to_date(session, self.shown)
            async with self.asking():
                pass
        except StoreUnavailable as exc:
            if exc.__cause__ is not None and (hint := _mend(exc.__cause__)):
                raise SettingError("ledger", self.shown, said(exc.__cause__), hint) from None
            raise StoreUnavailable(f"{exc}; {_REMEDY}") from exc
        except RowRefused as exc:  # As by a trigger that watches over what becomes of tables.
            raise SettingError("ledger", self.shown, f"takes no tables: {said(exc.__cause__ or exc)}", _MEND) from exc
        except ValueError as exc:
            if "root certificate" in str(exc):
                hint = "Name one in the URL: ?sslmode=verify-full&sslrootcert=FILE."
                raise SettingError("ledger", self.shown, f"has no certificate to trust: {said(exc)}", hint) from None
            # Of the URL. Its text may show parts of it.
            raise SettingError("ledger", self.shown, "is no URL that asyncpg understands", _MEND) from None

    def writing(self) -> contextlib.AbstractAsyncContextManager[Session]:
        """Run a transaction for the block on the connection that writes.

        Raises:
            StoreUnavailable: the server does not answer, or does not do it.
        """
        return self._writer.use(CALL_WITHIN)

    def asking(self) -> contextlib.AbstractAsyncContextManager[Session]:
        """Run a transaction for the block on the other connection, where it holds up no writing."""
        return self._asker.use(CALL_WITHIN)

    async def close(self) -> None:
        """Close both connections."""
        await asyncio.gather(self._writer.close(), self._asker.close())


def _check_files(url: str) -> None:
    """Try the files for TLS that a URL names, since asyncpg does not say which of them is wrong.

    Raises:
        SettingError: a file cannot be used.
        ValueError: the text is no URL.
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


def _mend(cause: BaseException) -> str:
    """Advice about an error that would come again at a second try; empty for any other."""
    for text, hint in _OF_POOLING.items():
        if text in str(cause):
            return hint
    if isinstance(cause, _MISFITS):
        return _MEND_OPTION
    return _MEND if isinstance(cause, _REFUSALS) else ""


async def _bring_up_to_date(session: Session, shown: str) -> None:
    # Who may not make tables is not even to ask for them, if they are there.
    if not await session.fetchval("SELECT to_regclass('headway_schema')"):
        await session.execute(VERSIONS)
    version = await session.fetchval("SELECT coalesce(max(version), 0) FROM headway_schema")
    for number, statements in missing(POSTGRES, version, shown):
        for statement in statements:
            await session.execute(statement)
        await session.execute("INSERT INTO headway_schema VALUES ($1)", number)
