"""More than there is room for: what is served in time, who is refused, and does anything grow?

    python bench/load/overload.py                                30 s of load each, and two minutes of soak
    python bench/load/overload.py --seconds 8 --minutes 0.5      a first impression
    python bench/load/overload.py --only soak --minutes 20       long enough to tell

promise   3,000 requests/s to 2,000/s of capacity (two GPUs, 100 ms a batch of at most 100) under a promise of 200 ms, which is also the deadline;
          5 % enterprise, 25 % paid and 70 % free: what is answered in time, and how fast the others are refused.
soak      800 requests/s to two GPUs (10 ms a batch of at most 64) for `--minutes`, with a worker killed every `--kill-every` seconds. Memory,
          descriptors, threads and processes must not grow: their medians in the second and the last fifth of the time must be about equal.
          `--kill-every 0.4` shows what dead workers leave behind in their host.

GPUs are emulated; everything is on loopback. In mixed loads, requests without a key are enterprise, because X-Request-Tier may only lower a tier.
`promise` writes bench/out/overload.json.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from bench.stand import parts, processes, stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop
from bench.stand.stand import Server
from headway.load.report import Flow

GPUS, BATCH_MS = 2, 100.0
MIX = "enterprise=5,paid=25,free=70"
BY_TIER = ("--default-tier", "enterprise")
WARM_UP = 4.0
PROMISED_BATCH, OFFERED, PROMISE_MS = 100, 3_000.0, 200.0
SOAK_RATE, SAMPLES = 800.0, 100
MOST_GROWTH = {"front, MiB": 8.0, "workers, MiB": 8.0, "descriptors": 32, "threads": 0}
"""Maximum growth from the second fifth of the time to the last."""

T = TypeVar("T")


class Watch(threading.Thread, Generic[T]):
    """Samples at intervals until `finish`, which returns the samples."""

    def __init__(self, look: Callable[[], T], every: float) -> None:
        super().__init__(daemon=True)
        self._look, self._every, self._over = look, every, threading.Event()
        self._seen: list[T] = []
        self.start()

    def run(self) -> None:
        while not self._over.wait(self._every):
            self._seen.append(self._look())

    def finish(self) -> list[T]:
        self._over.set()
        self.join()
        return self._seen


def main() -> int:
    parser = argparse.ArgumentParser(description="More than there is room for, and for long.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default %(default)g)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the soak (default %(default)g)")
    parser.add_argument(
        "--kill-every", type=float, default=10.0, help="seconds between kills in it (default %(default)g)"
    )
    return parts.run(parser, PARTS, {"promise": "overload"})


def promise(findings: Findings, options: argparse.Namespace) -> None:
    """Send one and a half times what two GPUs can serve."""
    capacity = GPUS * PROMISED_BATCH / BATCH_MS * 1000
    findings.say(f"{OFFERED:,.0f}/s offered to {capacity:,.0f}/s for {options.seconds:g} s; {stand.PINNING}.")
    deadline = ("--request-timeout-ms", f"{PROMISE_MS:g}", "--queue-timeout-ms", f"{PROMISE_MS:g}")
    with stand.emulated(BATCH_MS, PROMISED_BATCH, GPUS, *deadline, *BY_TIER, name="overload") as server:
        open_loop(server, capacity / 2, WARM_UP, "--mix", MIX)
        judged = ("--mix", MIX, "--promise", f"{PROMISE_MS:g}", "--expect", "upper")
        measured = open_loop(server, OFFERED, options.seconds, *judged)
    report = measured.report
    findings.keep("3,000/s", measured)
    findings.table("Latency in ms", [_row(tier, flow) for tier, flow in {**report.tiers, "all": report.total}.items()])
    total, enterprise = report.total, report.tiers["enterprise"]
    findings.at_least("goodput, % of capacity", 100 * (total.goodput or 0.0) / capacity, 95, "%")
    findings.at_most("refusals: p99", total.refusal_ms.p99, 20, "ms")
    findings.none("refusals without Retry-After", total.refused_without_retry_after)
    findings.at_most("enterprise: p95", enterprise.latency_ms.p95, PROMISE_MS, "ms")
    findings.none("enterprise: requests not answered", enterprise.requests - enterprise.answered)
    findings.none("wrong answers", report.mismatches or 0)
    findings.at_most("all: answered late or failed, % of the requests", 100 * total.failed / total.requests, 1, "%")


def soak(findings: Findings, options: argparse.Namespace) -> None:
    rng, seconds = random.Random(0), options.minutes * 60

    def kill() -> int:
        victim: int = rng.choice(server.worker_pids() or [0])
        with contextlib.suppress(ProcessLookupError):
            if victim:
                os.kill(victim, signal.SIGKILL)
        return victim

    with stand.emulated(10.0, 64, GPUS, name="soak") as server:
        before = _held(server)
        watch, killing = Watch(lambda: _held(server), seconds / SAMPLES), Watch(kill, options.kill_every)
        measured = open_loop(server, SOAK_RATE, seconds, "--expect", "upper")
        kills, samples = sum(map(bool, killing.finish())), watch.finish()
        time.sleep(1.0)  # The server checks for closed connections twice a second.
        after = _held(server)
    fifth = len(samples) // 5
    early, late = ({what: statistics.median(one[what] for one in part) for what in before}
                   for part in (samples[fifth : 2 * fifth], samples[-fifth:]))  # fmt: skip
    rows = {"before": before, "second fifth": early, "last fifth": late, "after": after}
    findings.table("What the server holds (medians)", [{"when": when, **figures} for when, figures in rows.items()])
    findings.keep("samples", samples)
    findings.none("wrong answers", measured.report.mismatches or 0)
    findings.figure("workers killed", kills)
    for what, most in MOST_GROWTH.items():
        findings.at_most(f"growth of {what}", late[what] - early[what], most)
    for what in ("descriptors", "processes"):
        findings.at_most(f"{what} left behind", after[what] - before[what], 2 if what == "descriptors" else 0)


def _held(server: Server) -> dict[str, float]:
    rss = server.rss()
    return {
        "front, MiB": rss.get("front", 0) / 2**20, "workers, MiB": rss.get("worker", 0) / 2**20,
        "descriptors": server.descriptors(), "threads": processes.threads(server.pid), "processes": len(processes.family(server.pid)),
    }  # fmt: skip


def _row(tier: str, flow: Flow) -> dict[str, object]:
    return {
        "by": tier, "requests": flow.requests, "answered": flow.answered, "refused": flow.refused, "late or failed": flow.failed,
        "in time/s": flow.goodput, "p50": flow.latency_ms.p50, "p95": flow.latency_ms.p95, "p99": flow.latency_ms.p99,
        "refusal p99": flow.refusal_ms.p99,
    }  # fmt: skip


PARTS: parts.Parts = {"promise": promise, "soak": soak}

if __name__ == "__main__":
    sys.exit(main())
