"""`headway bench`: send an open-loop load to a URL, and measure."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import click

from headway.cli import EXIT_FAILED, EXIT_INTERRUPTED
from headway.cli.commands import command, option
from headway.cli.flags import fields_from, with_fields
from headway.cli.trust import make_context, trusting
from headway.errors import SettingError
from headway.load.spec import LoadSpec

if TYPE_CHECKING:
    from headway.load.report import Report

_BAD_BODY = ("400", "413", "422")  # Statuses of a body that the target doesn't accept.
_REQUEST, _RESULT = "Requests", "Results"


@command()
@click.argument("url", metavar="URL",
    help="http://host[:port][/path], or https. Default path: /v1/inference, or for tensors the Open Inference Protocol's.")  # fmt: skip
@with_fields(LoadSpec, required=("rate",), duration=10.0, seed=None)
@option("--mix", default="", metavar="TIER=WEIGHT,…", group=_REQUEST,
    help="Tiers to request (X-Request-Tier) and their weights, such as enterprise=5,paid=25,free=70.")  # fmt: skip
@option("--key", multiple=True, metavar="[TIER=]KEY", group=_REQUEST,
    help="API key for all requests, or for those of a tier, which then have no X-Request-Tier. Repeatable.")  # fmt: skip
@trusting
@option("--input", "text", metavar="TEXT", group=_REQUEST,
    help="Input of every request. A prefix makes each request different.")  # fmt: skip
@option("--body", type=Path, metavar="FILE", group=_REQUEST,
    help="JSON body of every request. The prefix is added to its string member input, input_data or prompt.")  # fmt: skip
@option("--tensor", "tensors", multiple=True, metavar="[NAME=]TYPE:SHAPE", group=_REQUEST,
    help="Send zeros in the binary form of the Open Inference Protocol instead of text, such as FP32:8,4 for 8 rows of 4. "
    "Repeatable, for several inputs.")  # fmt: skip
@option("--model", metavar="NAME", group=_REQUEST, help="Model to use.")
@option("--json", is_flag=True, group=_RESULT, help="Print the results as JSON instead of tables.")
@option("--out", type=Path, metavar="FILE", group=_RESULT, help="Write the results as JSON to FILE.")
@option("--quiet", "-q", is_flag=True, group=_RESULT, help="Show no progress on standard error.")
def bench(
    url: str, mix: str, key: Sequence[str], ca: str, cert: str, cert_key: str, text: str | None, body: Path | None,
    tensors: Sequence[str], model: str | None, json: bool, out: Path | None, quiet: bool, **given: Any,
) -> None:  # fmt: skip
    """Send requests to a URL at a fixed rate, and print the latency, the errors, and how many answers came in time.

    headway bench http://127.0.0.1:8000 --rate 100 --duration 30

    Each request is sent when it is due, even if earlier ones are still unanswered, and its latency is measured from that time. So a
    stalled server cannot hide how long requests waited.

    Exit codes: 0 done, 1 wrong answers or no success at all, 3 a bad setting, 130 interrupted.
    """
    from headway.load.spec import make_body, make_tensors, parse_keys, parse_mix, parse_target

    weights, data = parse_mix(mix), b""
    if tensors:
        if text is not None or body is not None:
            raise SettingError("--tensor", tensors[0], "cannot be combined with --input or --body", "Give one of them.")
        target = parse_target(url, f"/v2/models/{quote(model, safe='')}/infer" if model else "/v2/infer")
        (members, data), member = make_tensors(tensors), ""
    else:
        target = parse_target(url)
        members, member = make_body(target.path, text, model, _content(body))
    values = fields_from(LoadSpec, given)
    if values["seed"] is None:
        values["seed"] = secrets.randbelow(1 << 32)
    spec = LoadSpec(
        target=target, mix=weights, keys=parse_keys(key, weights), body=members, member=member, data=data,
        tls=make_context(ca, cert, cert_key) if target.tls else None, **values,
    )  # fmt: skip
    _run(spec, out, json=json, quiet=quiet)


def _run(spec: LoadSpec, out: Path | None, *, json: bool, quiet: bool) -> NoReturn:
    from headway.load.connection import Unreachable
    from headway.load.generator import run_load
    from headway.load.report import make_report, show, to_json

    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with _writable(out) as file:
            record = run_load(spec, 0.0 if quiet else None)
            report = make_report(spec, record, _without_keys(sys.argv), started_at)
            if file is not None:
                file.write(to_json(report))
    except Unreachable as exc:
        click.echo(f"headway: {exc}", err=True)
        raise click.exceptions.Exit(EXIT_FAILED) from None
    if json:
        click.echo(to_json(report))
    else:
        show(report)
    if reason := _without_success(report):
        click.echo(f"headway: {reason}{_first_refused(report, record.first_refused)}", err=True)
    if report.interrupted:
        raise click.exceptions.Exit(EXIT_INTERRUPTED)
    raise click.exceptions.Exit(EXIT_FAILED if report.mismatches or not report.total.answered else 0)


def _content(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as exc:
        raise SettingError("--body", str(path), f"cannot be read: {exc.strerror}", "Specify a JSON file.") from None


def _writable(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    try:  # Open the file before the load begins, so that no results are lost if that fails.
        return nullcontext() if path is None else path.open("wb")
    except OSError as exc:
        reason = f"cannot be written: {exc.strerror}"
        raise SettingError("--out", str(path), reason, "Name a file in an existing directory.") from None


def _without_keys(words: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for word in words:
        if word.startswith("--key="):
            shown.append("--key=…")
        else:
            shown.append("…" if shown and shown[-1] == "--key" else word)
    return shown


def _without_success(report: Report) -> str:
    total = report.total
    if total.answered or report.interrupted:
        return ""
    if not total.requests:
        return f"no request was due within {report.duration_s:g} s: raise --rate or --duration"
    outcome, count = next(iter(total.outcomes.items()))
    return f"none of {total.requests:,} requests succeeded; {count:,} ended with: {outcome}"


def _first_refused(report: Report, message: str) -> str:
    outcomes = report.total.outcomes
    if not message or any(not label.startswith("4") for label in outcomes):
        return ""
    hint = ""
    if any(label[:3] in _BAD_BODY for label in outcomes):
        hint = ". Give a body that this target takes: --body FILE, or --tensor for arrays"
    return f"\nheadway: the first error says: {message.rstrip('.')}{hint}"
