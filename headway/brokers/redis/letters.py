"""Wire format of dead letters; see `wire`."""

from __future__ import annotations

from headway.brokers.redis.wire import LETTER, read_entry, read_failure
from headway.model import DeadLetter


def pack_letter(died_at: float, attempts: int, failure: bytes, payload: bytes) -> bytes:
    """Pack a dead letter of an entry's payload and a packed failure."""
    return LETTER.pack(died_at, attempts, len(failure)) + failure + payload


def read_letter(packed: bytes) -> DeadLetter:
    """Read a dead letter."""
    died_at, attempts, length = LETTER.unpack_from(packed)
    start = LETTER.size
    failure = read_failure(packed[start : start + length])
    return DeadLetter(
        entry=read_entry(packed[start + length :]), error=failure.message, cause=failure.cause, attempts=int(attempts),
        worker=failure.worker, died_at=died_at,
    )  # fmt: skip
