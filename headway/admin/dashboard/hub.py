"""Hub of the dashboard: follows the departure board while somebody looks, and tells all viewers the same events.

    start   everything: half an hour of rows, the departures of the last minutes, the fleet as it is
    tick    what is new: twice a second if there are departures, else once; it is the stream's heartbeat, too

Nothing runs here while nobody looks. A viewer that comes back within a minute, and says by `Last-Event-ID` what it has
had, gets the ticks since instead of everything. While the broker is out of reach ticks say so, and show what was last known.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict, deque
from typing import Any

import msgspec

from headway.admin.dashboard.history import FleetHistory, scaling_of
from headway.admin.dashboard.viewers import Viewer
from headway.admin.process import ProcessView
from headway.admin.snapshot import Snapshot
from headway.admin.snapshot_source import SnapshotSource
from headway.core.departure_board import RECENT_SECONDS, STEP
from headway.errors import BrokerUnavailable
from headway.model.board import BatchDeparture, Notice
from headway.runtime.logger import get_logger
from headway.version import __version__

log = get_logger(__name__)

TICK = 0.5
"""Seconds between two ticks with departures, or with a worker's change; every second one tells the state of the fleet."""
REMEMBERED = 120
"""Ticks that a viewer may have missed and still get."""
MOST_VIEWERS = 100
"""Most streams of one process."""
MOST_DEPARTURES = 20_000
"""Most departures that are shown at a start."""
AGAIN_AFTER = 1.0
"""Seconds after which a board that did not answer is read again."""


class Hub:
    """Hub of one process.

    Arguments:
        process: view of the process.
        snapshots: source of the fleet's snapshots.
    """

    def __init__(self, process: ProcessView, snapshots: SnapshotSource) -> None:
        self._process = process
        self._snapshots = snapshots
        self._viewers: set[Viewer] = set()
        self._waiting: list[Viewer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._begin()

    @property
    def full(self) -> bool:
        """Whether there are as many viewers as may be."""
        return len(self._viewers) >= MOST_VIEWERS

    def join(self, viewer: Viewer, last_event: str, shut: asyncio.Event) -> None:
        """Begin to tell a viewer. `last_event` is the id of the last event that it has had; `shut` is set as the port closes."""
        self._viewers.add(viewer)
        self._shut = shut
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._follow()), loop.create_task(self._tell())]
        missed = self._since(last_event)
        if missed is None:
            self._waiting.append(viewer)
            self._due.set()
        else:
            for event in missed:
                viewer.offer(event)

    def leave(self, viewer: Viewer) -> None:
        """Tell a viewer no more."""
        self._viewers.discard(viewer)
        viewer.left()
        if not self._viewers:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self._begin()

    def _begin(self) -> None:
        """Forget everything: it is read again when somebody comes."""
        self._run = secrets.token_hex(4)
        self._number = 0
        self._history = FleetHistory(self._process.settings.tier_names)
        self._departures: OrderedDict[tuple[str, float], BatchDeparture] = OrderedDict()
        self._changes: deque[list[Any]] = deque(maxlen=1000)
        self._news: dict[tuple[str, float], BatchDeparture] = {}
        self._new_changes: list[list[Any]] = []
        self._new_scalings: list[list[Any]] = []
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)
        self._state: Snapshot | None = None
        self._recent: dict[str, Any] | None = None
        self._away = ""
        self._lost_at = 0.0
        self._read = False
        self._due = asyncio.Event()

    def _since(self, last_event: str) -> list[bytes] | None:
        """Ticks after an event; None where they are not all known."""
        run, _, number = last_event.partition("-")
        if run != self._run or not (number.isascii() and number.isdigit()) or not self._sent:
            return None
        last = int(number[:18])
        if not self._sent[0][0] - 1 <= last <= self._number:
            return None
        return [event for sent, event in self._sent if sent > last]

    async def _follow(self) -> None:
        """Read the board."""
        board, cursor = self._process.board, ""
        while True:
            try:
                if cursor:
                    news = await board.read(cursor)
                    for notice in news.notices:
                        self._history.add(notice)
                        self._new_scalings += [scaling_of(notice.at, change) for change in notice.scalings]
                else:
                    rows, news = await board.history()
                    self._history = FleetHistory(self._process.settings.tier_names, rows, news.notices)
                for notice in news.notices:
                    self._take(notice)
                cursor, self._lost_at, self._away = news.cursor, news.lost_at, ""
            except BrokerUnavailable as exc:
                self._away = str(exc)
                await asyncio.sleep(AGAIN_AFTER)
            if cursor and not self._read:
                self._read = True
                self._due.set()

    def _take(self, notice: Notice) -> None:
        """Note the batches and changes that a notice tells."""
        for departure in notice.departures:
            key = departure.worker, departure.left
            self._news[key] = self._departures[key] = departure
            self._departures.move_to_end(key)
        changes = [
            [round(notice.at - one.ago, 3), one.worker, one.model, one.status, one.restarts, one.cause]
            for one in notice.changes
        ]
        self._changes.extend(changes)
        self._new_changes += changes
        oldest = notice.at - RECENT_SECONDS
        while self._departures:
            key = next(iter(self._departures))
            if key[1] >= oldest and len(self._departures) <= MOST_DEPARTURES:
                break
            del self._departures[key]

    async def _tell(self) -> None:
        """Tell all viewers what is new, until the port closes."""
        count, seen = 0, None
        while not self._shut.is_set():
            await self._look()
            if self._read or self._away:
                statuses = self._state and [(one.worker_id, one.status) for one in self._state.workers]
                self._tick(count % 2 == 0 or statuses != seen)
                self._welcome()
                count, seen = count + 1, statuses
            self._due.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._due.wait()
        for viewer in self._viewers:
            viewer.end()

    async def _look(self) -> None:
        try:
            self._state = await self._snapshots.fresh()
            self._away = ""
        except BrokerUnavailable as exc:
            self._away = str(exc)
            self._state = self._snapshots.known(self._away)

    def _tick(self, whole: bool) -> None:
        """Send what is new since the last tick; with `whole` also the state of the fleet."""
        if not (whole or self._news or self._new_changes or self._new_scalings):
            return
        told: dict[str, Any] = {
            "now": self._now(),
            "rows": self._history.changed(),
            "departures": list(self._news.values()),
            "changes": self._new_changes,
            "scalings": self._new_scalings,
            "away": self._away,
            "lost_at": self._lost_at,
        }
        if whole:
            told |= {"snapshot": self._state, "recent": self._rates()}
        self._news, self._new_changes, self._new_scalings = {}, [], []
        self._number += 1
        event = _event("tick", f"{self._run}-{self._number}", told)
        self._sent.append((self._number, event))
        welcome = set(self._waiting)
        for viewer in self._viewers - welcome:
            viewer.offer(event)

    def _welcome(self) -> None:
        """Send everything to those that have come since the last tick."""
        if not self._waiting:
            return
        process = self._process
        told = {
            "id": process.id,
            "role": process.role.value,
            "version": __version__,
            "replays": process.gateway is not None,
            "tiers": process.settings.tier_names,
            "promise_ms": process.settings.promise_ms,
            "step": STEP,
            "now": self._now(),
            "rows": self._history.rows(),
            "departures": list(self._departures.values()),
            "changes": list(self._changes),
            "scalings": self._history.scalings(),
            "snapshot": self._state,
            "recent": self._rates(),
            "away": self._away,
            "lost_at": self._lost_at,
        }
        event = _event("start", f"{self._run}-{self._number}", told)
        for viewer in self._waiting:
            viewer.offer(event)
        self._waiting.clear()

    def _rates(self) -> dict[str, Any] | None:
        """Rates of the last seconds; while the broker is away the last ones that are known, None where none are."""
        if self._read and not self._away:
            self._recent = self._history.recent(self._now())
        return self._recent

    def _now(self) -> float:
        return round(self._state.now, 3) if self._state is not None else 0.0


def _event(kind: str, id: str, told: object) -> bytes:
    """Event as it travels; JSON has no line breaks of its own."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (id.encode(), kind.encode(), msgspec.json.encode(told))
