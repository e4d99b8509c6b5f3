"""The databases for the contract suites of ledgers, key stores and bulk jobs."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headway.ports import BulkStore, KeyStore, Ledger
from headway.storage.postgres import PostgresBulkStore, PostgresKeys, PostgresLedger
from headway.storage.sqlite import SqliteBulkStore, SqliteKeys, SqliteLedger
from tests.servers.pgbouncer import MODES
from tests.servers.postgres import SharedPostgres


@dataclass
class Database:
    """An empty database with its URL and its adapters. `query` runs SQL in it directly."""

    url: str
    query: Callable[[str], list[Any]]

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    def ledger(self) -> Ledger:
        return (SqliteLedger if self.is_sqlite else PostgresLedger)(self.url)

    def keys(self) -> KeyStore:
        return (SqliteKeys if self.is_sqlite else PostgresKeys)(self.url)

    def bulk(self) -> BulkStore:
        return (SqliteBulkStore if self.is_sqlite else PostgresBulkStore)(self.url)


class Store(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...


def opened(make: Callable[[], Store], story: Callable[..., Awaitable[None]], count: int = 1) -> None:
    """Run a story with several stores of one place, opened at the same time."""

    async def main() -> None:
        stores = [make() for _ in range(count)]
        try:
            await asyncio.gather(*(store.open() for store in stores))
            await story(*stores)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())


def sqlite_database(folder: Path, postgres: SharedPostgres) -> Database:
    path = folder / "ledger.db"

    def query(sql: str) -> list[Any]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return connection.execute(sql).fetchall()

    return Database(f"sqlite:///{path}", query)


def postgres_database(folder: Path, postgres: SharedPostgres) -> Database:
    server = postgres.server()
    url = server.fresh()
    return Database(url, lambda sql: server.query(sql, url=url))


def pooled_database(mode: str, folder: Path, postgres: SharedPostgres) -> Database:
    behind = postgres_database(folder, postgres)
    return replace(behind, url=postgres.pooled(mode).front_of(behind.url))


DATABASES: dict[str, Callable[[Path, SharedPostgres], Database]] = {
    "sqlite": sqlite_database,
    "postgres": postgres_database,
}
POOLED: dict[str, Callable[[Path, SharedPostgres], Database]] = {
    f"pgbouncer-{mode}": partial(pooled_database, mode) for mode in MODES
}
