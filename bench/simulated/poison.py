"""What inputs that make the model fail cost the others. Simulated with the production queue.

    python bench/simulated/poison.py [--seconds N]

Two GPUs, batches of at most 32 in 160 ms, so 400 requests/s at most; 200/s of them are good. Each table is made for three
models that take as long for a full batch, and differ in what a batch costs before its first input. The search for a
culprit runs small batches, so that part decides how much of it there is time for.

First, one tenant of its own sends nothing but poison, beside the good ones of another. Then everybody is one caller, and
some of its inputs are poison. Nobody retries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from bench.stand.findings import Findings
from headway.simulator.engine import simulate
from headway.simulator.record import Record
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

GPUS, MAX_BATCH, FULL = 2, 32, 0.160
RATE = 200.0
FIXED_MS = (10, 20, 40)
"""Of the full batch's time, what does not depend on its size."""
SEEDS = range(3)


def main() -> int:
    """Exit code 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated load of each case")
    seconds = parser.parse_args().seconds
    findings = Findings("poison", gpus=GPUS, max_batch=MAX_BATCH, full_batch_ms=FULL * 1000, good_per_second=RATE)
    beside, within = list(_beside(seconds)), list(_within(seconds))
    findings.table("Poison of one tenant beside 200 good requests/s of another", beside)
    findings.table("One caller, 200 requests/s", within)
    findings.none("good requests of another tenant that got no answer", sum(_number(row, "harmed") for row in beside))
    findings.at_most("rise of their p95", max(_number(row, "rise, ms") for row in beside), FULL * 1000, "ms")
    for poison, bound in ((1, 99.9), (2, 99.0)):
        found = [
            _number(row, "answered, %") for row in within if row["poison, %"] == poison and row["fixed, ms"] in (10, 20)
        ]
        findings.at_least(f"good ones answered at {poison} % of one caller", min(found), bound, "%")
    return findings.close()


def _beside(seconds: float) -> Iterator[dict[str, object]]:
    for fixed in FIXED_MS:
        calm = _p95(_run(fixed, seconds, RATE, 0.0))
        for poison in (5.0, 16.0):
            runs = _run(fixed, seconds, RATE + poison, poison / (RATE + poison), apart=True)
            yield {
                "fixed, ms": fixed,
                "poison/s": poison,
                "harmed": sum(run.harmed for run in runs),
                "p95, ms": _p95(runs),
                "rise, ms": _p95(runs) - calm,
            }


def _within(seconds: float) -> Iterator[dict[str, object]]:
    for fixed in FIXED_MS:
        for percent in (0, 1, 2, 5):
            runs = _run(fixed, seconds, RATE, percent / 100)
            yield {
                "fixed, ms": fixed,
                "poison, %": percent,
                "answered, %": round(100 * sum(run.unharmed for run in runs) / len(runs), 2),
                "p50, ms": _share(runs, 0.5),
                "p95, ms": _p95(runs),
            }


def _run(fixed: int, seconds: float, rate: float, poison: float, apart: bool = False) -> list[Record]:
    alpha = fixed / 1000
    return [
        simulate(
            Scenario(
                rate=rate,
                workers=GPUS,
                alpha=alpha,
                beta=(FULL - alpha) / MAX_BATCH,
                max_batch=MAX_BATCH,
                duration=seconds,
                warmup=min(10.0, seconds / 2),
                poison=poison,
                poisoner=apart,
                seed=seed,
            )
        )
        for seed in SEEDS
    ]


def _p95(runs: list[Record]) -> float:
    return _share(runs, 0.95)


def _share(runs: list[Record], share: float) -> float:
    return round(1000 * percentile(sorted(latency for run in runs for latency in run.latency), share), 1)


def _number(row: dict[str, object], name: str) -> float:
    found = row[name]
    assert isinstance(found, int | float)
    return found


if __name__ == "__main__":
    sys.exit(main())
