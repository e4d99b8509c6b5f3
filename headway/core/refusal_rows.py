"""Ledger records of refused requests.

One caller may have thousands of requests a second refused, without filling the ledger.

    first of a caller ──▶ a record of its own ──▶ next ones: counted for MINUTE seconds ──▶ one record for all of them

Each tier and each code of a refusal is counted apart, as there are few of them. A model may be called anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from headway.errors import REFUSALS
from headway.model import LedgerRecord

MINUTE = 60.0
"""Seconds for which refusals are counted together."""
MOST = 10_000
"""Most callers, tiers and codes that are counted at a time. Beyond, those counted longest get their record early."""


class _Minute(msgspec.Struct):
    """Refusals of one caller, tier and code."""

    ends: float
    counted: LedgerRecord | None = None
    """Record of all so far; None while there is but the refusal that has a record of its own."""


class RefusalCounts:
    """Refusals that are being counted."""

    def __init__(self) -> None:
        self._minutes: dict[tuple[str, str, str, str], _Minute] = {}
        """Minutes of refusals, in the order in which they end."""

    def count(self, record: LedgerRecord, now: float) -> bool:
        """Count a refusal with others. True when the record wants no row of its own.

        Arguments:
            record: record of any request.
            now: monotonic seconds.
        """
        if record.error not in REFUSALS or record.batch_size:
            return False
        key = (record.tenant, record.user, record.tier, record.error)
        minute = self._minutes.get(key)
        if minute is None:
            self._minutes[key] = _Minute(now + MINUTE)
            return False
        counted = minute.counted
        minute.counted = _plain(record) if counted is None else _together(counted, record)
        return True

    def ended(self, now: float = inf) -> Iterator[LedgerRecord]:
        """Take the records whose minute is over at instant `now`; by default, all."""
        while self._minutes:
            key = next(iter(self._minutes))
            if self._minutes[key].ends > now and len(self._minutes) <= MOST:
                return
            if (counted := self._minutes.pop(key).counted) is not None:
                yield counted


def _plain(record: LedgerRecord) -> LedgerRecord:
    return msgspec.structs.replace(record, input=None, output=None)


def _together(counted: LedgerRecord, record: LedgerRecord) -> LedgerRecord:
    return msgspec.structs.replace(
        counted,
        model=counted.model if counted.model == record.model else "",
        version=counted.version if counted.version == record.version else "",
        completed_at=max(counted.completed_at, record.completed_at),
        latency_ms=max(counted.latency_ms, record.latency_ms),
        requests=counted.requests + 1,
    )
