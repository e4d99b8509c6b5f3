"""`headway rollout`: shift requests to a new version of a model step by step, and back if it performs worse."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from headway.cli.admin import Admin, as_json, pretty, table, with_admin
from headway.cli.commands import CommandGroup, option

_model = click.argument("model", metavar="MODEL", help="Name of the model.")


@click.group(cls=CommandGroup)
def rollout() -> None:
    """Rollouts shift a model's requests to a new version step by step. Start, watch, promote or abort them."""


@rollout.command()
@_model
@click.argument("version", metavar="VERSION", help="New version. Workers must already serve it.")
@option("--steps", default="1,10,50,100", metavar="PERCENT,…", help="Share of the requests in each step, in percent.")
@option("--every", default="10m", metavar="DURATION", help="How long a step lasts: 30s, 10m or 12h.")
@option("--rollback-on", default="failures,p95", metavar="TEST,…",
    help="Tests that end the rollout when they fail: failures, p95 or both. An empty string: no tests.")  # fmt: skip
@option("--slower", default=25.0, metavar="PERCENT", help="How much slower the P95 of the new version may be.")
@option("--beside", default="", metavar="VERSION", help="Version to compare with, if workers serve several others.")
@with_admin
@as_json
def start(
    port: Admin, model: str, version: str, steps: str, every: str, rollback_on: str, slower: float, beside: str, json: bool,
) -> None:  # fmt: skip
    """Begin a rollout: the new version gets its first share of the requests immediately.

    Each further step raises its share. Once there is enough evidence that the new version fails more often or is slower, it gets
    no more requests. Its workers keep running, so that you can inspect them.
    """
    from headway.cli.keys import duration

    query = {
        "model": model, "version": version, "steps": steps, "every": duration("--every", every, least=1.0),
        "rollback_on": rollback_on, "slower": slower / 100.0, "beside": beside,
    }  # fmt: skip
    _show([port.post(f"/internal/rollouts/start?{urlencode(query)}")], json)


@rollout.command()
@with_admin
@as_json
def status(port: Admin, json: bool) -> None:
    """Show the last rollout of each model, with the statistics of both versions in the current step."""
    _show(port.get("/internal/rollouts")["rollouts"], json)


@rollout.command()
@_model
@with_admin
@as_json
def promote(port: Admin, model: str, json: bool) -> None:
    """Send all requests to the new version immediately, whatever the state of its rollout."""
    _show([port.post(f"/internal/rollouts/promote?{urlencode({'model': model})}")], json)


@rollout.command()
@_model
@with_admin
@as_json
def abort(port: Admin, model: str, json: bool) -> None:
    """Send no more requests to the new version, and restore the shares of the others, whatever the state of the rollout."""
    _show([port.post(f"/internal/rollouts/abort?{urlencode({'model': model})}")], json)


def _show(rollouts: list[dict[str, Any]], json: bool) -> None:
    if json:
        click.echo(pretty(rollouts))
    elif not rollouts:
        click.echo("no rollouts")
    else:
        counts = ("ANSWERED", "FAILED", "P95")
        head = ("MODEL", "VERSION", "STATE", "SHARE", "STEP", *counts, "BESIDE", *counts)
        click.echo(table(head, [_cells(rollout) for rollout in rollouts]))
        for rollout in rollouts:
            if rollout["reason"]:
                click.echo(f"{rollout['model']}@{rollout['version']} {rollout['state']}: {rollout['reason']}")


def _cells(rollout: dict[str, Any]) -> tuple[str, ...]:
    share = f"{rollout['percent']:g} %"
    step = f"{rollout['step'] + 1} of {len(rollout['steps'])}, {rollout['step_seconds']:.0f} of {rollout['every']:g} s"
    new, old = _counts(rollout["new"]), _counts(rollout["old"])
    return rollout["model"], rollout["version"], rollout["state"], share, step, *new, rollout["beside"], *old


def _counts(counts: dict[str, Any]) -> tuple[str, str, str]:
    p95 = "-" if counts["p95_seconds"] is None else f"{counts['p95_seconds'] * 1000:.0f} ms"
    return str(counts["answered"]), str(counts["failed"]), p95
