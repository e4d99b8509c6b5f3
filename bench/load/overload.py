"""Half as much again as two GPUs can serve: what is served in time, who is refused, and how fast.

    python bench/load/overload.py                30 s of load
    python bench/load/overload.py --seconds 10   a first impression

3,000 requests/s are offered to 2,000/s of capacity (two GPUs made of sleep, 100 ms a batch of at most 100), under a
promise of 200 ms, which is also the server's deadline. 5 % ask as enterprise, 25 % as paid, 70 % as free. Enterprise
is the tier of requests without a key here, because X-Request-Tier may only lower a tier.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.stand import Server

GPUS, BATCH_MS, MAX_BATCH = 2, 100.0, 100
CAPACITY = GPUS * MAX_BATCH / BATCH_MS * 1000
OFFERED = 3_000.0
PROMISE_MS = 200.0
MIX = "enterprise=5,paid=25,free=70"
WARM_UP = 3.0
GROWTH_MB = 8.0
"""What the memory of the server may grow by from the second fifth of the load to the last."""


class Watch(threading.Thread):
    """Reads the memory of a server once a second, in MiB, until it is told to stop."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.samples: list[float] = []

    def run(self) -> None:
        while not self._over.wait(1.0):
            self.samples.append(self._server.rss().get("front", 0) / 2**20)

    def finish(self) -> list[float]:
        """Stop, and return what was read."""
        self._over.set()
        self.join()
        return self.samples


def main() -> int:
    parser = argparse.ArgumentParser(description="Overload: goodput, refusals, tiers, memory.")
    parser.add_argument("--seconds", type=float, default=30.0, help="load (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("overload", seconds=options.seconds, warm_up_s=WARM_UP, pinning=stand.PINNING, mix=MIX)
    findings.say(f"{OFFERED:,.0f}/s offered to {CAPACITY:,.0f}/s for {options.seconds:g} s; {stand.PINNING}.")
    deadline = ("--request-timeout-ms", f"{PROMISE_MS:g}", "--queue-timeout-ms", f"{PROMISE_MS:g}")
    with stand.emulated(
        BATCH_MS,
        MAX_BATCH,
        GPUS,
        *deadline,
        "--default-tier",
        "enterprise",
        name="overload",
    ) as server:
        open_loop(server, CAPACITY / 2, WARM_UP, "--mix", MIX)
        watch = Watch(server)
        watch.start()
        measured = open_loop(
            server, OFFERED, options.seconds, "--mix", MIX, "--promise", f"{PROMISE_MS:g}", "--expect", "upper"
        )
        memory = watch.finish()
    _report(findings, measured, memory)
    return findings.close()


def _report(findings: Findings, measured: Measured, memory: list[float]) -> None:
    report = measured.report
    rows = [
        {
            "tier": name,
            "requests": flow.requests,
            "answered": flow.answered,
            "refused": flow.refused,
            "late or failed": flow.failed,
            "in time/s": flow.goodput,
            "p50": flow.latency_ms.p50,
            "p95": flow.latency_ms.p95,
            "p99": flow.latency_ms.p99,
            "refusal p99": flow.refusal_ms.p99,
        }
        for name, flow in (*report.tiers.items(), ("all", report.total))
    ]
    findings.table("Latency in ms", rows)
    findings.keep("load", measured)
    findings.keep("front_rss_mb_each_second", memory)
    total, enterprise = report.total, report.tiers["enterprise"]
    findings.at_least("goodput, % of capacity", 100 * (total.goodput or 0.0) / CAPACITY, 95, "%")
    findings.at_most("refusals: p99", total.refusal_ms.p99, 20, "ms")
    findings.none("refusals without Retry-After", total.refused_without_retry_after)
    findings.at_most("enterprise: p95", enterprise.latency_ms.p95, PROMISE_MS, "ms")
    findings.none("enterprise: requests not answered", enterprise.requests - enterprise.answered)
    findings.none("wrong answers", report.mismatches or 0)
    findings.at_most("all: answered late or failed, % of the requests", 100 * total.failed / total.requests, 1, "%")
    fifth = len(memory) // 5
    if fifth:
        growth = statistics.median(memory[-fifth:]) - statistics.median(memory[fifth : 2 * fifth])
        findings.at_most("front process: growth of memory", growth, GROWTH_MB, "MiB")
    own = report.generator
    findings.say(
        f"Server {measured.server_us:.1f} µs CPU per answered request, {measured.core:.0%} of its core; generator late "
        f"by p99 {own.lag_ms.p99:.2f} ms, {own.cpu_share:.0%} of a core."
    )


if __name__ == "__main__":
    sys.exit(main())
