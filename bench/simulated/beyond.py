"""What 10,000 to 1,000,000 requests/s take, and what breaks first: reckoned from measured costs, and the policy simulated.

    python bench/simulated/beyond.py                 a minute
    python bench/simulated/beyond.py --only sizes    at once

sizes    gateways, Redis nodes and GPUs for each rate, how busy what all processes ask in common keeps one Redis node, and
         what breaks first. One fleet goes as far as that node carries it; beyond, the design cuts models over fleets, each
         with a Redis of its own, behind the same proxies (docs/fleet.md).
policy   1,000 GPUs at 100,000 requests/s beside 10 at 1,000: fill, P95, and the variation of gaps. Latency must lie between
         a batch's time and a gap more; so the larger fleet has the shorter tail.

Costs are CPU time per request, measured over Redis at 2,000 requests/s on two cores; at higher rates a call carries more, and
each costs less. So the table says what is enough, not what is least.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulated.hosts import latency_and_fill
from bench.stand.findings import Findings
from headway.simulator.engine import simulate
from headway.simulator.report import make_report
from headway.simulator.scenario import Scenario

RATES = (10_000, 100_000, 1_000_000)
GATEWAY, HOST, REDIS = 103e-6, 58e-6, 70e-6
"""Seconds of CPU for each request: in a gateway, in the hosts of the workers, and in Redis."""
ROW_READ, ROW_DECODED = 1.5e-6, 3.2e-6
"""Seconds of CPU for each worker that a process asks for: in Redis, and in the process. 1,000 workers in one answer."""
BEAT = 89e-6
"""Seconds of CPU in Redis for each heartbeat of a worker."""
LOOKS, BEATS = 2.0, 2.0
"""Looks at all workers that each gateway takes in a second, and heartbeats of each worker."""
BUSY = 0.6
"""Share of a core that a process is planned to be busy."""
BATCH_SECONDS, MAX_BATCH, FILL = 0.1, 100, 0.7


@dataclass(frozen=True, slots=True)
class Size:
    """What a rate takes."""

    rate: float

    @property
    def gpus(self) -> int:
        """GPUs with batches that are as full as planned."""
        return math.ceil(self.rate * BATCH_SECONDS / (MAX_BATCH * FILL))

    @property
    def nodes(self) -> int:
        """Redis nodes for what requests cost, a core each."""
        return math.ceil(self.rate * REDIS / BUSY)

    @property
    def gateways(self) -> int:
        """Gateways, a core each, which also read what all workers tell."""
        left = BUSY - LOOKS * self.gpus * ROW_DECODED
        return math.ceil(self.rate * GATEWAY / left) if left > 0.0 else 0

    @property
    def in_common(self) -> float:
        """Share of one Redis node's core that goes into what all processes ask of one place: who is there."""
        return self.gpus * (BEATS * BEAT + LOOKS * self.gateways * ROW_READ)

    @property
    def breaks(self) -> str:
        """What breaks first if nothing is done about it."""
        if self.nodes == 1:
            return "nothing"
        return "one Redis node's core" if self.in_common <= BUSY else "the node that knows who is there"


def main() -> int:
    parser = argparse.ArgumentParser(description="What many requests a second take.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options = parser.parse_args()
    findings = Findings("beyond", batch_ms=BATCH_SECONDS * 1000, max_batch=MAX_BATCH, fill=FILL, busy=BUSY)
    for name in options.only:
        PARTS[name](findings)
    return findings.close()


def sizes(findings: Findings) -> None:
    rows: list[dict[str, object]] = []
    for rate in RATES:
        whole = Size(rate)
        fleets = next(count for count in range(1, 10_000) if Size(rate / count).in_common <= BUSY)
        one = Size(rate / fleets)
        rows.append(
            {
                "requests/s": rate, "GPUs": whole.gpus, "gateways": fleets * one.gateways, "Redis nodes": fleets * one.nodes,
                "cores of hosts": math.ceil(rate * HOST / BUSY), "who is there, % of a node": 100 * whole.in_common,
                "breaks first": whole.breaks, "fleets": fleets,
            }
        )  # fmt: skip
    findings.table("What a rate takes, with batches of 100 ms and of at most 100, 70 % full", rows)


def policy(findings: Findings) -> None:
    rows: list[dict[str, object]] = []
    p95: dict[int, float] = {}
    for gpus, rate, seconds in ((10, 1_000.0, 60.0), (1_000, 100_000.0, 14.0)):
        scenario = Scenario(
            workers=gpus, alpha=0.64, max_batch=100, rate=rate, duration=seconds, warmup=8.0, queue_timeout=30.0, timeout=30.0
        )  # fmt: skip
        report = make_report(simulate(scenario))
        figures = latency_and_fill(report)
        rows.append({"GPUs": gpus, "requests/s": rate, **figures, "variation of gaps": report.batches.gap_cv})
        p95[gpus] = figures["p95"]
    findings.table("The default policy, batches of 640 ms and of at most 100", rows)
    findings.at_most("P95 of 1,000 GPUs over that of 10", p95[1_000] / p95[10], 1.0)


PARTS: dict[str, Callable[[Findings], None]] = {"sizes": sizes, "policy": policy}

if __name__ == "__main__":
    sys.exit(main())
