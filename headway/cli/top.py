"""`headway top`: show the dashboard's live board of departing batches in a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from headway.cli import status
from headway.cli.admin import Admin, AdminError, table, with_admin
from headway.cli.commands import command, option
from headway.cli.status import BY_NAME, SORTS, Sort
from headway.cli.terminal import HELP, fit, key_within, keyboard, narrowed
from headway.model.board import ARRIVED, GIVEN_BACK, RUNNING, BatchDeparture

if TYPE_CHECKING:
    from rich.console import Console

WINDOW = 10.0  # Length of the lanes, and of the period that rates are computed over, in seconds.
BEHIND = 1.0  # Seconds by which the lanes lag, so that even the slowest process has reported.
SILENT = 4.0  # Seconds without an event after which the board reports that it has heard nothing.
STRIP = 60
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", ".:-=+*#%"  # Marks that show how full a batch is, with and without Unicode.
NAMED = 4  # Number of reasons to name in a line. The rates of the others are added up.
MOST_EVENTS = 5
KEPT = 180.0  # Seconds for which the board keeps batches and changes.


class BoardEvent(NamedTuple):
    """Event from a port's stream. Its kind is `start`, `tick` or `dropped`. If the port doesn't answer, the kind is `error`
    and `data` is the reason."""

    kind: str
    data: Any
    id: str = ""


class BoardView:
    """The board, updated by each event. `ready` is True once an event with data has arrived."""

    def __init__(self, unicode: bool = True) -> None:
        self.ready = False
        self._marks = BLOCKS if unicode else PLAIN
        self._about: Mapping[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._batches: dict[tuple[str, float], BatchDeparture] = {}
        self._changes: deque[Sequence[Any]] = deque(maxlen=1000)
        self._scalings: deque[Sequence[Any]] = deque(maxlen=100)
        self._trouble = ""
        self._heard_at = 0.0

    def take(self, event: BoardEvent, at: float) -> None:
        kind, data, _ = event
        if kind in ("error", "dropped"):
            self._trouble = data if kind == "error" else f"connecting again: {data['reason']}"
            return
        if kind == "start":
            self._about, self._latest = data, {}
            self._batches.clear()
            self._changes.clear()
            self._scalings.clear()
        elif not self._about:
            return
        self._trouble, self._heard_at, self.ready = "", at, True
        now = data["now"] or self._latest.get("now", 0.0)
        self._latest |= data | {"now": now}
        for departure in msgspec.convert(data["departures"], list[BatchDeparture]):
            self._batches[departure.worker, departure.left] = departure
        self._changes.extend(data["changes"])
        self._scalings.extend(data.get("scalings", ()))  # Older processes don't send it.
        for key in [key for key in self._batches if key[1] < now - KEPT]:
            del self._batches[key]

    def text(self, at: float, width: int = 0, sort: Sort = BY_NAME) -> str:
        """Return the board at time `at`, on the same clock as in `take`. A `width` of 0 means no limit."""
        if not self.ready:
            return textwrap.fill(self._trouble or "connecting …", width or STRIP * 2)
        snapshot, recent = self._latest.get("snapshot"), self._latest.get("recent")
        parts = [self._head(at, snapshot, recent)]
        if recent is not None:
            parts.append(self._tiers(recent, snapshot, width))
        parts.append(self._strips(snapshot, width))
        if snapshot is not None:
            workers, members = snapshot["workers"], snapshot["members"]
            if workers:
                parts += [status.workers_table(workers, width, sort), *status.reasons(workers)]
            if len(members) > 1:
                parts.append(status.members_table(members, width, None if recent is None else recent["processes"]))
            parts += status.departed_table(snapshot.get("departed", []))
        parts += self._happened()
        return "\n\n".join(parts)

    def _head(self, at: float, snapshot: Mapping[str, Any] | None, recent: Mapping[str, Any] | None) -> str:
        about, latest = self._about, self._latest
        lines = {"asked": f"{about['role']} {about['id']}, version {about['version']}"}
        if self._trouble:
            lines["connection"] = self._trouble
        elif (silent := at - self._heard_at) > SILENT:
            lines["connection"] = f"nothing heard for {silent:.0f} s"
        if latest["away"]:
            lines["broker away"] = latest["away"]
            lines["fleet"] = f"as it was {snapshot['age_seconds']:.0f} s ago" if snapshot is not None else "not known"
        if latest["lost_at"] and latest["now"] - latest["lost_at"] < KEPT:
            lines["history"] = f"begins {latest['now'] - latest['lost_at']:.0f} s ago, when the broker lost its data"
        if recent is not None:
            _, p95, _ = recent["latency"]
            lines["requests"] = (
                f"{sum(recent['ended'].values()):.1f}/s, P95 {milliseconds(p95)} of {about['promise_ms']:g} ms promised"
            )
        if snapshot is not None:
            queues, workers = snapshot["queues"], snapshot["workers"]
            waiting = sum(queue["depth"] for queue in queues)
            oldest = max((queue["oldest_seconds"] for queue in queues), default=0.0)
            lines["waiting"] = f"{waiting}, oldest {milliseconds(oldest)}" if waiting else "nothing"
            healthy = sum(worker["status"] == "healthy" for worker in workers)
            present = sum(worker["status"] in _PRESENT for worker in workers)
            lines["workers"] = f"{healthy} of {present} healthy"
            if snapshot["capacities"]:
                lines["capacity"] = "; ".join(map(status.capacity_text, snapshot["capacities"]))
            if scaling := snapshot.get("scaling"):
                lines["wanted"] = "; ".join(f"{model}: {_wanted(line)}" for model, line in scaling.items())
            lines["dead letters"] = str(snapshot["dead_letters"])
        return _listed(lines)

    def _tiers(self, recent: Mapping[str, Any], snapshot: Mapping[str, Any] | None, width: int) -> str:
        rows = []
        for tier in recent["tiers"]:
            queues = [queue for queue in (snapshot or {"queues": ()})["queues"] if queue["tier"] == tier["tier"]]
            oldest = max((queue["oldest_seconds"] for queue in queues), default=0.0)
            depth = sum(queue["depth"] for queue in queues)
            rows.append((
                tier["tier"], f"{tier['answered']:.1f}", *map(milliseconds, tier["latency"]), str(depth),
                milliseconds(oldest) if depth else "-",
            ))  # fmt: skip
        head = (f"LAST {WINDOW:.0f} S", "ANSWERED/S", "P50", "P95", "P99", "WAITING", "OLDEST")
        parts = [table(*narrowed(head, rows, width, ("P50", "P99", "OLDEST")))]
        refused = recent["refused"]
        rates = {
            "models": recent["ended"] if len(recent["ended"]) > 1 else {},
            "refused": refused,
            "errors": {name: rate for name, rate in recent["failed"].items() if name not in refused},
            "retried": recent["retries"],
        }
        if lines := {name: largest(by_reason, "{:.1f}/s") for name, by_reason in rates.items() if by_reason}:
            parts.append(_listed(lines))
        return "\n\n".join(parts)

    def _strips(self, snapshot: Mapping[str, Any] | None, width: int) -> str:
        end = self._latest["now"] - BEHIND
        begin = end - WINDOW
        shown = [batch for batch in self._batches.values() if begin <= batch.left < end]
        rates = f"{len(shown) / WINDOW:.1f}/s"
        if shown:
            reasons: dict[str, float] = {}
            for batch in shown:
                reasons[batch.reason] = reasons.get(batch.reason, 0.0) + 1 / len(shown)
            fill = sum(batch.fill for batch in shown) / len(shown)
            size = sum(batch.size for batch in shown) / len(shown)
            rates += f" of {size:.1f} inputs, {fill:.0%} full: {largest(reasons, '{:.0%}')}"
        lines = [_listed({"departures": rates})]
        workers = (snapshot or {"workers": ()})["workers"]
        online = {worker["worker_id"] for worker in workers if worker["status"] != "offline"}
        names = sorted(online | {batch.worker for batch in shown})
        longest = max(map(len, names), default=0)
        columns = max(width - longest - 3, 10) if width else STRIP
        lines += [f"{_plain(name):<{longest}} |{self._strip(name, begin, columns)}|" for name in names]
        return "\n".join(lines)

    def _strip(self, worker: str, begin: float, columns: int) -> str:
        """Return a worker's lane. Marks show how full its batches are; `x` is a failed batch, `!` a change of the worker's status."""
        cells = [" "] * columns
        by_second = columns / WINDOW
        for batch in self._batches.values():
            if batch.worker == worker:
                ends = batch.left + batch.seconds if batch.outcome != RUNNING else begin + WINDOW
                first, last = (int((at - begin) * by_second) for at in (batch.left, ends))
                mark = self._marks[min(int(batch.fill * len(self._marks)), len(self._marks) - 1)]
                for cell in range(max(first, 0), min(max(last, first + 1), columns)):
                    cells[cell] = mark
                if _failed(batch) and 0 <= last < columns:
                    cells[last] = "x"
        for at, name, *_ in self._changes:
            if name == worker and 0 <= (cell := int((at - begin) * by_second)) < columns:
                cells[cell] = "!"
        return "".join(cells)

    def _happened(self) -> list[str]:
        happened = [
            (batch.left + batch.seconds, f"{batch.worker}: a batch of {batch.size} came back {batch.outcome}")
            for batch in self._batches.values()
            if _failed(batch)
        ]
        for at, worker, _, state, restarts, *cause in self._changes:
            happened.append((at, f"{worker} is {state}{after(restarts)}{': '.join(['', *filter(None, cause)])}"))
        for at, model, before, desired, _, reason in self._scalings:
            happened.append((at, f"{model}: {before} to {desired} workers, {reason}"))
        newest = sorted(happened, reverse=True)[:MOST_EVENTS]
        now = self._latest["now"]
        lines = [f"{now - at:4.0f} s ago  {_plain(text)}" for at, text in newest if now - at < KEPT]
        return ["\n".join(lines)] if lines else []


_PRESENT = frozenset(("healthy", "degraded", "starting", "cold", "failed", "drained"))


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds or seconds; a dash if unknown."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _wanted(scaling: Mapping[str, Any]) -> str:
    late = f", {scaling['late']} late" if scaling["late"] else ""
    trouble = f"; {scaling['trouble']}" if scaling["trouble"] else ""
    return f"{scaling['desired']} workers, {scaling['current']} there, {scaling['coming']} coming{late}{trouble}"


def after(restarts: int) -> str:
    """Format the number of a worker's restarts, or return an empty string for 0."""
    return f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""


def largest(rates: Mapping[str, float], form: str) -> str:
    """Format up to NAMED of the largest rates, and the sum of the others."""
    ordered = sorted(rates.items(), key=lambda item: -item[1])
    shown = [f"{name} {form.format(rate)}" for name, rate in ordered[:NAMED]]
    others = sum(rate for _, rate in ordered[NAMED:])
    return ", ".join([*shown, f"others {form.format(others)}"] if others else shown)


def _failed(batch: BatchDeparture) -> bool:
    return batch.outcome not in (RUNNING, ARRIVED, GIVEN_BACK)


def _listed(lines: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<13} {_plain(value)}" for name, value in lines.items())


def _plain(text: str) -> str:
    from headway.runtime.log import escape

    return escape(text)


PATH = "/internal/events"
AGAIN_AFTER = 1.0  # Seconds to wait before reopening a stream that has ended.


@command()
@with_admin
@option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, metavar="S", help="Seconds between updates.")
@option("--once", is_flag=True, help="Print the board once and exit. This is the default in a pipe.")
def top(port: Admin, interval: float, once: bool) -> None:
    """Show the batches, rates and workers of a running service live, until you press q or Ctrl-C.

    You can ask the admin port of any process, because each knows the whole fleet. The board shows the same data as the dashboard.
    Rates and percentiles cover the last 10 s. In a worker's lane, each mark is a batch and shows how full it is; x is a failed
    batch, and ! a worker that stopped or came back. If the process stops, the board waits for it to return.

    Keys: q quits, ? shows help, s and r sort the workers.

    Exit codes: 0 ended by q or Ctrl-C; with --once as for headway status: 0 the process serves, 1 it does not, or is unreachable.
    """
    from rich.console import Console

    if math.isnan(interval):
        raise click.BadParameter("nan is not a number of seconds", param_hint="--interval")
    console = Console()
    if once or not console.is_terminal:
        state = status.look(port)
        if not status.serves(state):
            click.echo(status.overview(state))
            raise click.exceptions.Exit(1)
        with contextlib.closing(events(port)) as stream:
            now, view = time.monotonic(), BoardView(_unicode())
            view.take(next(stream), now)
            click.echo(view.text(now))
        return
    _show_live(console, port, f"{port.url}, every {interval:g} s", interval)


def events(port: Admin, last: str = "") -> Generator[BoardEvent, None, None]:
    """Yield the events of a port's stream, resuming after event `last` if possible. Raises AdminError at the end."""
    fields: dict[str, str] = {}
    header = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    for line in port.stream(PATH, header):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield BoardEvent(fields["event"], msgspec.json.decode(fields["data"]), fields.get("id", ""))
            fields = {}
    raise AdminError("the process closed the stream")


class BoardFollower:
    """Reads a port's stream in a thread, and reopens it when it ends."""

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
    """View chosen with the keyboard. If `helps`, the help is shown instead of the board."""

    def __init__(self) -> None:
        self.sort = BY_NAME
        self.helps = False

    def press(self, key: str) -> bool:
        """Handle a key press. Return False to quit."""
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
        hint = "q quits, ? shows help" if has_keys else "Ctrl-C quits"
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
