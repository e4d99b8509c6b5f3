"""The cases that the default policy is made for, simulated: does it keep what was promised?

    python bench/simulated/promised.py

Arrivals are Poisson, a batch takes its time whatever its size, and 1.5 ms pass between a GPU's answer and its next batch.
The same seed gives the same figures on every machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.stand.findings import Findings
from headway.simulator.engine import simulate
from headway.simulator.report import make_report
from headway.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Promise:
    """A load, the GPUs that are to carry it, and the latency that they are to keep.

    Attributes:
        alpha: seconds that a batch takes.
        bound: milliseconds that `percentile` of the requests may take.
    """

    name: str
    rate: float
    workers: int
    alpha: float
    max_batch: int
    percentile: str
    bound: float


PROMISES = (
    Promise("H1", 1_000, 2, 0.100, 100, "p95", 155),
    Promise("H2", 10_000, 11, 0.100, 100, "p95", 125),
    Promise("H3", 1_000, 2, 0.050, 32, "p95", 85),
    Promise("H4", 10_000, 17, 0.050, 32, "p95", 70),
    Promise("H5", 10_000, 32, 0.200, 64, "p99", 240),
    Promise("H6", 10_000, 9, 0.050, 64, "p99", 80),
)
SECONDS = {1_000: 120.0, 10_000: 40.0}
"""Simulated time, by rate."""


def main() -> int:
    findings = Findings("promised", seconds=SECONDS)
    rows: list[dict[str, object]] = []
    for one in PROMISES:
        report = make_report(
            simulate(
                Scenario(
                    rate=one.rate,
                    workers=one.workers,
                    alpha=one.alpha,
                    max_batch=one.max_batch,
                    duration=SECONDS[int(one.rate)],
                    seed=0,
                )
            )
        )
        latency = report.total.latency_ms
        load = report.offered_rate / report.capacity if report.capacity else None
        rows.append({"case": one.name, "load": load, "p50": latency.p50, "p95": latency.p95, "p99": latency.p99})
        findings.at_most(f"{one.name}: {one.percentile}", getattr(latency, one.percentile), one.bound, "ms")
    findings.table("Poisson arrivals, 1.5 ms between two batches of a GPU; latency in ms", rows)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
