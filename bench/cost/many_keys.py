"""A million API keys: how long the event loop stands still while the ring of keys reads them, and how soon it knows a revocation.

    python bench/cost/many_keys.py                      a million keys in SQLite, about two minutes
    python bench/cost/many_keys.py --keys 100000        a first impression
    python bench/cost/many_keys.py --store postgres     in PostgreSQL

Half as many ended keys lie beside the live ones. A task that asks for its turn every millisecond measures how late it gets
it, on the wall and in CPU time of the loop's thread: the former tells of other programs on the machine too, as does the same
task while nothing goes on. What is measured: nothing, the routine reading of all keys, 20,000 new keys at once, and the
reading of all keys in a hurry after the store's history has changed, with a revocation in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from bench.stand import stand
from bench.stand.findings import Findings
from headway.app.stores import make_key_store
from headway.config import Settings
from headway.identity.api_keys.cache import ApiKeyCache
from headway.identity.api_keys.credential import LIVE, NOISE, digest, generate, parse
from headway.model import ApiKey
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor
from headway.storage.key_rows import COLUMNS, row_of
from tests.servers.postgres import PostgresServer

MOST_STALL_MS = 20.0
KNOWN_WITHIN = 5.0
QUIET = 3.0
ROUTINE = 10.0
"""Seconds for which nothing, and the routine reading, is measured."""
MANY = 20_000
TICK = 0.001
_ADD = f"INSERT INTO headway_keys ({COLUMNS}, revision) VALUES ({', '.join('?' * 12)})"
_FORGET = "UPDATE headway_key_changes SET mark = 'another'"
_NAMES = (*COLUMNS.split(", "), "revision")


class Turns:
    """How late a task gets its turns."""

    def __init__(self) -> None:
        self.longest = self.longest_cpu = 0.0

    async def measure(self, work: Callable[[], Awaitable[None]]) -> tuple[float, float, float]:
        """Longest wait in ms on the wall and in CPU time while `work` goes on, and its seconds."""
        self.longest = self.longest_cpu = 0.0
        began = time.monotonic()
        ticking = asyncio.create_task(self._tick_on())
        await work()
        ticking.cancel()
        return self.longest * 1e3, self.longest_cpu * 1e3, time.monotonic() - began

    async def _tick_on(self) -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK)
            self.longest = max(self.longest, time.monotonic() - wall - TICK)
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description="Stalls of the event loop with many API keys.")
    parser.add_argument("--keys", type=int, default=1_000_000, help="live ones (default %(default)s)")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("many_keys", keys=options.keys, store=options.store)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, contextlib.ExitStack() as stack:
        url = f"sqlite:///{folder}/keys.db"
        if options.store == "postgres":
            url = stack.enter_context(PostgresServer()).fresh()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(findings, url, options.keys))
    return findings.close()


async def _measure(findings: Findings, url: str, count: int) -> None:
    settings = Settings(keys="ledger", ledger=url)
    store = make_key_store(settings, create=True)
    await store.open()
    await _fill(url, _keys(count, None), 0)
    await _fill(url, _keys(count // 2, 1.0), count)
    supervisor = Supervisor()
    ring = ApiKeyCache(store, settings, Counters(), time.monotonic, time.time)
    turns, rows = Turns(), []
    before = _memory()

    def note(what: str, measured: tuple[float, float, float]) -> None:
        wall, cpu, seconds = measured
        rows.append({"while": what, "s": seconds, "longest stall ms": wall, "longest step ms CPU": cpu})

    note("all keys are read at the start", await turns.measure(ring.open))
    held = _memory() - before
    ring.start(supervisor)
    note("nothing goes on", await turns.measure(lambda: asyncio.sleep(QUIET)))
    ring._begin(hurry=False)
    ring._hurry.set()
    note("all keys are read at leisure", await turns.measure(lambda: asyncio.sleep(ROUTINE)))

    async def add_many() -> None:
        await _fill(url, _keys(MANY, None), 2 * count)
        while len(ring) < count + MANY:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    note(f"{MANY:,} new keys come", await turns.measure(add_many))
    text = generate(LIVE, os.urandom(NOISE))
    id, secret = parse(text.encode()) or ("", b"")
    await store.add(ApiKey(id=id, digest=digest(secret), user="u", tenant="t", tier="paid", created_at=time.time()))
    credential = f"Bearer {text}".encode()
    while ring.identify(credential) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    seen = 0.0

    async def lose_history() -> None:
        nonlocal seen
        await _change(url, _FORGET)
        while ring._whole:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await store.expire(id, 0.0)
        while ring.identify(credential) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        seen = time.monotonic() - began
        while not ring._whole:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    note("all keys are read in a hurry", await turns.measure(lose_history))
    await supervisor.stop()
    await ring.close()
    findings.table(f"{count:,} live keys and {count // 2:,} ended ones", rows)
    findings.say(f"memory: {held / 2**20:,.0f} MiB for {len(ring):,} keys")
    worst = max(float(str(row["longest step ms CPU"])) for row in rows[1:])
    findings.none("keys held that are not live, or live ones that are not", len(ring) - count - MANY)
    findings.at_most("longest step of the loop while it serves, CPU", worst, MOST_STALL_MS, "ms")
    findings.at_most("a revocation in the middle is known", seen, KNOWN_WITHIN, "s")


def _keys(count: int, ends: float | None) -> Iterator[ApiKey]:
    for _ in range(count):
        noise = os.urandom(24).hex()
        user = f"user-{noise[:8]}"
        id = noise[8:20]
        yield ApiKey(
            id=id, digest=os.urandom(32), user=user, tenant=f"tenant-{noise[:2]}", tier="paid", created_at=1e9,
            expires_at=ends,
        )  # fmt: skip


async def _fill(url: str, keys: Iterator[ApiKey], revision: int) -> None:
    rows = ((*row_of(key), number) for number, key in enumerate(keys, start=revision + 1))
    if url.startswith("postgres"):
        await _in_postgres(url, lambda it: it.copy_records_to_table("headway_keys", records=rows, columns=_NAMES))
    else:
        await asyncio.to_thread(_in_sqlite, url, lambda connection: connection.executemany(_ADD, rows))


async def _change(url: str, statement: str) -> None:
    if url.startswith("postgres"):
        await _in_postgres(url, lambda connection: connection.execute(statement))
    else:
        await asyncio.to_thread(_in_sqlite, url, lambda connection: connection.execute(statement))


async def _in_postgres(url: str, work: Callable[[asyncpg.Connection], Awaitable[Any]]) -> None:
    """Do `work` on another event loop than the one that is measured."""

    async def whole() -> None:
        connection = await asyncpg.connect(url)
        await work(connection)
        await connection.close()

    await asyncio.to_thread(asyncio.run, whole())


def _in_sqlite(url: str, work: Callable[[sqlite3.Connection], Any]) -> None:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        work(connection)


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
