"""What the ledger keeps of a request: no input and no output unless that is asked for, and names that a database takes."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import SHOWN
from headway.model import Entry, LedgerRecord, Principal, Reply

NAME_LENGTH = 128
"""Characters that are kept of what names somebody or something; a model that is asked for may have any name."""


def record_of(
    caller: Principal,
    entry: Entry,
    seconds: float,
    reply: Reply,
    completed_at: float,
    tiers: Sequence[str],
    content: bool,
) -> LedgerRecord:
    """The record of a request that has its outcome.

    Arguments:
        caller: who asked.
        entry: what was asked.
        seconds: that it took.
        reply: what came of it.
        completed_at: Unix time in seconds.
        tiers: their names.
        content: whether input and output are kept.
    """
    failure = reply.failure
    ran = reply.ran if reply.shared is None else None
    input = output = None
    if content:
        input = _storable(entry.input)
        output = None if reply.output is None else _storable(reply.output)
    return LedgerRecord(
        id=entry.id,
        user=_name(caller.user),
        tenant=_name(caller.tenant),
        tier=tiers[entry.tier],
        model=_name(entry.model),
        status="completed" if failure is None else "failed",
        created_at=completed_at - seconds,
        completed_at=completed_at,
        latency_ms=seconds * 1000.0,
        batch_size=0 if ran is None else ran.size,
        worker="" if ran is None else ran.worker,
        error="" if failure is None else SHOWN.get(failure.code, failure.code),
        input=input,
        output=output,
    )


def size_of(record: LedgerRecord) -> int:
    """Characters of its input and output."""
    return len(record.input or "") + len(record.output or "")


def _name(text: str) -> str:
    return text if text.isprintable() and len(text) <= NAME_LENGTH else _storable(text[:NAME_LENGTH])


def _storable(text: str) -> str:
    """`text` with what a database does not take escaped: what is no Unicode, and U+0000."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
