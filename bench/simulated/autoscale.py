"""A day under the autoscaler: `rules`, `plan`, and what else could be had for its GPU-hours.

    python bench/simulated/autoscale.py --traces DIR      both Azure traces, starts of 60 and 300 s; about ten minutes of one core

Beside the usual rules and `plan` there are

fixed        as many GPUs as the busiest minute needs.
scaled       the usual rules with lower thresholds of utilisation.
tuned        the rules of a family that takes the fewest GPU-hours: both thresholds, times and steps are chosen for this very day.
foresight    nobody can have it: every five minutes the number of GPUs that is best for what will come, at once.

The last three are those whose share within the promise is just no lower than that of `plan`. The service has 100 ms + 1 ms an
input, 32 inputs at most, and promises 250 ms.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headway.core.scaling.rules import QUEUE_ABOVE, USUAL, UTILISATION_ABOVE, UTILISATION_BELOW, ScaleRule
from headway.core.scaling.scaler import PLAN, RULES, ScaleLimits
from headway.core.scaling.sizing import BatchCost
from headway.simulator.day import POLICIES, Backlog, Day, DayReport, day_arrivals, simulate_day
from headway.simulator.traffic import read_trace

TRACES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}
STARTS = (60.0, 300.0)
STEP = 0.01
"""Grain of a threshold of utilisation."""
APART = (0.4 / 0.85, 0.6, 0.75, 0.9)
"""Thresholds from which workers are removed, as a share of those from which they are added."""
PACES = ((300.0, 900.0, 1), (60.0, 300.0, 1), (60.0, 300.0, 2))
"""Seconds for which a high and a low utilisation must hold, and the workers that are added."""
SPAN = 300
"""Seconds for which foresight keeps a number."""
Traffic = tuple[Sequence[float], float]
RulesAt = Callable[[float], tuple[ScaleRule, ...]]
"""Function from the threshold from which workers are added to the rules."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the two Azure traces")
    parser.add_argument("--rate", type=float, default=2000.0, help="mean requests per second")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| trace | start | policy | GPU-hours | `plan` takes | in promise | refused | ups | downs | workers |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, file in TRACES.items():
        trace = read_trace(given.traces / file)
        traffic = None
        for start in STARTS:
            day = Day(
                rate=given.rate,
                cost=BatchCost(0.1015, 0.001, 32),
                promise=0.25,
                start=start,
                trace=trace,
                seed=given.seed,
            )
            traffic = traffic or day_arrivals(day)
            for line in lines(day, traffic, f"| {name} | {start:g} s"):
                print(line, flush=True)


def lines(day: Day, traffic: Traffic, where: str) -> Iterator[str]:
    """Rows of one day."""
    reports = {policy: simulate_day(day, policy, progress, traffic) for policy in POLICIES}
    plan = reports[PLAN]
    for policy, report in reports.items():
        yield row(where, f"`{policy}`" if policy in (RULES, PLAN) else policy, report, plan)
    for name, families in (("scaled", [scaled]), ("tuned", [tuned(*one) for one in families_of()])):
        found = [best for rules_at in families if (best := laziest(day, traffic, rules_at, plan.within))]
        if not found:
            yield f"{where} | `rules`, {name} | none does | | | | | | |"
            continue
        rules, report = min(found, key=lambda one: one[1].gpu_hours)
        yield row(where, f"`rules`, {name}: {words(rules)}", report, plan)
    hours, within = foresight(day, traffic, plan.within)
    yield f"{where} | foresight | {hours:.0f} | {plan.gpu_hours / hours:.2f} | {within:.2%} | | | | |"


def laziest(
    day: Day, traffic: Traffic, rules_at: RulesAt, within: float
) -> tuple[tuple[ScaleRule, ...], DayReport] | None:
    """Rules with the highest threshold whose share within the promise is no lower; None if no threshold is low enough.

    The share falls as the threshold rises, but for what the very instants of the changes make.
    """
    low, high, best = 0, int(1.0 / STEP), None
    while high - low > 1:
        middle = (low + high) // 2
        rules = rules_at(middle * STEP)
        found = simulate_day(replace(day, limits=ScaleLimits(rules=rules)), RULES, progress, traffic)
        if found.within >= within:
            low, best = middle, (rules, found)
        else:
            high = middle
    return best


def scaled(threshold: float) -> tuple[ScaleRule, ...]:
    """The usual rules, with both thresholds of utilisation lower by one factor."""
    [usual] = [rule.threshold for rule in USUAL if rule.condition == UTILISATION_ABOVE]
    return tuple(
        rule if rule.condition == QUEUE_ABOVE else replace(rule, threshold=rule.threshold * threshold / usual)
        for rule in USUAL
    )


def families_of() -> Iterator[tuple[float, float, float, int]]:
    """All families of `tuned`."""
    return ((apart, *pace) for apart, pace in itertools.product(APART, PACES))


def tuned(apart: float, high_for: float, low_for: float, add: int) -> RulesAt:
    """Rules of a family by their threshold."""
    queue = [rule for rule in USUAL if rule.condition == QUEUE_ABOVE]
    return lambda threshold: (
        *queue,
        ScaleRule(UTILISATION_ABOVE, threshold, high_for, add),
        ScaleRule(UTILISATION_BELOW, threshold * apart, low_for, -1),
    )


def words(rules: Sequence[ScaleRule]) -> str:
    """The rules on utilisation."""
    found = {rule.condition: rule for rule in rules if rule.condition != QUEUE_ABOVE}
    above, below = found[UTILISATION_ABOVE], found[UTILISATION_BELOW]
    return (
        f"+ {above.change} above {above.threshold:.2f} for {above.for_s:g} s, "
        f"− {-below.change} below {below.threshold:.2f} for {below.for_s:g} s"
    )


def foresight(day: Day, traffic: Traffic, within: float) -> tuple[float, float]:
    """Fewest GPU-hours at no lower share, with the number of each span chosen in knowledge of all arrivals; and the share."""
    arrivals, dispersion = traffic
    spans = [answered(day, arrivals[at : at + SPAN], dispersion) for at in range(0, len(arrivals), SPAN)]
    total = sum(arrivals)
    low, high, best = 0.0, total, (math.inf, 0.0)
    for _ in range(50):  # The price of a GPU in answers: the higher, the fewer are taken.
        price = (low + high) / 2.0
        chosen = [max(span.items(), key=lambda one: one[1] - price * one[0]) for span in spans]
        share = sum(count for _, count in chosen) / total
        if share >= within:
            low, best = price, (sum(workers for workers, _ in chosen) * SPAN / 3600.0, share)
        else:
            high = price
    return best


def answered(day: Day, arrivals: Sequence[float], dispersion: float) -> dict[int, float]:
    """Requests of a span that are answered within the promise, by the number of workers, until more gain nothing."""
    found = dict[int, float]()
    workers = max(1, int(sum(arrivals) / len(arrivals) / day.cost.pace))
    while True:
        backlog = Backlog(day, dispersion)
        found[workers] = sum(backlog.serve(arrived, workers)[0] for arrived in arrivals)
        if found[workers] >= 0.9995 * sum(arrivals):
            return found
        workers += 1


def row(where: str, policy: str, report: DayReport, plan: DayReport) -> str:
    """Row of one policy."""
    return (
        f"{where} | {policy} | {report.gpu_hours:.0f} | {plan.gpu_hours / report.gpu_hours:.2f} | {report.within:.2%} | "
        f"{report.refused:.2%} | {report.ups} | {report.downs} | {report.fewest}–{report.most} |"
    )


def progress(text: str) -> None:
    """Say how far it is, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
