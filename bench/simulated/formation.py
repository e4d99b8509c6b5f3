"""Where batches are formed: in one queue when a GPU is free, or by each gateway beforehand. Simulated.

    python bench/simulated/formation.py --traces DIR

DIR holds the Azure traces (see traces.py). Without it, or for lack of one of them, Poisson traffic and the traces that
are there are run.

The usual design is for each gateway to close a batch when it is full or its window is over, and to push it whole into a
queue that GPUs are served from (`tests.simulator.preformed`). It has two faults. A gateway sees its own share of the
traffic only, so its batches are the emptier the more gateways there are; and it closes them whether or not a GPU is free.
Both cost GPUs. Here, requests go into one queue, in calls that each gateway makes at most every 2 ms, and a batch is what
waits there when a GPU takes it.

The simulated queue does not know through which gateway a request came. So that it treats three alike to one is no finding;
what they cost in gathering is. That real gateways, brokers and clocks keep to it, bench/load/gathering.py measures.

1,000 requests/s in all; a batch takes 100 ms and holds at most 100; 1.5 ms pass between a GPU's answer and its next
batch. Each trace is played twice, and the first time is the warm-up. Nobody is refused, so latencies tell all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.simulated.traces import traffic
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario
from tests.simulator.preformed import simulate_preformed

RATE = 1_000.0
ALPHA, MAX_BATCH = 0.1, 100
GPUS = 2
GATEWAYS = (1, 3, 10)
GATHER = 0.002
WINDOWS_MS = (10.0, 40.0, math.inf)
PATIENCE = 30.0
POISSON_SECONDS = 30.0
PROMISE = 0.2
PLENTY = 300
"""GPUs enough for any batch to leave when it is formed."""


@dataclass(frozen=True, slots=True)
class Design:
    """A way to form batches. `ahead`: before a GPU is free, so that their number does not depend on the GPUs."""

    name: str
    run: Callable[[Scenario], Record]
    ahead: bool


SHARED = Design("at the claim", simulate, ahead=False)
DESIGNS = (
    SHARED,
    *(
        Design(
            "by gateways, full only" if math.isinf(window) else f"by gateways, {window:g} ms",
            partial(simulate_preformed, window=window / 1000),
            ahead=True,
        )
        for window in WINDOWS_MS
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Where batches are formed, simulated.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where the Azure traces lie")
    options = parser.parse_args()
    findings = Findings("formation", rate=RATE, batch_ms=ALPHA * 1000, max_batch=MAX_BATCH, gather_ms=GATHER * 1000)
    try:
        found = traffic(options.traces, findings)
    except SettingError as exc:
        print(exc, file=sys.stderr)
        return 2
    for name, trace in found.items():
        fill: dict[tuple[Design, int], float] = {}
        rows: list[dict[str, object]] = []
        for design, gateways in itertools.product(DESIGNS, GATEWAYS):
            figures = _figures(design, _scenario(trace, gateways))
            fill[design, gateways] = figures["fill %"] or 0.0
            rows.append({"batches formed": design.name, "gateways": gateways, **figures})
        findings.table(f"{name}: {RATE:,.0f} requests/s in all on {GPUS} GPUs; latency in ms", rows)
        off = abs(fill[SHARED, GATEWAYS[1]] / fill[SHARED, GATEWAYS[0]] - 1)
        findings.at_most(f"{name}: by how much {GATEWAYS[1]} gateways change the fill", off, 0.05)
    findings.say("GPUs busy: how many the batches keep busy. With more than there are, the queue grows without end.")
    return findings.close()


def _scenario(trace: tuple[float, ...], gateways: int) -> Scenario:
    lap = len(trace) / RATE if trace else POISSON_SECONDS
    return Scenario(
        rate=RATE,
        workers=GPUS,
        alpha=ALPHA,
        max_batch=MAX_BATCH,
        trace=trace,
        duration=2 * lap,
        warmup=lap,
        queue_timeout=PATIENCE,
        timeout=PATIENCE,
        gateways=gateways,
        gather=GATHER,
        seed=1,
    )


def _figures(design: Design, scenario: Scenario) -> dict[str, float | None]:
    record = design.run(replace(scenario, workers=PLENTY) if design.ahead else scenario)
    batches = len(record.size) / (scenario.duration - scenario.warmup)
    busy = batches * scenario.cycle(MAX_BATCH)
    p50 = p95 = p99 = None
    if not design.ahead or busy < GPUS:
        served = design.run(scenario)
        p50, p95, p99 = (_latency(served, share) * 1000 for share in (0.50, 0.95, 0.99))
    enough = next(_enough(design, scenario, max(GPUS, math.ceil(busy))), None)
    return {
        "batches/s": batches,
        "fill %": 100 * sum(record.size) / len(record.size) / MAX_BATCH,
        "GPUs busy": busy,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        f"GPUs for p95 < {PROMISE * 1000:g}": enough,
    }


def _enough(design: Design, scenario: Scenario, least: int) -> Iterator[int]:
    """Numbers of GPUs that keep the promise, from the least on; none where any number is too few."""
    if _latency(design.run(replace(scenario, workers=PLENTY)), 0.95) < PROMISE:
        for gpus in range(least, PLENTY):
            if _latency(design.run(replace(scenario, workers=gpus)), 0.95) < PROMISE:
                yield gpus


def _latency(record: Record, share: float) -> float:
    return percentile(sorted(record.latency), share)


if __name__ == "__main__":
    sys.exit(main())
