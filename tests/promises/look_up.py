"""What a gateway's admin port and a ledger say about requests."""

import asyncio
import contextlib
import json
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import asyncpg

from tests.promises.client import Door, connect
from tests.promises.evidence import Row
from tests.promises.operation import Telling

STATUS, LEDGER = "the status", "the ledger"
ROWS = "SELECT id, tenant, status, error, version, worker, requests, input, output FROM headway_requests"
WITHIN = 10.0
"""Timeout for a status, in seconds."""


async def look_up(door: Door, tenant: str, id: str) -> Telling | None:
    """Ask a gateway about a request that it answered. Returns None if that wasn't possible."""
    asked = f"GET /internal/requests/req_{id}?tenant={tenant} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(WITHIN):
            connection = await connect(Door(door.name, door.admin))
            try:
                connection.expect()
                connection.send(asked.encode())
                status, told = (await connection.head).status, json.loads(await connection.body)
            finally:
                connection.leave("close")
        return Telling(STATUS, tenant, id, told["model_version"] or "" if status == 200 else None)
    return None


def rows_in_file(path: Path) -> list[Row]:
    with contextlib.closing(sqlite3.connect(path)) as ledger:
        return [_row(uuid.UUID(bytes=id), *rest) for id, *rest in ledger.execute(ROWS)]


async def rows_in_postgres(url: str) -> list[Row]:
    ledger = await asyncpg.connect(url)
    try:
        return [_row(*tuple(one)) for one in await ledger.fetch(ROWS)]
    finally:
        await ledger.close()


def _row(id: uuid.UUID, *rest: Any) -> Row:
    tenant, status, error, version, worker, requests, input, output = rest
    return Row(tenant, str(id), status, error, version, worker, requests, input, output)
