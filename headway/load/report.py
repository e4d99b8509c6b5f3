"""Record and report of a load test: outcomes, percentiles and rates, tables for people, and progress lines during the test.
Times in reports are in milliseconds. Percentiles are exact (nearest rank). See also `headway.simulator.report`."""

from __future__ import annotations

import asyncio
import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from math import fsum, sqrt

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.load.spec import LoadSpec


class Stream:
    """Outcomes of the requests of one tier. Latencies are seconds from the due time to the last byte of the answer."""

    __slots__ = ("answered", "failed", "name", "refused", "refused_without_retry_after")

    def __init__(self, name: str) -> None:
        self.name = name
        self.answered = array("d")  # Latencies of answers with a 2xx status.
        self.refused = array("d")  # Latencies of refusals, status 429 or 503.
        self.refused_without_retry_after = 0  # Refusals without a Retry-After header.
        self.failed: Counter[str] = Counter()  # Other outcomes: status and error code, or how the connection ended.


class Record:
    """Outcomes and measurements of a load test while it runs. `tiers` are the names of the tiers."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.streams = [Stream(name) for name in tiers]
        self.sent = [0] * len(tiers)  # Number of requests that have become due, by tier.
        self.dues = array("d")  # Due times of the requests, in seconds from the start.
        self.lags = array("d")  # Seconds by which the generator was late for each request.
        self.mismatches = 0  # 2xx answers with a wrong output.
        self.mismatched: list[str] = []  # The first few of these.
        self.first_refused = ""  # Message of the first 4xx answer other than 429; empty if there was none.
        self.waited = 0  # Requests for which no connection was free when they were due.
        self.opened = 0  # Connections opened.
        self.peak = 0  # Maximum number of open connections.
        self.last_answer = 0.0  # Seconds from the start to the last answer of any status.
        self.elapsed = 0.0  # Seconds from the start until every request had its outcome.
        self.cpu = 0.0  # CPU seconds of the generator, user and system.
        self.interrupted = False  # True if the load was stopped early.

    @property
    def variation(self) -> float:
        """Coefficient of variation of the gaps between due times: 0 for equal gaps, about 1 for Poisson arrivals."""
        return spacing(self.dues)[1]


def spacing(instants: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the coefficient of variation of the gaps between ascending times; both 0 if there are no gaps."""
    gaps = [later - before for before, later in pairwise(instants)]
    mean = fsum(gaps) / len(gaps) if gaps else 0.0
    return mean, sqrt(fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean if mean > 0.0 else 0.0


_LATE_MS = 5.0
_BUSY = 0.9
_WIDTH = 160
_COLUMNS = ("requests", "answered", "p50", "p90", "p95", "p99", "p99.9", "max", "in time/s")

EVERY_ON_TERMINAL = 0.5  # Seconds between lines on a terminal, where each replaces the last.
EVERY = 5.0  # Seconds between lines in a file or a pipe.

_CLEAR = "\r\033[K"


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of times in milliseconds. All values are 0 if `count` is 0."""

    count: int
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = msgspec.field(default=0.0, name="p99.9")
    max: float = 0.0


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the requests of one tier, or of all."""

    requests: int  # Requests that were due.
    answered: int  # Requests with a 2xx answer.
    refused: int  # Requests with a 429 or 503.
    failed: int  # Requests with any other status, or without an answer.
    answered_rate: float  # 2xx answers per second, until the last answer came.
    in_time: int | None  # 2xx answers within the promise; null if there is no promise.
    goodput: float | None  # Answers within the promise per second of the load's duration; null if there is no promise.
    latency_ms: Latency  # From the due time to a 2xx answer.
    refusal_ms: Latency  # From the due time to a refusal.
    refused_without_retry_after: int  # Refusals without a Retry-After header.
    outcomes: dict[str, int]  # Requests by outcome: `ok` for 2xx, status and error code, or how the connection ended.


class Self(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the generator itself."""

    lag_ms: Latency  # How late the generator was for each request. This is part of every latency.
    cpu_us_per_request: float  # CPU time, user and system, in microseconds.
    cpu_share: float  # CPU time as a share of a core.
    connections_opened: int
    connections_peak: int  # Maximum number of open connections.
    waited_for_connection: int  # Requests for which no connection was free when they were due.


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a load test."""

    command: list[str]  # Command line without API keys.
    started_at: str  # ISO 8601, UTC.
    url: str
    rate: float
    duration_s: float
    arrivals: str
    seed: int
    promise_ms: float | None
    expect: str
    interrupted: bool  # True if it was stopped early.
    arrivals_cv: float  # Coefficient of variation of the gaps between due times: 0 if even, about 1 if Poisson.
    offered_rate: float  # Requests due per second.
    rows: int | None  # Rows of each request; null if its body has no tensors.
    answered_rows_rate: float | None  # Rows of 2xx answers per second, until the last answer; null without tensors.
    elapsed_s: float  # Seconds until every request had its outcome.
    total: Flow
    tiers: dict[str, Flow]  # Results of each tier, if there is a mix.
    mismatches: int | None  # 2xx answers with a wrong output; null if not checked.
    mismatched: list[str]  # The first few of these.
    generator: Self

    @property
    def unreached(self) -> bool:
        """True if no request got an answer of any status."""
        return self.total.requests > 0 and not any(kind == "ok" or kind[:3].isdigit() for kind in self.total.outcomes)


def make_report(spec: LoadSpec, record: Record, command: Sequence[str], started_at: str) -> Report:
    """Make the report of a finished load test. It includes `command` and `started_at` unchanged."""
    seconds = min(spec.duration, record.elapsed) if record.interrupted else spec.duration
    until = max(seconds, record.last_answer)
    target, requests, rows = spec.target, len(record.dues), spec.rows
    total = _flow(record.streams, requests, spec.promise, seconds, until)
    return Report(
        command=list(command),
        started_at=started_at,
        url=target.url,
        rate=spec.rate,
        duration_s=spec.duration,
        arrivals=spec.arrivals,
        seed=spec.seed,
        promise_ms=None if spec.promise is None else spec.promise * 1000,
        expect=spec.expect,
        interrupted=record.interrupted,
        arrivals_cv=record.variation,
        offered_rate=requests / seconds,
        rows=rows,
        answered_rows_rate=None if rows is None else rows * total.answered_rate,
        elapsed_s=record.elapsed,
        total=total,
        tiers={
            stream.name: _flow([stream], sent, spec.promise, seconds, until)
            for stream, sent in zip(record.streams, record.sent, strict=True)
            if spec.mix
        },
        mismatches=None if spec.expect == "none" else record.mismatches,
        mismatched=record.mismatched,
        generator=Self(
            lag_ms=latency_ms(record.lags),
            cpu_us_per_request=record.cpu / requests * 1e6 if requests else 0.0,
            cpu_share=record.cpu / record.elapsed if record.elapsed else 0.0,
            connections_opened=record.opened,
            connections_peak=record.peak,
            waited_for_connection=record.waited,
        ),
    )


def to_json(report: Report) -> bytes:
    """Return the report as indented JSON, with a final line feed."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _flow(streams: Sequence[Stream], requests: int, promise: float | None, seconds: float, until: float) -> Flow:
    answered = sum(len(stream.answered) for stream in streams)
    refused = sum(len(stream.refused) for stream in streams)
    outcomes: Counter[str] = Counter()
    for stream in streams:
        outcomes.update(stream.failed)
    failed = outcomes.total() - refused
    if answered:
        outcomes["ok"] = answered
    in_time = None
    if promise is not None:
        in_time = sum(latency <= promise for stream in streams for latency in stream.answered)
    return Flow(
        requests=requests, answered=answered, refused=refused, failed=failed, answered_rate=answered / until, in_time=in_time,
        goodput=None if in_time is None else in_time / seconds,
        latency_ms=latency_ms(chain.from_iterable(stream.answered for stream in streams)),
        refusal_ms=latency_ms(chain.from_iterable(stream.refused for stream in streams)),
        refused_without_retry_after=sum(stream.refused_without_retry_after for stream in streams),
        outcomes=dict(outcomes.most_common()),
    )  # fmt: skip


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the percentile of ascending values by nearest rank. `share` is from 0 to 1. NaN if there are no values."""
    if not ascending:
        return math.nan
    return ascending[min(len(ascending) - 1, max(0, math.ceil(len(ascending) * share) - 1))]


def latency_ms(seconds: Iterable[float]) -> Latency:
    """Return the distribution, in milliseconds, of latencies in seconds."""
    ascending = sorted(seconds)
    if not ascending:
        return Latency(count=0)
    p50, p90, p95, p99, p999 = (percentile(ascending, share) * 1000 for share in (0.5, 0.9, 0.95, 0.99, 0.999))
    return Latency(
        count=len(ascending), mean=math.fsum(ascending) / len(ascending) * 1000, p50=p50, p90=p90, p95=p95, p99=p99, p999=p999,
        max=ascending[-1] * 1000,
    )  # fmt: skip


def show(report: Report, console: Console | None = None) -> None:
    """Print a report on a console, by default on standard output."""
    console = console or standard_console()
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


def standard_console() -> Console:
    """Return a console for standard output that doesn't wrap lines in a file or pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def figure(value: float) -> str:
    """Format milliseconds, with fewer decimals for large values."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.1f}"


def figures(latency: Latency, *values: float) -> list[str]:
    """Format values of a distribution, as dashes if it is empty."""
    return [figure(value) if latency.count else "–" for value in values]


def table_of(title: str, words: Sequence[str], numbers: Iterable[str]) -> Table:
    """Return an empty table with columns for words, then columns for numbers."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _latencies(report: Report) -> Table:
    columns = _COLUMNS if report.promise_ms is not None else _COLUMNS[:-1]
    table = table_of("Latency of answers from the due time, in ms", [""], columns)
    for tier, flow in report.tiers.items():
        table.add_row(tier, *_cells(flow))
    table.add_row("all", *_cells(report.total), style="bold")
    return table


def _cells(flow: Flow) -> list[str]:
    latency = flow.latency_ms
    percentiles = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p999, latency.max)
    cells = [f"{flow.requests:,}", f"{flow.answered:,}", *figures(latency, *percentiles)]
    return cells if flow.goodput is None else [*cells, f"{flow.goodput:,.1f}"]


def _outcomes(report: Report) -> Table:
    flows = report.tiers or {"all": report.total}
    table = table_of("Outcomes", [""], [*flows, "share"])
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
    rows = f": {report.answered_rows_rate:,.1f} rows/s" if report.answered_rows_rate is not None else ""
    lines.append(f"Offered {report.offered_rate:,.1f}/s, answered {total.answered_rate:,.1f}/s{rows}.")
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
        lines += [f"  {escape(wrong)}" for wrong in report.mismatched]
    lag = own.lag_ms
    lines.append(
        f"Generator: {own.cpu_us_per_request:.1f} µs CPU per request, {own.cpu_share:.0%} of a core; sends late by "
        f"p50 {lag.p50:.2f}, p99 {lag.p99:.2f}, max {lag.max:.2f} ms; connections: at most {own.connections_peak:,}, "
        f"{own.waited_for_connection:,} requests had to wait for one."
    )
    if lag.p99 > _LATE_MS or own.cpu_share > _BUSY:
        lines.append(
            "[yellow]The generator itself was late, and these latencies include this: "
            "give it a core of its own, or lower the rate.[/]"
        )
    if report.unreached:
        lines.append("[red]No request got an answer.[/]")
    return lines


def line(record: Record, seconds: float, duration: float) -> str:
    """Describe the progress of a load test of `duration` seconds, `seconds` after its start."""
    sent = sum(record.sent)
    answered = sum(len(stream.answered) for stream in record.streams)
    refused = sum(len(stream.refused) for stream in record.streams)
    failed = sum(stream.failed.total() for stream in record.streams) - refused
    waiting = sent - answered - refused - failed
    words = [f"{sent:,} sent", f"{answered:,} answered"]
    words += [f"{count:,} {outcome}" for count, outcome in ((refused, "refused"), (failed, "failed")) if count]
    return f"{min(seconds, duration):.0f} of {duration:g} s: {', '.join(words)}, {waiting:,} in flight"


async def report_on(record: Record, elapsed: Callable[[], float], duration: float, every: float | None = None) -> None:
    """Write progress lines to standard error until cancelled, then clear the last line of a terminal. `elapsed` returns the
    seconds since the start of the load (negative before it). `every` is the number of seconds between lines. 0 means no lines,
    None the default."""
    if every == 0.0:
        return
    live = sys.stderr.isatty()
    before, after = (_CLEAR, "") if live else ("", "\n")
    try:
        while True:
            await asyncio.sleep((EVERY_ON_TERMINAL if live else EVERY) if every is None else every)
            if (seconds := elapsed()) >= 0.0:
                _write(f"{before}{line(record, seconds, duration)}{after}")
    finally:
        if live:
            _write(_CLEAR)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # The load must not fail because its progress can't be shown.
        sys.stderr.write(text)
        sys.stderr.flush()
