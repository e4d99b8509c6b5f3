"""Ledger records of requests, in names that a database takes. Input and output are in them only when that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.values import shown
from headway.errors import SHOWN
from headway.model import Entry, LedgerRecord, Principal, Reply

NAME_LENGTH = 128
"""Most characters of a name that are kept. A client may ask for a model of any name."""


def record_of(
    principal: Principal,
    entry: Entry,
    seconds: float,
    reply: Reply,
    completed_at: float,
    tiers: Sequence[str],
    content: bool,
) -> LedgerRecord:
    """Ledger record of a request that has its outcome.

    Arguments:
        principal: principal that asked.
        entry: entry of the request.
        seconds: seconds from the request to its outcome.
        reply: outcome of the request.
        completed_at: Unix time in seconds.
        tiers: names of the tiers.
        content: whether input and output are kept.
    """
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
    """Ledger record of a request that has no outcome yet, and has one after `seconds` at the latest."""
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
    """Characters of a record's input and output."""
    return len(record.input or "") + len(record.output or "")


def _name(text: str) -> str:
    return text if text.isprintable() and len(text) <= NAME_LENGTH else _storable(text[:NAME_LENGTH])


def _storable(text: str) -> str:
    """`text` with what a database does not take escaped: lone surrogates, and U+0000."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
