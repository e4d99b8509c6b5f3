"""`headway bench`: open-loop load on a URL."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from headway.cli.trust import Ca, Cert, CertKey, make_context

if TYPE_CHECKING:
    from headway.load.report import Report

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_OF_BODY = ("400", "413", "422")
"""Statuses of a body that does not fit the target."""
_LOAD, _REQUEST, _RESULT = "Load", "Requests", "Results"


def bench(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="http://host[:port][/path], or https; without a path /v1/inference.",
            show_default=False,
        ),
    ],
    rate: Annotated[
        float,
        typer.Option(metavar="R", help="Mean requests per second.", rich_help_panel=_LOAD, show_default=False),
    ],
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of load.", rich_help_panel=_LOAD)] = 10.0,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="poisson|uniform|FILE",
            help="When requests come: Poisson, evenly, or as in a trace (CSV with a TIMESTAMP column or one column of "
            "seconds), its time scaled to the rate.",
            rich_help_panel=_LOAD,
        ),
    ] = "poisson",
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Same seed, same load. By default a new one.", rich_help_panel=_LOAD),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most connections at once. By default as many as it takes, up to 10,000.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(metavar="S", help="Give a request up after S seconds.", rich_help_panel=_LOAD),
    ] = 10.0,
    mix: Annotated[
        str,
        typer.Option(
            metavar="TIER=WEIGHT,…",
            help="Tiers to ask for (X-Request-Tier) and their weights, such as enterprise=5,paid=25,free=70.",
            rich_help_panel=_REQUEST,
        ),
    ] = "",
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TIER=]KEY",
            help="API key, for all requests or those of a tier, which then need no X-Request-Tier. Repeatable.",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    text: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="TEXT",
            help="Input of every request, after a prefix that makes each one different.",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON body of every request; its text member input, input_data or prompt gets the prefix.",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask.", rich_help_panel=_REQUEST)] = None,
    expect: Annotated[
        str,
        typer.Option(
            metavar="none|upper|echo",
            help="Check each answer against its own request: the input in capitals, or as it is.",
            rich_help_panel=_RESULT,
        ),
    ] = "none",
    promise: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Latency promise, to count the answers in time.", rich_help_panel=_RESULT),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON instead of tables.", rich_help_panel=_RESULT)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JSON to FILE.", rich_help_panel=_RESULT)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress on standard error.", rich_help_panel=_RESULT)
    ] = False,
) -> None:
    """Put open-loop load on a URL; report latency, errors and answers in time.

    Requests are sent when they are due, whether or not earlier ones were answered, and latency counts from the
    instant a request was due: a server that stalls cannot hide what it kept waiting.

    Exit codes: 0 done, 1 wrong answers or not one success, 3 a bad setting, 130 interrupted.
    """
    from headway.load import spec as order
    from headway.load.generator import run_load
    from headway.load.pool import Unreachable
    from headway.load.report import make_report, show, to_json

    target, weights = order.parse_target(url), order.parse_mix(mix)
    members, member = order.make_body(target.path, text, model, _content(body))
    spec = order.LoadSpec(
        target=target,
        rate=rate,
        duration=duration,
        arrivals=arrivals,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        connections=connections,
        timeout=timeout,
        mix=weights,
        keys=order.parse_keys(key or (), weights),
        body=members,
        member=member,
        expect=expect,
        promise=None if promise is None else promise / 1000,
        tls=make_context(ca, cert, cert_key) if target.tls else None,
    )
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with _writable(out) as file:
            record = run_load(spec, 0.0 if quiet else None)
            report = make_report(spec, record, _without_keys(sys.argv), started_at)
            if file is not None:
                file.write(to_json(report))
    except Unreachable as exc:
        typer.echo(f"headway: {exc}", err=True)
        raise typer.Exit(_EXIT_FAILED) from None
    if json:
        typer.echo(to_json(report))
    else:
        show(report)
    if reason := _without_success(report):
        typer.echo(f"headway: {reason}{_first_refused(report, record.first_refused)}", err=True)
    raise typer.Exit(_exit_code(report))


def _content(path: Path | None) -> bytes | None:
    from headway.errors import SettingError

    try:
        return None if path is None else path.read_bytes()
    except OSError as exc:
        raise SettingError("--body", str(path), f"cannot be read: {exc.strerror}", "Name a file of JSON.") from None


def _writable(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    """Open the file before the load begins, so that no result is lost for a wrong name."""
    from headway.errors import SettingError

    try:
        return nullcontext() if path is None else path.open("wb")
    except OSError as exc:
        reason = f"cannot be written: {exc.strerror}"
        raise SettingError("--out", str(path), reason, "Name a file in a directory that is there.") from None


def _without_keys(words: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for word in words:
        if word.startswith("--key="):
            shown.append("--key=…")
        else:
            shown.append("…" if shown and shown[-1] == "--key" else word)
    return shown


def _exit_code(report: Report) -> int:
    if report.interrupted:
        return _EXIT_INTERRUPTED
    return _EXIT_FAILED if report.mismatches or not report.total.answered else 0


def _without_success(report: Report) -> str:
    """Reason why nothing succeeded; empty when something did, or the load was stopped."""
    total = report.total
    if total.answered or report.interrupted:
        return ""
    if not total.requests:
        return f"no request fell due in {report.duration_s:g} s: raise --rate or --duration"
    outcome, count = next(iter(total.outcomes.items()))
    return f"not one of {total.requests:,} requests succeeded; {count:,} ended with: {outcome}"


def _first_refused(report: Report, told: str) -> str:
    """Text of the first error and a hint, where all answers are 4xx; else nothing."""
    outcomes = report.total.outcomes
    if not told or any(not label.startswith("4") for label in outcomes):
        return ""
    hint = (
        ". Give the body that this target takes: --body FILE"
        if any(label[:3] in _OF_BODY for label in outcomes)
        else ""
    )
    return f"\nheadway: the first says: {told.rstrip('.')}{hint}"


if __name__ == "__main__":
    from headway.cli import main

    main(["bench", *sys.argv[1:]])
