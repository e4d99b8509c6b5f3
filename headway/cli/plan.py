"""`headway plan`: find the number of GPUs that a load needs to meet its latency targets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.cli.commands import command, option
from headway.cli.flags import with_fields
from headway.cli.simulate import scenario_values, with_lengths
from headway.cli.terminal import waiting
from headway.simulator.scenario import QueueRules, Scenario

if TYPE_CHECKING:
    from headway.simulator.planner import Plan, Prediction

_TARGETS = "Targets"
_FIELDS = (
    "rate", "alpha", "times", "max_batch", "beta", "padded", "weights", "max_weight", "jitter", "overhead", "trace", "policy", "seed",
)  # fmt: skip


@command()
@with_fields(Scenario, _FIELDS, required=("rate",), alpha=None, max_batch=32)
@with_fields(QueueRules, ("max_wait",))
@with_lengths
@option("--p95", type=float, metavar="MS", group=_TARGETS, help="Highest allowed 95th percentile of latency.")
@option("--p99", type=float, metavar="MS", group=_TARGETS, help="Highest allowed 99th percentile of latency.")
@option("--gpu-hour-cost", type=float, metavar="X", group=_TARGETS, help="Price of one GPU for an hour, in any currency.")  # fmt: skip
@option("--target-utilisation", type=float, default=0.7, metavar="X", group=_TARGETS,
    help="Share of the capacity that the load may use if there is to be room for growth and failures.")  # fmt: skip
@option("--max-gpus", type=int, default=2000, metavar="N", group=_TARGETS, help="Largest number of GPUs to consider.")
@option("--bulk", is_flag=True, group="Results",
    help="Also estimate how many lines of bulk jobs per second the spare capacity can run.")  # fmt: skip
@option("--json", is_flag=True, group="Results", help="Print the plan as JSON.")
def plan(
    p95: float | None, p99: float | None, gpu_hour_cost: float | None, target_utilisation: float, max_gpus: int, bulk: bool,
    json: bool, **given: Any,
) -> None:  # fmt: skip
    """Find out how many GPUs you need to answer --rate requests per second within --p95 or --p99.

    headway plan --rate 2000 --batch-ms 100 --p95 300

    The plan simulates Headway's own queue and batching policy. It begins with the fewest GPUs that can carry the load, and adds one
    GPU at a time until the latency meets the targets. A request without an answer counts as late. The plan shows 95 % confidence
    intervals over several seeds, the latency with one GPU fewer, and the highest rate that still meets the targets. It warns if the
    result is within 3 % or 2 ms of a target.

    A batch of n inputs takes --batch-ms + n × --beta-ms; `headway check` measures both. With --weights, the batch's weight replaces
    n. With --padded, a batch takes --batch-ms + n × its longest input × --beta-ms, split into as many calls as workers would make.
    The plan then also shows how many GPUs would be needed if inputs ran in the order of arrival, all in one call.

    Exit codes: 0 done, 3 a bad setting or a target that cannot be met.
    """
    import msgspec

    from headway.errors import SettingError
    from headway.simulator.batch_times import BATCH_MS_HINT
    from headway.simulator.planner import Goal, make_plan

    if given["alpha"] is None and given["times"] is None:
        raise SettingError("--batch-ms", None, "must be given, unless --batch-times is", BATCH_MS_HINT)
    goal = Goal(
        scenario=Scenario(workers=1, **scenario_values(given)), p95=None if p95 is None else p95 / 1000,
        p99=None if p99 is None else p99 / 1000, gpu_hour_cost=gpu_hour_cost, max_gpus=max_gpus,
        target_utilisation=target_utilisation, bulk=bulk,
    )  # fmt: skip
    with waiting("simulating") as progress:
        result = make_plan(goal, lambda text: progress.tell(f"simulating {text}"))
    if json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        _show(result, Path(given["trace"]).name if given["trace"] else "Poisson")


def _show(plan: Plan, arrivals: str) -> None:
    from headway.load.report import standard_console

    show = standard_console().print
    gaps, busy = f"variation of gaps {plan.arrivals_cv:.2f}", f"GPUs {plan.utilisation:.1%} busy"
    show(f"[bold]{_gpus(plan.gpus)}[/] for {plan.rate:,.15g} requests/s ({arrivals}, {gaps})")
    show(f"  latency    {_percentiles(plan)}")
    show(f"  load       {plan.load:.1%} of their {plan.capacity:,.0f} requests/s; batches {plan.fill:.0%} full, {busy}")
    if plan.unanswered:
        show(f"  unanswered {plan.unanswered:.3%} of the requests")
    show(f"  headroom   the targets are met up to about {plan.meets_up_to:,.0f} requests/s")
    if plan.with_room > plan.gpus:
        share = plan.load * plan.gpus / plan.with_room
        show(f"  with room  {plan.with_room} GPUs: the load is {share:.0%} of their capacity")
    if plan.first_come is not None:
        show(f"  in order of arrival, all in one call, inputs would need {_gpus(plan.first_come)}")
    if plan.bulk is not None:
        show(f"  bulk       {plan.bulk:,.0f} lines/s of bulk jobs on the spare capacity")
    if plan.on_the_edge:
        show("  on the edge: this is so close to the target that a real run may miss it")
    if plan.one_more is not None:
        show(f"  one more   {_percentiles(plan.one_more)}")
    if plan.one_less is None:
        show("  one less   could not carry the load")
    else:
        show(f"  one less   {_percentiles(plan.one_less)}")
    if (cost := plan.cost) is not None:
        show(f"  cost       {cost.per_hour:,.2f} an hour, {cost.per_million_requests:,.2f} for a million requests")
    show(f"  confidence ± is the 95 % confidence interval over {plan.seeds} seeds, {plan.requests:,} requests in all")
    if arrivals != "Poisson":
        show("             (for this trace only, started at different points: other days may be burstier)")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _percentiles(prediction: Prediction) -> str:
    from headway.load.report import figure

    doubt = prediction.doubt_ms
    pairs = (
        ("p50", prediction.p50_ms, doubt.p50),
        ("p95", prediction.p95_ms, doubt.p95),
        ("p99", prediction.p99_ms, doubt.p99),
    )
    return ", ".join(f"{name} {figure(value)} ± {figure(error)} ms" for name, value, error in pairs)
