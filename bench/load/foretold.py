"""What `headway plan` says beside what happens, simulated with other seeds and for real, with emulated GPUs.

    python bench/load/foretold.py                          some minutes
    python bench/load/foretold.py --plans 5 --real 0       a first impression

Services, rates and a P95 are drawn at random, and each gets a plan. The plan is held against simulations with seeds that it hasn't seen, and, for
some, against `headway serve` from a cold start. It holds when its k meets the P95, or when it said that it is on the edge; and when one GPU
less doesn't, or comes within the doubt that the plan had of it.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.simulated import draws
from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop
from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.engine import simulate
from headway.simulator.planner import EDGE_MS, EDGE_SHARE, Goal, Plan, make_plan
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import arrivals

PATIENT = (
    *("--queue-timeout-ms", "30000", "--request-timeout-ms", "30000", "--gpu-timeout-ms", "10000"),
    *("--default-tier", "enterprise", "--log-level", "warning"),
)
SEEDS = range(1000, 1003)
"""Seeds that no plan has seen."""
MOST_RATE, MOST_GPUS = 800.0, 6
"""Largest plans that are run for real."""
REAL_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans beside simulations and real runs with emulated GPUs.")
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the plans (default %(default)d)")
    add("--plans", type=int, default=20, metavar="N", help="how many plans (default %(default)d)")
    add("--real", type=int, default=3, metavar="N", help="of them run for real (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("plans", seed=options.seed, plans=options.plans, pinning=stand.PINNING)
    simulated: list[dict[str, object]] = []
    real: list[dict[str, object]] = []
    number = 0
    planner.RATE_STEPS = 0  # Skips the search for how far a plan reaches.
    while len(simulated) < options.plans:
        goal = _goal(options.seed, number)
        number += 1
        try:
            plan = make_plan(goal)
        except SettingError:
            continue  # No number of GPUs keeps such a promise.
        simulated.append(_planned(goal, plan))
        if len(real) < options.real and goal.scenario.rate <= MOST_RATE and plan.gpus <= MOST_GPUS:
            scenario = replace(goal.scenario, workers=plan.gpus, warmup=0.0, duration=REAL_SECONDS, seed=SEEDS[0])
            real.append(_held(goal, plan, _real_p95(scenario)))
    findings.table("Plans, and what seeds that they have not seen give; P95 in ms", simulated)
    if real:
        findings.table("Plans, and real runs; P95 in ms", real)
    findings.none("plans whose k does not hold", sum(row["k holds"] == "NO" for row in simulated))
    findings.none("plans with one GPU more than is needed, unsaid", sum(row["k − 1 fails"] == "NO" for row in simulated))
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


def _planned(goal: Goal, plan: Plan) -> dict[str, object]:
    """Row of a plan beside simulations with other seeds."""
    promise, less = _promise_ms(goal), plan.one_less
    short = _simulated_p95(goal, plan.gpus - 1) if less is not None else None
    near = less is not None and less.p95_ms + less.doubt_ms.p95 <= promise + max(EDGE_SHARE * promise, EDGE_MS)
    return {
        **_held(goal, plan, _simulated_p95(goal, plan.gpus)),
        "k − 1 foretold": None if less is None else less.p95_ms,
        "k − 1 given": short,
        "k − 1 fails": _verdict(short is None or short > promise, near),
    }


def _held(goal: Goal, plan: Plan, given: float) -> dict[str, object]:
    """Row of a plan beside the P95 that its number of GPUs gives."""
    service = goal.scenario
    jitter = f", ±{service.jitter:.0%}" * (service.jitter > 0.0)
    return {
        "service": f"{service.alpha * 1000:g} + {service.beta * 1000:.3g}·n ms ≤ {service.max_batch}{jitter}",
        "requests/s": service.rate,
        "promise": _promise_ms(goal),
        "k": plan.gpus,
        "on the edge": "yes" if plan.on_the_edge else "",
        "foretold": plan.p95_ms,
        "given": given,
        "k holds": _verdict(given <= _promise_ms(goal), plan.on_the_edge),
    }


def _promise_ms(goal: Goal) -> float:
    assert goal.p95 is not None
    return goal.p95 * 1000


def _verdict(holds: bool, near: bool) -> str:
    return "yes" if holds else "near, as said" if near else "NO"


def _simulated_p95(goal: Goal, gpus: int) -> float:
    """Mean P95 in ms over the seeds."""
    scenario = replace(draws.steady("", goal.scenario, goal.scenario.rate).scenario, workers=gpus)
    latencies = [sorted(simulate(replace(scenario, seed=seed)).latency) for seed in SEEDS]
    return statistics.fmean(percentile(ascending, 0.95) * 1000 for ascending in latencies)


def _real_p95(scenario: Scenario) -> float:
    """P95 in ms of a run whose arrivals are at the very instants that are simulated."""
    instants = list(arrivals(scenario, random.Random(f"{scenario.seed}/arrivals")))
    rate = (len(instants) - 1) / (instants[-1] - instants[0])  # So that nothing is scaled.
    shape = ("--workers", str(scenario.workers), "--max-batch-size", str(scenario.max_batch))
    environment = {
        "BENCH_ALPHA_MS": str(scenario.alpha * 1000),
        "BENCH_BETA_MS": str(scenario.beta * 1000),
        "BENCH_JITTER": str(scenario.jitter),
    }
    target = f"{stand.TARGETS}:Emulated"
    with (
        tempfile.TemporaryDirectory() as folder,
        stand.headway(target, *shape, *PATIENT, name="foretold", environment=environment) as server,
    ):
        path = Path(folder) / "instants.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["TIMESTAMP"], *([f"{instant:.6f}"] for instant in instants)])
        flags = ("--arrivals", str(path), "--timeout", "30", "--expect", "upper")
        return open_loop(server, rate, scenario.duration, *flags).report.total.latency_ms.p95


if __name__ == "__main__":
    sys.exit(main())
