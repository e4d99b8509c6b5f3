"""What records cost in CPU time: a ledger in SQLite or PostgreSQL, and traces, with a working collector and one that never answers.

    python bench/cost/records.py                     about five minutes
    python bench/cost/records.py --seconds 4         a first impression

Services without records and with each kind run side by side, and get the same load in turn. All traces are sampled. CPU time is that of Headway's
own process, including the SQLite writer but not the PostgreSQL server, which has its defaults, with fsync, on the load generators' core. chaos.py
covers a ledger whose database is down; tests/telemetry covers other collector problems.
"""

import argparse
import contextlib
import math
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.processes import family
from tests.servers.postgres import PostgresServer

MOST_COST = 1.10
"""Maximum ratio of CPU time with a ledger to that without."""
MOST_P95_MS = 3.0
"""Maximum milliseconds that traces may add to P95, which varies by about 1 ms anyway."""
BATCH_MS, MAX_BATCH = 100, 100
DROPPED = "headway_ledger_dropped_total", "headway_trace_spans_dropped_total"
_DURABLE = {"fsync": "on", "full_page_writes": "on", "autovacuum": "on", "shared_buffers": "128MB"}

Kinds = dict[str, tuple[tuple[str, ...], str]]
"""Flags of a service, and the URL of its collector."""


def main() -> int:
    parser = argparse.ArgumentParser(description="What ledgers and traces cost.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="of loads (default %(default)s)")
    parser.add_argument("--rate", type=float, default=2_000.0, help="of the loads (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("records", seconds=options.seconds, rate=options.rate, pinning=stand.PINNING)
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-") as folder,
        _postgres() as postgres,
        _collector() as collector,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        kinds: Kinds = {
            "off": ((), ""),
            "sqlite": (("--ledger", f"sqlite:///{folder}/cost.db"), ""),
            "postgres": (("--ledger", postgres.fresh()), ""),
            "traces": (("--trace",), collector),
            "traces, silent": (("--trace",), f"http://127.0.0.1:{silent.getsockname()[1]}"),
        }
        runs, dropped = _measure(kinds, options.rate, options.seconds, options.rounds)
    rows = []
    for name, measured in runs.items():
        cpu, p95 = _cpu(measured), statistics.median(_p95(measured))
        ratio = statistics.median(used / without for used, without in zip(cpu, _cpu(runs["off"]), strict=True))
        unanswered = sum(run.report.total.requests - run.report.total.answered for run in measured)
        costs = {"CPU µs per request": statistics.median(cpu), "least": min(cpu), "most": max(cpu), "to off": ratio}
        rows.append({"records": name, **costs, "p95 ms": p95, "not answered": unanswered, "dropped": dropped[name]})
        findings.none(f"{name}: requests not answered", unanswered)
        if "--ledger" in kinds[name][0]:
            findings.at_most(f"{name}: CPU time per request to that without a ledger", ratio, MOST_COST)
            findings.none(f"{name}: rows dropped", dropped[name])
        if "--trace" in kinds[name][0]:
            findings.at_most(f"{name}: added to P95", p95 - statistics.median(_p95(runs["off"])), MOST_P95_MS, "ms")
    findings.table(f"Headway's process at {options.rate:,.0f} requests/s", rows)
    return findings.close()


def _cpu(measured: list[Measured]) -> list[float]:
    return [run.cpu_us["front"] for run in measured]


def _p95(measured: list[Measured]) -> list[float]:
    return [run.report.total.latency_ms.p95 for run in measured]


def _measure(
    kinds: Kinds, rate: float, seconds: float, rounds: int
) -> tuple[dict[str, list[Measured]], dict[str, float]]:
    """Return the loads of each service, and the rows or spans that it dropped."""
    runs: dict[str, list[Measured]] = {name: [] for name in kinds}
    shape = ("--workers", str(math.ceil(rate * 1.3 / 1000)), "--max-batch-size", str(MAX_BATCH), "--log-level", "error")
    gpu = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH), "OTEL_BSP_SCHEDULE_DELAY": "500"}
    with contextlib.ExitStack() as stack:
        servers: dict[str, stand.Server] = {}
        for number, (name, (flags, collector)) in enumerate(kinds.items()):
            environment = gpu | ({"OTEL_EXPORTER_OTLP_ENDPOINT": collector} if collector else {})
            up = stand.headway(stand.EMULATED_GPU, *shape, *flags, name=f"records-{number}", environment=environment)
            servers[name] = stack.enter_context(up)
        for server in servers.values():
            open_loop(server, rate, min(seconds, 3.0))
        for turn in range(rounds):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                runs[name].append(open_loop(servers[name], rate, seconds))
        return runs, {name: sum(map(server.total, DROPPED)) for name, server in servers.items()}


@contextlib.contextmanager
def _postgres() -> Iterator[PostgresServer]:
    with PostgresServer(**_DURABLE) as server:
        for process in family(server.pid):  # Its later child processes inherit the core.
            with contextlib.suppress(ProcessLookupError):
                stand.move_to_load_core(process.pid)
        yield server


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Run a collector that accepts everything. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
