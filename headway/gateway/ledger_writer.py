"""The ledger writer. It records every request without making any of them wait.

    gateway ─finished─▶ notes ─4 times a second, or when there are many─▶ records ─in bulk─▶ ledger

Adding a note is cheap. Notes keep inputs and outputs in memory, so they are soon turned into records, which don't. Most refusals
are only counted (`core/ledger_records.py`). While the ledger is slow or unreachable, records wait in order, up to a limit. New
records beyond the limit are dropped and counted.

A bulk of records is kept until the ledger has confirmed it. Writing it twice has no effect. After a quick write the next bulk is twice as
large; after a failed write it is half as large. So a slow ledger gets as much as it can handle, and a record that the ledger refuses soon
ends up in a bulk of its own."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from msgspec.structs import replace

from headway.config import ALL_ROWS, Settings
from headway.core.ledger_records import RefusalCounts, open_record_of, record_of, size_of
from headway.core.retry import backoff
from headway.errors import SettingError, StoreUnavailable
from headway.gateway.pending import Ending, Key, PendingRequest, PendingTable
from headway.model import LedgerRecord
from headway.ports import Ledger
from headway.runtime.availability import Availability
from headway.runtime.counters import StoreCounts
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

INTERVAL = 0.25  # Seconds between conversions of notes to records.
BULK = 2000  # Maximum number of records in a bulk. This many notes are converted without waiting for INTERVAL.
FIRST_BULK = 100  # Maximum number of records in the first bulk of a process, and in the first of its shutdown.
SWIFT = 0.5  # If writing a full bulk takes no more seconds than this, the next one is twice as large.
PAGE = 250  # Number of notes converted to records in one turn of the event loop.
CONTENT_CHARS = 64 << 20  # Maximum number of characters in waiting inputs and outputs, if these are recorded.
FLUSH_WITHIN = 5.0  # How many seconds a shutdown waits for the last records to be written.
ASK_EVERY = 5.0  # After this many seconds without records, check if the ledger still answers.
PRUNE_EVERY = 60.0  # Seconds between searches for records that are too old.
PRUNE_BITE = 1000  # Maximum number of records removed at a time, so that writes don't wait for long.
PRUNE_PAUSE = 0.05  # Seconds between removals.
OPEN_AT_ONCE = 500  # Maximum number of rows that one call writes or removes for open requests.


class AcceptedRequests:
    """Open requests, which have no outcome yet, for a ledger that records requests before they end.

        pending requests ──look, with each bulk of records──▶ new ──if still pending──▶ rows ──ended──▶ removed

    Accepting a request costs nothing, because `look` finds it at the end of the pending table. No row is written here for a request
    that ends before its turn."""

    def __init__(
        self, tiers: Sequence[str], clock: Callable[[], float], wall: Callable[[], float], pending: PendingTable
    ) -> None:
        self._tiers, self._clock, self._wall, self._pending = tiers, clock, wall, pending
        self._looked = -math.inf
        self._new: dict[Key, PendingRequest] = {}
        self._written: dict[Key, tuple[PendingRequest, Key]] = {}  # Requests with a row, and the row's tenant and id.
        self._taken: dict[Key, tuple[PendingRequest, LedgerRecord]] = {}
        self._ended: list[Key] = []

    @property
    def due(self) -> bool:
        return bool(self._new or self._ended)

    def look(self) -> None:
        now = self._clock()
        for key, pending in reversed(self._pending.items()):
            if pending.since < self._looked:
                break
            if (key not in self._written or self._written[key][0] is not pending) and not pending.follows:
                self._new[key] = pending
        self._looked = now

    def ended(self, request: PendingRequest) -> None:
        """Record that a request has its outcome."""
        key = request.entry.tenant, request.entry.id
        if (written := self._written.get(key)) is not None and written[0] is request:
            del self._written[key]
            self._ended.append(written[1])
        elif self._new.get(key) is request:
            del self._new[key]

    def take(self) -> tuple[Sequence[LedgerRecord], Sequence[Key]]:
        """Return the next rows to write, and the keys of rows to remove first. Returns the same ones until `done` is called."""
        now, wall = self._clock(), self._wall()
        self._taken = {}
        for key, pending in list(self._new.items())[:OPEN_AT_ONCE]:
            created, seconds = wall - (now - pending.since), pending.deadline - pending.since
            row = open_record_of(pending.principal, pending.entry, created, seconds, self._tiers, pending.part_of)
            self._taken[key] = pending, row
        return [row for _, row in self._taken.values()], self._ended[:OPEN_AT_ONCE]

    def done(self, removed: Sequence[Key]) -> None:
        """Record that the rows from the last `take` have been written or removed."""
        del self._ended[: len(removed)]
        for key, (request, row) in self._taken.items():
            stored = row.tenant, row.id
            if self._new.get(key) is request:
                del self._new[key]
                self._written[key] = request, stored
            else:  # It has ended since `take`, so its row is removed next.
                self._ended.append(stored)
        self._taken = {}


class LedgerWriter:
    """Observer that writes the ledger. The settings decide if requests in `held` get rows early. `wall` returns Unix time."""

    def __init__(
        self,
        ledger: Ledger,
        settings: Settings,
        counters: StoreCounts,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
        held: PendingTable | None = None,
    ) -> None:
        self._ledger = ledger
        self._tiers = settings.tier_names
        self._bound = settings.ledger_backlog
        self._retention = settings.keep_days * 86_400.0
        self._content = settings.ledger_content
        self._counters, self._clock, self._wall, self._rng = counters, clock, wall, rng
        self._notes: deque[tuple[float, float, Sequence[PendingRequest]]] = deque()
        self._noted = 0  # Number of requests in the notes.
        self._unended: list[tuple[float, float, PendingRequest]] = []  # Notes of first inputs, until their lists end.
        self._refusals = RefusalCounts()
        self._accepted: AcceptedRequests | None = None
        if settings.ledger_rows == ALL_ROWS:
            self._accepted = AcceptedRequests(self._tiers, clock, wall, PendingTable() if held is None else held)
        self._records: deque[LedgerRecord] = deque()  # Unconfirmed records. The bulk being written comes first.
        self._content_size = 0
        self._bulk = FIRST_BULK  # Maximum number of records in the next bulk.
        self._pace = 0.0  # Seconds that each record of the last bulk took.
        self._suspect: LedgerRecord | None = None  # First record of the last bulk that the ledger refused.
        self._failures, self._many = 0, asyncio.Event()
        self._there_are_records = asyncio.Event()
        self._opened = False
        self._availability = Availability("ledger", clock, "ledger")
        self._unpruned = Availability("ledger retention", clock, "ledger")

    @property
    def waiting(self) -> int:
        """Number of requests that aren't in the ledger yet."""
        return self._noted + len(self._unended) + len(self._records)

    def trouble(self) -> str:
        """Return why the ledger isn't accepting records; empty if it is."""
        error = self._availability.error
        return error and f"accepts no records: {error}; {self.waiting} records are waiting, of at most {self._bound}"

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        self._notes.append((self._wall(), now, requests))
        self._noted += len(requests)
        if self._noted >= BULK or self._noted + len(self._records) > self._bound:
            self._crowd()

    def add(self, record: LedgerRecord) -> None:
        """Add a record that doesn't come from a request."""
        if len(self._records) >= self._bound:
            self._counters.ledger_dropped += 1
            return
        self._records.append(record)
        self._there_are_records.set()

    async def open(self) -> None:
        """Open the ledger, or retry later if it is unreachable. Raises SettingError if it is unusable."""
        try:
            await self._ledger.open()
            self._opened = True
        except StoreUnavailable as exc:
            self._availability.failed(self._clock(), exc)

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("ledger records", self._collect_on)
        supervisor.start("ledger", self._write_on)
        if self._retention:
            supervisor.start("ledger retention", self._prune_on)

    async def close(self) -> None:
        """Write the remaining records, and close the ledger. Records that aren't written within FLUSH_WITHIN are dropped and counted."""
        self._bulk = min(self._bulk, FIRST_BULK)
        until = self._clock() + FLUSH_WITHIN
        try:
            async with asyncio.timeout(FLUSH_WITHIN):
                await self._collect()
                for at, ended, request in self._unended:
                    self._keep(self._record(at, ended, request))
                self._unended.clear()
                for record in self._refusals.ended():
                    self._keep(record)
                while self._records:
                    if self._pace:  # Use smaller bulks, because a bulk that isn't written in time is lost completely.
                        self._bulk = max(1, min(self._bulk, int((until - self._clock()) / 2 / self._pace)))
                    await self._write()
                while self._accepted is not None and self._accepted.due:
                    await self._write_open_rows(self._accepted)
        except TimeoutError:
            self._counters.ledger_dropped += self.waiting
            log.warning("the last records could not be written to the ledger", count=self.waiting)
            self._notes.clear()
            self._records.clear()
            self._noted = 0
        await self._ledger.close()

    def _crowd(self) -> None:
        """Drop notes beyond the limit, and have the others converted to records soon."""
        excess = self._noted + len(self._records) - self._bound
        if excess > 0:
            at, ended, notes = self._notes.pop()
            kept = notes[: max(0, len(notes) - excess)]
            if self._accepted is not None:
                for request in notes[len(kept) :]:
                    self._accepted.ended(request)
            self._noted -= len(notes) - len(kept)
            self._counters.ledger_dropped += len(notes) - len(kept)
            if kept:
                self._notes.append((at, ended, kept))
        self._many.set()

    async def _collect_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._many.wait()
            except TimeoutError:
                pass
            self._many.clear()
            await self._collect()

    async def _collect(self) -> None:
        turn, unended = 0, self._unended
        self._unended = []
        for at, ended, request in unended:
            self._take(at, ended, request, self._clock())
        while self._notes:
            at, ended, notes = self._notes.popleft()
            self._noted -= len(notes)
            now = self._clock()
            for request in notes:
                self._take(at, ended, request, now)
            turn += len(notes)
            if turn >= PAGE:
                turn = 0
                self._there_are_records.set()
                await asyncio.sleep(0)
        for record in self._refusals.ended(self._clock()):
            self._keep(record)
        if self._accepted is not None:
            self._accepted.look()
        if self._records or (self._accepted is not None and self._accepted.due):
            self._there_are_records.set()

    def _take(self, at: float, ended: float, request: PendingRequest, now: float) -> None:
        """Record a request, or wait for its list's outcome. The request ended at `ended`, which is `at` in Unix time."""
        if self._accepted is not None:
            self._accepted.ended(request)
        if request.several is not None and (whole := request.whole) is not None and not whole.ended:
            self._unended.append((at, ended, request))
            return
        record = self._record(at, ended, request)
        if not self._refusals.count(record, now):
            self._keep(record)

    def _record(self, at: float, ended: float, request: PendingRequest) -> LedgerRecord:
        """Make a record. For the first of several inputs, the record contains the outcome of the whole request."""
        seconds, reply, part_of = ended - request.since, request.reply, ""
        if request.several is not None:
            whole, part_of = request.whole, request.part_of
            if whole is not None and whole.ended:
                at, seconds = at - seconds + whole.seconds, whole.seconds
                output = reply.output if whole.failure is None else None
                reply = replace(reply, output=output, failure=whole.failure, ran=whole.ran, shared=whole.shared)
        record = record_of(request.principal, request.entry, seconds, reply, at, self._tiers, self._content)
        return replace(record, part_of=part_of) if part_of else record

    def _keep(self, record: LedgerRecord) -> None:
        if self._content:
            size = size_of(record)
            if self._content_size + size > CONTENT_CHARS:
                self._counters.ledger_dropped += 1
                return
            self._content_size += size
        self._records.append(record)

    async def _write_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ASK_EVERY):
                    await self._there_are_records.wait()
            except TimeoutError:
                await self._update_open_rows()  # An empty call shows if the ledger answers.
                continue
            while self._records:
                await self._write()
            if self._accepted is not None and self._accepted.due:
                await self._write_open_rows(self._accepted)
            self._there_are_records.clear()

    async def _reach(self) -> None:
        if not self._opened:
            await self._ledger.open()
            self._opened = True

    async def _write_open_rows(self, accepted: AcceptedRequests) -> None:
        """Write the rows of open requests that fit into one call. Other rows wait for the next interval."""
        records, ended = accepted.take()
        if await self._update_open_rows(records, ended):
            accepted.done(ended)

    async def _update_open_rows(
        self, records: Sequence[LedgerRecord] = (), ended: Sequence[tuple[str, str]] = ()
    ) -> bool:
        """Write and remove rows of open requests. Returns False if the ledger is unreachable."""
        began = self._clock()
        try:
            await self._reach()
            await self._ledger.note_open(records, ended)
        except (StoreUnavailable, SettingError) as exc:
            self._availability.failed(began, exc)
            self._failures += 1
            await asyncio.sleep(backoff(self._failures, self._rng()))
            return False
        except Exception as exc:  # These requests still get a row when they end.
            log.error("the ledger rejected the rows of open requests", error=type(exc).__name__)
        self._availability.over()
        self._failures = 0
        return True

    async def _write(self) -> None:
        bulk = list(islice(self._records, self._bulk))
        began = self._clock()
        try:
            await self._reach()
            await self._ledger.write(bulk)
        except (StoreUnavailable, SettingError) as exc:
            self._availability.failed(began, exc)
            self._failures += 1
            if self._clock() - began > SWIFT:  # A quick failure isn't due to the size of the bulk.
                self._bulk = max(1, len(bulk) // 2)
            await asyncio.sleep(backoff(self._failures, self._rng()))
        except Exception as exc:
            self._refused(bulk, exc)
        else:
            self._availability.over()
            self._failures = 0
            self._forget(bulk)
            took = self._clock() - began
            self._pace = took / len(bulk)
            if len(bulk) == self._bulk and took <= SWIFT:
                self._bulk = min(self._bulk * 2, BULK)

    def _refused(self, bulk: Sequence[LedgerRecord], error: Exception) -> None:
        """Halve a refused bulk until the bad record is alone. Drop that record only if it is refused again."""
        if len(bulk) > 1 or bulk[0] is not self._suspect:
            self._suspect = bulk[0]
            self._bulk = max(1, len(bulk) // 2)
            return
        self._counters.ledger_dropped += 1
        log.error("the ledger rejected a record", request_id=bulk[0].id, error=type(error).__name__)
        self._forget(bulk)

    def _forget(self, bulk: Sequence[LedgerRecord]) -> None:
        for _ in bulk:
            self._records.popleft()
        if self._content:
            self._content_size -= sum(map(size_of, bulk))

    async def _prune_on(self) -> None:
        await asyncio.sleep(PRUNE_EVERY * self._rng())  # Gateways that start together shouldn't prune at the same time.
        while True:
            removed = await self._prune() if self._availability.since is None else 0
            await asyncio.sleep(PRUNE_PAUSE if removed == PRUNE_BITE else PRUNE_EVERY)

    async def _prune(self) -> int:
        began, removed = self._clock(), 0
        try:
            removed = await self._ledger.prune(self._wall() - self._retention, PRUNE_BITE)
        except StoreUnavailable as exc:
            self._unpruned.failed(began, exc)
        else:
            self._unpruned.over()
        return removed
