"""Where batches are formed: in one queue when a GPU is free, or by each gateway beforehand. Simulated.

    python bench/formation.py --traces DIR

DIR holds the Azure traces (see traces.py). Without it, or for lack of one of them, Poisson traffic and the traces that
are there are run.

The usual design is for each gateway to close a batch when it is full or its window is over, and to push it whole into a
queue that GPUs are served from (`headway.simulator.preformed`). It has two faults. A gateway sees its own share of the
traffic only, so its batches are the emptier the more gateways there are; and it closes them whether or not a GPU is free.
Both cost GPUs. Here, requests go into one queue, in calls that each gateway makes at most every 2 ms, and a batch is what
waits there when a GPU takes it.

The simulated queue does not know through which gateway a request came. So that it treats three alike to one is no finding;
what they cost in gathering is. That real gateways, brokers and clocks keep to it, gathering.py measures.

1,000 requests/s in all; a batch takes 100 ms and holds at most 100; 1.5 ms pass between a GPU's answer and its next
batch. Each trace is played twice, and the first time is the warm-up. Nobody is refused, so latencies tell all.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from findings import Findings
from traces import traffic

from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.preformed import simulate_preformed
from headway.simulator.record import Record
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

type Design = Callable[[Scenario], Record]

RATE = 1_000.0
ALPHA, MAX_BATCH = 0.1, 100
GPUS = 2
GATEWAYS = (1, 3, 10)
GATHER = 0.002
WINDOWS_MS = (10.0, 40.0, math.inf)
PATIENCE = 30.0
POISSON_SECONDS = 30.0
PLENTY = 300
"""GPUs enough for any batch to leave when it is formed."""
PROMISE = 0.2
HEADWAY = "at the claim"


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
    rows = [row for name, trace in found.items() for row in _rows(name, trace)]
    findings.table(f"{RATE:,.0f} requests/s in all, {ALPHA * 1000:g} ms a batch of at most {MAX_BATCH}; in ms", rows)
    findings.say(
        f"busy: GPUs that the batches keep busy; above {GPUS} the queue grows without end, and latencies are left out."
    )
    for name in found:
        one, three = (
            _row(rows, name, HEADWAY, gateways)["fill %"] for gateways in GATEWAYS[:2]
        )
        findings.at_most(f"{name}: fill with {GATEWAYS[1]} gateways from that with one", abs(three / one - 1), 0.05)
    return findings.close()


def _row(rows: list[dict[str, float | str | None]], traffic: str, design: str, gateways: int) -> dict[str, float]:
    wanted = (traffic, design, gateways)
    return next(row for row in rows if (row["traffic"], row["batches formed"], row["gateways"]) == wanted)


def _designs() -> Iterator[tuple[str, Design]]:
    yield HEADWAY, lambda scenario: simulate(replace(scenario, gather=GATHER))
    for window in WINDOWS_MS:
        name = "by gateways, full only" if math.isinf(window) else f"by gateways, {window:g} ms"
        yield name, lambda scenario, window=window: simulate_preformed(scenario, window / 1000)


def _rows(name: str, trace: tuple[float, ...]) -> Iterator[dict[str, float | str | None]]:
    lap = len(trace) / RATE if trace else POISSON_SECONDS
    for design, run in _designs():
        for gateways in GATEWAYS:
            scenario = Scenario(
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
                seed=1,
            )
            yield {"traffic": name, "batches formed": design, "gateways": gateways, **_figures(scenario, run)}
