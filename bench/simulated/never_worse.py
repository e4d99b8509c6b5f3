"""The default policy compared with the usual ones, on random services and loads: where is it worse, and by how much?

    python bench/simulated/never_worse.py                                  500 configurations, about half an hour of one core
    python bench/simulated/never_worse.py --configurations 50 --seed 2     a first impression, other ones

A service has 1 to 8 GPUs, a batch time of α + β for each input, batch times that vary or not, and perhaps one GPU that is slower than the others.
Its load is Poisson arrivals of 5 to 95 % of what the GPUs can do; the same while a GPU dies and comes back; steps between such rates; bursts,
synthetic and from the Azure traces (--traces DIR, see traces.py); 4, 16 or 64 clients that each wait for their last answer; or a cold start
straight into a rate. The production queue and policies run it in virtual time.

A configuration's ratio is P95 under `paced` over the smaller P95 of `window` and eager; with clients that wait, the larger answer rate of those
two over that of `paced`. So above 1 is worse. If chance could explain a ratio beyond the bound, the mean over more seeds counts.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import msgspec

from bench.simulated import draws
from bench.simulated.draws import Drawn
from bench.simulated.traces import parser, traffic
from bench.stand.findings import Findings
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

MOST = 1.03
"""Maximum ratio."""
SHOWN = 20
POLICIES = ("paced", "window", "eager")
SEEDS, MORE_SEEDS = 4, 16
"""Seeds of cold starts, which have few requests; and of everything that exceeds the bound with fewer."""


class Row(msgspec.Struct, frozen=True):
    """Result of a configuration: P95 in ms and answers per second under each policy, and the ratio."""

    name: str
    kind: str
    workers: int
    alpha_ms: float
    beta_ms: float
    max_batch: int
    load: float
    clients: int
    jitter: float
    slow: float
    traffic: str
    p95: dict[str, float]
    answers: dict[str, float]
    ratio: float


def main() -> int:
    options = parser("The default policy beside the usual ones, on random services and loads.").parse_args()
    findings = Findings("never_worse", configurations=options.configurations, seed=options.seed)
    try:
        traces = traffic(options.traces, findings)
    except SettingError as exc:
        print(exc, file=sys.stderr)
        return 2
    begun = time.monotonic()
    chosen = [draws.draw(options.seed, number, traces) for number in range(options.configurations)]
    by_name = list(map(compared, draws.named()))
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(compared, chosen))
    findings.say(f"{len(rows)} configurations in {time.monotonic() - begun:.0f} s.")
    findings.table(
        "Configurations asked for by name; P95 in ms, answers/s with clients", [_shown(row) for row in by_name]
    )
    _report(findings, rows)
    findings.keep("rows", rows)
    for row in by_name:
        findings.at_most(f"{row.name}: ratio", row.ratio, MOST)
    return findings.close()


def compared(drawn: Drawn) -> Row:
    seeds = SEEDS if drawn.kind == "cold" else 1
    p95, answers = _figures(drawn, seeds)
    ratio = _ratio(drawn, p95, answers)
    if ratio > MOST:
        p95, answers = _figures(drawn, MORE_SEEDS)
        ratio = _ratio(drawn, p95, answers)
    fleet = drawn.scenario
    return Row(
        drawn.name, drawn.kind, fleet.workers, fleet.alpha * 1000, fleet.beta * 1000, fleet.max_batch, drawn.load, fleet.clients,
        fleet.jitter, fleet.faults.slow, drawn.traffic, p95, answers, ratio,
    )  # fmt: skip


def _figures(drawn: Drawn, seeds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean P95 in ms and mean answers per second, under each policy."""
    p95, answers = {}, {}
    for policy in POLICIES:
        runs = [_run(replace(drawn.scenario, policy=policy, seed=drawn.scenario.seed + n)) for n in range(seeds)]
        p95[policy] = statistics.fmean(latency for latency, _ in runs)
        answers[policy] = statistics.fmean(rate for _, rate in runs)
    return p95, answers


def _run(scenario: Scenario) -> tuple[float, float]:
    latency = simulate(scenario).latency
    return percentile(sorted(latency), 0.95) * 1000, len(latency) / (scenario.duration - scenario.warmup)


def _ratio(drawn: Drawn, p95: dict[str, float], answers: dict[str, float]) -> float:
    if drawn.kind == "closed":
        return max(answers["window"], answers["eager"]) / answers["paced"]
    return p95["paced"] / min(p95["window"], p95["eager"])


def _report(findings: Findings, rows: list[Row]) -> None:
    worst = sorted(rows, key=lambda row: -row.ratio)[:SHOWN]
    findings.table(f"The {len(worst)} where paced does worst", [_shown(row) for row in worst])
    table = [_summed_up("all", rows)]
    for dimension, of in DIMENSIONS.items():
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(of(row), []).append(row)
        table += [_summed_up(f"{dimension} {group}", groups[group]) for group in sorted(groups)]
    findings.table("Ratio of paced to the better one of window and eager: above 1 is worse", table)
    for even in (True, False):
        ratios = [row.ratio for row in rows if (row.slow == 1.0) is even]
        if ratios:
            what = "equal GPUs" if even else "one GPU slower"
            findings.at_most(f"{what}: worst ratio", max(ratios), MOST)


def _load(row: Row) -> str:
    share = "≤ 35 %" if row.load <= 0.35 else "≤ 70 %" if row.load <= 0.7 else "> 70 %"
    return "clients" if row.kind == "closed" else share


DIMENSIONS: dict[str, Callable[[Row], str]] = {
    "load:": lambda row: row.kind,
    "clients:": lambda row: f"{row.clients:>2}" if row.clients else "none",
    "rate:": _load,
    "GPUs:": lambda row: "1" if row.workers == 1 else "2" if row.workers == 2 else "3–4" if row.workers < 5 else "5–8",
    "β·n over α:": lambda row: f"{row.beta_ms * row.max_batch / row.alpha_ms:.2f}",
    "jitter:": lambda row: f"{row.jitter:g}",
    "slow GPU:": lambda row: f"×{row.slow:g}",
}


def _summed_up(name: str, rows: Iterable[Row]) -> dict[str, object]:
    ratios = sorted(row.ratio for row in rows)
    return {
        "": name,
        "number": len(ratios),
        "median": statistics.median(ratios),
        "geometric mean": math.exp(statistics.fmean(map(math.log, ratios))),
        "worst": ratios[-1],
        "best": ratios[0],
        f"% above {MOST:g}": 100 * sum(ratio > MOST for ratio in ratios) / len(ratios),
        "% below 1": 100 * sum(ratio < 1 for ratio in ratios) / len(ratios),
    }


def _shown(row: Row) -> dict[str, object]:
    figures = row.answers if row.kind == "closed" else row.p95
    load = f"{row.clients} clients" if row.clients else f"{row.load:.0%} {row.traffic}".rstrip()
    return {
        "configuration": row.name,
        "kind": row.kind,
        "load": load,
        "GPUs": row.workers,
        "α ms": row.alpha_ms,
        "β ms": round(row.beta_ms, 3),
        "≤": row.max_batch,
        "jitter": row.jitter,
        "slow": row.slow,
        **figures,
        "ratio": f"{row.ratio:.3f}",
    }


if __name__ == "__main__":
    sys.exit(main())
