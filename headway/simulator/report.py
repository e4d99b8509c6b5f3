"""Reports on simulations: exact percentiles (nearest rank), shares and rates, and tables of these. Times are in milliseconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.core.scaling.scaler import RULES
from headway.load.report import Latency, figure, figures, latency_ms, spacing, standard_console, table_of
from headway.load.report import percentile as percentile
from headway.simulator.day import DayReport
from headway.simulator.record import EXPIRED, FAILED, REFUSED, Record
from headway.simulator.scenario import Scenario


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the requests of one tier, or of all tiers. The four kinds of outcomes add up to `requests`."""

    requests: int
    answered: int  # Requests answered before their deadline.
    refused: int  # Requests that were not admitted.
    expired: int  # Requests that were admitted but not answered before their deadline.
    failed: int  # Requests that were given up because their batches failed.
    reasons: dict[str, int]  # Losses by kind and reason, such as `refused: shed`.
    in_time: int | None  # Answers within the promise; null if there is none.
    goodput: float  # Answers per second; if there is a promise, only those within it.
    latency_ms: Latency  # Latencies of answers.


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of batches."""

    count: int
    mean_size: float  # Mean number of entries.
    fill: float  # Mean share of a full batch, by number or by weight.
    reasons: dict[str, int]  # Number of batches by the reason why they started.
    gap_ms: float  # Mean gap between starts.
    gap_cv: float  # Coefficient of variation of these gaps: 0 if regular, 1 if random, higher if bunched.
    shard_gap_cv: float | None  # Mean of `gap_cv` over the shards, which are independent; null without shards.
    stolen: float  # Share of batches claimed by workers with another home shard.


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """The queue's final estimates: arrivals per second, and ℓ(n) = α + βn with its standard deviation."""

    rate: float
    alpha_ms: float
    beta_ms: float
    deviation_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one simulation after its warm-up."""

    policy: str
    workers: int  # Number of GPUs.
    capacity: float  # Most requests per second that they can answer, if all batches are full.
    arrivals_cv: float  # Coefficient of variation of the gaps between arrivals (`Record.gap_variation`).
    offered_rate: float  # Requests per second that arrived.
    total: Flow
    tiers: dict[str, Flow]  # By tier, highest first, if there are several.
    batches: Batches
    utilisation: float  # Share of time for which the GPUs ran batches.
    down: float  # Share of time for which the GPUs were dead.
    deaths: int
    retried: int  # Entries that were rerun because their batch failed.
    estimates: Estimates
    bulk: float | None = None  # Bulk lines answered per second; null if the scenario has none.


def make_report(record: Record) -> Report:
    """Create the report on a finished simulation."""
    scenario = record.scenario
    seconds = scenario.duration - scenario.warmup
    tiers = range(len(scenario.mix))
    gpu_seconds = seconds * scenario.workers
    rate, alpha, beta, deviation = record.estimates
    latencies: list[list[float]] = [[] for _ in tiers]
    for latency, tier in zip(record.latency, record.tier, strict=True):
        latencies[tier].append(latency)
    return Report(
        policy=scenario.policy,
        workers=scenario.workers,
        capacity=scenario.capacity,
        arrivals_cv=record.gap_variation,
        offered_rate=sum(record.offered) / seconds,
        total=_flow(record, tiers, record.latency, seconds),
        tiers={
            name: _flow(record, (index,), latencies[index], seconds)
            for index, name in enumerate(scenario.mix)
            if len(scenario.mix) > 1
        },
        batches=_batches(record),
        utilisation=record.busy / gpu_seconds,
        down=record.down / gpu_seconds,
        deaths=record.deaths,
        retried=record.retried,
        estimates=Estimates(rate=rate, alpha_ms=alpha * 1000, beta_ms=beta * 1000, deviation_ms=deviation * 1000),
        bulk=record.bulk / seconds if scenario.bulk else None,
    )


def _flow(record: Record, tiers: Sequence[int], latencies: Sequence[float], seconds: float) -> Flow:
    promise = record.scenario.queue.promise
    reasons: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (kind, reason, tier), count in record.lost.items():
        if tier in tiers:
            kinds[kind] += count
            reasons[f"{kind}: {reason}"] += count
    in_time = None if promise is None else sum(latency <= promise for latency in latencies)
    return Flow(
        requests=sum(record.offered[tier] for tier in tiers), answered=len(latencies), refused=kinds[REFUSED],
        expired=kinds[EXPIRED], failed=kinds[FAILED], reasons=dict(reasons.most_common()), in_time=in_time,
        goodput=(len(latencies) if in_time is None else in_time) / seconds, latency_ms=latency_ms(latencies),
    )  # fmt: skip


def _batches(record: Record) -> Batches:
    count = len(record.left_at)
    mean_size = sum(record.size) / count if count else 0.0
    gap, variation = spacing(record.left_at)
    return Batches(
        count=count, mean_size=mean_size, fill=record.filled / count if count else 0.0, reasons=dict(record.reasons.most_common()),
        gap_ms=gap * 1000, gap_cv=variation, shard_gap_cv=_shard_variation(record) if record.scenario.topology.shards > 1 else None,
        stolen=record.stolen / count if count else 0.0,
    )  # fmt: skip


def _shard_variation(record: Record) -> float | None:
    left: dict[int, list[float]] = {}
    for instant, shard in zip(record.left_at, record.shard, strict=True):
        left.setdefault(shard, []).append(instant)
    variations = [spacing(instants)[1] for instants in left.values() if len(instants) > 2]
    return math.fsum(variations) / len(variations) if variations else None


def describe(scenario: Scenario) -> dict[str, object]:
    """Return a scenario as plain values for JSON. Trace, weights and recorded times are replaced by their lengths."""
    values = vars(scenario) | {name: len(getattr(scenario, name) or ()) for name in ("trace", "weights", "times")}
    groups = [vars(values.pop(name)) for name in ("faults", "queue", "topology")]
    return {name: msgspec.to_builtins(value) for group in (values, *groups) for name, value in group.items()}


def show(scenario: Scenario, reports: Sequence[Report], arrivals: str, console: Console | None = None) -> None:
    """Print the reports on one scenario, one for each policy. `arrivals` names the arrival process, such as `poisson`."""
    console = console or standard_console()
    first = reports[0]
    console.print(
        f"[bold]{first.offered_rate:,.1f} requests/s[/] ({escape(arrivals)}, variation of gaps "
        f"{first.arrivals_cv:.2f}) on [bold]{scenario.workers} GPUs[/] for {first.capacity:,.0f} requests/s in total; "
        f"{scenario.duration - scenario.warmup:.1f} s after {scenario.warmup:.1f} s of warm-up, seed {scenario.seed}"
    )
    console.print(_latencies(scenario, reports))
    console.print(_departures(reports))
    if any(report.total.answered < report.total.requests for report in reports):
        console.print(_losses(reports))
    for report in reports:
        if report.bulk is not None:
            console.print(f"{report.bulk:,.0f} bulk lines/s in empty seats ({report.policy}).")
    if first.deaths:
        console.print(f"{first.deaths} worker deaths; GPUs were down for {first.down:.2%} of the time.")


def _latencies(scenario: Scenario, reports: Sequence[Report]) -> Table:
    names = ["requests", "answered", "p50", "p95", "p99", "max", "answers/s"]
    if scenario.queue.promise is not None:
        names[-1] = f"within {scenario.queue.promise * 1000:g} ms/s"
    table = table_of("Latency of answers, in ms", ["policy", "tier"], names)
    for report in reports:
        for tier, flow in report.tiers.items():
            table.add_row(report.policy, escape(tier), *_cells(flow))
        table.add_row(report.policy, "all" if report.tiers else "", *_cells(report.total), style="bold")
    return table


def _cells(flow: Flow) -> list[str]:
    latency = flow.latency_ms
    percentiles = figures(latency, latency.p50, latency.p95, latency.p99, latency.max)
    return [f"{flow.requests:,}", f"{flow.answered:,}", *percentiles, f"{flow.goodput:,.1f}"]


def _departures(reports: Sequence[Report]) -> Table:
    sharded = any(report.batches.shard_gap_cv is not None for report in reports)
    shard_columns = ("in a shard", "stolen") if sharded else ()
    columns = ("batches", "size", "fill", "gap ms", "variation of gaps", *shard_columns, "GPUs busy")
    table = table_of("Departures", ["policy"], columns)
    table.add_column("left because", no_wrap=True)
    for report in reports:
        batches = report.batches
        reasons = " ".join(f"{name} {count / batches.count:.0%}" for name, count in batches.reasons.items())
        table.add_row(
            report.policy, f"{batches.count:,}", f"{batches.mean_size:.1f}", f"{batches.fill:.0%}", figure(batches.gap_ms),
            f"{batches.gap_cv:.2f}", *(_shard_cells(batches) if sharded else ()), f"{report.utilisation:.1%}", reasons,
        )  # fmt: skip
    return table


def _shard_cells(batches: Batches) -> tuple[str, str]:
    variation = batches.shard_gap_cv
    return "–" if variation is None else f"{variation:.2f}", f"{batches.stolen:.1%}"


def _losses(reports: Sequence[Report]) -> Table:
    names = sorted({reason for report in reports for reason in report.total.reasons})
    table = table_of("Requests without an answer", ["policy", "tier"], [*names, "share"])
    for report in reports:
        for tier, flow in (report.tiers or {"": report.total}).items():
            share = 1 - flow.answered / flow.requests if flow.requests else 0.0
            counts = (f"{flow.reasons.get(name, 0):,}" for name in names)
            table.add_row(report.policy, escape(tier), *counts, f"{share:.2%}")
    return table


def show_day(reports: Sequence[DayReport], title: str) -> None:
    """Print a line for each policy. The first report must be that of RULES."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = ["policy", "GPU-hours", f"of {RULES}", "in promise", "refused", "ups", "downs", "workers", "load"]
    zero = any(report.zero_hours for report in reports)
    for name in (*names, *(("at zero", "starts", "held", "503") if zero else ())):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for report in reports:
        zero_cells = (
            f"{report.zero_hours:,.1f} h", str(report.starts), f"{report.held:,.0f}", f"{report.sent_away:,.0f}",
        )  # fmt: skip
        table.add_row(
            report.policy, f"{report.gpu_hours:,.{1 if zero else 0}f}", f"{report.gpu_hours / reports[0].gpu_hours:.2f}",
            f"{report.within:.2%}", f"{report.refused:.2%}", str(report.ups), str(report.downs), f"{report.fewest}–{report.most}",
            f"{report.utilisation:.0%}", *(zero_cells if zero else ()),
        )  # fmt: skip
    standard_console().print(table)
