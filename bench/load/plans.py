"""Do plans hold? Services drawn at random, a plan for each, and what its number of GPUs and one less really give.

    python bench/load/plans.py                         20 plans against other seeds; three of them against real runs
    python bench/load/plans.py --plans 5 --real 0      a first impression

A plan is for a rate and a P95 drawn at random. What it says is held against simulations with seeds that it has not seen, and, for
some, against `headway serve` with GPUs made of sleep. It holds when its k meets the P95, or when it said that it is on the
edge; and when one GPU less does not, or comes within the doubt of what the plan said of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import replace

from bench.simulated import draws
from bench.stand import rehearsal, stand
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.planner import EDGE_MS, EDGE_SHARE, Goal, Plan, make_plan
from headway.simulator.scenario import Scenario

SEEDS = range(1000, 1003)
"""Seeds that no plan has seen."""
MOST_REAL_RATE = 800.0
SECONDS = 10.0


def main() -> int:
    options = _options()
    stand.end_in_order()
    findings = Findings("plans", plans=options.plans, real=options.real, seed=options.seed, pinning=stand.PINNING)
    rows: list[dict[str, object]] = []
    real: list[dict[str, object]] = []
    number = 0
    planner.RATE_STEPS = 0  # How far a plan would reach is not asked.
    while len(rows) < options.plans:
        goal = _goal(options.seed, number)
        number += 1
        try:
            plan = make_plan(goal)
        except SettingError:
            continue  # No number of GPUs keeps such a promise.
        rows.append(_row(goal, plan))
        if len(real) < options.real and goal.scenario.rate <= MOST_REAL_RATE and plan.gpus <= 6:
            real.append(_rehearsed(goal, plan))
    findings.table("Plans, and what seeds that they have not seen give; P95 in ms", rows)
    if real:
        findings.table("Plans, and real runs; P95 in ms", real)
    findings.none("plans whose k does not hold", sum(row["k holds"] == "NO" for row in rows))
    findings.none("plans with one GPU more than is needed, unsaid", sum(row["k − 1 fails"] == "NO" for row in rows))
    findings.none("plans whose k does not hold in a real run", sum(row["k holds"] == "NO" for row in real))
    return findings.close()


def _goal(seed: int, number: int) -> Goal:
    rng = random.Random(f"{seed}/plan/{number}")
    alpha, max_batch = rng.choice((0.02, 0.05, 0.1, 0.2)), rng.choice((16, 32, 64, 100))
    beta = rng.choice((0.0, 0.25, 1.0)) * alpha / max_batch
    full = alpha + beta * max_batch
    rate = rng.uniform(0.3, 5.0) * max_batch / full
    scenario = Scenario(
        rate=round(rate, 1), workers=1, alpha=alpha, beta=beta, max_batch=max_batch, jitter=rng.choice((0.0, 0.0, 0.1))
    )
    return Goal(scenario=scenario, p95=round((alpha + full) / 2 * rng.uniform(1.05, 1.8) + 0.003, 3))


def _row(goal: Goal, plan: Plan) -> dict[str, object]:
    assert goal.p95 is not None
    promise = goal.p95 * 1000
    given = statistics.fmean(_simulated(goal, plan.gpus, seed) for seed in SEEDS)
    less = plan.one_less
    short = statistics.fmean(_simulated(goal, plan.gpus - 1, seed) for seed in SEEDS) if less is not None else None
    near = less is not None and less.p95_ms + less.doubt_ms.p95 <= promise + max(EDGE_SHARE * promise, EDGE_MS)
    return {
        "service": _shown(goal.scenario),
        "requests/s": goal.scenario.rate,
        "promise": promise,
        "k": plan.gpus,
        "on the edge": "yes" if plan.on_the_edge else "",
        "foretold": plan.p95_ms,
        "given": given,
        "k holds": _verdict(given <= promise, plan.on_the_edge),
        "k − 1 foretold": None if less is None else less.p95_ms,
        "k − 1 given": short,
        "k − 1 fails": _verdict(short is None or short > promise, near),
    }


def _verdict(holds: bool, near: bool) -> str:
    return "yes" if holds else "near, as said" if near else "NO"


def _simulated(goal: Goal, gpus: int, seed: int) -> float:
    drawn = draws.steady("", goal.scenario, goal.scenario.rate)
    return rehearsal.simulated(replace(drawn.scenario, workers=gpus, seed=seed), "paced").p95


def _rehearsed(goal: Goal, plan: Plan) -> dict[str, object]:
    assert goal.p95 is not None
    scenario = replace(goal.scenario, workers=plan.gpus, warmup=0.0, duration=SECONDS, seed=SEEDS[0])
    given = rehearsal.real(scenario, "paced").p95
    return {
        "service": _shown(goal.scenario),
        "requests/s": goal.scenario.rate,
        "promise": goal.p95 * 1000,
        "k": plan.gpus,
        "on the edge": "yes" if plan.on_the_edge else "",
        "foretold": plan.p95_ms,
        "given": given,
        "k holds": _verdict(given <= goal.p95 * 1000, plan.on_the_edge),
    }


def _shown(scenario: Scenario) -> str:
    jitter = f", ±{scenario.jitter:.0%}" if scenario.jitter else ""
    return f"{scenario.alpha * 1000:g} + {scenario.beta * 1000:.3g}·n ms ≤ {scenario.max_batch}{jitter}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans of random services, and what they give.")
    parser.add_argument("--plans", type=int, default=20, metavar="N", help="how many (default %(default)d)")
    parser.add_argument("--real", type=int, default=3, metavar="N", help="of them run for real (default %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default %(default)d)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
