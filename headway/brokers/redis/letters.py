"""Wire format of dead letters; see `wire`."""

from __future__ import annotations

import struct

from headway.brokers.redis.entry_wire import Apart, TracedWireEntry, entry_of, read_payload
from headway.brokers.redis.wire import read_failure
from headway.model import DeadLetter

LETTER = struct.Struct(">ddI")
"""Head of a dead letter: the instant, the runs, the length of the packed failure."""


def pack_letter(died_at: float, attempts: int, failure: bytes, payload: bytes) -> bytes:
    """Pack a dead letter of an entry's payload and a packed failure."""
    return LETTER.pack(died_at, attempts, len(failure)) + failure + payload


def payload_of(letter: bytes) -> TracedWireEntry:
    """Read the payload in a dead letter; raises as `read_payload`."""
    length = LETTER.unpack_from(letter)[2]
    return read_payload(letter[LETTER.size + length :])


def read_letter(packed: bytes, apart: Apart | None = None) -> DeadLetter:
    """Read a dead letter; `apart` is what is stored apart of its entry."""
    died_at, attempts, length = LETTER.unpack_from(packed)
    start = LETTER.size
    failure = read_failure(packed[start : start + length])
    return DeadLetter(
        entry=entry_of(read_payload(packed[start + length :]), apart), error=failure.message, cause=failure.cause, attempts=int(attempts),
        worker=failure.worker, died_at=died_at, version=failure.version, batch_id=failure.batch_id,
    )  # fmt: skip
