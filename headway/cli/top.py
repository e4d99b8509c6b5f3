"""`headway top`: shows live what `headway status` shows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.admin import DEFAULT_URL, Admin, AdminError, AdminUrl, Token
from headway.cli.status import look, overview, serves

if TYPE_CHECKING:
    from rich.console import Console


def top(
    admin: AdminUrl = DEFAULT_URL,
    token: Token = "",
    interval: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end; so does a pipe.")] = False,
) -> None:
    """Show how a running service and its fleet are doing, again each second, until Ctrl-C.

    The admin port of any process will do: each knows the whole fleet. A process that goes away is waited for.

    Exit codes: 0 ended by Ctrl-C; with --once as headway status: 0 it serves, 1 it does not or cannot be reached.
    """
    port = Admin(admin, token)
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal:
        found = look(port)
        typer.echo(overview(found))
        raise typer.Exit(0 if serves(found) else 1)
    _show_live(console, port, f"{admin}, every {interval:g} s, Ctrl-C ends", interval)


def _show_live(console: Console, port: Admin, title: str, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Text(f"{title}\n\n{_now(port)}", no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _now(port: Admin) -> str:
    """Overview, or the reason why there is none at the moment."""
    try:
        return overview(look(port))
    except AdminError as exc:
        return str(exc)
