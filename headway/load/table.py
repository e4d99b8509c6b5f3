"""Tables that show the report of a load test to people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.load.report import Flow, Latency, Report

_LATE_MS = 5.0
_BUSY = 0.9
_WIDTH = 160
_COLUMNS = ("requests", "answered", "p50", "p90", "p95", "p99", "p99.9", "max", "in time/s")


def show(report: Report, console: Console | None = None) -> None:
    """Print a report, on standard output unless another console is given."""
    console = console or _standard()
    console.print(
        f"[bold]{escape(report.url)}[/]  {report.rate:,.15g} requests/s for {report.duration_s:g} s, "
        f"{escape(report.arrivals)} arrivals (variation of gaps {report.arrivals_cv:.2f}), seed {report.seed}"
    )
    if report.interrupted:
        console.print(f"[yellow]Interrupted after {report.elapsed_s:.1f} s.[/]")
    console.print(_latencies(report))
    if report.total.answered < report.total.requests:
        console.print(_outcomes(report))
    for line in _remarks(report):
        console.print(line)


def _standard() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file or a pipe has no width to wrap at.
        console.width = _WIDTH
    return console


def _latencies(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="Latency of answers from the due instant, in ms", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in _COLUMNS if report.promise_ms is not None else _COLUMNS[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    for tier, flow in report.tiers.items():
        table.add_row(tier, *_cells(flow))
    table.add_row("all", *_cells(report.total), style="bold")
    return table


def _cells(flow: Flow) -> list[str]:
    cells = [f"{flow.requests:,}", f"{flow.answered:,}", *_percentiles(flow.latency_ms)]
    return cells if flow.goodput is None else [*cells, f"{flow.goodput:,.1f}"]


def _percentiles(latency: Latency) -> list[str]:
    if not latency.count:
        return ["–"] * 6
    values = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p999, latency.max)
    return [f"{value:,.2f}" if value < 100 else f"{value:,.1f}" for value in values]


def _outcomes(report: Report) -> Table:
    flows = report.tiers or {"all": report.total}
    table = Table(box=box.SIMPLE, title="Outcomes", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in flows:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share", justify="right")
    for outcome, count in report.total.outcomes.items():
        share = f"{count / report.total.requests:.2%}"
        table.add_row(escape(outcome), *(f"{flow.outcomes.get(outcome, 0):,}" for flow in flows.values()), share)
    return table


def _remarks(report: Report) -> list[str]:
    total, own = report.total, report.generator
    lines = []
    if total.in_time is not None:
        share = total.in_time / total.requests if total.requests else 0.0
        lines.append(f"In time ({report.promise_ms:g} ms): {share:.2%} of the requests.")
    lines.append(f"Offered {report.offered_rate:,.1f}/s, answered {total.answered_rate:,.1f}/s.")
    if total.refused:
        lacking = total.refused_without_retry_after
        hint = f"[red]{lacking:,} without Retry-After[/]" if lacking else "all with Retry-After"
        refusal = total.refusal_ms
        lines.append(
            f"Refusals (429, 503): {total.refused:,}, {hint}; p50 {refusal.p50:.2f}, p99 {refusal.p99:.2f}, "
            f"max {refusal.max:.2f} ms."
        )
    if report.mismatches is not None:
        checked = f"{total.answered:,} answers checked ({report.expect})"
        lines.append(
            f"{checked}: [red]{report.mismatches:,} wrong[/]" if report.mismatches else f"{checked}: all right."
        )
        lines += [f"  {escape(one)}" for one in report.mismatched]
    lag = own.lag_ms
    lines.append(
        f"Generator: {own.cpu_us_per_request:.1f} µs CPU per request, {own.cpu_share:.0%} of a core; sends late by "
        f"p50 {lag.p50:.2f}, p99 {lag.p99:.2f}, max {lag.max:.2f} ms; connections: at most {own.connections_peak:,}, "
        f"{own.waited_for_connection:,} requests had to wait for one."
    )
    if lag.p99 > _LATE_MS or own.cpu_share > _BUSY:
        lines.append(
            "[yellow]The generator itself was late, which is part of these latencies: "
            "give it a core of its own, or lower the rate.[/]"
        )
    if report.unreached:
        lines.append("[red]No request got an answer.[/]")
    return lines
