"""`headway top`: shows live what `headway status` shows, and what the metrics say of the last seconds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.admin import DEFAULT_URL, Admin, AdminError, AdminUrl, Token, table
from headway.cli.figures import REFUSALS_SHOWN, Figures, Scrape, TierFigures, between, read
from headway.cli.screen import HELP, fit, key_within, keyboard, narrowed
from headway.cli.status import BY_NAME, SORTS, Sort, look, overview, serves
from headway.cli.trust import Ca, Cert, CertKey

if TYPE_CHECKING:
    from rich.console import Console

WINDOW = 10.0
"""Seconds of which the rates and percentiles are."""


def top(
    admin: AdminUrl = DEFAULT_URL,
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    interval: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.", min=0.1, max=3600)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print what headway status prints, and end; so does a pipe.")
    ] = False,
) -> None:
    """Show how a running service and its fleet are doing, again each second, until q or Ctrl-C.

    The admin port of any process will do: each knows the whole fleet. Latency, refusals, errors and departures are those
    of the process that is asked, over the last 10 s. A process that goes away is waited for.

    Keys: q quits, ? helps, s and r sort the workers.

    Exit codes: 0 ended by q or Ctrl-C; with --once as headway status: 0 it serves, 1 it does not or cannot be reached.
    """
    port = Admin(admin, token, ca, cert, cert_key)
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal:
        found = look(port)
        typer.echo(overview(found))
        raise typer.Exit(0 if serves(found) else 1)
    _show_live(console, View(port), f"{admin}, every {interval:g} s", interval)


class View:
    """Text of one admin port, look by look.

    Arguments:
        port: the admin port.

    Attributes:
        sort: order of the workers.
        helps: whether the keys are explained instead.
    """

    def __init__(self, port: Admin) -> None:
        self.sort = BY_NAME
        self.helps = False
        self._port = port
        self._scrapes: deque[Scrape] = deque()
        self._found = ""

    def press(self, key: str) -> bool:
        """Do what a key asks for; False when it asks for the end."""
        columns = list(SORTS)
        match key:
            case "q" | "Q" | "\x03" | "\x04":
                return False
            case "?" | "h":
                self.helps = not self.helps
            case "s":
                following = columns[(columns.index(self.sort.column) + 1) % len(columns)]
                self.sort = Sort(following, self.sort.reverse)
            case "r":
                self.sort = Sort(self.sort.column, not self.sort.reverse)
        return True

    def now(self, at: float, width: int = 0) -> str:
        """Overview at instant `at`, or the reason why there is none at the moment."""
        try:
            found = look(self._port)
            self._scrapes.append(read(self._port.text("/metrics"), at))
        except AdminError as exc:
            self._scrapes.clear()
            return str(exc)
        while len(self._scrapes) > 2 and self._scrapes[1].at <= at - WINDOW:
            self._scrapes.popleft()
        more = ""
        if len(self._scrapes) > 1:
            more = described(between(self._scrapes[0], self._scrapes[-1]), width)
        return overview(found, width, self.sort, more)


def described(figures: Figures, width: int = 0) -> str:
    """Figures as text for people; a table that is too wide loses its least columns."""
    lines = [_table("LAST " + f"{figures.seconds:.0f} S", figures.tiers, width)]
    if figures.models:
        lines += ["", _table("MODEL", figures.models, width), ""]
    lines += [
        f"{name:<13} {_most(rates, '{:.1f}/s')}"
        for name, rates in (("refused", figures.refusals), ("errors", figures.errors))
        if rates
    ]
    batches = f"{figures.departures:.1f}/s"
    if not math.isnan(figures.size):
        batches += f" of {figures.size:.1f} inputs: {_most(figures.reasons, '{:.0%}')}"
    return "\n".join([*lines, f"{'departures':<13} {batches}"])


def _table(first: str, figures: Sequence[TierFigures], width: int) -> str:
    rows = [
        (one.tier, *(f"{rate:.1f}" for rate in (one.answered, one.refused, one.errors)),
         *map(_milliseconds, (one.p50, one.p95, one.p99)))
        for one in figures
    ]  # fmt: skip
    head = (first, "ANSWERED/S", "REFUSED/S", "ERRORS/S", "P50 MS", "P95 MS", "P99 MS")
    return table(*narrowed(head, rows, width, ("P50 MS", "P99 MS", "ERRORS/S")))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.0f}"


def _most(rates: Mapping[str, float], form: str) -> str:
    shown = [f"{name} {form.format(rate)}" for name, rate in list(rates.items())[:REFUSALS_SHOWN]]
    rest = sum(list(rates.values())[REFUSALS_SHOWN:])
    return ", ".join([*shown, f"others {form.format(rest)}"] if rest else shown)


def _show_live(console: Console, view: View, title: str, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, screen=True, auto_refresh=False) as live, keyboard() as has_keys:
        keys = "q quits, ? helps" if has_keys else "Ctrl-C ends"
        try:
            due, body = 0.0, ""
            while True:
                now, (width, height) = time.monotonic(), console.size
                if now >= due:
                    body, due = view.now(now, width), now + interval
                order = f", workers by {view.sort.column.lower()}" if view.sort != BY_NAME else ""
                shown = HELP if view.helps else body
                text = fit(f"{title}, {keys}{order}\n\n{shown}", width, height)
                live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                key = key_within(max(due - time.monotonic(), 0.05), has_keys)
                if key and not view.press(key):
                    return
                if key in ("s", "r"):
                    due = 0.0
        except KeyboardInterrupt:
            return
