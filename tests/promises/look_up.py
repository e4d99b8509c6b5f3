"""Versions of requests as a gateway's admin port and a ledger tell them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import uuid
from pathlib import Path

from tests.promises.client import Door, connect
from tests.promises.operation import Telling

STATUS, LEDGER = "the status", "the ledger"
WITHIN = 10.0
"""Seconds after which a status is not waited for any more."""


async def look_up(door: Door, tenant: str, id: str) -> Telling | None:
    """What a gateway tells of a request that it has answered; None where it could not be asked."""
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


def ledger_in(path: Path) -> list[Telling]:
    """What a ledger in a file tells of all requests that were answered."""
    with contextlib.closing(sqlite3.connect(path)) as ledger:
        rows = ledger.execute("SELECT tenant, id, version FROM headway_requests WHERE status = 'completed'")
        return [Telling(LEDGER, tenant, str(uuid.UUID(bytes=id)), version) for tenant, id, version in rows]
