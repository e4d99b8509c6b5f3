"""Server-sent events for the dashboard. A hub follows the departure board, and sends the same events to all viewers.

    start   the full state: half an hour of rows, the departures of the last few minutes, the fleet
    tick    changes: twice a second if there are departures, otherwise once a second, which also keeps the stream alive

Nothing runs while there are no viewers. A viewer that reconnects within a minute gets the ticks after its `Last-Event-ID`
instead of a start. While the broker is unreachable, ticks say so and contain the last known state."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headway.admin.process import ProcessView
from headway.admin.snapshot import Snapshot, SnapshotSource
from headway.core.departure_board import RECENT_SECONDS, STEP, BoardHistory
from headway.errors import SERVICE_OVERLOADED, BrokerUnavailable
from headway.http.routing import Request, RouteAnswer, StreamedAnswer, refusal
from headway.model import Failure
from headway.model.board import BatchDeparture, HistoryRow, Notice, RequestFlow, ScalingChange
from headway.runtime.counters import SECONDS
from headway.version import __version__

WINDOW = 10.0  # Seconds covered by current rates and percentiles.
QUANTILES = (0.5, 0.95, 0.99)


class FleetHistory:
    """Rows of the last half hour, and current rates and percentiles. `tiers` are names, highest first. `rows` include `notices`."""

    def __init__(self, tiers: Sequence[str], rows: Iterable[HistoryRow] = (), notices: Iterable[Notice] = ()) -> None:
        self._tiers = tiers
        self._history = BoardHistory(rows)
        self._changed: dict[int, HistoryRow] = {}
        self._flows: deque[tuple[float, str, RequestFlow]] = deque()
        for notice in notices:
            self._note(notice)

    def add(self, notice: Notice) -> None:
        self._note(notice)
        if (row := self._history.add(notice)) is not None:
            self._changed[row.step] = row

    def rows(self) -> list[list[Any]]:
        """Return all rows, oldest first."""
        self._changed.clear()
        return [self._shown(row) for row in self._history.rows()]

    def scalings(self) -> list[list[Any]]:
        """Return all scaling decisions, oldest first, in the format of `scaling_of`."""
        return [scaling_of(row.step * STEP, change) for row in self._history.rows() for change in row.scalings]

    def changed(self) -> list[list[Any]]:
        """Return the rows that have changed since the last call."""
        changed, self._changed = self._changed, {}
        return [self._shown(changed[step]) for step in sorted(changed)]

    def recent(self, now: float) -> dict[str, Any]:
        """Return rates per second and percentiles in seconds, over the WINDOW before broker time `now`."""
        while self._flows and self._flows[0][0] < now - WINDOW:
            self._flows.popleft()
        answered, processes = Counter[str](), Counter[str]()
        latencies: defaultdict[str, Counter[int]] = defaultdict(Counter)
        reasons = {name: Counter[str]() for name in ("refused", "failed", "retries", "ended")}
        for _, process, flow in self._flows:
            processes[process] += sum(flow.ended.values())
            answered.update(flow.answered)
            for tier, counts in flow.latencies.items():
                latencies[tier].update(counts)
            for name, counted in reasons.items():
                counted.update(getattr(flow, name))
        everything = sum(latencies.values(), Counter[int]())
        return {
            "window": WINDOW,
            "tiers": [
                {"tier": tier, "answered": answered[tier] / WINDOW, "latency": percentiles(_buckets(latencies[tier]))}
                for tier in self._tiers
            ],
            "latency": percentiles(_buckets(everything)),
            "processes": {process: count / WINDOW for process, count in processes.items()},
            **{
                name: {reason: count / WINDOW for reason, count in counted.most_common()}
                for name, counted in reasons.items()
            },
        }

    def _note(self, notice: Notice) -> None:
        if notice.flow is not None:
            self._flows.append((notice.at, notice.process, notice.flow))

    def _shown(self, row: HistoryRow) -> list[Any]:
        """Return a row for the page: time, rates, percentiles, and the fleet's stats, if known."""
        rates = [count / STEP for count in (row.ended, row.answered, row.refused, row.failed)]
        figures = row.fleet
        fleet = [None] * 5 if figures is None else [
            figures.waiting, max(figures.oldest, default=0.0), figures.capacity, figures.usable, figures.healthy,
        ]  # fmt: skip
        return [row.step * STEP, *rates, *percentiles(_buckets(row.latencies)), *fleet]


def scaling_of(at: float, change: ScalingChange) -> list[Any]:
    """Return a scaling decision for the page. `at` is the time of the notice that contains it."""
    return [round(at - change.ago, 1), change.model, change.before, change.desired, change.direction, change.reason]


def _buckets(counts: Mapping[int, int]) -> list[int]:
    buckets = [0] * (len(SECONDS) + 1)
    for bucket, count in counts.items():
        buckets[min(bucket, len(SECONDS))] += count
    return buckets


def percentiles(buckets: Sequence[int]) -> list[float | None]:
    """Return percentiles in seconds, given the counts by bucket. All are None if all counts are 0."""
    total = sum(buckets)
    return [round(_quantile(buckets, share * total), 4) if total else None for share in QUANTILES]


def _quantile(buckets: Sequence[int], rank: float) -> float:
    """Return the value with `rank` values below it, assuming that values are uniform within each bucket."""
    for index, count in enumerate(buckets):
        if count and rank <= count:
            low, high = SECONDS[index - 1] if index else 0.0, SECONDS[min(index, len(SECONDS) - 1)]
            return low + (high - low) * rank / count
        rank -= count
    return SECONDS[-1]


TICK = 0.5  # Seconds between ticks. Every other tick also contains the state of the fleet.
REMEMBERED = 120  # Number of ticks on which a reconnecting viewer can catch up.
MOST_VIEWERS = 100  # Maximum number of streams per process.
MOST_DEPARTURES = 20_000  # Maximum number of departures in a start event.
AGAIN_AFTER = 1.0  # Seconds before reading the board again after it didn't respond.
BUFFER = 32  # Maximum number of events waiting for one viewer. A viewer that is further behind is dropped.
DROP_GRACE = 5.0  # Seconds that a dropped viewer has for reading why, before its connection is cut.
TOO_SLOW = b'event: dropped\ndata: {"reason":"this page did not take its events in time"}\n\n'
OPENING = b"retry: 1000\n\n"  # Start of a stream. It makes browsers reconnect one second after the stream ends.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream:
    """Route for the event stream. `valid` returns True if a session hasn't ended."""

    def __init__(self, hub: Hub, valid: Callable[[str], bool]) -> None:
        self._hub, self._valid = hub, valid

    async def answer(self, request: Request) -> RouteAnswer:
        if self._hub.full:
            message = f"{MOST_VIEWERS} pages are already watching this process; open the dashboard of another one"
            return refusal(request.id, Failure(SERVICE_OVERLOADED, message, 5.0, "viewers"))
        return StreamedAnswer(partial(self._events, request), _HEADERS, "text/event-stream; charset=utf-8")

    async def _events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield events until the client leaves, signs out or is too slow, or the port closes."""
        session, viewer = request.session, Viewer(request.cut)
        leaving = asyncio.ensure_future(request.left())
        leaving.add_done_callback(lambda _: viewer.end())
        self._hub.join(viewer, request.headers.get("last-event-id", ""), request.shut)
        try:
            yield OPENING
            while (event := await viewer.next()) is not None and (not session or self._valid(session)):
                yield event
        finally:
            self._hub.leave(viewer)
            leaving.cancel()


class Viewer:
    """One open stream, with a bounded buffer of encoded events. `cut` closes its connection."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self.ended = False

    def offer(self, event: bytes) -> None:
        """Queue an event. If the buffer is full, drop the viewer and tell it why."""
        if self.ended:
            return
        if len(self._events) >= BUFFER:
            self._events.clear()
            self._events.append(TOO_SLOW)
            self._grace = asyncio.get_running_loop().call_later(DROP_GRACE, self._cut)
            self.ended = True
        else:
            self._events.append(event)
        self._news.set()

    def end(self) -> None:
        """End the stream after the queued events."""
        self.ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Wait for events, and return all queued events together. Return None at the end of the stream."""
        while not self._events:
            if self.ended:
                return None
            self._news.clear()
            await self._news.wait()
        queued = b"".join(self._events)
        self._events.clear()
        return queued

    def left(self) -> None:
        self.ended = True
        self._events.clear()
        if self._grace is not None:
            self._grace.cancel()


class Hub:
    """Follows the board on behalf of all viewers of one process."""

    def __init__(self, process: ProcessView, snapshots: SnapshotSource) -> None:
        self._process, self._snapshots = process, snapshots
        self._viewers: set[Viewer] = set()
        self._waiting: list[Viewer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._begin()

    @property
    def full(self) -> bool:
        return len(self._viewers) >= MOST_VIEWERS

    def join(self, viewer: Viewer, last_event: str, shut: asyncio.Event) -> None:
        """Start sending events to a viewer, beginning after the event with id `last_event`. `shut` is set when the port closes."""
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
        self._viewers.discard(viewer)
        viewer.left()
        if not self._viewers:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self._begin()

    def _begin(self) -> None:
        """Reset the state, so that everything is read again for the next viewer."""
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
        """Return the ticks after an event, or None if the hub no longer has all of them."""
        run, _, number = last_event.partition("-")
        if run != self._run or not (number.isascii() and number.isdigit()) or not self._sent:
            return None
        last = int(number[:18])
        if not self._sent[0][0] - 1 <= last <= self._number:
            return None
        return [event for sent, event in self._sent if sent > last]

    async def _follow(self) -> None:
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
        for departure in notice.departures:
            key = departure.worker, departure.left
            self._news[key] = self._departures[key] = departure
            self._departures.move_to_end(key)
        at = notice.at
        changes = [
            [round(at - change.ago, 3), change.worker, change.model, change.status, change.restarts, change.cause]
            for change in notice.changes
        ]
        self._changes.extend(changes)
        self._new_changes += changes
        oldest = at - RECENT_SECONDS
        while self._departures:
            key = next(iter(self._departures))
            if key[1] >= oldest and len(self._departures) <= MOST_DEPARTURES:
                break
            del self._departures[key]

    async def _tell(self) -> None:
        """Send ticks to all viewers, until the port closes."""
        count, seen = 0, None
        while not self._shut.is_set():
            await self._look()
            if self._read or self._away:
                statuses = self._state and [(worker.worker_id, worker.status) for worker in self._state.workers]
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

    def _tick(self, full: bool) -> None:
        """Send the changes since the last tick and, if `full`, the state of the fleet."""
        if not (full or self._news or self._new_changes or self._new_scalings):
            return
        news: dict[str, Any] = {
            "now": self._now(),
            "rows": self._history.changed(),
            "departures": list(self._news.values()),
            "changes": self._new_changes,
            "scalings": self._new_scalings,
            "away": self._away,
            "lost_at": self._lost_at,
        }
        if full:
            news |= {"snapshot": self._state, "recent": self._rates()}
        self._news, self._new_changes, self._new_scalings = {}, [], []
        self._number += 1
        event = _event("tick", f"{self._run}-{self._number}", news)
        self._sent.append((self._number, event))
        for viewer in self._viewers.difference(self._waiting):
            viewer.offer(event)

    def _welcome(self) -> None:
        """Send the full state to viewers that have joined since the last tick."""
        if not self._waiting:
            return
        process = self._process
        everything = {
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
        event = _event("start", f"{self._run}-{self._number}", everything)
        for viewer in self._waiting:
            viewer.offer(event)
        self._waiting.clear()

    def _rates(self) -> dict[str, Any] | None:
        """Return the current rates, or the last known ones while the broker is unreachable."""
        if self._read and not self._away:
            self._recent = self._history.recent(self._now())
        return self._recent

    def _now(self) -> float:
        return round(self._state.now, 3) if self._state is not None else 0.0


def _event(kind: str, id: str, data: object) -> bytes:
    # Encoded JSON contains no line breaks, so it fits into one data line.
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (id.encode(), kind.encode(), msgspec.json.encode(data))
