"""What the ledger takes, and what it costs. What becomes of it while its database is away, chaos.py asks.

    python bench/cost/ledger.py                     rows per second and CPU time per request, about three minutes
    python bench/cost/ledger.py --seconds 4         a first impression

Rows per second: notes are added to a journal as fast as it takes them, in one process with the event loop and the writer of
SQLite; the time ends when the last row is in the database. PostgreSQL is as it comes, with fsync, in a folder of its own on
the core of load generators. CPU time: services without a ledger, with SQLite and with PostgreSQL are up at the same time, and
get the same load in turn; all of Headway's own process is counted, the writer of SQLite included, and not the server of
PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.processes import family
from headway.app.stores import make_ledger
from headway.config import Settings
from headway.gateway.ledger_writer import LedgerWriter
from headway.gateway.pending import NOBODY, Ending, PendingRequest
from headway.model import BatchRun, Entry, Principal, Reply
from headway.runtime.counters import StoreCounts
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from tests.servers.postgres import PostgresServer

TARGETS = {"sqlite": 5_000.0, "postgres": 10_000.0}
"""Rows per second that each is to take."""
MOST_COST = 1.10
"""Largest ratio of CPU time with a ledger to that without."""
RATE = 2_000.0
BACKLOG = 10_000
"""Rows that wait for the database while as many are added as it takes."""

_DURABLE = {"fsync": "on", "full_page_writes": "on", "autovacuum": "on", "shared_buffers": "128MB"}
_COUNT = "SELECT count(*) FROM headway_requests"


def main() -> int:
    parser = argparse.ArgumentParser(description="What the ledger takes, and what it costs.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="of loads for the CPU time (default %(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="of these loads (default %(default)g)")
    parser.add_argument("--only", choices=("rows", "cost"), help="one of both")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("ledger", seconds=options.seconds, rate=options.rate, pinning=stand.PINNING)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, _postgres() as postgres:
        if options.only != "cost":
            _rows(findings, Path(folder), postgres, options.seconds)
        if options.only != "rows":
            _cost(findings, Path(folder), postgres, options.rate, options.seconds, options.rounds)
    return findings.close()


@contextlib.contextmanager
def _postgres() -> Iterator[PostgresServer]:
    with PostgresServer(**_DURABLE) as server:
        for process in family(server.pid):  # What it starts later comes from the first, and stays there too.
            with contextlib.suppress(ProcessLookupError):
                stand.move_to_load_core(process.pid)
        yield server


# Rows per second.


def _rows(findings: Findings, folder: Path, postgres: PostgresServer, seconds: float) -> None:
    rows = []
    for name, url in (("sqlite", f"sqlite:///{folder}/rows.db"), ("postgres", postgres.fresh())):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            taken, elapsed, cpu, stall, dropped = runner.run(_pour(url, seconds))
        kept = _count(postgres, url)
        rate = taken / elapsed
        rows.append({
            "ledger": name, "rows/s": rate, "rows": taken, "s": elapsed, "CPU µs per row": cpu / taken * 1e6,
            "longest stall of the loop ms": stall * 1e3,
        })  # fmt: skip
        findings.at_least(f"{name}: rows per second", rate, TARGETS[name])
        findings.none(f"{name}: rows that are not there", taken - kept)
        findings.none(f"{name}: rows dropped", dropped)
    findings.table("Rows through the journal, their making included", rows)


async def _pour(url: str, seconds: float) -> tuple[int, float, float, float, int]:
    """Rows taken, in how many seconds, with how much CPU time, the longest stall of the event loop, and rows dropped."""
    counters = StoreCounts()
    journal = LedgerWriter(make_ledger(url), Settings(), counters, time.monotonic)
    supervisor = Supervisor()
    await journal.open()
    journal.start(supervisor)
    callers = [Principal(f"user-{number}", f"tenant-{number % 20}", number % 3) for number in range(100)]
    began, cpu, taken, stall = time.monotonic(), time.process_time(), 0, 0.0
    while (now := time.monotonic()) < began + seconds:
        if journal.waiting < BACKLOG:
            journal.finished(list(_notes(callers, taken, 100)), Ending.REPLIED, 1.0)
            taken += 100
        asked = time.monotonic()
        await asyncio.sleep(0 if journal.waiting < BACKLOG else 0.001)
        stall = max(stall, time.monotonic() - asked)
    while journal.waiting:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    now, used = time.monotonic(), time.process_time() - cpu
    await supervisor.stop()
    await journal.close()
    return taken, now - began, used, stall, counters.ledger_dropped


def _notes(callers: list[Principal], first: int, count: int) -> Iterator[PendingRequest]:
    ran = BatchRun("host-1/gpu-0", 32, 0.1, 0.0)
    for caller in itertools.islice(itertools.cycle(callers), first % len(callers), first % len(callers) + count):
        entry = Entry(new_id(), "default", "", caller.tier, caller.tenant, "gateway", 2.0, 4.0)
        reply = Reply(entry.id, entry.tenant, "", None, ran)
        yield PendingRequest(NOBODY, caller, entry, random.random(), 4.0, None, reply=reply)


def _count(postgres: PostgresServer, url: str) -> int:
    if url.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return int(connection.execute(_COUNT).fetchone()[0])
    return int(postgres.query(_COUNT, url=url)[0][0])


# What it costs.


def _cost(findings: Findings, folder: Path, postgres: PostgresServer, rate: float, seconds: float, rounds: int) -> None:
    urls = {"off": "", "sqlite": f"sqlite:///{folder}/cost.db", "postgres": postgres.fresh()}
    runs: dict[str, list[Measured]] = {name: [] for name in urls}
    workers = math.ceil(rate * 1.3 / 1000)
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                stand.emulated(100, 100, workers, *(("--ledger", url) if url else ()), name=f"ledger_{name}")
            )
            for name, url in urls.items()
        }
        for server in servers.values():
            open_loop(server, rate, min(seconds, 3.0))
        for turn in range(rounds):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                runs[name].append(open_loop(servers[name], rate, seconds))
        dropped = sum(server.total("headway_ledger_dropped_total") for server in servers.values())
    base = [run.cpu_us["front"] for run in runs["off"]]
    rows = []
    for name, measured in runs.items():
        cpu = [run.cpu_us["front"] for run in measured]
        ratio = statistics.median(one / other for one, other in zip(cpu, base, strict=True))
        rows.append({
            "ledger": name, "CPU µs per request": statistics.median(cpu), "least": min(cpu), "most": max(cpu),
            "to off": ratio, "p95 ms": statistics.median(run.report.total.latency_ms.p95 for run in measured),
            "p99 ms": statistics.median(run.report.total.latency_ms.p99 for run in measured),
            "not answered": sum(run.report.total.requests - run.report.total.answered for run in measured),
        })  # fmt: skip
        findings.none(f"{name}: requests not answered", float(str(rows[-1]["not answered"])))
        if name != "off":
            findings.at_most(f"{name}: CPU time per request to that without a ledger", ratio, MOST_COST)
    findings.none("rows dropped", dropped)
    findings.table(f"Headway's process at {rate:,.0f} requests/s", rows)


if __name__ == "__main__":
    sys.exit(main())
