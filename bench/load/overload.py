"""More than there is room for: what is served in time, who is refused, who waits longer for it, and how exact limits are.

    python bench/load/overload.py                                        all, 30 s of load each, 3 minutes for the exactness
    python bench/load/overload.py --seconds 8 --minutes 0.2              a first impression
    python bench/load/overload.py --only promise models                  some of them

promise   3,000 requests/s to 2,000/s of capacity (two GPUs, 100 ms a batch of at most 100) under a promise of 200 ms, which is also the deadline, by
          5 % enterprise, 25 % paid and 70 % free: what is answered in time, how fast the others are refused, and whether memory grows.
tiers     400/s of capacity, asked for two and a half times, and five times, as much by that mix. Enterprise's P95 against that at half the
          capacity; who is refused; free's reserved share.
models    two models on two GPUs of one process, which hold both. *b* is measured calm, then while *a* is asked for twice what both GPUs can do.
          Then *a* alone is asked for more than one GPU can do.
workers   two of four worker hosts are killed under a flood of free requests, and started again: how soon the gateway's throttle follows.
exact     one key of 1,000 a minute, 50 at once, through four gateways over Redis, which get 70, 20, 9 and 1 % of the traffic: what was let in,
          against the rule.

GPUs are made of sleep; everything is on loopback. Enterprise is the tier of requests without a key where a mix asks, because X-Request-Tier
may only lower a tier. `promise` leaves bench/out/overload.json, each other part a file of its own.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.stand import fleet as fleets
from bench.stand import parts, stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from headway.load.report import Flow

GPUS, BATCH_MS = 2, 100.0
MIX = "enterprise=5,paid=25,free=70"
BY_TIER = ("--default-tier", "enterprise")
WARM_UP = 4.0
PROMISED_BATCH, OFFERED, PROMISE_MS = 100, 3_000.0, 200.0
GROWTH_MB = 8.0
"""Most growth of the server's memory from the second fifth of the load to the last."""
MAX_BATCH = 20
CAPACITY = GPUS * MAX_BATCH / BATCH_MS * 1000
"""Requests per second of all other parts."""
RESERVED = 0.1
"""Share of the capacity that the lowest tier has for itself."""
CALM, FLOOD, ALONE = 20.0, 320.0, 120.0
"""Requests per second of model b, of a beside it, and of a alone. A GPU does 80."""
DRAINED = 3.0
"""Seconds after which nothing is left of a flood, because its requests wait for 2 s at most."""
PATIENT = ("--queue-timeout-ms", "2000", "--request-timeout-ms", "4000")
RATE, BURST = 1000.0, 50.0
SPLIT = (0.7, 0.2, 0.09, 0.01)


class Watch(threading.Thread):
    """Reads a figure again and again; `samples` are (monotonic seconds, figure)."""

    def __init__(self, read: Callable[[], float], every: float) -> None:
        super().__init__(daemon=True)
        self._read, self._every = read, every
        self._over = threading.Event()
        self.samples: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        while not self._over.wait(self._every):
            self.samples.append((time.monotonic(), self._read()))

    def finish(self) -> list[tuple[float, float]]:
        """Stop, and return what was read."""
        self._over.set()
        self.join()
        return self.samples

    def reached(self, since: float, low: float, high: float) -> float:
        """Return the seconds from an instant until the figure first lay between two bounds; -1 if it never did."""
        return next((at - since for at, read in self.samples if at >= since and low <= read <= high), -1.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="More than there is room for: goodput, refusals, tiers, tenants, limits."
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default %(default)g)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the exactness (default %(default)g)")
    return parts.run(parser, PARTS, {name: f"overload_{name}" for name in PARTS} | {"promise": "overload"})


def promise(findings: Findings, options: argparse.Namespace) -> None:
    """Half as much again as two GPUs can serve."""
    capacity = GPUS * PROMISED_BATCH / BATCH_MS * 1000
    findings.say(f"{OFFERED:,.0f}/s offered to {capacity:,.0f}/s for {options.seconds:g} s; {stand.PINNING}.")
    deadline = ("--request-timeout-ms", f"{PROMISE_MS:g}", "--queue-timeout-ms", f"{PROMISE_MS:g}")
    with stand.emulated(BATCH_MS, PROMISED_BATCH, GPUS, *deadline, *BY_TIER, name="overload") as server:
        open_loop(server, capacity / 2, WARM_UP, "--mix", MIX)
        watch = Watch(lambda: server.rss().get("front", 0) / 2**20, 1.0)
        judged = ("--mix", MIX, "--promise", f"{PROMISE_MS:g}", "--expect", "upper")
        measured = open_loop(server, OFFERED, options.seconds, *judged)
        memory = [read for _, read in watch.finish()]
    report = measured.report
    _show(findings, "Latency in ms", {"3,000/s": measured})
    findings.keep("front_rss_mb_each_second", memory)
    total, enterprise = report.total, report.tiers["enterprise"]
    findings.at_least("goodput, % of capacity", 100 * (total.goodput or 0.0) / capacity, 95, "%")
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


def tiers(findings: Findings, options: argparse.Namespace) -> None:
    with stand.emulated(BATCH_MS, MAX_BATCH, GPUS, *PATIENT, *BY_TIER, name="overload-tiers") as server:
        open_loop(server, CAPACITY / 2, WARM_UP, "--mix", MIX)
        loads = {
            f"{times:g} × capacity": open_loop(server, times * CAPACITY, options.seconds, "--mix", MIX)
            for times in (0.5, 2.5, 5.0)
        }
    calm, leaving, flood = _show(findings, "A flood by all tiers; latency in ms", loads)
    share = 100 * flood["enterprise"].latency_ms.p95 / calm["enterprise"].latency_ms.p95
    findings.at_most("enterprise: p95 in the flood, % of calm", share, 110, "%")
    unanswered = flood["enterprise"].requests - flood["enterprise"].answered
    findings.none("enterprise: requests not answered in the flood", unanswered)
    both = flood["paid"].refused > 0 and flood["free"].refused > 0
    findings.say(f"At five times the capacity paid and free were{'' if both else ' not both'} refused.")
    findings.none("paid: requests refused while the others leave room (2.5 ×)", leaving["paid"].refused)
    kept = leaving["free"].answered / options.seconds / (CAPACITY * RESERVED)
    findings.at_least("free: answered, % of its reserved share (2.5 ×)", 100 * kept, 90, "%")


def models(findings: Findings, options: argparse.Namespace) -> None:
    """A flood of one model beside another."""
    environment = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": "8"}
    flags = ("--workers", str(GPUS), "--models-per-gpu", "2", "--max-batch-size", "8", "--log-level", "warning")
    targets = [f"{model}={stand.EMULATED_GPU}" for model in "ab"]
    with (
        stand.headway(*targets, *flags, name="overload-models", environment=environment) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        calm = open_loop(server, CALM, options.seconds, "--model", "b")
        other = pool.submit(open_loop, server, FLOOD, options.seconds + 4.0, "--model", "a")
        time.sleep(2.0)
        flooded = open_loop(server, CALM, options.seconds, "--model", "b")
        other.result()
        time.sleep(DRAINED)
        alone = open_loop(server, ALONE, options.seconds, "--model", "a")
    rows = [calm.row("b, calm"), flooded.row("b, a flooded"), alone.row("a alone")]
    findings.table("Two models on the same GPUs; latency in ms", rows)
    longer = flooded.report.total.latency_ms.p95 - calm.report.total.latency_ms.p95
    findings.at_most("models: P95 of the one beside a flood of the other, above calm", longer, BATCH_MS, "ms")
    findings.at_least("models: answered of one that two GPUs must carry", alone.answered, 0.99)
    findings.at_least("models: answered of the one beside a flood of the other", flooded.answered, 0.99)


def workers(findings: Findings, options: argparse.Namespace) -> None:
    """Half the workers are killed, and come back."""
    flags = (*PATIENT, "--default-tier", "free")
    with (
        fleets.emulated(BATCH_MS, MAX_BATCH, hosts=4, gpus=1, name="overload-workers", gateway_flags=flags) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        whole = 2 * CAPACITY
        offered = 1.5 * whole
        open_loop(fleet, offered, WARM_UP)
        watch = Watch(lambda: float(fleet.gateways[0].total("headway_throttle_per_second")), 0.05)
        phase = max(options.seconds / 2, 6.0)
        loading = pool.submit(open_loop, fleet, offered, 3 * phase)
        time.sleep(phase / 2)
        killed_at = time.monotonic()
        for host in fleet.workers[:2]:
            host.kill()
        time.sleep(phase)
        fleet.workers[:2] = [fleet.start("worker") for _ in range(2)]
        for host in fleet.workers[:2]:
            fleets.wait_until_up("worker", host)
        back_at = time.monotonic()
        measured = loading.result()
        samples = watch.finish()
    total = measured.report.total
    tightened = watch.reached(killed_at, 0.0, 0.55 * whole)
    relaxed = watch.reached(back_at - 1.0, 0.9 * whole, 2 * whole) - 1.0
    after = [rate for at, rate in samples if at >= killed_at + 3.0]
    findings.keep("workers", measured)
    findings.keep("workers: throttle by seconds since the kill", [(at - killed_at, rate) for at, rate in samples])
    findings.table("Two of four worker hosts are killed under a flood of free requests, and come back", [{
        "offered/s": offered, "usable/s": whole, "tightened after s": tightened, "relaxed after s": relaxed,
        "least let in/s": min(after), "most let in/s": max(after),
        "answered": total.answered, "refused": total.refused, "failed": total.failed, "p95 ms": total.latency_ms.p95,
    }])  # fmt: skip
    findings.at_least("workers: the throttle tightened (1: yes)", float(tightened >= 0.0), 1)
    findings.at_most("workers: seconds until the throttle tightened", tightened, 3.0, "s")
    findings.at_most("workers: most let in after their return, % of usable", 100 * max(after) / whole, 105, "%")
    findings.at_least("workers: least let in without them, % of usable", 100 * min(after) / whole, 40, "%")


def exact(findings: Findings, options: argparse.Namespace) -> None:
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = stand.write_keys(path, ["limited"], "paid", RATE, BURST)
        flags = (*PATIENT, "--keys", str(path))
        with (
            fleets.emulated(
                10.0, 100, hosts=1, gpus=2, gateways=len(SPLIT), name="overload-exact", gateway_flags=flags
            ) as fleet,
            ThreadPoolExecutor() as pool,
        ):
            offered = 3 * RATE / 60
            loads = [
                pool.submit(open_loop, gateway, offered * part, seconds, "--key", keys["limited"])
                for gateway, part in zip(fleet.gateways, SPLIT, strict=True)
            ]
            measured = {f"{part:.0%}": load.result() for part, load in zip(SPLIT, loads, strict=True)}
    title = f"A key of {RATE:g} a minute and {BURST:g} at once for {seconds:g} s through gateways with so much of the traffic"
    _show(findings, title, measured)
    totals = [load.report.total for load in measured.values()]
    answered, rule = sum(total.answered for total in totals), BURST + RATE / 60 * seconds
    findings.at_most("exact: let in, % off the rule", 100 * abs(answered / rule - 1), 1, "%")
    findings.none("exact: requests failed", sum(total.failed for total in totals))


def _show(findings: Findings, title: str, loads: Mapping[str, Measured]) -> list[Mapping[str, Flow]]:
    """Table of each load by tier, and in all; returns the streams of each."""
    rows = []
    for name, measured in loads.items():
        findings.keep(name, measured)
        report = measured.report
        for tier, flow in {**report.tiers, "all": report.total}.items():
            rows.append({
                "load": name, "by": tier, "requests": flow.requests, "answered": flow.answered, "refused": flow.refused,
                "late or failed": flow.failed, "in time/s": flow.goodput, "p50": flow.latency_ms.p50,
                "p95": flow.latency_ms.p95, "p99": flow.latency_ms.p99, "refusal p99": flow.refusal_ms.p99,
            })  # fmt: skip
    findings.table(title, rows)
    return [measured.report.tiers for measured in loads.values()]


PARTS: parts.Parts = {"promise": promise, "tiers": tiers, "models": models, "workers": workers, "exact": exact}

if __name__ == "__main__":
    sys.exit(main())
