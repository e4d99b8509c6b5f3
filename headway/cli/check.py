"""`headway check`: check that a target follows the rules, and measure how long its batches take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headway.cli.commands import command, option
from headway.cli.flags import with_settings
from headway.cli.terminal import waiting
from headway.config import CHARS, FIELDS, Settings, flag
from headway.config.target import RemoteTarget, shown_target
from headway.core.deadlines import fitting
from headway.core.service_model import ServiceModel
from headway.errors import SettingError, TargetError
from headway.model import ALL_PARAMETERS, CostShape

if TYPE_CHECKING:
    from headway.app.backends import SlotPlan
    from headway.cli.trial import Findings

_SETTINGS = (
    "model",
    "max_batch_size",
    "max_batch_weight",
    "weight",
    "gpu_timeout_ms",
    "queue_timeout_ms",
    "request_timeout_ms",
    "start_timeout_ms",
    "devices",
    *(name for name in FIELDS if name.startswith("remote_")),
    "log_level",
    "log_json",
)
_DEADLINES = {  # Reasons for the recommended deadlines, with a time to fill in.
    "gpu_timeout_ms": "the slowest batch takes {}",
    "queue_timeout_ms": "a request may have to wait for one such batch ({})",
    "request_timeout_ms": "a request may wait for one such batch ({}) and run in the next",
}
_MAX_ERROR, _TINY_MS = 0.3, 0.5  # Largest relative error of a good fit. Medians below _TINY_MS count as _TINY_MS.


@command()
@click.argument("target", metavar="TARGET",
    help="module:attribute, path/file.py:attribute, or the URL of a remote batch API.")  # fmt: skip
@option("--input", "texts", multiple=True, metavar="TEXT",
    help="Input to send: text, JSON if the target takes JSON or arrays, or base64 if it takes bytes. Repeatable. "
    "Default: the target's example, or else numbered strings.")  # fmt: skip
@option("--inputs", type=Path, metavar="FILE", help="File with more inputs, one per line, in the form of --input.")
@option("--parameters", default="", metavar="JSON", help="Parameters for every input: a JSON object.")
@option("--repeats", type=click.IntRange(1, 1000), default=3, metavar="N", help="How many batches of each size to run.")
@option("--record", type=Path, metavar="FILE",
    help="Also run batches of many sizes and mixtures of the inputs, and write their times to FILE, for the option --batch-times of "
    "`headway simulate` and `plan`.")  # fmt: skip
@option("--json", is_flag=True, help="Print the findings as JSON.")
@with_settings(_SETTINGS)
def check(
    target: str, settings: Settings, texts: Sequence[str], inputs: Path | None, parameters: str, repeats: int, record: Path | None,
    json: bool,
) -> None:  # fmt: skip
    """Load TARGET in a real worker, run batches from 1 input up to the largest size, and report how long they take.

    The target must return one output for each input, of the annotated kind, in the order of the inputs, and within the GPU
    deadline. To check the order, the largest batch is sent in three different orders. The report shows the times by batch size,
    the first inputs with their outputs, the line ℓ(n) = α + βn fitted to the times, and settings that suit them.

    With --record, another 72 batches run for each of the --repeats. Most of them are small or of the largest size.

    Exit codes: 0 fit to serve, 1 it breaks a rule, 3 a bad setting, 4 it cannot be loaded.
    """
    import asyncio

    from headway.cli.trial import notes_on, read_lines, writing
    from headway.runtime import log

    given = [*(text for text in texts if text), *read_lines(inputs)]
    content = _object(parameters)
    with log.running(settings.log_level, json=settings.log_json), writing(record) as recorded:
        findings = asyncio.run(_try_out(settings, target, given, content, repeats, records=record is not None))
        recorded.extend(findings.recorded)
    if recorded:
        findings.notes += notes_on(recorded, bool(given))
    advice = _advice(settings, findings)
    if json:
        click.echo(msgspec.json.encode(_as_json(target, settings, findings, advice)).decode())
    else:
        click.echo(_as_text(target, settings, findings, advice, record))
    if findings.faults:
        raise click.exceptions.Exit(1)


def _object(text: str) -> bytes:
    if not text:
        return b""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, UnicodeEncodeError) as exc:
        raise SettingError("--parameters", text, f"is not a JSON object: {exc}", 'For example {"top": 3}.') from None
    return text.encode()


async def _try_out(
    settings: Settings, target: str, given: list[str], parameters: bytes, repeats: int, *, records: bool
) -> Findings:
    from functools import partial

    from headway.app.backends import (
        SlotPlan,
        make_backend,
        make_devices,
        make_remote_certificates,
        make_weights,
        worker_name,
    )
    from headway.cli.trial import Trial, batches_to_record, choose_inputs
    from headway.config.target import parse_target
    from headway.runtime.counters import TlsCounts

    spec = parse_target(target)
    devices = make_devices(settings, spec)
    weights = make_weights(settings, spec, 0)
    name = worker_name(settings, spec, devices, 0)
    tls = make_remote_certificates(settings, [spec], TlsCounts())
    plan = SlotPlan(settings, name, devices.of(0), warms_up=False, cuts=False, weights=weights, certificates=tls)
    backend = make_backend(spec, plan)
    try:
        trial = Trial(
            backend,
            choose=partial(choose_inputs, given, settings.max_batch_size),
            parameters=parameters,
            timeout=settings.gpu_timeout_ms / 1000,
            model=settings.model,
            repeats=repeats,
            limits={name: getattr(settings, name) for name in _DEADLINES},
            record=partial(batches_to_record, given, settings.max_batch_size, repeats) if records else None,
            weights=weights,
        )
        with waiting(f"trying {spec}"):
            findings = await trial.run()
        findings.weight = weights.mean if weights is not None else 0.0
        if retries := getattr(backend, "retries", 0):
            findings.notes.append(_retried(retries, getattr(backend, "rested", 0.0)))
        return findings
    except TargetError as exc:
        if (
            isinstance(spec, RemoteTarget)
            and getattr(backend, "misread", False)
            and (fits := await _format_of(spec, plan))
        ):
            raise TargetError(f"{exc} It does respond with --remote-format {fits}.") from None
        raise
    finally:
        await backend.stop()


def _retried(retries: int, rested: float) -> str:
    rest = f", and it asked for {rested:.3g} s of rest" if rested else ""
    tries = "1 call was repeated" if retries == 1 else f"{retries} calls were repeated"
    return f"{tries} because the API failed{rest}; the times include this"


async def _format_of(spec: RemoteTarget, plan: SlotPlan) -> str:
    """Return a format that a remote API understands, or an empty string if there is none or the user has chosen one."""
    from dataclasses import replace

    from headway.app.backends import make_backend
    from headway.dialects import AUTO, NAMES

    if plan.settings.remote_format != AUTO or spec.over_grpc:
        return ""
    for name in NAMES:
        settings = replace(plan.settings, remote_format=name)
        try:
            backend = make_backend(spec, msgspec.structs.replace(plan, settings=settings, shared=None))
            with waiting(f"asking {spec} in the format {name}"):
                await backend.start()
        except (SettingError, TargetError):
            continue
        await backend.stop()
        return name
    return ""


def _advice(settings: Settings, findings: Findings) -> list[str]:
    if not findings.runs or findings.faults:
        return []
    model, largest = findings.model, settings.max_batch_size
    full = max(model.seconds(largest), *(run.seconds for run in findings.runs)) * 1000
    advice = [f"--max-batch-size {largest}"]
    if model.seconds(largest) > 0:
        rate = float(f"{largest / model.seconds(largest):.2g}")  # More digits would suggest too much accuracy.
        advice[0] += f": about {rate:,.10g} {findings.unit}s/s from each worker"
    if model.beta > 0 and model.alpha < model.beta * largest / 2 and findings.cost.shape is CostShape.NUMBER:
        knee = max(1, round(model.alpha / model.beta * 2))
        advice.append(
            f"batches above about {min(knee, largest)} gain little: their time grows almost in proportion to the {findings.unit}s"
        )
    advice += _weight_advice(settings, findings)
    for name, needed in fitting(full / 1000).items():
        value, time = getattr(settings, name), f"{full:.0f} ms" if full >= 10 else f"{full:.2g} ms"
        fits = "fits" if value >= needed else f"tight, {needed} would be better"
        advice.append(f"{flag(name)} {value:g}: {fits}; {_DEADLINES[name].format(time)}")
    return advice


def _ms(milliseconds: float) -> str:
    if not milliseconds:
        return "0"
    return f"{milliseconds:.2f}" if milliseconds >= 0.1 else f"{milliseconds:.2g}"


_SHAPES = {CostShape.NUMBER: "number", CostShape.WEIGHT: "length", CostShape.PADDED: "number × longest"}


def _cost_line(settings: Settings, findings: Findings, record: Path | None) -> list[str]:
    """Describe what predicts the call times best: the number of inputs, their length, or number × longest."""
    cost, shape = findings.cost, findings.cost.shape
    errors = [f"{error:.0%} by {_SHAPES[other]}" for other, error in cost.errors.items()]
    if len({round(error, 2) for error in cost.errors.values()}) == 1:
        return []
    line, unit = cost.line, "length" if settings.weight == CHARS else "weight"
    accuracy = f"mean error of forecasts: {', '.join(errors)}".replace("length", unit)
    if shape is CostShape.NUMBER:
        return [accuracy]
    alpha, beta, what = _ms(line.alpha * 1000), f"{line.beta * 1000:.3g}", record or "FILE"
    options = f"--padded --lengths {what}" if shape is CostShape.PADDED else f"--weights {what}"
    pads = ": the model pads" if shape is CostShape.PADDED else ""
    return [
        f"a call takes α + β · {_SHAPES[shape].replace('length', unit)}{pads}; {accuracy}",
        f"  headway plan and simulate: --batch-ms {alpha} --beta-ms {beta} {options}",
    ]


def _weight_advice(settings: Settings, findings: Findings) -> list[str]:
    if not findings.weight:
        return []
    model, largest = findings.model, settings.max_batch_weight
    advice = [f"--weight {settings.weight}: {findings.weight:.4g} on average of these inputs"]
    if findings.cost.shape is not CostShape.PADDED:  # A model that pads has its own β, which the line above shows.
        advice[0] += f"; {model.beta * 1000 / findings.weight:.4f} ms for each unit (plan and simulate: --beta-ms)"
    if largest:
        count = min(max(1, int(largest / findings.weight)), settings.max_batch_size)
        seconds = model.alpha + model.beta * count
        advice.append(f"--max-batch-weight {largest}: {count} of these inputs a batch in about {seconds * 1000:.0f} ms")
    return advice


def _misfit(model: ServiceModel, medians: list[tuple[int, float]]) -> str:
    size, ms = max(medians, key=lambda pair: abs(model.seconds(pair[0]) * 1000 - pair[1]) / max(pair[1], _TINY_MS))
    predicted = model.seconds(size) * 1000
    if abs(predicted - ms) <= _MAX_ERROR * max(ms, _TINY_MS):
        return ""
    hint = "Trust the table instead, or set --repeats higher"
    return f"  the line does not fit: {_ms(predicted)} ms for {size}, where the median is {_ms(ms)} ms. {hint}"


def _as_json(target: str, settings: Settings, findings: Findings, advice: list[str]) -> dict[str, Any]:
    from headway.core import values

    return {
        "target": shown_target(target),
        "ok": not findings.faults,
        "faults": findings.faults,
        "notes": findings.notes,
        "max_batch_size": settings.max_batch_size,
        "warm_up_ms": findings.warm_up * 1000,
        "unit": findings.unit,
        "answers": [
            {"input": msgspec.Raw(values.as_json(value)), "output": msgspec.Raw(values.as_json(output))}
            for value, output in findings.answers
        ],
        "runs": [{"size": run.size, "ms": run.seconds * 1000} for run in findings.runs],
        "alpha_ms": findings.model.alpha * 1000,
        "beta_ms": findings.model.beta * 1000,
        "cost": {
            "shape": findings.cost.shape.value,
            "alpha_ms": findings.cost.line.alpha * 1000,
            "beta_ms": findings.cost.line.beta * 1000,
            "errors": {shape.value: error for shape, error in findings.cost.errors.items()},
        },
        "recorded": len(findings.recorded),
        "weight": findings.weight or None,
        "together": findings.per_call,
        "advice": advice,
    }


def _as_text(target: str, settings: Settings, findings: Findings, advice: list[str], record: Path | None) -> str:
    from headway.cli.admin import table
    from headway.cli.trial import brief
    from headway.runtime.log import escape

    medians = [
        (size, statistics.median([run.seconds for run in findings.runs if run.size == size]) * 1000)
        for size in sorted({run.size for run in findings.runs})
    ]
    rows = [(str(size), _ms(ms), _ms(ms / size)) for size, ms in medians]
    warm = "no warm-up batch, because it has no example"
    if findings.warm_up:
        warm = f"warm-up batch in {findings.warm_up * 1000:.1f} ms"
    columns = ("ROWS", "MS A BATCH", "MS A ROW") if findings.unit == "row" else ("SIZE", "MS A BATCH", "MS AN INPUT")
    lines = [f"{shown_target(target)}: {warm}"]
    if rows:
        lines += ["", table(columns, rows), ""]
    if findings.answers:
        lines += [table(("INPUT", "ANSWER"), [(brief(value), brief(output)) for value, output in findings.answers]), ""]
    if rows and not findings.faults and findings.cost.shape is CostShape.NUMBER:
        alpha, beta = _ms(findings.model.alpha * 1000), _ms(findings.model.beta * 1000)
        lines.append(f"ℓ(n) = α + βn with α = {alpha} ms, β = {beta} ms")
        lines += filter(None, [_misfit(findings.model, medians)])
    if not findings.faults:
        lines += _cost_line(settings, findings, record)
    lines += [f"  {line}" for line in advice]
    if findings.per_call:
        which = "all parameters" if findings.per_call == ALL_PARAMETERS else escape(", ".join(findings.per_call))
        lines.append(f"together: a call has one value of {which}; requests with different values run in separate calls")
    if findings.recorded:
        lines.append(f"recorded: {len(findings.recorded)} batches, for --batch-times of headway simulate and plan")
    lines += [f"note: {escape(note)}" for note in findings.notes]
    lines += [f"fault: {escape(fault)}" for fault in findings.faults]
    lines.append("not fit to serve" if findings.faults else "fit to serve")
    return "\n".join(lines)
