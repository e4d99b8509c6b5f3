"""Ledgers of a run: PostgreSQL, which can be killed and paused, or a file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.promises.evidence import Row
from tests.promises.look_up import rows_in_file, rows_in_postgres
from tests.servers.postgres import PostgresServer

KINDS = ("postgres", "sqlite")


@dataclass(frozen=True, slots=True)
class Ledger:
    """One ledger: its URL, and its server, which a file has not."""

    url: str
    server: PostgresServer | None = None
    file: Path | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of processes that write it, inputs and outputs too."""
        return ["--ledger", self.url, "--ledger-content"]

    def rows(self) -> list[Row]:
        """All its rows."""
        return rows_in_file(self.file) if self.file is not None else asyncio.run(rows_in_postgres(self.url))


@contextlib.contextmanager
def ledger_of(kind: str, folder: Path) -> Iterator[Ledger]:
    """A ledger of a kind, empty, until the context ends."""
    if kind == "sqlite":
        file = folder / "ledger.db"
        yield Ledger(f"sqlite:///{file}", file=file)
        return
    with PostgresServer() as server:
        yield Ledger(server.fresh(), server)
