"""Predictions of `headway plan` compared with simulations of seeds that it hasn't seen.

    python bench/simulated/plans.py                some minutes
    python bench/simulated/plans.py --plans 5      a first impression

Services, rates and a P95 are drawn at random, and each gets a plan. It holds if its k meets the P95, or if the plan called it borderline; and if
one GPU less doesn't meet it, or is within the plan's stated uncertainty.
"""

import argparse
import random
import statistics
import sys
from dataclasses import replace

from bench.simulated import draws
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.engine import simulate
from headway.simulator.planner import EDGE_MS, EDGE_SHARE, Goal, Plan, make_plan
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

SEEDS = range(1000, 1003)
"""Seeds that no plan has seen."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans beside simulations and real runs with emulated GPUs.")
    parser.add_argument("--seed", type=int, default=1, help="of the plans (default %(default)d)")
    parser.add_argument("--plans", type=int, default=20, metavar="N", help="how many plans (default %(default)d)")
    options = parser.parse_args()
    findings = Findings("plans", seed=options.seed, plans=options.plans)
    rows: list[dict[str, object]] = []
    number = 0
    planner.RATE_STEPS = 0  # Skips the search for the plan's highest rate.
    while len(rows) < options.plans:
        goal = _goal(options.seed, number)
        number += 1
        try:
            plan = make_plan(goal)
        except SettingError:
            continue  # No number of GPUs can keep such a promise.
        rows.append(_planned(goal, plan))
    findings.table("Plans, and what seeds that they have not seen give; P95 in ms", rows)
    findings.none("plans whose k does not hold", sum(row["k holds"] == "NO" for row in rows))
    findings.none("plans with one GPU more than is needed, unsaid", sum(row["k − 1 fails"] == "NO" for row in rows))
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


def _planned(goal: Goal, plan: Plan) -> dict[str, object]:
    """Return a row that compares a plan with simulations of other seeds."""
    assert goal.p95 is not None
    service, promise, less = goal.scenario, goal.p95 * 1000, plan.one_less
    given = _simulated_p95(goal, plan.gpus)
    short = _simulated_p95(goal, plan.gpus - 1) if less is not None else None
    near = less is not None and less.p95_ms + less.doubt_ms.p95 <= promise + max(EDGE_SHARE * promise, EDGE_MS)
    jitter = f", ±{service.jitter:.0%}" * (service.jitter > 0.0)
    return {
        "service": f"{service.alpha * 1000:g} + {service.beta * 1000:.3g}·n ms ≤ {service.max_batch}{jitter}",
        "requests/s": service.rate,
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


def _simulated_p95(goal: Goal, gpus: int) -> float:
    """Return mean P95 in ms over the seeds."""
    scenario = replace(draws.steady("", goal.scenario, goal.scenario.rate).scenario, workers=gpus)
    latencies = [sorted(simulate(replace(scenario, seed=seed)).latency) for seed in SEEDS]
    return statistics.fmean(percentile(ascending, 0.95) * 1000 for ascending in latencies)


if __name__ == "__main__":
    sys.exit(main())
