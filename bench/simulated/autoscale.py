"""A day under the autoscaler: `rules`, `plan`, and as many GPUs as the busiest minute needs.

    python bench/simulated/autoscale.py --traces DIR      both Azure traces, starts of 60 and 300 s; about five minutes of one core

Beside the usual rules there are the same with lower thresholds for utilisation: the highest of them whose share within the
promise is no lower than that of `plan`. The service has 100 ms + 1 ms an input, 32 inputs at most, and promises 250 ms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headway.core.scaling.rules import USUAL, UTILISATION_ABOVE, ScaleRule
from headway.core.scaling.scaler import PLAN, RULES, ScaleLimits
from headway.core.scaling.sizing import BatchCost
from headway.simulator.day import POLICIES, Day, DayReport, simulate_day
from headway.simulator.traffic import read_trace

TRACES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}
STARTS = (60.0, 300.0)
LOWER = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15)
"""Parts of the usual thresholds of utilisation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the two Azure traces")
    parser.add_argument("--rate", type=float, default=2000.0, help="mean requests per second")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| trace | start | policy | GPU-hours | of `rules` | in promise | refused | ups | downs | workers |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, file in TRACES.items():
        trace = read_trace(given.traces / file)
        for start in STARTS:
            day = Day(
                rate=given.rate,
                cost=BatchCost(0.1015, 0.001, 32),
                promise=0.25,
                start=start,
                trace=trace,
                seed=given.seed,
            )
            for line in lines(day, f"| {name} | {start:g} s"):
                print(line, flush=True)


def lines(day: Day, where: str) -> Iterator[str]:
    """Rows of one day."""
    reports = {policy: simulate_day(day, policy, progress) for policy in POLICIES}
    usual = reports[RULES].gpu_hours
    for policy, report in reports.items():
        yield row(where, f"`{policy}`" if policy in (RULES, PLAN) else policy, report, usual)
    for part in LOWER:
        found = simulate_day(replace(day, limits=ScaleLimits(rules=lower(part))), RULES, progress)
        if found.within >= reports[PLAN].within:
            yield row(where, f"`rules`, thresholds × {part:g}", found, usual)
            return
    yield f"{where} | `rules` at no lower share | none of {LOWER} | | | | | | |"


def lower(part: float) -> tuple[ScaleRule, ...]:
    """The usual rules with a part of their thresholds of utilisation."""
    return tuple(
        replace(rule, threshold=rule.threshold * part) if rule.condition.startswith(UTILISATION_ABOVE[:5]) else rule
        for rule in USUAL
    )


def row(where: str, policy: str, report: DayReport, usual: float) -> str:
    """Row of one policy."""
    return (
        f"{where} | {policy} | {report.gpu_hours:.0f} | {report.gpu_hours / usual:.2f} | {report.within:.2%} | "
        f"{report.refused:.2%} | {report.ups} | {report.downs} | {report.fewest}–{report.most} |"
    )


def progress(text: str) -> None:
    """Say how far it is, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
