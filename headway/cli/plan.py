"""`headway plan`: how many GPUs a load and a promise need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.waiting import waiting
from headway.config import FIELDS
from headway.simulator.scenario import POLICIES

if TYPE_CHECKING:
    from headway.simulator.planner import Outlook, Plan

_LOAD, _MODEL, _TARGETS, _RESULT = "Load", "Model", "Targets", "Results"


def plan(
    rate: Annotated[
        float, typer.Option(metavar="R", help="Mean requests per second.", rich_help_panel=_LOAD, show_default=False)
    ],
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
    p95: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Highest 95th percentile of latency.", rich_help_panel=_TARGETS),
    ] = None,
    p99: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Highest 99th percentile of latency.", rich_help_panel=_TARGETS),
    ] = None,
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
    overhead_ms: Annotated[
        float,
        typer.Option(metavar="MS", help="Time between a GPU's answer and its next batch.", rich_help_panel=_MODEL),
    ] = 1.5,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrivals as recorded in FILE (CSV with a TIMESTAMP column or one column of seconds), its time scaled "
            "to the rate. By default Poisson.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="|".join(POLICIES), help="When a batch leaves.", rich_help_panel=_MODEL)
    ] = "paced",
    max_wait_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help=FIELDS["max_wait_ms"].help,
            rich_help_panel=_MODEL,
        ),
    ] = None,
    gpu_hour_cost: Annotated[
        float | None,
        typer.Option(metavar="X", help="Price of one GPU for an hour, in any currency.", rich_help_panel=_TARGETS),
    ] = None,
    target_utilisation: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Share of their capacity that GPUs use in a fleet with room for growth and failures.",
            rich_help_panel=_TARGETS,
        ),
    ] = 0.7,
    max_gpus: Annotated[int, typer.Option(metavar="N", help="Most GPUs to consider.", rich_help_panel=_TARGETS)] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same answer.", rich_help_panel=_LOAD)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.", rich_help_panel=_RESULT)] = False,
) -> None:
    """Say how many GPUs a load and a promise need.

    The production policy is simulated with ever more GPUs, from the least that can carry the load, until the
    percentiles meet the targets. A request without an answer counts as later than any target. Beside the answer
    stands how sure it is: 95 % confidence intervals over several seeds, what one GPU less would give, the rate
    at which the targets are no longer met, and whether the answer is on the edge: within 3 % or 2 ms of a target.

    A batch of n entries takes --batch-ms and n times --beta-ms; `headway check` measures both. With --weights it takes
    --batch-ms and its weight times --beta-ms.

    Exit codes: 0 done, 3 a bad setting or a target that cannot be met.
    """
    import msgspec

    from headway.errors import SettingError
    from headway.simulator.batch_times import BATCH_MS_HINT, read_batch_times
    from headway.simulator.planner import Goal, make_plan
    from headway.simulator.scenario import Scenario
    from headway.simulator.traffic import read_trace, read_weights

    if batch_ms is None and batch_times is None:
        raise SettingError("--batch-ms", None, "nothing tells how long a batch takes", BATCH_MS_HINT)
    times = None if batch_times is None else read_batch_times(batch_times)

    scenario = Scenario(
        rate=rate,
        workers=1,
        alpha=(batch_ms or 0.0) / 1000,
        beta=beta_ms / 1000,
        times=times,
        max_batch=max_batch_size if max_batch is None else max_batch,
        weights=read_weights(weights) if weights else times.weights if times else (),
        max_weight=max_batch_weight,
        jitter=jitter,
        overhead=overhead_ms / 1000,
        policy=policy,
        max_wait=None if max_wait_ms is None else max_wait_ms / 1000,
        trace=() if trace is None else read_trace(trace),
        seed=seed,
    )
    goal = Goal(
        scenario=scenario,
        p95=None if p95 is None else p95 / 1000,
        p99=None if p99 is None else p99 / 1000,
        gpu_hour_cost=gpu_hour_cost,
        max_gpus=max_gpus,
        target_utilisation=target_utilisation,
    )
    with waiting("simulating") as doing:
        found = make_plan(goal, lambda text: doing.tell(f"simulating {text}"))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _show(found, "Poisson" if trace is None else trace.name)


def _show(found: Plan, arrivals: str) -> None:
    from headway.load.report import standard_console

    print_line = standard_console().print
    print_line(
        f"[bold]{found.gpus} GPU{'s' if found.gpus > 1 else ''}[/] for {found.rate:,.15g} requests/s ({arrivals}, "
        f"variation of gaps {found.arrivals_cv:.2f})"
    )
    print_line(f"  latency    {_percentiles(found)}")
    print_line(
        f"  load       {found.load:.1%} of their {found.capacity:,.0f} requests/s; "
        f"batches {found.fill:.0%} full, GPUs {found.utilisation:.1%} busy"
    )
    if found.unanswered:
        print_line(f"  unanswered {found.unanswered:.3%} of the requests")
    print_line(f"  headroom   the targets are met up to {found.meets_up_to:,.0f} requests/s")
    if found.with_room > found.gpus:
        share = found.load * found.gpus / found.with_room
        print_line(f"  with room  {found.with_room} GPUs: the load is {share:.0%} of their capacity")
    if found.on_the_edge:
        print_line("  on the edge: so near to the promise, a real run may miss it")
    if found.one_more is not None:
        print_line(f"  one more   {_percentiles(found.one_more)}")
    if found.one_less is None:
        print_line("  one less   could not carry the load")
    else:
        print_line(f"  one less   {_percentiles(found.one_less)}")
    if found.cost is not None:
        print_line(
            f"  cost       {found.cost.per_hour:,.2f} an hour, {found.cost.per_million_requests:,.2f} for a million "
            "requests"
        )
    print_line(
        f"  sureness   ± is the 95 % confidence interval over {found.seeds} seeds, {found.requests:,} requests in all"
    )
    if arrivals != "Poisson":
        print_line("             (of this record only, begun at different places: other days may be burstier)")


def _percentiles(outlook: Outlook) -> str:
    from headway.load.report import figure

    doubt = outlook.doubt_ms
    pairs = (("p50", outlook.p50_ms, doubt.p50), ("p95", outlook.p95_ms, doubt.p95), ("p99", outlook.p99_ms, doubt.p99))
    return ", ".join(f"{name} {figure(value)} ± {figure(error)} ms" for name, value, error in pairs)


if __name__ == "__main__":
    from headway.cli import main

    main(["plan", *sys.argv[1:]])
