"""`headway simulate`: the production policies under virtual time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.waiting import waiting
from headway.config import FIELDS
from headway.errors import SettingError
from headway.simulator.scenario import EVERYBODY, POLICIES, USUAL_MIX, Scenario, parse_kills, parse_steps

_LOAD, _MODEL, _BATCHING, _FLEET = "Load", "Model and GPUs", "Batching", "Gateways and shards"
_FAILURES, _RESULT, _SCALING = "Failures", "Results", "Autoscaler"
_SETTLING = 75.0
"""Batch times of warm-up by default, as a fleet that starts in step near saturation needs so many to spread."""


_DAY_ONLY = {"cold_start_s", "scale_rules"}
_DAY_TAKES = _DAY_ONLY | {
    "autoscale", "rate", "batch_ms", "beta_ms", "overhead_ms", "max_batch_size", "max_batch", "promise", "trace", "seed",
    "json",
}  # fmt: skip
"""Parameters that a day under the autoscaler goes by."""


def simulate(
    ctx: typer.Context,
    workers: Annotated[
        int | None,
        typer.Option(metavar="K", help="GPUs; not with --autoscale.", rich_help_panel=_MODEL, show_default=False),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(
            metavar="R",
            help="Mean requests per second; with --autoscale the mean of the daily wave, before the doubling.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = 0.0,
    clients: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Instead: clients, each of which sends its next request when it has the answer to the last one.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = 0,
    batch_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Fixed part of a batch's time (α).", rich_help_panel=_MODEL, show_default=False
        ),
    ] = None,
    batch_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead: times that `headway check --record` has written. Entries weigh what those in FILE do, "
            "unless --weights says otherwise.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(metavar="N", help="Largest batch.", rich_help_panel=_MODEL)] = 32,
    max_batch: Annotated[int | None, typer.Option(hidden=True, help="The same as --max-batch-size.")] = None,
    beta_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            help="Time that each entry, or each unit of --weights, adds to a batch (β).",
            rich_help_panel=_MODEL,
        ),
    ] = 0.0,
    weights: Annotated[
        str,
        typer.Option(
            metavar="LOW-HIGH|FILE",
            help="What entries weigh: evenly between two whole numbers, or as the lines of FILE. A batch's time then goes "
            "by weight.",
            rich_help_panel=_LOAD,
        ),
    ] = "",
    max_batch_weight: Annotated[
        int, typer.Option(metavar="N", help="Most weight of a batch; 0: no bound.", rich_help_panel=_MODEL)
    ] = 0,
    jitter: Annotated[
        float,
        typer.Option(metavar="X", help="Standard deviation of a batch's time over its mean.", rich_help_panel=_MODEL),
    ] = 0.0,
    slow: Annotated[
        float,
        typer.Option(
            metavar="X", help="How many times as long the first of the GPUs takes.", rich_help_panel=_FAILURES
        ),
    ] = 1.0,
    overhead_ms: Annotated[
        float,
        typer.Option(metavar="MS", help="Time between a GPU's answer and its next batch.", rich_help_panel=_MODEL),
    ] = 1.5,
    policy: Annotated[
        str,
        typer.Option(metavar="|".join(POLICIES), help="When a batch leaves.", rich_help_panel=_BATCHING),
    ] = "paced",
    compare: Annotated[
        bool, typer.Option("--compare", help="Run every policy on the same arrivals.", rich_help_panel=_BATCHING)
    ] = False,
    max_wait_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help=FIELDS["max_wait_ms"].help,
            rich_help_panel=_BATCHING,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrivals as recorded in FILE (CSV with a TIMESTAMP column or one column of seconds), its time scaled "
            "to the rate. By default Poisson.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(metavar="S=R", help="From second S on, R requests per second. Repeatable.", rich_help_panel=_LOAD),
    ] = None,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of load.", rich_help_panel=_LOAD)] = 60.0,
    warmup: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds at the start to leave out of the results. By default 75 batch times, at most half of the "
            "duration.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    mix: Annotated[
        str,
        typer.Option(
            metavar="TIER=WEIGHT,…",
            help="Tiers and their weights, highest first, or `usual` for enterprise=5,paid=25,free=70.",
            rich_help_panel=_LOAD,
        ),
    ] = "",
    tenants: Annotated[int, typer.Option(metavar="N", help="Equal tenants in each tier.", rich_help_panel=_LOAD)] = 1,
    queue_timeout_ms: Annotated[
        float, typer.Option(metavar="MS", help="Longest wait in the queue.", rich_help_panel=_BATCHING)
    ] = 2000.0,
    request_timeout_ms: Annotated[
        float, typer.Option(metavar="MS", help="Longest time for a request in all.", rich_help_panel=_BATCHING)
    ] = 4000.0,
    target_utilisation: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Share of the measured capacity above which the lowest of several tiers is held to what the others "
            "leave.",
            rich_help_panel=_BATCHING,
        ),
    ] = 1.0,
    gateways: Annotated[
        int, typer.Option(metavar="N", help="Gateways that requests come through.", rich_help_panel=_FLEET)
    ] = 1,
    gather_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            help="Time for which a gateway gathers entries before it calls the queue.",
            rich_help_panel=_FLEET,
        ),
    ] = 0.0,
    shards: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Shards that the queue may be cut into; each in use has a few GPUs at least.",
            rich_help_panel=_FLEET,
        ),
    ] = 1,
    zones: Annotated[
        int,
        typer.Option(
            metavar="N", help="Zones of the GPUs and gateways, each with a queue of its own.", rich_help_panel=_FLEET
        ),
    ] = 1,
    fail_every: Annotated[
        float,
        typer.Option(
            metavar="S", help="Mean seconds between two deaths of one worker; 0: never.", rich_help_panel=_FAILURES
        ),
    ] = 0.0,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="S=N", help="At second S, N workers die. Repeatable.", rich_help_panel=_FAILURES),
    ] = None,
    restart_s: Annotated[
        float, typer.Option(metavar="S", help="Seconds until a dead worker serves again.", rich_help_panel=_FAILURES)
    ] = 5.0,
    poison: Annotated[
        float,
        typer.Option(
            metavar="X", help="Share of inputs that make any batch they are in fail.", rich_help_panel=_FAILURES
        ),
    ] = 0.0,
    promise: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Latency promise, to count the answers in time.", rich_help_panel=_RESULT),
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Instead: a day of traffic under the autoscaler, with a daily wave and a doubling within a minute.",
            rich_help_panel=_SCALING,
        ),
    ] = False,
    cold_start_s: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds until a worker that was asked for serves.", rich_help_panel=_SCALING),
    ] = 60.0,
    scale_rules: Annotated[
        str, typer.Option(metavar="JSON", help="Rules, as the setting of that name has them.", rich_help_panel=_SCALING)
    ] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same run.", rich_help_panel=_LOAD)] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON instead of tables.", rich_help_panel=_RESULT)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the run into FILE, such as run.png: latency of each tier and fill of the batches over time; .png, .svg or "
            ".pdf. Needs matplotlib.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
) -> None:
    """Run the production queue and policies under virtual time.

    Requests, batches and failures are events on a heap; the queue, the policies, admission and retries are those
    that serve. Half of the overhead lies before a batch's run and half after, and it is part of every latency. A
    batch of n entries takes --batch-ms and n times --beta-ms or, with --weights, its weight times --beta-ms. With
    --batch-times it takes what recorded batches like it took.

    With --autoscale it is a day under the autoscaler's policies, `rules` and `plan`, beside as many GPUs as the busiest
    minute needs: arrivals are counted by the second, and the load waits as a level. Its columns: GPU-hours of the day, and as a
    share of those of `rules`; requests answered within --promise, and requests refused; decisions for more workers
    (ups) and for fewer (downs); fewest and most workers; and the load as a share of what the workers could carry.

    Exit codes: 0 done, 3 a bad setting.
    """
    from headway.load.spec import parse_mix
    from headway.simulator.batch_times import BATCH_MS_HINT, read_batch_times
    from headway.simulator.traffic import read_trace, read_weights

    _refuse_idle(ctx, autoscale=autoscale)
    if batch_ms is None and batch_times is None and not autoscale:
        raise SettingError("--batch-ms", "", "nothing tells how long a batch takes", BATCH_MS_HINT)
    times = None if batch_times is None else read_batch_times(batch_times)

    if autoscale:
        _simulate_day(
            rate, batch_ms, beta_ms, overhead_ms, max_batch_size if max_batch is None else max_batch,
            promise, cold_start_s, scale_rules, trace, seed, json=json,
        )  # fmt: skip
        return
    if workers is None:
        raise typer.BadParameter(
            "it is missing, and --autoscale, which needs none, is not there", param_hint="--workers"
        )
    largest = max_batch_size if max_batch is None else max_batch
    scenario = Scenario(
        rate=rate,
        clients=clients,
        workers=workers,
        alpha=(batch_ms or 0.0) / 1000,
        beta=beta_ms / 1000,
        times=times,
        max_batch=largest,
        weights=read_weights(weights) if weights else times.weights if times else (),
        max_weight=max_batch_weight,
        jitter=jitter,
        slow=slow,
        overhead=overhead_ms / 1000,
        policy=policy,
        max_wait=None if max_wait_ms is None else max_wait_ms / 1000,
        trace=() if trace is None else read_trace(trace),
        steps=parse_steps(step or ()),
        duration=duration,
        warmup=0.0 if warmup is None else warmup,
        mix=USUAL_MIX if mix == "usual" else parse_mix(mix) or {EVERYBODY: 1.0},
        tenants=tenants,
        queue_timeout=queue_timeout_ms / 1000,
        timeout=request_timeout_ms / 1000,
        target_utilisation=target_utilisation,
        promise=None if promise is None else promise / 1000,
        gateways=gateways,
        gather=gather_ms / 1000,
        shards=shards,
        zones=zones,
        fail_every=fail_every,
        kills=parse_kills(kill or ()),
        restart=restart_s,
        poison=poison,
        seed=seed,
    )
    if warmup is None:
        scenario = replace(scenario, warmup=min(_SETTLING * scenario.cycle(largest), duration / 2))
    arrivals = f"{clients} clients" if clients else "Poisson" if trace is None else trace.name
    _run(scenario, POLICIES if compare else (policy,), plot, arrivals, json=json)


def _run(scenario: Scenario, policies: Sequence[str], plot: Path | None, arrivals: str, *, json: bool) -> None:
    """Simulate a scenario under each of the policies, and show what came of it. `arrivals` names what its requests follow."""
    import msgspec

    from headway.simulator.engine import simulate as run
    from headway.simulator.report import describe, make_report, show

    if plot is not None:
        from headway.simulator.plot import check

        check(plot)
    records, reports = [], []
    for name in policies:
        with waiting(f"simulating {scenario.duration:g} s under {name}"):
            records.append(run(replace(scenario, policy=name)))
            reports.append(make_report(records[-1]))
    if plot is not None:
        from headway.simulator.plot import draw

        draw(records, plot)
    if json:
        found = {"command": ["headway", *sys.argv[1:]], "scenario": describe(scenario), "reports": reports}
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        show(scenario, reports, arrivals)


def _refuse_idle(ctx: typer.Context, *, autoscale: bool) -> None:
    """Refuse the first option that was given and has no effect on this kind of run.

    Raises:
        SettingError: there is one.
    """
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        idle = name not in _DAY_TAKES if autoscale else name in _DAY_ONLY
        if not idle or source is None or source.name != "COMMANDLINE":
            continue
        given = ctx.params[name]
        value = str(given) if isinstance(given, Path) else " ".join(given) if isinstance(given, list | tuple) else given
        if autoscale:
            reason, hint = "has no effect on a day under the autoscaler", "Leave it out, or leave out --autoscale."
        else:
            reason, hint = "has no effect without --autoscale", "Leave it out, or give --autoscale, too."
        raise SettingError(parameter.opts[0], value, reason, hint)


def _simulate_day(
    rate: float,
    batch_ms: float | None,
    beta_ms: float,
    overhead_ms: float,
    max_batch: int,
    promise: float | None,
    cold_start_s: float,
    scale_rules: str,
    trace: Path | None,
    seed: int,
    *,
    json: bool,
) -> None:
    """Run a day under each policy of the autoscaler, and print what each took."""
    import msgspec

    from headway.core.scaling import rules
    from headway.core.scaling.scaler import ScaleLimits
    from headway.core.scaling.sizing import BatchCost
    from headway.simulator.day import POLICIES as SCALE_POLICIES
    from headway.simulator.day import Day, simulate_day
    from headway.simulator.report import show_day
    from headway.simulator.traffic import read_trace

    if batch_ms is None:
        hint = "Write the fixed part of a batch's time in ms, for example 100."
        raise SettingError("--batch-ms", "", "--autoscale needs to know how long a batch takes", hint)
    try:
        chosen = rules.read(scale_rules)
    except rules.NoRules as exc:
        hint = 'For example [{"queue_above": 500, "for_s": 30, "add": 3}].'
        raise SettingError("--scale-rules", scale_rules, f"cannot be read: {exc}", hint) from None
    day = Day(
        rate=rate,
        cost=BatchCost((batch_ms + overhead_ms) / 1000, beta_ms / 1000, max_batch),
        promise=0.2 if promise is None else promise / 1000,
        start=cold_start_s,
        trace=() if trace is None else read_trace(trace),
        limits=ScaleLimits(rules=chosen),
        seed=seed,
    )
    with waiting("simulating a day") as doing:
        reports = [
            simulate_day(day, policy, lambda text: doing.tell(f"simulating {text}")) for policy in SCALE_POLICIES
        ]
    if json:
        found = {"command": ["headway", *sys.argv[1:]], "reports": reports}
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        arrivals = "Poisson" if trace is None else trace.name
        show_day(reports, f"A day of {rate:g} requests/s ({arrivals}), starts of {cold_start_s:g} s")


if __name__ == "__main__":
    from headway.cli import main

    main(["simulate", *sys.argv[1:]])
