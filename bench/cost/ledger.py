"""What a ledger costs in CPU time. What becomes of it while its database is away, chaos.py asks.

    python bench/cost/ledger.py                     about three minutes
    python bench/cost/ledger.py --seconds 4         a first impression

Services without a ledger, with SQLite and with PostgreSQL are up at the same time, and get the same load in turn. All of Headway's own process
is counted, the writer of SQLite included, but not the server of PostgreSQL. That is as it comes, with fsync, on the core of load generators.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.processes import family
from tests.servers.postgres import PostgresServer

MOST_COST = 1.10
"""Largest ratio of CPU time with a ledger to that without."""
_DURABLE = {"fsync": "on", "full_page_writes": "on", "autovacuum": "on", "shared_buffers": "128MB"}


def main() -> int:
    parser = argparse.ArgumentParser(description="What a ledger costs.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="of loads (default %(default)s)")
    parser.add_argument("--rate", type=float, default=2_000.0, help="of the loads (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("ledger", seconds=options.seconds, rate=options.rate, pinning=stand.PINNING)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, _postgres() as postgres:
        urls = {"off": "", "sqlite": f"sqlite:///{folder}/cost.db", "postgres": postgres.fresh()}
        runs, dropped = _measure(urls, options.rate, options.seconds, options.rounds)
    base = [run.cpu_us["front"] for run in runs["off"]]
    rows = []
    for name, measured in runs.items():
        cpu = [run.cpu_us["front"] for run in measured]
        ratio = statistics.median(used / without for used, without in zip(cpu, base, strict=True))
        totals = [run.report.total for run in measured]
        unanswered = sum(total.requests - total.answered for total in totals)
        rows.append({
            "ledger": name, "CPU µs per request": statistics.median(cpu), "least": min(cpu), "most": max(cpu), "to off": ratio,
            "p95 ms": statistics.median(total.latency_ms.p95 for total in totals),
            "p99 ms": statistics.median(total.latency_ms.p99 for total in totals), "not answered": unanswered,
        })  # fmt: skip
        findings.none(f"{name}: requests not answered", unanswered)
        if name != "off":
            findings.at_most(f"{name}: CPU time per request to that without a ledger", ratio, MOST_COST)
    findings.none("rows dropped", dropped)
    findings.table(f"Headway's process at {options.rate:,.0f} requests/s", rows)
    return findings.close()


@contextlib.contextmanager
def _postgres() -> Iterator[PostgresServer]:
    with PostgresServer(**_DURABLE) as server:
        for process in family(server.pid):  # Processes that it starts later inherit the core.
            with contextlib.suppress(ProcessLookupError):
                stand.move_to_load_core(process.pid)
        yield server


def _measure(
    urls: dict[str, str], rate: float, seconds: float, rounds: int
) -> tuple[dict[str, list[Measured]], float]:
    """Loads of each service, and rows that were dropped."""
    runs: dict[str, list[Measured]] = {name: [] for name in urls}
    workers = math.ceil(rate * 1.3 / 1000)
    with contextlib.ExitStack() as stack:
        servers: dict[str, stand.Server] = {}
        for name, url in urls.items():
            flags = ("--ledger", url) if url else ()
            servers[name] = stack.enter_context(stand.emulated(100, 100, workers, *flags, name=f"ledger_{name}"))
        for server in servers.values():
            open_loop(server, rate, min(seconds, 3.0))
        for turn in range(rounds):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                runs[name].append(open_loop(servers[name], rate, seconds))
        return runs, sum(server.total("headway_ledger_dropped_total") for server in servers.values())


if __name__ == "__main__":
    sys.exit(main())
