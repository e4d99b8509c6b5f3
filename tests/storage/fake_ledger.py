"""A ledger in memory that does what the test wants."""

import asyncio
from collections.abc import Sequence

from headway.errors import StoreUnavailable
from headway.model import LedgerRecord


class FakeLedger:
    def __init__(self) -> None:
        self.away = False  # Every call fails.
        self.slow = 0.0  # Seconds per call.
        self.row_seconds = 0.0  # Seconds per row of a write.
        self.within = 5.0  # Seconds after which a write counts as unanswered, and is undone.
        self.unfit = ""  # Why no row can be removed, if none can.
        self.refusals = 0  # Number of coming writes to refuse, whatever is in them.
        self.unloved: set[str] = set()  # Ids of records that it can't take.
        self.batches: list[list[LedgerRecord]] = []
        self.calls = 0  # Number of writes requested.
        self.pruned: list[tuple[float, float, int]] = []
        self.old = 0  # Number of records that are too old.
        self.opened = self.closed = 0
        self.waiting: dict[tuple[str, str], LedgerRecord] = {}  # Records of requests without an outcome.
        self.noted = 0  # Number of such records noted in all.

    @property
    def records(self) -> list[LedgerRecord]:
        return [record for batch in self.batches for record in batch]

    async def open(self) -> None:
        await self._answer()
        self.opened += 1

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        self.calls += 1
        batch = list(records)
        await self._answer()
        takes = self.row_seconds * len(batch)
        await asyncio.sleep(min(takes, self.within))
        if takes > self.within:
            raise StoreUnavailable("no answer in time")
        refused = self.refusals > 0
        self.refusals -= refused
        if refused or self.unloved.intersection(record.id for record in batch):
            raise ValueError("not that one")
        self.batches.append(batch)

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        await self._answer()
        for key in ended:
            del self.waiting[key]
        self.waiting |= {(record.tenant, record.id): record for record in records}
        self.noted += len(records)

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        await self._answer()
        return [record for record in self.records if record.id == id]

    async def prune(self, before: float, limit: int) -> int:
        await self._answer()
        if self.unfit:
            raise StoreUnavailable(self.unfit)
        self.pruned.append((asyncio.get_running_loop().time(), before, limit))
        removed = min(self.old, limit)
        self.old -= removed
        return removed

    async def close(self) -> None:
        self.closed += 1

    async def _answer(self) -> None:
        if self.slow:
            await asyncio.sleep(self.slow)
        if self.away:
            raise StoreUnavailable("the ledger is away")
