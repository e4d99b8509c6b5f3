"""The default policy in the simulator: the production queue and policy in virtual time.

    python bench/simulated/policies.py

The cases H1 to H6: does the policy keep its promises? Arrivals are Poisson, and a batch's time doesn't depend on its size. 1.5 ms pass between
a GPU's answer and its next batch.
"""

import argparse
import sys
from dataclasses import dataclass

from bench.stand import parts
from bench.stand.findings import Findings
from headway.simulator.engine import simulate
from headway.simulator.report import make_report
from headway.simulator.scenario import Scenario


def main() -> int:
    return parts.run(argparse.ArgumentParser(description="What the default policy keeps, by the simulator."), PARTS)


@dataclass(frozen=True, slots=True)
class Promise:
    """A load, its GPUs, and the bound in ms on a latency percentile."""

    name: str
    rate: float
    workers: int
    alpha: float
    max_batch: int
    percentile: str
    bound: float
    seconds: float = 40.0


PROMISES = (
    Promise("H1", 1_000, 2, 0.100, 100, "p95", 155, 120.0),
    Promise("H2", 10_000, 11, 0.100, 100, "p95", 125),
    Promise("H3", 1_000, 2, 0.050, 32, "p95", 85, 120.0),
    Promise("H4", 10_000, 17, 0.050, 32, "p95", 70),
    Promise("H5", 10_000, 32, 0.200, 64, "p99", 240),
    Promise("H6", 10_000, 9, 0.050, 64, "p99", 80),
)


def promised(findings: Findings, _: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    for promise in PROMISES:
        service = {"workers": promise.workers, "alpha": promise.alpha, "max_batch": promise.max_batch}
        report = make_report(simulate(Scenario(rate=promise.rate, duration=promise.seconds, seed=0, **service)))  # type: ignore[arg-type]
        latency = report.total.latency_ms
        load = report.offered_rate / report.capacity if report.capacity else None
        rows.append({"case": promise.name, "load": load, "p50": latency.p50, "p95": latency.p95, "p99": latency.p99})
        value = getattr(latency, promise.percentile)
        findings.at_most(f"{promise.name}: {promise.percentile}", value, promise.bound, "ms")
    findings.table("Poisson arrivals, 1.5 ms between two batches of a GPU; latency in ms", rows)


PARTS: parts.Parts = {"promised": promised}

if __name__ == "__main__":
    sys.exit(main())
