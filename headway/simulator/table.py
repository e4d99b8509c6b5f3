"""Tables that show simulations to people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.simulator.report import Batches, Flow, Report
from headway.simulator.scenario import Scenario

_WIDTH = 160


def show(scenario: Scenario, reports: Sequence[Report], arrivals: str, console: Console | None = None) -> None:
    """Print the reports of one scenario under one or more policies.

    Arguments:
        scenario: scenario that was simulated.
        reports: one report for each policy.
        arrivals: name of the arrivals, for example `poisson`.
        console: console to print on; standard output when None.
    """
    console = console or standard_console()
    first = reports[0]
    console.print(
        f"[bold]{first.offered_rate:,.1f} requests/s[/] ({escape(arrivals)}, variation of gaps "
        f"{first.arrivals_cv:.2f}) on [bold]{scenario.workers} GPUs[/] of {first.capacity:,.0f} requests/s in all; "
        f"{scenario.duration - scenario.warmup:.1f} s after {scenario.warmup:.1f} s of warm-up, seed {scenario.seed}"
    )
    console.print(_latencies(scenario, reports))
    console.print(_departures(reports))
    if any(report.total.answered < report.total.requests for report in reports):
        console.print(_losses(reports))
    if first.deaths:
        console.print(f"{first.deaths} deaths of workers, {first.down:.2%} of the GPUs' time.")


def standard_console() -> Console:
    """Standard output; a file or a pipe has no width to wrap at."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def figure(value: float) -> str:
    """Milliseconds with as many places as are worth reading."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.1f}"


def _latencies(scenario: Scenario, reports: Sequence[Report]) -> Table:
    table = _table("Latency of answers, in ms", ["policy", "tier"])
    names = ["requests", "answered", "p50", "p95", "p99", "max", "answers/s"]
    if scenario.promise is not None:
        names[-1] = f"within {scenario.promise * 1000:g} ms/s"
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        for tier, flow in report.tiers.items():
            table.add_row(report.policy, escape(tier), *_cells(flow))
        table.add_row(report.policy, "all" if report.tiers else "", *_cells(report.total), style="bold")
    return table


def _cells(flow: Flow) -> list[str]:
    latency = flow.latency_ms
    values = (latency.p50, latency.p95, latency.p99, latency.max)
    percentiles = [figure(value) for value in values] if latency.count else ["–"] * len(values)
    return [f"{flow.requests:,}", f"{flow.answered:,}", *percentiles, f"{flow.goodput:,.1f}"]


def _departures(reports: Sequence[Report]) -> Table:
    table = _table("Departures", ["policy"])
    sharded = any(report.batches.shard_gap_cv is not None for report in reports)
    shard_columns = ("in a shard", "stolen") if sharded else ()
    for name in ("batches", "size", "fill", "gap ms", "variation of gaps", *shard_columns, "GPUs busy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("left because", no_wrap=True)
    for report in reports:
        batches = report.batches
        reasons = " ".join(f"{name} {count / batches.count:.0%}" for name, count in batches.reasons.items())
        table.add_row(
            report.policy,
            f"{batches.count:,}",
            f"{batches.mean_size:.1f}",
            f"{batches.fill:.0%}",
            figure(batches.gap_ms),
            f"{batches.gap_cv:.2f}",
            *(_shard_cells(batches) if sharded else ()),
            f"{report.utilisation:.1%}",
            reasons,
        )
    return table


def _shard_cells(batches: Batches) -> tuple[str, str]:
    variation = batches.shard_gap_cv
    return "–" if variation is None else f"{variation:.2f}", f"{batches.stolen:.1%}"


def _losses(reports: Sequence[Report]) -> Table:
    table = _table("Requests without an answer", ["policy", "tier"])
    names = sorted({reason for report in reports for reason in report.total.reasons})
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for report in reports:
        for tier, flow in (report.tiers or {"": report.total}).items():
            share = 1 - flow.answered / flow.requests if flow.requests else 0.0
            counts = (f"{flow.reasons.get(name, 0):,}" for name in names)
            table.add_row(report.policy, escape(tier), *counts, f"{share:.2%}")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
