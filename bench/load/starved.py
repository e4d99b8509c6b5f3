"""Both doors side by side while the server gets little processor time.

    python bench/load/starved.py                    0, 3 and 9 busy programs beside the server, 8 s each: a minute
    python bench/load/starved.py --hogs 9 --connections 8

One process serves two GPUs made of sleep (20 ms a batch of at most 32). Busy programs of the same priority share its core. An open
loop asks over HTTP, another one over gRPC, at the same time and rate. A call's time counts from the instant at which it was due.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop
from bench.stand.stand import HERE

GPUS, BATCH_MS, MAX_BATCH = 2, 20.0, 32
WARM_UP = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description="HTTP and gRPC while the server gets little processor time.")
    parser.add_argument(
        "--hogs", type=int, nargs="+", default=[0, 3, 9], help="busy programs beside it (default 0 3 9)"
    )
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second by each door (default %(default)g)")
    parser.add_argument("--connections", type=int, default=1, help="gRPC connections (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("starved", rate=options.rate, connections=options.connections, pinning=stand.PINNING)
    port = stand.free_port()
    flags = ("--grpc-port", str(port), "--request-timeout-ms", "60000", "--queue-timeout-ms", "30000")
    rows = []
    with stand.emulated(BATCH_MS, MAX_BATCH, GPUS, *flags, name="starved") as server:
        open_loop(server, options.rate, WARM_UP)
        for count in options.hogs:
            with _hogs(count), _calls(port, options) as calls:
                http = open_loop(server, options.rate, options.seconds).report.total
                found = json.loads(calls.communicate()[0])
            rows.append(_row(count, http, found))
    findings.table("Latency by both doors beside busy programs, ms", rows)
    return findings.close()


def _row(count: int, http: Any, found: dict[str, Any]) -> dict[str, object]:
    times = sorted(found["milliseconds"]) or [0.0]
    return {
        "busy programs": count,
        "HTTP p50": http.latency_ms.p50, "p95": http.latency_ms.p95, "max": http.latency_ms.max,
        "gRPC p50": times[len(times) // 2], "gRPC p95": times[int(len(times) * 0.95)], "gRPC max": times[-1],
        "HTTP failed": http.requests - http.answered, "gRPC failed": sum(found["failed"].values()),
    }  # fmt: skip


@contextlib.contextmanager
def _hogs(count: int) -> Iterator[None]:
    """Busy programs on the server's core."""
    command = stand.on_server_core([sys.executable, "-c", "while True: pass"])
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


@contextlib.contextmanager
def _calls(port: int, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "grpc_open_loop.py"), f"127.0.0.1:{port}"]
    given = [
        "--rate",
        f"{options.rate:g}",
        "--seconds",
        f"{options.seconds:g}",
        "--connections",
        str(options.connections),
    ]
    process = subprocess.Popen(stand.on_load_core([*command, *given]), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
