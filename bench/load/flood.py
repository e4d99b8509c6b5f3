"""Floods: who is refused, who waits longer for it, how fast limits follow the workers, and how exact limits are.

    python bench/load/flood.py                    all four, 20 s of load each, 3 minutes for the exactness: 10 minutes
    python bench/load/flood.py --seconds 8 --minutes 0.2    a first impression
    python bench/load/flood.py tiers tenants      some of them

    tiers     400/s of capacity, asked for five times, and two and a half times, as much by 5 % enterprise, 25 % paid and 70 % free.
              Enterprise's P95 against that of the same mix at half the capacity; who is refused; free's reserved share.
    tenants   eleven tenants of one tier. One of them asks ten times as much as each other: below capacity in all, and alone
              for half as much again as there is. The others' P95 against that without it.
    workers   two of four worker hosts are killed under a flood of free requests, and started again: how long the
              gateway's throttle takes to follow, and what it lets in meanwhile.
    exact     one key of 1,000 a minute, 50 at once, through four gateways over Redis, which get 70, 20, 9 and 1 % of the
              traffic: what was let in, against the rule.

GPUs are made of sleep; everything is on loopback.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.stand import fleet as fleets
from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.stand import Server

GPUS, BATCH_MS, MAX_BATCH = 2, 100.0, 20
CAPACITY = GPUS * MAX_BATCH / BATCH_MS * 1000
UTILISATION = 1.0
"""Target utilisation, the default."""
RESERVED = 0.1
MIX = "enterprise=5,paid=25,free=70"
OTHERS = 10
WARM_UP = 4.0
PATIENT = ("--queue-timeout-ms", "2000", "--request-timeout-ms", "4000")
SAMPLE_EVERY = 0.05
RATE, BURST = 1000.0, 50.0
SPLIT = (0.7, 0.2, 0.09, 0.01)


def main() -> int:
    parts: dict[str, Callable[[Findings, argparse.Namespace], None]] = {
        "tiers": _tiers, "tenants": _tenants, "workers": _workers, "exact": _exact,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description="Floods: tiers, tenants, lost workers, exact limits.")
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(parts)} (default all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (default %(default)g)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the exactness (default %(default)g)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part named {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    stand.end_in_order()
    findings = Findings("flood", seconds=options.seconds, minutes=options.minutes, pinning=stand.PINNING)
    for name in options.parts or parts:
        parts[name](findings, options)
    return findings.close()


def _tiers(findings: Findings, options: argparse.Namespace) -> None:
    """A flood by all tiers."""
    with stand.emulated(
        BATCH_MS, MAX_BATCH, GPUS, *PATIENT, "--default-tier", "enterprise", name="flood-tiers"
    ) as server:
        open_loop(server, CAPACITY / 2, WARM_UP, "--mix", MIX)
        loads = {
            f"{times:g} × capacity": open_loop(server, times * CAPACITY, options.seconds, "--mix", MIX)
            for times in (0.5, 2.5, 5.0)
        }
    rows = _rows(findings, "A flood by all tiers; latency in ms", loads)
    calm, leaving, flood = (rows[name] for name in loads)
    findings.at_most("enterprise: p95 in the flood, % of calm", _percent(flood, calm, "enterprise"), 110, "%")
    findings.none("enterprise: requests not answered in the flood", _unanswered(flood, "enterprise"))
    paid_alone = flood["paid"].refused > 0 and flood["free"].refused > 0
    findings.say(f"At five times the capacity paid and free were{'' if paid_alone else ' not both'} refused.")
    findings.none("paid: requests refused while the others leave room (2.5 ×)", leaving["paid"].refused)
    kept = leaving["free"].answered / options.seconds / (CAPACITY * UTILISATION * RESERVED)
    findings.at_least("free: answered, % of its reserved share (2.5 ×)", 100 * kept, 90, "%")


def _tenants(findings: Findings, options: argparse.Namespace) -> None:
    """A flood by one tenant."""
    names = [f"t{number}" for number in range(OTHERS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = _write_keys(path, [*names, "flood"])
        with stand.emulated(BATCH_MS, MAX_BATCH, GPUS, *PATIENT, "--keys", str(path), name="flood-tenants") as server:

            def load(each: float, flood: float) -> Measured:
                """So many requests a second by each of the others, and by the one."""
                mix = ",".join([*(f"{name}={each:g}" for name in names), *([f"flood={flood:g}"] if flood else [])])
                flags = [
                    flag
                    for name, key in keys.items()
                    if flood or name != "flood"
                    for flag in ("--key", f"{name}={key}")
                ]
                return open_loop(server, OTHERS * each + flood, options.seconds, "--mix", mix, *flags)

            each = 0.04 * CAPACITY
            load(each, 0.0)
            loads = {
                "the others alone": load(each, 0.0),
                "10 × each other, 0.8 of capacity in all": load(each, 10 * each),
                "alone 1.5 of capacity": load(each, 1.5 * CAPACITY),
            }
    rows = []
    for name, measured in loads.items():
        tiers = measured.report.tiers
        others = [tiers[one] for one in names]
        rows.append({
            "load": name,
            "others: requests": sum(flow.requests for flow in others),
            "refused": sum(flow.refused for flow in others),
            "failed": sum(flow.failed for flow in others),
            "p95 (mean of ten)": sum(flow.latency_ms.p95 for flow in others) / OTHERS,
            **({"flood: requests": tiers["flood"].requests, "answered": tiers["flood"].answered,
                "flood refused": tiers["flood"].refused, "flood failed": tiers["flood"].failed,
                "flood p95": tiers["flood"].latency_ms.p95} if "flood" in tiers else
               dict.fromkeys(("flood: requests", "answered", "flood refused", "flood failed", "flood p95"), 0)),
        })  # fmt: skip
        findings.keep(f"tenants, {name}", measured)
    findings.table("A flood by one tenant of eleven; latency in ms", rows)
    for row in rows[1:]:
        share = 100 * float(str(row["p95 (mean of ten)"])) / float(str(rows[0]["p95 (mean of ten)"]))
        findings.at_most(f"others: p95 with the flood ({row['load']}), % of that without", share, 110, "%")
        findings.none(
            f"others: requests not answered ({row['load']})", int(str(row["refused"])) + int(str(row["failed"]))
        )


class _Watch(threading.Thread):
    """Reads what a gateway's throttle lets in a second, until it is told to stop.

    Attributes:
        samples: (monotonic seconds, rate).
    """

    def __init__(self, gateway: Server) -> None:
        super().__init__(daemon=True)
        self._gateway = gateway
        self._over = threading.Event()
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._over.wait(SAMPLE_EVERY):
            self.samples.append((time.monotonic(), self._gateway.total("headway_throttle_per_second")))

    def finish(self) -> None:
        self._over.set()
        self.join()

    def reached(self, since: float, low: float, high: float) -> float:
        """Seconds from an instant until the rate first lay between two bounds; -1 when it never did."""
        return next((at - since for at, rate in self.samples if at >= since and low <= rate <= high), -1.0)


def _workers(findings: Findings, options: argparse.Namespace) -> None:
    """Half the workers are killed, and come back."""
    flags = ("--default-tier", "free")
    with (
        fleets.emulated(
            BATCH_MS, MAX_BATCH, hosts=4, gpus=1, name="flood-workers", gateway_flags=(*PATIENT, *flags)
        ) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        whole = 2 * CAPACITY * UTILISATION
        offered = 1.5 * whole
        open_loop(fleet, offered, WARM_UP)
        watch = _Watch(fleet.gateways[0])
        watch.start()
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
        watch.finish()
    report = measured.report.total
    tightened = watch.reached(killed_at, 0.0, 0.55 * whole)
    relaxed = watch.reached(back_at - 1.0, 0.9 * whole, 2 * whole) - 1.0
    after = [rate for at, rate in watch.samples if at >= killed_at + 3.0]
    findings.keep("workers", measured)
    findings.keep("workers: throttle by seconds since the kill", [(at - killed_at, rate) for at, rate in watch.samples])
    findings.table("Two of four worker hosts are killed under a flood of free requests, and come back", [{
        "offered/s": offered, "usable/s": whole, "tightened after s": tightened, "relaxed after s": relaxed,
        "least let in/s": min(after), "most let in/s": max(after),
        "answered": report.answered, "refused": report.refused, "failed": report.failed, "p95 ms": report.latency_ms.p95,
    }])  # fmt: skip
    findings.at_least("workers: the throttle tightened (1: yes)", float(tightened >= 0.0), 1)
    findings.at_most("workers: seconds until the throttle tightened", tightened, 3.0, "s")
    findings.at_most("workers: most let in after their return, % of usable", 100 * max(after) / whole, 105, "%")
    findings.at_least("workers: least let in without them, % of usable", 100 * min(after) / whole, 40, "%")


def _exact(findings: Findings, options: argparse.Namespace) -> None:
    """One key through four gateways."""
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        [key] = _write_keys(path, ["limited"], RATE, BURST).values()
        with fleets.emulated(
            10.0, 100, hosts=1, gpus=2, gateways=len(SPLIT), name="flood-exact",
            gateway_flags=(*PATIENT, "--keys", str(path)),
        ) as fleet, ThreadPoolExecutor() as pool:  # fmt: skip
            offered = 3 * RATE / 60
            loads = [
                pool.submit(open_loop, gateway, offered * part, seconds, "--key", key)
                for gateway, part in zip(fleet.gateways, SPLIT, strict=True)
            ]
            measured = [load.result() for load in loads]
    totals = [one.report.total for one in measured]
    answered, rule = sum(total.answered for total in totals), BURST + RATE / 60 * seconds
    rows = [
        {"gateway gets": f"{part:.0%}", "requests": total.requests, "answered": total.answered, "refused": total.refused,
         "failed": total.failed} for part, total in zip(SPLIT, totals, strict=True)
    ]  # fmt: skip
    findings.table(f"A key of {RATE:g} a minute and {BURST:g} at once for {seconds:g} s through four gateways", rows)
    findings.keep("exact", measured)
    findings.at_most("exact: let in, % off the rule", 100 * abs(answered / rule - 1), 1, "%")
    findings.none("exact: requests failed", sum(total.failed for total in totals))


def _rows(findings: Findings, title: str, loads: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    rows, flows = [], {}
    for name, measured in loads.items():
        flows[name] = dict(measured.report.tiers)
        findings.keep(name, measured)
        for tier, flow in flows[name].items():
            rows.append({
                "load": name, "tier": tier, "requests": flow.requests, "answered": flow.answered, "refused": flow.refused,
                "late or failed": flow.failed, "p50": flow.latency_ms.p50, "p95": flow.latency_ms.p95,
                "refusal p99": flow.refusal_ms.p99,
            })  # fmt: skip
    findings.table(title, rows)
    return flows


def _percent(flood: dict[str, Any], calm: dict[str, Any], tier: str) -> float:
    return float(100 * flood[tier].latency_ms.p95 / calm[tier].latency_ms.p95)


def _unanswered(flows: dict[str, Any], tier: str) -> int:
    return int(flows[tier].requests - flows[tier].answered)


def _write_keys(path: Path, tenants: Sequence[str], rate: float = 1e9, burst: float = 1e9) -> dict[str, str]:
    """A keys file with one fresh key of the middle tier for each tenant; returns the keys."""
    keys = {}
    text = ""
    for tenant in tenants:
        id, digest, keys[tenant] = stand.fresh_key()
        text += (
            f'[[keys]]\nid = "{id}"\nsha256 = "{digest}"\nuser = "{tenant}"\ntenant = "{tenant}"\ntier = "paid"\n'
            f"rate = {rate}\nburst = {burst}\n"
        )
    path.write_text(text, encoding="utf-8")
    return keys


if __name__ == "__main__":
    sys.exit(main())
