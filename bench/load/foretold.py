"""What the simulator and `headway plan` say beside what really happens, with emulated GPUs.

    python bench/simulated/never_worse.py             first, for `policies`: it leaves its outcomes in bench/out
    python bench/load/foretold.py                     about twenty minutes
    python bench/load/foretold.py --worst 0 --plans 5 --real 0      a first impression

policies  The worst configurations of never_worse.py, and those that it names, under `paced`, `window` and eager (a window of 0 ms), on
          GPUs made of sleep, from a cold start: Poisson arrivals at the very instants that are simulated, or clients that wait for
          their answers. Only configurations that this machine can carry are taken. Simulated and real figures are of the same seconds.
plans     Services, rates and P95 drawn at random, and a plan for each. What it says is held against simulations with seeds that it has
          not seen, and, for some, against `headway serve`. It holds when its k meets the P95, or when it said that it is on the
          edge; and when one GPU less does not, or comes within the doubt of what the plan said of it.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.simulated import draws
from bench.simulated.draws import Drawn
from bench.simulated.never_worse import Row
from bench.stand import parts, stand
from bench.stand.findings import OUT, Findings
from bench.stand.generators import closed_loop, open_loop
from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.engine import simulate
from headway.simulator.planner import EDGE_MS, EDGE_SHARE, Goal, Plan, make_plan
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import arrivals

POLICIES = {
    "paced": ("--policy", "paced"),
    "window": ("--policy", "window"),
    "eager": ("--policy", "window", "--max-wait-ms", "0"),
}
"""Flags of `headway serve` for the policies of the simulator."""
PATIENT = (
    "--queue-timeout-ms", "30000", "--request-timeout-ms", "30000", "--gpu-timeout-ms", "10000", "--default-tier", "enterprise",
    "--log-level", "warning",
)  # fmt: skip
BODY = b'{"input": "the quick brown fox"}'
KINDS = ("poisson", "closed")
OFF = 0.05
"""Most by which a simulated P95 may differ from a real one, as a share of the real one."""
MOST = 1.03
"""Most that the ratio of paced to the better one of window and eager may be."""
SEEDS = range(1000, 1003)
"""Seeds that no plan has seen."""
MOST_RATE, MOST_GPUS = 800.0, 6
"""What of the plans is run for real."""
PLAN_SECONDS = 10.0


class Figures(msgspec.Struct, frozen=True):
    """P95 and P99 in ms, and answers per second."""

    p95: float
    p99: float
    answers: float


def main() -> int:
    parser = argparse.ArgumentParser(description="The simulator and plans beside real runs with emulated GPUs.")
    add = parser.add_argument
    add("--worst", type=int, default=12, metavar="N", help="worst of never_worse.py (default %(default)d)")
    add("--no-named", action="store_true", help="leave out those that never_worse.py names")
    add("--seed", type=int, default=1, help="of never_worse.py's run, and of the plans (default %(default)d)")
    add("--seconds", type=float, default=8.0, help="that count, of each run of policies (default %(default)g)")
    add("--warm-up", type=float, default=2.0, help="of clients that wait (default %(default)g s)")
    add("--most-rate", type=float, default=1000.0, help="highest requests/s taken (default %(default)g)")
    add("--plans", type=int, default=20, metavar="N", help="how many plans (default %(default)d)")
    add("--real", type=int, default=3, metavar="N", help="of them run for real (default %(default)d)")
    return parts.run(parser, PARTS, {"policies": "foretold"})


def simulated(scenario: Scenario, policy: str) -> Figures:
    """Figures of a simulation."""
    ascending = sorted(simulate(replace(scenario, policy=policy)).latency)
    seconds = scenario.duration - scenario.warmup
    return Figures(percentile(ascending, 0.95) * 1000, percentile(ascending, 0.99) * 1000, len(ascending) / seconds)


def real(scenario: Scenario, policy: str) -> Figures:
    """Figures of a run: Poisson arrivals at the very instants that are simulated, or clients that wait.

    Of an open load the whole counts, as if there were no warm-up.

    Raises:
        Broken: the server does not come up, or the load did not report.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "BENCH_ALPHA_MS": str(scenario.alpha * 1000),
            "BENCH_BETA_MS": str(scenario.beta * 1000),
            "BENCH_JITTER": str(scenario.jitter),
            "BENCH_SLOW": str(scenario.slow),
            "BENCH_SLOW_MARK": str(Path(folder) / "slow"),
        }
        flags = (
            "--workers",
            str(scenario.workers),
            "--max-batch-size",
            str(scenario.max_batch),
            *PATIENT,
            *POLICIES[policy],
        )
        with stand.headway(f"{stand.TARGETS}:Emulated", *flags, name="foretold", environment=environment) as server:
            if scenario.clients:
                return _closed(server, scenario)
            return _open(server, scenario, Path(folder) / "instants.csv")


def _open(server: stand.Server, scenario: Scenario, path: Path) -> Figures:
    instants = list(arrivals(scenario, random.Random(f"{scenario.seed}/arrivals")))
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["TIMESTAMP"], *([f"{instant:.6f}"] for instant in instants)])
    rate = (len(instants) - 1) / (instants[-1] - instants[0])  # So that nothing is scaled.
    flags = ("--arrivals", str(path), "--timeout", "30", "--expect", "upper")
    total = open_loop(server, rate, scenario.duration, *flags).report.total
    return Figures(total.latency_ms.p95, total.latency_ms.p99, total.answered / scenario.duration)


def _closed(server: stand.Server, scenario: Scenario) -> Figures:
    url = f"{server.url}/v1/inference"
    closed_loop(url, BODY, scenario.warmup, scenario.clients)
    done = closed_loop(url, BODY, scenario.duration - scenario.warmup, scenario.clients)
    return Figures(done.p95_ms, done.p99_ms, done.rate)


# Policies.


def policies(findings: Findings, options: argparse.Namespace) -> None:
    """Run and simulate configurations under each policy."""
    rows: list[dict[str, object]] = []
    ratios: list[dict[str, object]] = []
    off: list[float] = []
    for drawn in _chosen(options):
        warm_up = options.warm_up if drawn.kind == "closed" else 0.0  # Of open loads the cold start counts, too.
        scenario = replace(drawn.scenario, warmup=warm_up, duration=warm_up + options.seconds)
        given = {name: real(scenario, name) for name in POLICIES}
        said = {name: simulated(scenario, name) for name in POLICIES}
        rows += [_row(drawn, name, given[name], said[name]) for name in POLICIES]
        off += [abs(said[name].p95 / given[name].p95 - 1) for name in POLICIES]
        ratios.append({"configuration": drawn.name, "real": _ratio(drawn, given), "simulated": _ratio(drawn, said)})
        findings.say(f"{drawn.name}: {_ratio(drawn, given):.3f} real, {_ratio(drawn, said):.3f} simulated")
    findings.table("Real and simulated; ms and answers/s", rows)
    findings.table(
        "Ratio of paced to the better one of window and eager: P95 or, of clients, answers/s turned round", ratios
    )
    if off:
        findings.at_most("median difference of P95", statistics.median(off), OFF)
        findings.at_most("largest difference of P95", max(off), OFF)
        findings.at_most("worst real ratio", max(float(str(row["real"])) for row in ratios), MOST)


def _chosen(options: argparse.Namespace) -> Iterator[Drawn]:
    """Configurations by name, then the worst ones of the last run that this machine can carry."""

    def fits(drawn: Drawn) -> bool:
        return drawn.kind in KINDS and drawn.scenario.rate <= options.most_rate

    if not options.no_named:
        yield from filter(fits, draws.named())
    path = OUT / f"never_worse-{options.seed}.jsonl"
    rows = [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()] if options.worst else []
    worst = (draws.draw(options.seed, int(row.name), {}) for row in sorted(rows, key=lambda row: -row.ratio))
    yield from (drawn for drawn, _ in zip(filter(fits, worst), range(options.worst), strict=False))


def _row(drawn: Drawn, policy: str, given: Figures, said: Figures) -> dict[str, object]:
    fleet = drawn.scenario
    slow = f", ×{fleet.slow:g}" * (fleet.slow != 1.0)
    return {
        "configuration": drawn.name,
        "GPUs, ms": f"{fleet.workers} × {_service(fleet)}{slow}",
        "load": f"{fleet.clients} clients" if fleet.clients else f"{fleet.rate:.0f}/s, {drawn.load:.0%}",
        "policy": policy,
        "p95": given.p95,
        "simulated": said.p95,
        "off %": 100 * (said.p95 / given.p95 - 1),
        "p99": given.p99,
        "simulated p99": said.p99,
        "off % p99": 100 * (said.p99 / given.p99 - 1),
        "answers/s": given.answers,
        "simulated/s": said.answers,
    }


def _ratio(drawn: Drawn, figures: dict[str, Figures]) -> float:
    paced, window, eager = (figures[name] for name in POLICIES)
    if drawn.kind == "closed":
        return max(window.answers, eager.answers) / paced.answers
    return paced.p95 / min(window.p95, eager.p95)


# Plans.


def plans(findings: Findings, options: argparse.Namespace) -> None:
    """Hold plans against what their number of GPUs, and one less, give."""
    rows: list[dict[str, object]] = []
    given: list[dict[str, object]] = []
    number = 0
    planner.RATE_STEPS = 0  # How far a plan would reach is not asked.
    while len(rows) < options.plans:
        goal = _goal(options.seed, number)
        number += 1
        try:
            plan = make_plan(goal)
        except SettingError:
            continue  # No number of GPUs keeps such a promise.
        rows.append(_planned(goal, plan))
        if len(given) < options.real and goal.scenario.rate <= MOST_RATE and plan.gpus <= MOST_GPUS:
            scenario = replace(goal.scenario, workers=plan.gpus, warmup=0.0, duration=PLAN_SECONDS, seed=SEEDS[0])
            given.append(_held(goal, plan, real(scenario, "paced").p95))
    findings.table("Plans, and what seeds that they have not seen give; P95 in ms", rows)
    if given:
        findings.table("Plans, and real runs; P95 in ms", given)
    findings.none("plans whose k does not hold", sum(row["k holds"] == "NO" for row in rows))
    findings.none("plans with one GPU more than is needed, unsaid", sum(row["k − 1 fails"] == "NO" for row in rows))
    findings.none("plans whose k does not hold in a real run", sum(row["k holds"] == "NO" for row in given))


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
    short = _simulated(goal, plan.gpus - 1) if less is not None else None
    near = less is not None and less.p95_ms + less.doubt_ms.p95 <= promise + max(EDGE_SHARE * promise, EDGE_MS)
    return {
        **_held(goal, plan, _simulated(goal, plan.gpus)),
        "k − 1 foretold": None if less is None else less.p95_ms,
        "k − 1 given": short,
        "k − 1 fails": _verdict(short is None or short > promise, near),
    }


def _held(goal: Goal, plan: Plan, given: float) -> dict[str, object]:
    """Row of a plan beside the P95 that its number of GPUs gives."""
    return {
        "service": _service(goal.scenario),
        "requests/s": goal.scenario.rate,
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


def _simulated(goal: Goal, gpus: int) -> float:
    """Mean P95 over the seeds."""
    scenario = replace(draws.steady("", goal.scenario, goal.scenario.rate).scenario, workers=gpus)
    return statistics.fmean(simulated(replace(scenario, seed=seed), "paced").p95 for seed in SEEDS)


def _service(scenario: Scenario) -> str:
    jitter = f", ±{scenario.jitter:.0%}" * (scenario.jitter > 0.0)
    return f"{scenario.alpha * 1000:g} + {scenario.beta * 1000:.3g}·n ms ≤ {scenario.max_batch}{jitter}"


PARTS: parts.Parts = {"policies": policies, "plans": plans}


if __name__ == "__main__":
    sys.exit(main())
