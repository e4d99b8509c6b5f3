"""`headway simulate`: run the production policies in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from headway.cli.commands import command, option
from headway.cli.flags import fields_from, with_fields
from headway.cli.terminal import waiting
from headway.errors import SettingError
from headway.simulator.scenario import LENGTHS_HINT, POLICIES, Faults, QueueRules, Scenario, Topology

_SCALING = "Autoscaler"

with_lengths = option("--lengths", metavar="LOW-HIGH|FILE", group="Load",
    help="Lengths of inputs, for a model that pads: uniformly distributed between two whole numbers, or from FILE, which has one length "
    "per line or comes from `headway check --record`.")  # fmt: skip

_DAY_ONLY = {"cold_start_s", "scale_rules", "scale_to_zero_after_s"}
_DAY_TAKES = _DAY_ONLY | {
    "autoscale", "rate", "alpha", "beta", "overhead", "max_batch", "promise", "trace", "seed", "json",
}  # fmt: skip


@command()
@with_fields(Scenario, workers=None, max_batch=32, alpha=None, warmup=None)
@with_fields(Faults)
@with_fields(QueueRules)
@with_fields(Topology)
@with_lengths
@option("--compare", is_flag=True, group="Batching", help="Run every policy on the same arrivals.")
@option("--autoscale", is_flag=True, group=_SCALING,
    help="Simulate a day with the autoscaler instead. Traffic rises and falls, and doubles once within a minute.")  # fmt: skip
@option("--cold-start-s", type=float, default=60.0, metavar="S", group=_SCALING,
    help="Seconds that a new worker takes to start.")  # fmt: skip
@option("--scale-rules", default="", metavar="JSON", group=_SCALING, help="Rules of the autoscaler, as in the setting `scale_rules`.")  # fmt: skip
@option("--scale-to-zero-after-s", type=float, default=0.0, metavar="S", group=_SCALING,
    help="Also simulate removing all workers after this many seconds without a request; 0: always keep one.")  # fmt: skip
@option("--json", is_flag=True, group="Results", help="Print the results as JSON instead of tables.")
@option("--plot", type=Path, metavar="FILE", group="Results",
    help="Draw the latency of each tier and the fill of batches over time into FILE (.png, .svg or .pdf). Needs matplotlib.")  # fmt: skip
@click.pass_context
def simulate(
    ctx: click.Context, /, compare: bool, autoscale: bool, cold_start_s: float, scale_rules: str, scale_to_zero_after_s: float,
    json: bool, plot: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Try a load, a model and settings without a GPU: simulate requests in Headway's own queue.

    headway simulate --rate 200 --workers 2 --batch-ms 100 --promise 400

    The queue, batching policies, admission and retries are those of a real service. Only time, requests, batches and failures are
    simulated, so a run takes seconds. The report shows how many requests were answered, refused and late, their latency, and how
    full the batches were.

    A batch of n inputs takes --batch-ms + n × --beta-ms. With --weights, the batch's weight replaces n. With --batch-times, a batch
    takes as long as similar batches recorded by `headway check --record`. Half of --overhead-ms comes before each batch, half
    after it; every latency includes both.

    With --autoscale, the command instead simulates a day with an hour of doubled traffic: under each policy of the autoscaler
    (`rules`, `plan`), and with a fixed number of GPUs, enough for the busiest minute. --rate is the day's mean without the
    doubling. For each run, the table shows the GPU-hours, also relative to `rules`; the requests answered within --promise, and
    those refused; how often workers were added (ups) and removed (downs); the fewest and most workers; and the load as a share
    of the workers' capacity.
    With --scale-to-zero-after-s, both policies are also tried without workers in quiet times. The table then also has the hours
    without a worker, the starts from zero, the requests that waited for such a start (up to --request-timeout-ms), and those that
    got 503.

    Exit codes: 0 done, 3 a bad setting.
    """
    from headway.simulator.batch_times import BATCH_MS_HINT

    _refuse_idle(ctx, autoscale=autoscale, to_zero=bool(scale_to_zero_after_s))
    if given["alpha"] is None and given["times"] is None and not autoscale:
        raise SettingError("--batch-ms", "", "must be given, unless --batch-times is", BATCH_MS_HINT)
    if autoscale:
        _simulate_day(given, cold_start_s, scale_rules, scale_to_zero_after_s, json=json)
        return
    if given["workers"] is None:
        raise click.BadParameter("it is required, except with --autoscale", param_hint="--workers")
    scenario = _scenario(given)
    trace, clients = given["trace"], given["clients"]
    arrivals = f"{clients} clients" if clients else Path(trace).name if trace else "Poisson"
    _run(scenario, POLICIES if compare else (scenario.policy,), plot, arrivals, json=json)


def scenario_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of options to fields of Scenario, and read the files that options name."""
    from headway.simulator.batch_times import read_batch_times
    from headway.simulator.traffic import read_trace, read_weights

    values = fields_from(Scenario, given)
    values["queue"] = QueueRules(**fields_from(QueueRules, given))
    times = values["times"] = None if given["times"] is None else read_batch_times(Path(given["times"]))
    values["alpha"] = values["alpha"] or 0.0
    weights, lengths, trace = given["weights"], given["lengths"], given["trace"]
    if lengths and (weights or not (given["padded"] or times)):
        other = "Give --padded, or if the model's time depends on the weight, --weights instead."
        hint = "Leave --weights out." if weights else other
        raise SettingError("--lengths", lengths, "is for models that pad", hint)
    if given["padded"] and times:
        raise SettingError("--padded", True, "has no effect with --batch-times", "Leave one of them out.")
    if lengths:
        values["weights"] = read_weights(lengths, "--lengths", LENGTHS_HINT)
    else:
        values["weights"] = read_weights(weights) if weights else times.weights if times else ()
    values["trace"] = read_trace(Path(trace)) if trace else ()
    return values


def _scenario(given: Mapping[str, Any]) -> Scenario:
    from headway.load.spec import parse_mix
    from headway.simulator.planner import SETTLING
    from headway.simulator.scenario import EVERYBODY, USUAL_MIX, parse_kills, parse_steps

    mix, warmup = given["mix"] or "", given["warmup"]
    values = scenario_values(given) | {
        "steps": parse_steps(given["steps"]),
        "faults": Faults(**fields_from(Faults, given) | {"kills": parse_kills(given["kills"])}),
        "topology": Topology(**fields_from(Topology, given)),
        "mix": USUAL_MIX if mix == "usual" else parse_mix(mix) or {EVERYBODY: 1.0},
        "warmup": warmup or 0.0,
    }
    scenario = Scenario(**values)
    if warmup is not None:
        return scenario
    return replace(scenario, warmup=min(SETTLING * scenario.cycle(scenario.max_batch), scenario.duration / 2))


def _run(scenario: Scenario, policies: Sequence[str], plot: Path | None, arrivals: str, *, json: bool) -> None:
    import msgspec

    from headway.simulator.engine import simulate as run
    from headway.simulator.report import describe, make_report, show

    if plot is not None:
        from headway.simulator.plot import check, draw

        check(plot)
    records, reports = [], []
    for name in policies:
        with waiting(f"simulating {scenario.duration:g} s under {name}"):
            records.append(run(replace(scenario, policy=name)))
            reports.append(make_report(records[-1]))
    if plot is not None:
        draw(records, plot)
    if json:
        result = {"command": ["headway", *sys.argv[1:]], "scenario": describe(scenario), "reports": reports}
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        show(scenario, reports, arrivals)


def _refuse_idle(ctx: click.Context, *, autoscale: bool, to_zero: bool) -> None:
    """Raise SettingError for the first option on the command line that has no effect on this kind of run."""
    of_day = _DAY_TAKES | ({"timeout"} if to_zero else set())
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        idle = name not in of_day if autoscale else name in _DAY_ONLY
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
    given: Mapping[str, Any], cold_start_s: float, scale_rules: str, zero_after_s: float, *, json: bool
) -> None:
    import msgspec

    from headway.core.scaling import rules
    from headway.core.scaling.scaler import PLAN, RULES, ScaleLimits
    from headway.core.scaling.sizing import BatchCost
    from headway.simulator.day import POLICIES as SCALE_POLICIES
    from headway.simulator.day import Day, DayReport, day_arrivals, simulate_day
    from headway.simulator.report import show_day
    from headway.simulator.traffic import read_trace

    if given["alpha"] is None:
        hint = "Write the fixed part of a batch's time in ms, for example 100."
        raise SettingError("--batch-ms", "", "is required if --autoscale is given", hint)
    try:
        chosen = rules.read(scale_rules)
    except rules.NoRules as exc:
        hint = 'For example [{"queue_above": 500, "for_s": 30, "add": 3}].'
        raise SettingError("--scale-rules", scale_rules, f"cannot be read: {exc}", hint) from None
    values, trace = fields_from(Scenario, given) | fields_from(QueueRules, given), given["trace"]
    day = Day(
        rate=values["rate"], cost=BatchCost(values["alpha"] + values["overhead"], values["beta"], values["max_batch"]),
        promise=0.2 if values["promise"] is None else values["promise"], start=cold_start_s,
        trace=read_trace(Path(trace)) if trace else (), limits=ScaleLimits(rules=chosen), timeout=values["timeout"],
        seed=values["seed"],
    )  # fmt: skip
    traffic = day_arrivals(day)
    with waiting("simulating a day") as progress:

        def run(day: Day, policy: str) -> DayReport:
            return simulate_day(day, policy, lambda text: progress.tell(f"simulating {text}"), traffic)

        reports = [run(day, policy) for policy in SCALE_POLICIES]
        if zero_after_s:
            to_zero = msgspec.structs.replace(day, limits=msgspec.structs.replace(day.limits, idle_after=zero_after_s))
            zero_reports = [run(to_zero, policy) for policy in (RULES, PLAN)]
            reports += [msgspec.structs.replace(report, policy=f"{report.policy}, to zero") for report in zero_reports]
    if json:
        result = {"command": ["headway", *sys.argv[1:]], "reports": reports}
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        arrivals = Path(trace).name if trace else "Poisson"
        show_day(reports, f"A day of {day.rate:g} requests/s ({arrivals}), starts of {cold_start_s:g} s")
