"""Ledger records of requests, with names that a database accepts. They contain inputs and outputs only if configured.

Refusals are counted together, so that thousands per second for one caller don't fill the ledger:

    first of a caller ──▶ a record of its own ──▶ next ones: counted for MINUTE seconds ──▶ one record for all of them

They are counted by tier and code, of which there are few. They aren't counted by model, because clients may make up names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import msgspec

from headway.core.values import shown
from headway.errors import REFUSALS, SHOWN
from headway.model import Entry, LedgerRecord, Principal, Reply

NAME_LENGTH = 128  # Limit on a name in characters, because clients may make up names.
MINUTE = 60.0  # Seconds for which refusals are counted together.
MOST_COUNTED = 10_000  # Limit on combinations of caller, tier and code. Beyond it, the oldest are recorded early.


def record_of(
    principal: Principal,
    entry: Entry,
    seconds: float,
    reply: Reply,
    completed_at: float,
    tiers: Sequence[str],
    content: bool,
) -> LedgerRecord:
    """Return the ledger record of a request that finished after `seconds`, with its input and output if `content`."""
    failure, of_answer = reply.failure, reply.ran
    ran = of_answer if reply.shared is None else None
    input = output = None
    if content:
        input = _storable(shown(entry.input))
        output = None if reply.output is None else _storable(shown(reply.output))
    return LedgerRecord(
        id=entry.id,
        user=_name(principal.user),
        tenant=_name(principal.tenant),
        tier=tiers[entry.tier],
        model=_name(entry.model),
        status="completed" if failure is None else "failed",
        created_at=completed_at - seconds,
        completed_at=completed_at,
        latency_ms=seconds * 1000.0,
        batch_size=0 if ran is None else ran.size,
        worker="" if ran is None else ran.worker,
        version=(of_answer.version if of_answer is not None else "") or _name(entry.version),
        error="" if failure is None else SHOWN.get(failure.code, failure.code),
        batch_id="" if ran is None else ran.batch_id,
        tokens=None if reply.tokens is None else reply.tokens.used,
        input=input,
        output=output,
    )


def open_record_of(
    principal: Principal, entry: Entry, created_at: float, seconds: float, tiers: Sequence[str], part_of: str
) -> LedgerRecord:
    """Return the ledger record of a request that will finish within `seconds`."""
    return LedgerRecord(
        id=entry.id,
        user=_name(principal.user),
        tenant=_name(principal.tenant),
        tier=tiers[entry.tier],
        model=_name(entry.model),
        status="queued",
        created_at=created_at,
        completed_at=created_at + seconds,
        latency_ms=0.0,
        version=_name(entry.version),
        part_of=part_of,
    )


def size_of(record: LedgerRecord) -> int:
    """Return the number of characters in a record's input and output."""
    return len(record.input or "") + len(record.output or "")


def _name(text: str) -> str:
    return text if text.isprintable() and len(text) <= NAME_LENGTH else _storable(text[:NAME_LENGTH])


def _storable(text: str) -> str:
    """Escape what databases don't accept: lone surrogates and U+0000."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class _Minute(msgspec.Struct):
    ends: float
    counted: LedgerRecord | None = None  # Record of those counted. None after the first, which has its own record.


class RefusalCounts:
    """Counts refusals by caller, tier and code."""

    def __init__(self) -> None:
        self._minutes: dict[tuple[str, str, str, str], _Minute] = {}  # In the order in which their minutes end.

    def count(self, record: LedgerRecord, now: float) -> bool:
        """Count a record if it is a refusal. Returns True if the refusal needs no row of its own."""
        if record.error not in REFUSALS or record.batch_size:
            return False
        key = (record.tenant, record.user, record.tier, record.error)
        minute = self._minutes.get(key)
        if minute is None:
            self._minutes[key] = _Minute(now + MINUTE)
            return False
        counted = minute.counted
        minute.counted = (
            msgspec.structs.replace(record, input=None, output=None) if counted is None else _together(counted, record)
        )
        return True

    def ended(self, now: float = inf) -> Iterator[LedgerRecord]:
        """Remove and yield the records whose minute is over at time `now`; by default, all of them."""
        while self._minutes:
            key = next(iter(self._minutes))
            if self._minutes[key].ends > now and len(self._minutes) <= MOST_COUNTED:
                return
            if (counted := self._minutes.pop(key).counted) is not None:
                yield counted


def _together(counted: LedgerRecord, record: LedgerRecord) -> LedgerRecord:
    return msgspec.structs.replace(
        counted,
        model=counted.model if counted.model == record.model else "",
        version=counted.version if counted.version == record.version else "",
        completed_at=max(counted.completed_at, record.completed_at),
        latency_ms=max(counted.latency_ms, record.latency_ms),
        requests=counted.requests + 1,
    )
