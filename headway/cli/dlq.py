"""`headway dlq`: dead letters, the inputs that made the model fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from headway.cli.admin import Admin, AdminError, AdminUrl, AsJson, Token, letter_path, pretty, table
from headway.cli.trust import Ca, Cert, CertKey

_MANY = 10_000
_SHOWN = 60

dlq = typer.Typer(
    name="dlq",
    help="Dead letters: the inputs that made the model fail when they ran alone. List, show, replay, purge.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="Request id, with or without req_.", show_default=False)]
_Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID…", help="Request ids, with or without req_.", show_default=False)
]
_All = Annotated[bool, typer.Option("--all", help="Every letter there is, or every one of --tenant.")]
_Tenant = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Tenant of the letter, if several tenants have one with this id.", show_default=False
    ),
]


@dlq.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many, the newest.", min=1, max=_MANY)] = 100,
    admin: AdminUrl = "",
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json: AsJson = False,
) -> None:
    """List dead letters, newest first, without their inputs."""
    answer = Admin(admin, token, ca, cert, cert_key).get("/internal/dlq", {"limit": limit})
    letters = answer["letters"]
    if json:
        typer.echo(pretty(answer))
    elif not letters:
        typer.echo("no dead letters")
    else:
        head = ("ID", "DIED AT", "TENANT", "TIER", "MODEL", "WORKER", "TRIES", "CAUSE", "ERROR")
        rows = [(*_cells(letter), _short(letter["error"])) for letter in letters]
        typer.echo(table(head, rows))
        if answer["count"] > len(letters):
            typer.echo(f"{answer['count']} in all; --limit shows more")


@dlq.command()
def show(
    id: _Id,
    tenant: _Tenant = None,
    admin: AdminUrl = "",
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
) -> None:
    """Show one dead letter, its input included, as JSON."""
    typer.echo(pretty(Admin(admin, token, ca, cert, cert_key).get(letter_path(id, tenant))))


@dlq.command()
def replay(
    ids: _Ids = None,
    all_: _All = False,
    tenant: _Tenant = None,
    admin: AdminUrl = "",
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json: AsJson = False,
) -> None:
    """Run dead letters again, one after the other. One that succeeds is removed, one that fails is kept.

    Exit codes: 0 all succeeded, 1 some did not.
    """
    port = Admin(admin, token, ca, cert, cert_key)

    def again(id: str, tenant: str | None) -> None:
        answer = port.post(letter_path(id, tenant, "/replay"))
        typer.echo(pretty(answer) if json else f"{id} succeeded after {answer['latency_ms']:.0f} ms")

    _each(_chosen(port, ids, all_, tenant), again)


@dlq.command()
def purge(
    ids: _Ids = None,
    all_: _All = False,
    tenant: _Tenant = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before purging all.")] = False,
    admin: AdminUrl = "",
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
) -> None:
    """Remove dead letters for good.

    Exit codes: 0 all removed, 1 some were not there.
    """
    port = Admin(admin, token, ca, cert, cert_key)
    chosen = _chosen(port, ids, all_, tenant)
    if all_ and chosen and not yes:
        typer.confirm(f"Remove {len(chosen)} dead letters for good?", abort=True)

    def remove(id: str, tenant: str | None) -> None:
        port.delete(letter_path(id, tenant))
        typer.echo(f"{id} removed")

    _each(chosen, remove)


def _chosen(port: Admin, ids: list[str] | None, everything: bool, tenant: str | None) -> list[tuple[str, str | None]]:
    """Ids of the chosen dead letters, each with its tenant as far as that is known."""
    if bool(ids) == everything:
        raise typer.BadParameter("name ids, or give --all for every letter: one of the two")
    if ids:
        return [(id, tenant) for id in ids]
    letters = port.get("/internal/dlq", {"limit": _MANY})["letters"]
    return [(letter["id"], letter["tenant"]) for letter in letters if tenant in (None, letter["tenant"])]


def _each(chosen: Sequence[tuple[str, str | None]], act: Callable[[str, str | None], None]) -> None:
    """Act on every dead letter, also after one failed. An error that concerns none of them ends it."""
    failed = 0
    for id, tenant in chosen:
        try:
            act(id, tenant)
        except AdminError as exc:
            if exc.status in (0, 401, 403):
                raise
            failed += 1
            typer.echo(f"{id} failed: {exc}", err=True)
    if failed:
        raise typer.Exit(1)


def _cells(letter: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        str(letter[name]) for name in ("id", "died_at", "tenant", "tier", "model", "worker", "attempts", "cause")
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
