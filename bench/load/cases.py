"""The cases that Headway is designed for, with real servers, real clients and GPUs made of sleep.

    python bench/load/cases.py                 about six minutes
    python bench/load/cases.py --seconds 10    a first impression
    python bench/load/cases.py --only H1 H7

H1, H3   1,000 requests/s on two GPUs: the 95th percentile against what perfectly even spacing would give
H2       10,000 requests/s on eleven GPUs, in steps: as far as this machine carries it, and what stops it
H7       a lone request on an idle system: what Headway adds to the run of the function

Load is open-loop, Poisson, counted from the instant each request was due, so the load generator's own lateness is
in every figure (but H7's: see bench/stand/lone.py). Each server is warmed up for some seconds first: the batch time and the
rate are learnt in service.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from bench.stand import lone, stand
from bench.stand.findings import Findings
from bench.stand.generators import Measured, open_loop

WARM_UP = 3.0
LATE_MS = 5.0
BUSY = 0.9
ADDED_MS = 2.0
"""Most that a lone request may pay at p99."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, the GPUs for it, and the bound that its 95th percentile must keep (milliseconds)."""

    name: str
    batch_ms: float
    max_batch: int
    workers: int
    rate: float
    p95_ms: float

    @property
    def ideal_ms(self) -> float:
        """The 95th percentile of latency with departures evenly spaced by s = α/k: about s·(k + 0.95)."""
        return self.batch_ms * (1 + 0.95 / self.workers)


CASES = (
    Case("H1", 100, 100, 2, 1_000, 155),
    Case("H3", 50, 32, 2, 1_000, 85),
)
STEPS = tuple(
    Case(f"H2 at {rate:,}/s", 100, 100, -(-rate * 11 // 10_000), rate, 125) for rate in range(2000, 10_001, 2000)
)


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings("cases", seconds=options.seconds, warm_up_s=WARM_UP, pinning=stand.PINNING)
    findings.say(f"Load for {options.seconds:g} s each; {stand.PINNING}.")
    chosen = set(options.only)
    rows = [_run(case, options.seconds, findings) for case in CASES if case.name in chosen]
    if rows:
        findings.table("1,000 requests/s on two GPUs; ms, CPU in µs per request, cores in shares", rows)
    if "H7" in chosen:
        _lone(options.seconds, findings)
    if "H2" in chosen:
        _climb(options.seconds, findings)
    return findings.close()


def _run(case: Case, seconds: float, findings: Findings) -> dict[str, object]:
    measured = _measure(case, seconds)
    findings.keep(case.name, measured)
    findings.at_most(f"{case.name}: p95", measured.report.total.latency_ms.p95, case.p95_ms, "ms")
    findings.none(f"{case.name}: requests without a right answer", measured.failures)
    return _row(case, measured)


def _climb(seconds: float, findings: Findings) -> None:
    """H2 in steps, until one is not carried."""
    rows, carried = [], 0.0
    for step in STEPS:
        measured = _measure(step, seconds)
        findings.keep(step.name, measured)
        limit = step.ideal_ms * STEPS[-1].p95_ms / STEPS[-1].ideal_ms
        fine = measured.report.total.latency_ms.p95 <= limit and not measured.failures
        rows.append(_row(step, measured) | {"p95 ≤": round(limit, 1), "carried": "yes" if fine else _culprit(measured)})
        if not fine:
            break
        carried = step.rate
    findings.table("100 ms a batch of at most 100, eleven GPUs for 10,000 requests/s; as above", rows)
    findings.at_least("H2: requests/s carried on this machine", carried, STEPS[-1].rate)
    if carried == STEPS[-1].rate:
        findings.at_most("H2: p95", measured.report.total.latency_ms.p95, STEPS[-1].p95_ms, "ms")


def _lone(seconds: float, findings: Findings) -> None:
    """H7: far enough apart that no two meet; the function takes microseconds."""
    with stand.headway(f"{stand.TARGETS}:upper", "--log-level", "warning", name="cases-H7") as server:
        lone.measure(findings, server, seconds, "H7: p99 of the round trip, less the bare server's", ADDED_MS)


def _measure(case: Case, seconds: float) -> Measured:
    name = f"cases-{case.name.replace(' ', '-').replace('/', '-')}"
    with stand.emulated(case.batch_ms, case.max_batch, case.workers, name=name) as server:
        open_loop(server, case.rate, WARM_UP)
        return open_loop(server, case.rate, seconds, "--expect", "upper")


def _row(case: Case, measured: Measured) -> dict[str, object]:
    report, latency = measured.report, measured.report.total.latency_ms
    return {
        "case": case.name,
        "GPUs": case.workers,
        "requests": report.total.requests,
        "failed": measured.failures,
        "p50": latency.p50,
        "p95": latency.p95,
        "p99": latency.p99,
        "max": latency.max,
        "ideal p95": round(case.ideal_ms, 1),
        "server µs": measured.server_us,
        "server core": measured.core,
        "load core": report.generator.cpu_share,
        "lag p99": report.generator.lag_ms.p99,
    }


def _culprit(measured: Measured) -> str:
    """What kept a step from being carried."""
    own = measured.report.generator
    if measured.core > BUSY:
        return "no: the server's core is full"
    if own.cpu_share > BUSY or own.lag_ms.p99 > LATE_MS:
        return "no: the load generator is late"
    return "no: see the latencies"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cases that Headway is designed for.")
    parser.add_argument("--seconds", type=float, default=60.0, help="load for each case (default %(default)g)")
    names = [case.name for case in CASES] + ["H7", "H2"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
