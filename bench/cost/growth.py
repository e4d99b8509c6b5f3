"""How cost grows: CPU time per request by rate and by number of workers, and memory per waiting client.

    python bench/cost/growth.py                about three minutes
    python bench/cost/growth.py --seconds 4    a first impression

GPUs are made of sleep (100 ms a batch of at most 100), eleven for each 10,000 requests/s; load is open-loop, Poisson.
What a server does whether or not it is asked (heartbeats, sweeps) is in these figures, and weighs most at the lowest
rate. For memory, the GPU sleeps for long while more and more clients wait.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import resource
import socket
import sys
import time
from urllib.parse import urlsplit

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop

RATES = (100, 300, 1_000, 3_000, 10_000)
WORKERS = (1, 4, 16, 64)
WORKERS_RATE = 900.0
CLIENTS = 4_000
FEW = 500
SPREAD = 1.1 / 0.9
WARM_UP = 3.0
MOST_KB = 20.0
_ASK = "POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n{body}"


def main() -> int:
    parser = argparse.ArgumentParser(description="How cost grows with rate, workers and waiting clients.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("growth", seconds=options.seconds, clients=CLIENTS, pinning=stand.PINNING)
    findings.say(f"Load for {options.seconds:g} s each; {stand.PINNING}.")
    costs = [_cost(findings, rate, max(1, math.ceil(rate * 1.1 / 1000)), options.seconds) for rate in RATES]
    findings.table("By rate; CPU in µs per request", costs)
    _flat(findings, "rates", costs)
    costs = [_cost(findings, WORKERS_RATE, workers, options.seconds) for workers in WORKERS]
    findings.table("By workers; CPU in µs per request", costs)
    _flat(findings, "numbers of workers", costs)
    _memory(findings)
    return findings.close()


def _cost(findings: Findings, rate: float, workers: int, seconds: float) -> dict[str, float]:
    with stand.emulated(100, 100, workers, name="growth") as server:
        open_loop(server, rate, WARM_UP)
        measured = open_loop(server, rate, seconds, "--expect", "upper")
        batch = server.total("headway_batch_size_sum") / max(1.0, server.total("headway_batch_size_count"))
    findings.keep(f"{rate:g}/s on {workers}", measured)
    total = measured.report.total
    return {
        "requests/s": rate,
        "GPUs": workers,
        "front": measured.cpu_us.get("front", 0.0),
        "workers": measured.cpu_us.get("worker", 0.0),
        "all": measured.server_us,
        "batch": batch,
        "p95 ms": total.latency_ms.p95,
        "not answered": total.requests - total.answered,
    }


def _flat(findings: Findings, over: str, costs: list[dict[str, float]]) -> None:
    every = [cost["all"] for cost in costs]
    findings.at_most(f"CPU per request over all {over}: largest to smallest", max(every) / min(every), round(SPREAD, 2))
    findings.none(f"over all {over}: requests not answered", sum(cost["not answered"] for cost in costs))


def _memory(findings: Findings) -> None:
    """What each further client adds that waits for its answer."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW + CLIENTS + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    patience = ("--request-timeout-ms", "30000", "--queue-timeout-ms", "30000", "--gpu-timeout-ms", "30000")
    slow = stand.headway(f"{stand.TARGETS}:Slow", *patience, "--log-level", "warning", name="growth-memory")
    with slow as server, contextlib.ExitStack() as held:
        parts = urlsplit(server.url)
        sizes = []
        for number in range(FEW + CLIENTS):
            client = held.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=10))
            body = f'{{"input": "client number {number}"}}'
            client.sendall(_ASK.format(host=parts.netloc, length=len(body), body=body).encode())
            if number + 1 in (FEW, FEW + CLIENTS):
                _until_held(server, number + 1)
                sizes.append(server.rss()["front"])
    each = (sizes[1] - sizes[0]) / CLIENTS / 1024
    findings.say(
        f"{CLIENTS:,} more waiting clients: {(sizes[1] - sizes[0]) / 2**20:.1f} MiB more, {each:.1f} KiB each."
    )
    findings.keep("rss_bytes", sizes)
    findings.at_most("memory for each waiting client", each, MOST_KB, "KiB")


def _until_held(server: stand.Server, clients: int) -> None:
    patience = time.monotonic() + 8
    while (held := server.ask("/internal/health")["pending"]) < clients:
        if time.monotonic() > patience:
            raise stand.Broken(f"only {held} of {clients} requests are held:\n{server.output[-1000:]}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
