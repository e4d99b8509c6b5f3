"""Writer of the ledger: records every request, off the way that requests take.

    gateway ─finished─▶ notes ─4 times a second, or when there are many─▶ records ─in bulk─▶ ledger

To add a note costs next to nothing, and never waits. Notes hold inputs and outputs, so they are soon made into records,
which do not, whether the ledger answers or not; most refusals are only counted (`core/ledger_records.py`). While it is slow or
away records wait for it, in the order in which they came. There is room for so many, those under way included; what
comes when it is full is dropped, and counted.

A bulk is forgotten only when it is written. One that was written unheard is written again, which changes nothing. How
large the next one is follows from the last: twice as large where that was quick, half where it was not taken, for want
of time or for a row in it. So a slow ledger gets what it can take, and a row that it cannot take soon stands alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from msgspec.structs import replace

from headway.config import ALL_ROWS, Settings
from headway.core.ledger_records import RefusalCounts, record_of, size_of
from headway.core.retry import backoff
from headway.errors import SettingError, StoreUnavailable
from headway.gateway.accepted_requests import AcceptedRequests
from headway.gateway.pending import Ending, PendingRequest, PendingTable
from headway.model import LedgerRecord
from headway.ports import Ledger
from headway.runtime.availability import Availability
from headway.runtime.counters import StoreCounts
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

INTERVAL = 0.25
"""Seconds after which notes are made into records, and written."""
BULK = 2000
"""Most records in one bulk. As many notes do not wait for the interval."""
FIRST_BULK = 100
"""Most records in the first bulk, and in the first at the end of a process, as the ledger's speed has to be found out.
"""
SWIFT = 0.5
"""Seconds that a full bulk may take for the next one to be twice as large."""
PAGE = 250
"""Notes made into records before the event loop gets its turn."""
CONTENT_CHARS = 64 << 20
"""Most characters of inputs and outputs that wait, where they are recorded."""
FLUSH_WITHIN = 5.0
"""Seconds for which the end of a process waits for its last records to be written."""
ASK_EVERY = 5.0
"""Seconds without records after which the ledger is asked whether it still answers."""
PRUNE_EVERY = 60.0
"""Seconds between two looks for records that are too old."""
PRUNE_BITE = 1000
"""Most records removed at once, so that a record that is written does not wait for long."""
PRUNE_PAUSE = 0.05
"""Seconds between two removals."""
_DAY = 86_400.0


class LedgerWriter:
    """Ledger writer of one gateway; see `headway.gateway.pending.Observer` and `headway.app.lifecycle.Resource`.

    Arguments:
        ledger: ledger that gets the records.
        settings: settings of the bound, the age at which records are removed, the names of tiers, and whether inputs
            and outputs are recorded.
        counters: counters of dropped records.
        clock: monotonic seconds.
        wall: Unix time in seconds.
        rng: uniform in [0, 1), for pauses.
        held: pending requests of the gateway, which get rows, too, if the settings say so; None: there are none.
    """

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
        self._retention = settings.keep_days * _DAY
        self._content = settings.ledger_content
        self._counters = counters
        self._clock = clock
        self._wall = wall
        self._rng = rng
        self._notes: deque[tuple[float, float, Sequence[PendingRequest]]] = deque()
        self._noted = 0
        """Number of notes that are not records yet."""
        self._unended: list[tuple[float, float, PendingRequest]] = []
        """Notes of first ones of several inputs, whose records are their requests' and wait for the outcome of those."""
        self._refusals = RefusalCounts()
        self._accepted = (
            AcceptedRequests(settings.tier_names, clock, wall, PendingTable() if held is None else held)
            if settings.ledger_rows == ALL_ROWS
            else None
        )
        self._records: deque[LedgerRecord] = deque()
        """Records that are not written yet, those under way in front."""
        self._content_size = 0
        self._bulk = FIRST_BULK
        """Most records that are written at once."""
        self._pace = 0.0
        """Seconds that the last bulk took for each record."""
        self._suspect: LedgerRecord | None = None
        """First record of the last bulk that was refused."""
        self._failures = 0
        """Number of times in a row that the ledger has not answered."""
        self._many = asyncio.Event()
        self._there_are_records = asyncio.Event()
        self._opened = False
        self._availability = Availability("ledger", clock, "ledger")
        self._unpruned = Availability("ledger retention", clock, "ledger")

    @property
    def waiting(self) -> int:
        """Requests whose records are not written yet."""
        return self._noted + len(self._unended) + len(self._records)

    def trouble(self) -> str:
        """Words on why nothing gets into the ledger now; empty while it takes what it is given."""
        error = self._availability.error
        return error and f"takes nothing: {error}; {self.waiting} records wait, of {self._bound} at most"

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Note requests that have ended; never waits."""
        self._notes.append((self._wall(), now, requests))
        self._noted += len(requests)
        if self._noted >= BULK or self._noted + len(self._records) > self._bound:
            self._crowd()

    def add(self, record: LedgerRecord) -> None:
        """Have a record of something else than a request written; never waits."""
        if len(self._records) >= self._bound:
            self._counters.ledger_dropped += 1
            return
        self._records.append(record)
        self._there_are_records.set()

    async def open(self) -> None:
        """Reach the ledger. When it is away, that is tried again while requests are served.

        Raises:
            SettingError: the ledger cannot be used.
        """
        try:
            await self._ledger.open()
            self._opened = True
        except StoreUnavailable as exc:
            self._availability.failed(self._clock(), exc)

    def start(self, supervisor: Supervisor) -> None:
        """Start the loops."""
        supervisor.start("ledger records", self._collect_on)
        supervisor.start("ledger", self._write_on)
        if self._retention:
            supervisor.start("ledger retention", self._prune_on)

    async def close(self) -> None:
        """Write the remaining records, within FLUSH_WITHIN; the rest is dropped and counted. Then close the ledger."""
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
                    if self._pace:  # What is not done by then is lost, so the last ones are small.
                        self._bulk = max(1, min(self._bulk, int((until - self._clock()) / 2 / self._pace)))
                    await self._write()
                while self._accepted is not None and self._accepted.due:
                    await self._note_open(self._accepted)
        except TimeoutError:
            self._counters.ledger_dropped += self.waiting
            log.warning("the last records do not get into the ledger", count=self.waiting)
            self._notes.clear()
            self._records.clear()
            self._noted = 0
        await self._ledger.close()

    def _crowd(self) -> None:
        """Have notes made into records soon when there are many, and drop those for which there is no room."""
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
        """Make records of all notes."""
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
        """Make the record of a request that ended at instant `ended`, Unix time `at`, or have it wait for its outcome."""
        if self._accepted is not None:
            self._accepted.ended(request)
        if request.several is not None and (whole := request.whole) is not None and not whole.ended:
            self._unended.append((at, ended, request))
            return
        record = self._record(at, ended, request)
        if not self._refusals.count(record, now):
            self._keep(record)

    def _record(self, at: float, ended: float, request: PendingRequest) -> LedgerRecord:
        """Record of a request. The first of several inputs has their request's, which tells what the client got."""
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
                await self._tell_ledger()  # Nothing, only to see whether it answers.
                continue
            while self._records:
                await self._write()
            if self._accepted is not None and self._accepted.due:
                await self._note_open(self._accepted)
            self._there_are_records.clear()

    async def _reach(self) -> None:
        if not self._opened:
            await self._ledger.open()
            self._opened = True

    async def _note_open(self, accepted: AcceptedRequests) -> None:
        """Note requests without an outcome, and remove those whose rows are written. The next interval has what is left."""
        records, ended = accepted.take()
        if await self._tell_ledger(records, ended):
            accepted.done(ended)

    async def _tell_ledger(self, records: Sequence[LedgerRecord] = (), ended: Sequence[tuple[str, str]] = ()) -> bool:
        """Have the ledger note and remove these requests. Returns False if it is out of reach."""
        began = self._clock()
        try:
            await self._reach()
            await self._ledger.note_open(records, ended)
        except (StoreUnavailable, SettingError) as exc:
            self._availability.failed(began, exc)
            self._failures += 1
            await asyncio.sleep(backoff(self._failures, self._rng()))
            return False
        except Exception as exc:  # They get rows when they have ended.
            log.error("the ledger cannot take requests without an outcome", error=type(exc).__name__)
        self._availability.over()
        self._failures = 0
        return True

    async def _write(self) -> None:
        """Write one bulk. If the ledger does not take it now, pause, and halve the next bulk."""
        bulk = list(islice(self._records, self._bulk))
        began = self._clock()
        try:
            await self._reach()
            await self._ledger.write(bulk)
        except (StoreUnavailable, SettingError) as exc:
            self._availability.failed(began, exc)
            self._failures += 1
            if self._clock() - began > SWIFT:  # Else it is no matter of how much it was.
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
        """Handle a bulk with a record that the ledger cannot take.

        The next bulks are smaller, until that record stands alone. Then it is tried once more, as it may have been
        damaged on its way.
        """
        if len(bulk) > 1 or bulk[0] is not self._suspect:
            self._suspect = bulk[0]
            self._bulk = max(1, len(bulk) // 2)
            return
        self._counters.ledger_dropped += 1
        log.error("the ledger cannot take a record", request_id=bulk[0].id, error=type(error).__name__)
        self._forget(bulk)

    def _forget(self, bulk: Sequence[LedgerRecord]) -> None:
        for _ in bulk:
            self._records.popleft()
        if self._content:
            self._content_size -= sum(map(size_of, bulk))

    async def _prune_on(self) -> None:
        """Remove old records, in bites.

        The first removal is at a random time of the first minute, so that gateways that start together do not remove
        together.
        """
        await asyncio.sleep(PRUNE_EVERY * self._rng())
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
