"""The size of a fleet: what 10,000 to 1,000,000 requests/s take, in gateways, Redis nodes and GPUs, and what breaks first.

    python bench/simulated/sharding.py

What all processes ask in common keeps one Redis node busy. One fleet goes as far as that node carries it; beyond, models are cut over fleets
(docs/fleet.md). Costs are CPU time per request, measured over Redis at 2,000 requests/s on two cores; at higher rates each costs less. So this is
enough, not the least. A batch takes 100 ms and holds at most 100. Latency and spacing in shards are asked by tests/simulator/test_engine.py.
"""

import math
import sys
from dataclasses import dataclass

from bench.stand.findings import Findings

ALPHA, MAX_BATCH = 0.1, 100
RATES = (10_000, 100_000, 1_000_000)
GATEWAY, HOST, REDIS = 103e-6, 58e-6, 70e-6
"""Seconds of CPU for each request: in a gateway, in the hosts of the workers, and in Redis."""
ROW_READ, ROW_DECODED = 1.5e-6, 3.2e-6
"""Seconds of CPU for each worker that a process asks for: in Redis, and in the process."""
BEAT = 89e-6
"""Seconds of CPU in Redis for each heartbeat of a worker."""
LOOKS, BEATS = 2.0, 2.0
"""Looks at all workers that each gateway takes in a second, and heartbeats of each worker."""
BUSY = 0.6
"""Share of a core that a process is planned to be busy."""
FILL = 0.7


@dataclass(frozen=True, slots=True)
class Size:
    rate: float

    @property
    def gpus(self) -> int:
        return math.ceil(self.rate * ALPHA / (MAX_BATCH * FILL))

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
        """Share of a Redis node's core for what all processes ask of one place: who is there."""
        return self.gpus * (BEATS * BEAT + LOOKS * self.gateways * ROW_READ)

    @property
    def breaks(self) -> str:
        """What breaks first if nothing is done about it."""
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
