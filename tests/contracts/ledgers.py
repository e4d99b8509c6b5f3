"""The databases that the contract suites of ledgers and of key stores are run on."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.ports import KeyStore, Ledger
from headway.storage.postgres import PostgresKeys, PostgresLedger
from headway.storage.sqlite import SqliteKeys, SqliteLedger
from tests.servers.pgbouncer import MODES
from tests.servers.postgres import RunningPostgres, SharedPostgres


@dataclass
class Database:
    """An empty database, by its URL; `ledger` and `keys` make adapters, and `query` runs SQL in it, beside Headway."""

    url: str
    ledger: Callable[[str], Ledger]
    keys: Callable[[str], KeyStore]
    query: Callable[[str], list[Any]]


def sqlite_database(folder: Path, postgres: SharedPostgres) -> Database:
    path = folder / "ledger.db"

    def query(sql: str) -> list[Any]:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    return Database(f"sqlite:///{path}", SqliteLedger, SqliteKeys, query)


def postgres_database(folder: Path, postgres: SharedPostgres) -> Database:
    server: RunningPostgres = postgres.server()
    url = server.fresh()
    return Database(url, PostgresLedger, PostgresKeys, lambda sql: server.query(sql, url=url))


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
