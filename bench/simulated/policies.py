"""What the departure policies do, through the simulator: the production queue and policies under virtual time.

    python bench/simulated/policies.py --traces DIR
    python bench/simulated/policies.py --only promised

promised   The cases H1 to H6: does the default policy keep what was promised? Poisson arrivals, and a batch takes its time whatever its size.
formation  Where batches are formed: in one queue when a GPU is free, or, as is usual, by each gateway, which closes a batch when it is full or its
           window is over, and pushes it whole into a queue (`bench.simulated.preformed`). Such a gateway sees only its own share of the traffic,
           and closes batches whether or not a GPU is free. Both cost GPUs.

DIR holds the Azure traces (see traces.py); those that aren't there are left out. Time is compressed to a mean rate of 1,000 requests/s; each trace is
played twice, and the first time is the warm-up. There a batch takes 100 ms and holds at most 100. 1.5 ms pass between a GPU's answer and
its next batch.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.simulated.preformed import simulate_preformed
from bench.simulated.traces import traffic
from bench.stand import parts
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import make_report, percentile
from headway.simulator.scenario import Scenario

RATE = 1_000.0
ALPHA, MAX_BATCH = 0.1, 100
PATIENCE = 30.0
PROMISE = 0.2
"""Seconds."""
POISSON_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="What the departure policies do, through the simulator.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where the Azure traces lie")
    try:
        return parts.run(parser, PARTS)
    except SettingError as exc:
        print(exc, file=sys.stderr)
        return 2


@dataclass(frozen=True, slots=True)
class Promise:
    """A load, the GPUs for it, and the milliseconds that a percentile of its requests may take."""

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


@dataclass(frozen=True, slots=True)
class Design:
    """A way to form batches; `ahead` of a free GPU, so that their number doesn't depend on the GPUs."""

    name: str
    run: Callable[[Scenario], Record]
    ahead: bool = True


SHARED = Design("at the claim", simulate, ahead=False)
DESIGNS = (
    SHARED,
    Design("by gateways, 10 ms", partial(simulate_preformed, window=0.01)),
    Design("by gateways, 40 ms", partial(simulate_preformed, window=0.04)),
    Design("by gateways, full only", partial(simulate_preformed, window=math.inf)),
)
PLENTY = 300
"""GPUs enough for any batch to leave when it is formed."""


def formation(findings: Findings, options: argparse.Namespace) -> None:
    for name, trace in traffic(options.traces, findings).items():
        fill: dict[tuple[Design, int], float] = {}
        rows: list[dict[str, object]] = []
        for design, gateways in itertools.product(DESIGNS, (1, 3, 10)):
            figures = _formed(design, replace(_scenario(trace), gateways=gateways, gather=0.002))
            fill[design, gateways] = figures["fill %"] or 0.0
            rows.append({"batches formed": design.name, "gateways": gateways, **figures})
        findings.table(f"{name}: {RATE:,.0f} requests/s in all on 2 GPUs; latency in ms", rows)
        off = abs(fill[SHARED, 3] / fill[SHARED, 1] - 1)
        findings.at_most(f"{name}: by how much 3 gateways change the fill", off, 0.05)
    findings.say("GPUs busy: how many the batches keep busy. With more than there are, the queue grows without end.")


def _formed(design: Design, scenario: Scenario) -> dict[str, float | None]:
    record = design.run(replace(scenario, workers=PLENTY) if design.ahead else scenario)
    batches = len(record.size) / (scenario.duration - scenario.warmup)
    busy = batches * scenario.cycle(MAX_BATCH)
    latencies: Mapping[str, float | None] = dict.fromkeys(("p50", "p95", "p99"))
    if not design.ahead or busy < scenario.workers:
        latencies = _latencies(design.run(scenario))
    enough = next(_enough(design, scenario, max(scenario.workers, math.ceil(busy))), None)
    return {
        "batches/s": batches,
        "fill %": 100 * sum(record.size) / len(record.size) / MAX_BATCH,
        "GPUs busy": busy,
        **latencies,
        f"GPUs for p95 < {PROMISE * 1000:g}": enough,
    }


def _enough(design: Design, scenario: Scenario, least: int) -> Iterator[int]:
    """Numbers of GPUs that keep the promise, from the least on; none where any number is too few."""
    for gpus in (PLENTY, *range(least, PLENTY)):
        kept = _latencies(design.run(replace(scenario, workers=gpus)))["p95"] < PROMISE * 1000
        if gpus == PLENTY and not kept:
            return
        if gpus < PLENTY and kept:
            yield gpus


def _scenario(trace: tuple[float, ...]) -> Scenario:
    lap = len(trace) / RATE if trace else POISSON_SECONDS
    return Scenario(
        rate=RATE, workers=2, alpha=ALPHA, max_batch=MAX_BATCH, trace=trace, duration=2 * lap, warmup=lap,
        queue_timeout=PATIENCE, timeout=PATIENCE, seed=1,
    )  # fmt: skip


def _latencies(record: Record) -> dict[str, float]:
    ascending = sorted(record.latency)
    return {f"p{share * 100:g}": percentile(ascending, share) * 1000 for share in (0.5, 0.95, 0.99)}


PARTS: parts.Parts = {"promised": promised, "formation": formation}

if __name__ == "__main__":
    sys.exit(main())
