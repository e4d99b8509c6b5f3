"""The departure board as text: what its events tell, in the width of a terminal. Pure."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headway.cli.admin import table
from headway.cli.board_events import BoardEvent
from headway.cli.screen import narrowed
from headway.cli.status import BY_NAME, Sort, capacity_text, departed_table, members_table, reasons, workers_table
from headway.model.board import ARRIVED, GIVEN_BACK, RUNNING, BatchDeparture

WINDOW = 10.0
"""Seconds of departures that are shown, and of which the rates are."""
BEHIND = 1.0
"""Seconds by which the lanes are behind, so that the process that tells last has told."""
SILENT = 4.0
"""Seconds without an event after which the text says so."""
STRIP = 60
"""Columns of a lane where nothing bounds them."""
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", ".:-=+*#%"
"""Marks of a batch by its fill, and those for terminals without Unicode."""
NAMED = 4
"""Reasons that are named in one line; the rest is summed up."""
MOST_EVENTS = 5
"""Kills, restarts and failed batches that are shown."""
KEPT = 180.0
"""Seconds for which batches and changes are kept."""


class BoardView:
    """View of the board, event by event.

    Arguments:
        unicode: whether the terminal can show BLOCKS.

    Attributes:
        ready: whether there is something to show.
    """

    def __init__(self, unicode: bool = True) -> None:
        self.ready = False
        self._marks = BLOCKS if unicode else PLAIN
        self._about: Mapping[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._batches: dict[tuple[str, float], BatchDeparture] = {}
        self._changes: deque[Sequence[Any]] = deque(maxlen=1000)
        self._scalings: deque[Sequence[Any]] = deque(maxlen=100)
        self._trouble = ""
        self._heard_at = 0.0

    def take(self, event: BoardEvent, at: float) -> None:
        """Take an event that was heard at instant `at`."""
        kind, told, _ = event
        if kind in ("error", "dropped"):
            self._trouble = told if kind == "error" else f"connecting again: {told['reason']}"
            return
        if kind == "start":
            self._about, self._told = told, {}
            self._batches.clear()
            self._changes.clear()
            self._scalings.clear()
        elif not self._about:
            return
        self._trouble, self._heard_at, self.ready = "", at, True
        now = told["now"] or self._told.get("now", 0.0)
        self._told |= told | {"now": now}
        for departure in msgspec.convert(told["departures"], list[BatchDeparture]):
            self._batches[departure.worker, departure.left] = departure
        self._changes.extend(told["changes"])
        self._scalings.extend(told.get("scalings", ()))  # A process of an earlier version does not tell.
        for key in [key for key in self._batches if key[1] < now - KEPT]:
            del self._batches[key]

    def text(self, at: float, width: int = 0, sort: Sort = BY_NAME) -> str:
        """Text at instant `at`.

        Arguments:
            at: instant on the clock of `take`.
            width: columns of the terminal; 0: no limit.
            sort: order of the workers.
        """
        if not self.ready:
            return textwrap.fill(self._trouble or "connecting …", width or STRIP * 2)
        snapshot, recent = self._told.get("snapshot"), self._told.get("recent")
        parts = [self._head(at, snapshot, recent)]
        if recent is not None:
            parts.append(self._tiers(recent, snapshot, width))
        parts.append(self._strips(snapshot, width))
        if snapshot is not None:
            workers, members = snapshot["workers"], snapshot["members"]
            if workers:
                parts += [workers_table(workers, width, sort), *reasons(workers)]
            if len(members) > 1:
                parts.append(members_table(members, width, None if recent is None else recent["processes"]))
            parts += departed_table(snapshot.get("departed", []))
        parts += self._happened()
        return "\n\n".join(parts)

    def _head(self, at: float, snapshot: Mapping[str, Any] | None, recent: Mapping[str, Any] | None) -> str:
        about, told = self._about, self._told
        lines = {"asked": f"{about['role']} {about['id']}, version {about['version']}"}
        if self._trouble:
            lines["connection"] = self._trouble
        elif (silent := at - self._heard_at) > SILENT:
            lines["connection"] = f"nothing heard for {silent:.0f} s"
        if told["away"]:
            lines["broker away"] = told["away"]
            lines["fleet"] = f"as it was {snapshot['age_seconds']:.0f} s ago" if snapshot is not None else "not known"
        if told["lost_at"] and told["now"] - told["lost_at"] < KEPT:
            lines["history"] = f"begins {told['now'] - told['lost_at']:.0f} s ago, when the broker lost its data"
        if recent is not None:
            _, p95, _ = recent["latency"]
            lines["requests"] = (
                f"{sum(recent['ended'].values()):.1f}/s, P95 {milliseconds(p95)} of {about['promise_ms']:g} ms promised"
            )
        if snapshot is not None:
            queues, workers = snapshot["queues"], snapshot["workers"]
            waiting, oldest = (
                sum(one["depth"] for one in queues),
                max((one["oldest_seconds"] for one in queues), default=0.0),
            )
            lines["waiting"] = f"{waiting}, oldest {milliseconds(oldest)}" if waiting else "nothing"
            healthy, there = (sum(one["status"] in kinds for one in workers) for kinds in _CENSUS)
            lines["workers"] = f"{healthy} of {there} healthy"
            if snapshot["capacities"]:
                lines["capacity"] = "; ".join(map(capacity_text, snapshot["capacities"]))
            if wanted := snapshot.get("scaling"):
                lines["wanted"] = "; ".join(f"{model}: {_wanted(one)}" for model, one in wanted.items())
            lines["dead letters"] = str(snapshot["dead_letters"])
        return _listed(lines)

    def _tiers(self, recent: Mapping[str, Any], snapshot: Mapping[str, Any] | None, width: int) -> str:
        """Table of the tiers, rates of models where there are several, and why requests were refused or failed."""
        rows = []
        for one in recent["tiers"]:
            queues = [queue for queue in (snapshot or {"queues": ()})["queues"] if queue["tier"] == one["tier"]]
            oldest = max((queue["oldest_seconds"] for queue in queues), default=0.0)
            depth = sum(queue["depth"] for queue in queues)
            rows.append((
                one["tier"], f"{one['answered']:.1f}", *map(milliseconds, one["latency"]), str(depth),
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
        if lines := {name: most(found, "{:.1f}/s") for name, found in rates.items() if found}:
            parts.append(_listed(lines))
        return "\n\n".join(parts)

    def _strips(self, snapshot: Mapping[str, Any] | None, width: int) -> str:
        """Departures of the last seconds: their rates, and a lane for each worker."""
        end = self._told["now"] - BEHIND
        begin = end - WINDOW
        shown = [one for one in self._batches.values() if begin <= one.left < end]
        rates = f"{len(shown) / WINDOW:.1f}/s"
        if shown:
            why: dict[str, float] = {}
            for one in shown:
                why[one.reason] = why.get(one.reason, 0.0) + 1 / len(shown)
            fill = sum(one.fill for one in shown) / len(shown)
            rates += (
                f" of {sum(one.size for one in shown) / len(shown):.1f} inputs, {fill:.0%} full: {most(why, '{:.0%}')}"
            )
        lines = [_listed({"departures": rates})]
        workers = {one["worker_id"] for one in (snapshot or {"workers": ()})["workers"] if one["status"] != "offline"}
        names = sorted(workers | {one.worker for one in shown})
        longest = max(map(len, names), default=0)
        columns = max(width - longest - 3, 10) if width else STRIP
        lines += [f"{_plain(name):<{longest}} |{self._strip(name, begin, columns)}|" for name in names]
        return "\n".join(lines)

    def _strip(self, worker: str, begin: float, columns: int) -> str:
        """Lane of a worker: a mark where a batch runs, by its fill; x where it failed, ! where the worker's status changed."""
        cells = [" "] * columns
        by_second = columns / WINDOW
        for one in self._batches.values():
            if one.worker == worker:
                ends = one.left + one.seconds if one.outcome != RUNNING else begin + WINDOW
                first, last = (int((instant - begin) * by_second) for instant in (one.left, ends))
                mark = self._marks[min(int(one.fill * len(self._marks)), len(self._marks) - 1)]
                for cell in range(max(first, 0), min(max(last, first + 1), columns)):
                    cells[cell] = mark
                if _failed(one) and 0 <= last < columns:
                    cells[last] = "x"
        for instant, name, *_ in self._changes:
            if name == worker and 0 <= (cell := int((instant - begin) * by_second)) < columns:
                cells[cell] = "!"
        return "".join(cells)

    def _happened(self) -> list[str]:
        """Kills, restarts, failed batches and decisions of the autoscaler, newest first; nothing where there was none."""
        found = [
            (one.left + one.seconds, f"{one.worker}: a batch of {one.size} came back {one.outcome}")
            for one in self._batches.values()
            if _failed(one)
        ]
        for instant, worker, _, status, restarts, *cause in self._changes:
            found.append((instant, f"{worker} is {status}{after(restarts)}{': '.join(['', *filter(None, cause)])}"))
        for instant, model, before, desired, _, reason in self._scalings:
            found.append((instant, f"{model}: {before} to {desired} workers, {reason}"))
        newest = sorted(found, reverse=True)[:MOST_EVENTS]
        now = self._told["now"]
        lines = [f"{now - instant:4.0f} s ago  {_plain(text)}" for instant, text in newest if now - instant < KEPT]
        return ["\n".join(lines)] if lines else []


_CENSUS = ({"healthy"}, {"healthy", "degraded", "starting", "cold", "failed", "drained"})
"""Statuses of the workers that are healthy, and of those that are there."""


def milliseconds(seconds: float | None) -> str:
    """Seconds as text for people; a dash where they are not known."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _wanted(scaling: Mapping[str, Any]) -> str:
    """Workers that a model should have, and how far that is."""
    late = f", {scaling['late']} late" if scaling["late"] else ""
    trouble = f"; {scaling['trouble']}" if scaling["trouble"] else ""
    return f"{scaling['desired']} workers, {scaling['current']} there, {scaling['coming']} coming{late}{trouble}"


def after(restarts: int) -> str:
    """Number of restarts of a worker, as the end of a line; empty for none."""
    return f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""


def most(rates: Mapping[str, float], form: str) -> str:
    """Rates as text, the largest by name and the others together."""
    ordered = sorted(rates.items(), key=lambda item: -item[1])
    shown = [f"{name} {form.format(rate)}" for name, rate in ordered[:NAMED]]
    rest = sum(rate for _, rate in ordered[NAMED:])
    return ", ".join([*shown, f"others {form.format(rest)}"] if rest else shown)


def _failed(one: BatchDeparture) -> bool:
    return one.outcome not in (RUNNING, ARRIVED, GIVEN_BACK)


def _listed(lines: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<13} {_plain(value)}" for name, value in lines.items())


def _plain(text: str) -> str:
    """Text in which nothing can steer a terminal."""
    from headway.runtime.log import escape

    return escape(text)


def taken(found: Iterable[BoardEvent], at: float, unicode: bool = True) -> BoardView:
    """View of events that were all heard at instant `at`."""
    view = BoardView(unicode)
    for event in found:
        view.take(event, at)
    return view
