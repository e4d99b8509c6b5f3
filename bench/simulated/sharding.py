"""The size of a fleet: how many gateways, Redis nodes and GPUs 10,000 to 1,000,000 requests/s need, and what breaks first.

    python bench/simulated/sharding.py

The data that all processes share occupies one Redis node. A fleet can grow as far as that node carries it; beyond that, models are split over
fleets (docs/fleet.md). Costs are CPU time per request, measured over Redis at 2,000 requests/s on two cores. They fall at higher rates, so these
numbers are an upper bound. A batch takes 100 ms and holds at most 100. tests/simulator/test_engine.py covers latency and spacing in shards.
"""

import math
import sys
from dataclasses import dataclass

from bench.stand.findings import Findings

ALPHA, MAX_BATCH = 0.1, 100
RATES = (10_000, 100_000, 1_000_000)
GATEWAY, HOST, REDIS = 103e-6, 58e-6, 70e-6
"""CPU seconds of a request: in a gateway, in the worker hosts, and in Redis."""
ROW_READ, ROW_DECODED = 1.5e-6, 3.2e-6
"""CPU seconds to look up one worker: in Redis, and in the process that asks."""
BEAT = 89e-6
"""CPU seconds in Redis for a worker's heartbeat."""
LOOKS, BEATS = 2.0, 2.0
"""How often per second each gateway reads all workers, and each worker sends a heartbeat."""
BUSY = 0.6
"""Planned utilisation of a core."""
FILL = 0.7


@dataclass(frozen=True, slots=True)
class Size:
    rate: float

    @property
    def gpus(self) -> int:
        return math.ceil(self.rate * ALPHA / (MAX_BATCH * FILL))

    @property
    def nodes(self) -> int:
        """Redis nodes for the cost of the requests, one core each."""
        return math.ceil(self.rate * REDIS / BUSY)

    @property
    def gateways(self) -> int:
        """Gateways, one core each, which also decode the rows of all workers."""
        left = BUSY - LOOKS * self.gpus * ROW_DECODED
        return math.ceil(self.rate * GATEWAY / left) if left > 0.0 else 0

    @property
    def in_common(self) -> float:
        """The share of a Redis node's core for the shared registry of processes."""
        return self.gpus * (BEATS * BEAT + LOOKS * self.gateways * ROW_READ)

    @property
    def breaks(self) -> str:
        if self.nodes == 1:
            return "nothing"
        return "one Redis node's core" if self.in_common <= BUSY else "the node that knows who is there"


def main() -> int:
    findings = Findings("sharding_sizes")
    rows: list[dict[str, object]] = []
    for rate in RATES:
        whole = Size(rate)
        fleets = next(count for count in range(1, 10_000) if Size(rate / count).in_common <= BUSY)
        part = Size(rate / fleets)
        rows.append(
            {
                "requests/s": rate, "GPUs": whole.gpus, "gateways": fleets * part.gateways, "Redis nodes": fleets * part.nodes,
                "cores of hosts": math.ceil(rate * HOST / BUSY), "who is there, % of a node": 100 * whole.in_common,
                "breaks first": whole.breaks, "fleets": fleets,
            }
        )  # fmt: skip
    findings.table("What a rate takes, with batches of 100 ms and of at most 100, 70 % full", rows)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
