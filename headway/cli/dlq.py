"""`headway dlq`: list, show, replay and purge dead letters, the inputs that made the model fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from headway.cli.admin import Admin, AdminError, as_json, letter_path, pretty, table, with_admin
from headway.cli.commands import CommandGroup, combined, option

_MANY = 10_000
_SHOWN = 60

_ID_HELP = "Request id, with or without req_."
_tenant = option("--tenant", metavar="NAME",
    help="Tenant of the letter, if several tenants have letters with the same id.")  # fmt: skip
_chosen_ids = combined((
    click.argument("ids", metavar="ID…", nargs=-1, help="Request ids, with or without req_."),
    option("--all", "all_", is_flag=True, help="All letters, or all letters of --tenant."),
    _tenant,
))  # fmt: skip


@click.group(cls=CommandGroup)
def dlq() -> None:
    """Dead letters are inputs that made the model fail even when they ran alone. List, show, replay or purge them."""


@dlq.command("list")
@option("--limit", type=click.IntRange(1, _MANY), default=100, metavar="N", help="How many letters to list at most.")
@with_admin
@as_json
def list_letters(port: Admin, limit: int, json: bool) -> None:
    """List dead letters, newest first, without their inputs."""
    answer = port.get("/internal/dlq", {"limit": limit})
    letters = answer["letters"]
    if json:
        click.echo(pretty(answer))
    elif not letters:
        click.echo("no dead letters")
    else:
        head = ("ID", "DIED AT", "TENANT", "TIER", "MODEL", "WORKER", "TRIES", "CAUSE", "ERROR")
        click.echo(table(head, [_cells(letter) for letter in letters]))
        if answer["count"] > len(letters):
            click.echo(f"{answer['count']} in all; --limit shows more")


@dlq.command()
@click.argument("id", metavar="ID", help=_ID_HELP)
@_tenant
@with_admin
def show(port: Admin, id: str, tenant: str | None) -> None:
    """Show a dead letter and its input as JSON."""
    click.echo(pretty(port.get(letter_path(id, tenant))))


@dlq.command()
@_chosen_ids
@with_admin
@as_json
def replay(port: Admin, ids: Sequence[str], all_: bool, tenant: str | None, json: bool) -> None:
    """Run dead letters again, one after the other. Remove each letter that succeeds, and keep each that fails.

    Exit codes: 0 all succeeded, 1 some failed.
    """

    def again(id: str, tenant: str | None) -> None:
        answer = port.post(letter_path(id, tenant, "/replay"))
        click.echo(pretty(answer) if json else f"{id} succeeded after {answer['latency_ms']:.0f} ms")

    _each(_chosen(port, ids, all_, tenant), again)


@dlq.command()
@_chosen_ids
@option("--yes", "-y", is_flag=True, help="Purge all letters without asking.")
@with_admin
def purge(port: Admin, ids: Sequence[str], all_: bool, tenant: str | None, yes: bool) -> None:
    """Remove dead letters for good.

    Exit codes: 0 all removed, 1 some were not found.
    """
    chosen = _chosen(port, ids, all_, tenant)
    if all_ and chosen and not yes:
        click.confirm(f"Remove {len(chosen)} dead letters for good?", abort=True)

    def remove(id: str, tenant: str | None) -> None:
        port.delete(letter_path(id, tenant))
        click.echo(f"{id} removed")

    _each(chosen, remove)


def _chosen(port: Admin, ids: Sequence[str], everything: bool, tenant: str | None) -> list[tuple[str, str | None]]:
    if bool(ids) == everything:
        raise click.BadParameter("give either ids, or --all for every letter")
    if ids:
        return [(id, tenant) for id in ids]
    letters = port.get("/internal/dlq", {"limit": _MANY})["letters"]
    return [(letter["id"], letter["tenant"]) for letter in letters if tenant in (None, letter["tenant"])]


def _each(chosen: Sequence[tuple[str, str | None]], act: Callable[[str, str | None], None]) -> None:
    """Call `act` for every dead letter. Stop only after a failure that would affect all letters. Show each reason once."""
    failed = dict[str, list[str]]()
    for id, tenant in chosen:
        try:
            act(id, tenant)
        except AdminError as exc:
            if exc.status in (0, 401, 403):
                raise
            failed.setdefault(str(exc), []).append(id)
            if failed[str(exc)] == [id]:
                click.echo(f"{id} failed: {exc}", err=True)
    for first, *more in failed.values():
        if more:
            click.echo(f"{len(more)} more failed for the same reason as {first}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _cells(letter: dict[str, Any]) -> tuple[str, ...]:
    names, error = ("id", "died_at", "tenant", "tier", "model", "worker", "attempts", "cause"), letter["error"]
    return (*(str(letter[name]) for name in names), error if len(error) <= _SHOWN else error[: _SHOWN - 1] + "…")
