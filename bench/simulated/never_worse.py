"""The default policy beside the usual ones, on fleets drawn at random: where is it worse, and by how much?

    python bench/simulated/never_worse.py                          about a quarter of an hour
    python bench/simulated/never_worse.py --fleets 50 --seed 2     a first impression, other fleets

A fleet has 1 to 8 GPUs, a batch time of α + β for each input, batch times that vary or not, one GPU that may be slower
than the others, and Poisson arrivals of 5 to 95 % of what the GPUs can do. The production queue and policies run it under
virtual time. Its figure is the 95th percentile under `paced` over the smaller one of those under `window` and eager.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import replace

from bench.stand.findings import Findings
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

REQUESTS = 15_000
WARM_UP_REQUESTS = 5_000
PATIENCE = 30.0
MOST = 1.03
"""Most that P95 may be over the better one of the usual policies'."""
SHOWN = 20
POLICIES = ("paced", "window", "eager")


def main() -> int:
    parser = argparse.ArgumentParser(description="The default policy beside the usual ones, on random fleets.")
    parser.add_argument("--fleets", type=int, default=500, help="how many (default %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default %(default)d)")
    parser.add_argument("--even", action="store_true", help="all GPUs of a fleet are equally fast")
    options = parser.parse_args()
    findings = Findings("never_worse", fleets=options.fleets, seed=options.seed, requests=REQUESTS)
    rng = random.Random(options.seed)
    rows = [_compared(_drawn(rng, options.even)) for _ in range(options.fleets)]
    for uneven in (False, True):
        chosen = [row for row in rows if (float(str(row["slow"])) > 1.0) is uneven]
        if chosen:
            _report(findings, "one GPU slower" if uneven else "equal GPUs", chosen)
    return findings.close()


def _drawn(rng: random.Random, even: bool) -> Scenario:
    workers, max_batch = rng.randint(1, 8), rng.choice((16, 32, 64, 100))
    alpha = rng.choice((0.02, 0.05, 0.1, 0.2))
    beta = rng.choice((0.0, 0.0, 0.25, 0.5, 1.0, 2.0)) * alpha / max_batch
    slow = rng.choice((1.0, 1.2, 1.5, 2.0, 3.0)) if workers > 1 and not even else 1.0
    jitter = rng.choice((0.0, 0.3))
    load = rng.uniform(0.05, 0.95)
    rate = load * (workers - 1 + 1 / slow) * max_batch / (alpha + beta * max_batch)
    return Scenario(
        rate=rate, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, slow=slow, jitter=jitter,
        duration=max((REQUESTS + WARM_UP_REQUESTS) / rate, 10.0), warmup=max(WARM_UP_REQUESTS / rate, 5.0),
        queue_timeout=PATIENCE, timeout=PATIENCE, max_queue=100_000, seed=rng.randrange(1 << 30),
    )  # fmt: skip


def _compared(fleet: Scenario) -> dict[str, object]:
    p95 = {policy: _p95(replace(fleet, policy=policy)) * 1000 for policy in POLICIES}
    capacity = (fleet.workers - 1 + 1 / fleet.slow) * fleet.max_batch / (fleet.alpha + fleet.beta * fleet.max_batch)
    return {
        "GPUs": fleet.workers,
        "α ms": fleet.alpha * 1000,
        "β ms": fleet.beta * 1000,
        "≤": fleet.max_batch,
        "load %": 100 * fleet.rate / capacity,
        "jitter": fleet.jitter,
        "slow": fleet.slow,
        **p95,
        "ratio": p95["paced"] / min(p95["window"], p95["eager"]),
    }


def _p95(fleet: Scenario) -> float:
    return percentile(sorted(simulate(fleet).latency), 0.95)


def _report(findings: Findings, kind: str, rows: list[dict[str, object]]) -> None:
    ratios = sorted((float(str(row["ratio"])) for row in rows), reverse=True)
    worse = sum(ratio > MOST for ratio in ratios)
    rows.sort(key=lambda row: -float(str(row["ratio"])))
    findings.table(f"{kind}: the {min(SHOWN, len(rows))} fleets where paced does worst; P95 in ms", rows[:SHOWN])
    findings.say(
        f"{kind}: {len(rows)} fleets, ratio of P95 to the better one of window and eager: median "
        f"{statistics.median(ratios):.3f}, geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, "
        f"worst {ratios[0]:.3f}, best {ratios[-1]:.3f}; above {MOST:g} in {worse}."
    )
    findings.at_most(f"{kind}: worst ratio", ratios[0], MOST)


if __name__ == "__main__":
    sys.exit(main())
