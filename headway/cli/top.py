"""`headway top`: the departure board of the dashboard, live in a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import click
import msgspec

from headway.cli.admin import Admin, AdminError, with_admin
from headway.cli.board_view import BoardEvent, BoardView, taken
from headway.cli.commands import command, option
from headway.cli.status import BY_NAME, SORTS, Sort, look, overview, serves
from headway.cli.terminal import HELP, fit, key_within, keyboard

if TYPE_CHECKING:
    from rich.console import Console

PATH = "/internal/events"
AGAIN_AFTER = 1.0
"""Seconds after which a stream that has ended is opened again."""


@command()
@with_admin
@option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, metavar="S", help="Seconds between two looks.")
@option("--once", is_flag=True, help="Print it once, and end; so does a pipe.")
def top(port: Admin, interval: float, once: bool) -> None:
    """Show the departure board of a running service and its fleet, again each second, until q or Ctrl-C.

    The admin port of any process will do: each knows the whole fleet, and tells the same as its dashboard. Rates and
    percentiles are of the last 10 s. In a worker's lane a mark is a batch, by how full it is; x is a batch that failed,
    ! a worker that stopped or came back. A process that goes away is waited for.

    Keys: q quits, ? helps, s and r sort the workers.

    Exit codes: 0 ended by q or Ctrl-C; with --once as headway status: 0 it serves, 1 it does not or cannot be reached.
    """
    from rich.console import Console

    if math.isnan(interval):
        raise click.BadParameter("nan is not a number of seconds", param_hint="--interval")
    console = Console()
    if once or not console.is_terminal:
        state = look(port)
        if not serves(state):
            click.echo(overview(state))
            raise click.exceptions.Exit(1)
        with contextlib.closing(events(port)) as stream:
            now = time.monotonic()
            click.echo(taken([next(stream)], now, _unicode()).text(now))
        return
    _show_live(console, port, f"{port.url}, every {interval:g} s", interval)


def events(port: Admin, last: str = "") -> Generator[BoardEvent, None, None]:
    """Yield the events of a port's stream, after the id `last` if the port still has it. Raises AdminError at the stream's end."""
    fields: dict[str, str] = {}
    header = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    for line in port.stream(PATH, header):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield BoardEvent(fields["event"], msgspec.json.decode(fields["data"]), fields.get("id", ""))
            fields = {}
    raise AdminError("the process has ended the stream")


class BoardFollower:
    """Reader of a port's stream, in a thread that opens the stream again when it ends."""

    def __init__(self, port: Admin, sleep: Callable[[float], None] = time.sleep) -> None:
        self._port, self._sleep = port, sleep
        self._queue: SimpleQueue[BoardEvent] = SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="board events", daemon=True).start()

    def heard(self) -> Iterator[BoardEvent]:
        with contextlib.suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def _follow(self) -> None:
        last = ""
        while True:
            try:
                for event in events(self._port, last):
                    last = event.id or last
                    self._queue.put(event)
            except AdminError as exc:
                self._queue.put(BoardEvent("error", str(exc)))
            self._sleep(AGAIN_AFTER)


class Keys:
    """View that the user has chosen by keys. With `helps`, help is shown instead of the board."""

    def __init__(self) -> None:
        self.sort = BY_NAME
        self.helps = False

    def press(self, key: str) -> bool:
        """Act on a key. Return False to quit."""
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


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")


def _show_live(console: Console, port: Admin, title: str, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    follower, view, keys = BoardFollower(port), BoardView(_unicode()), Keys()
    follower.start()
    with Live(console=console, screen=True, auto_refresh=False) as live, keyboard() as has_keys:
        hint = "q quits, ? helps" if has_keys else "Ctrl-C ends"
        due = 0.0
        try:
            while True:
                now, before = time.monotonic(), view.ready
                for event in follower.heard():
                    view.take(event, now)
                if now >= due or view.ready is not before:
                    width, height = console.size
                    order = f", workers by {keys.sort.column.lower()}" if keys.sort != BY_NAME else ""
                    shown = HELP if keys.helps else view.text(now, width, keys.sort)
                    text = fit(f"{title}, {hint}{order}\n\n{shown}", width, height)
                    live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                    due = now + interval
                key = key_within(min(max(due - time.monotonic(), 0.05), 0.25), has_keys)
                if key and not keys.press(key):
                    return
                if key:
                    due = 0.0
        except KeyboardInterrupt:
            return
