"""What is written into the server, as msgpack arrays: never pickle. Each begins with its schema version.

New members are only ever added at the end, with a default. So a process reads what one of the release before or after it
has written; what is newer than that it refuses, rather than guess.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from headway.core import verdicts
from headway.core.departure import Load
from headway.model import (
    BatchFailure,
    Capacity,
    Cause,
    DeadLetter,
    Entry,
    Failure,
    Member,
    Ran,
    Reply,
    WorkerInfo,
)

T = TypeVar("T")

SCHEMA = 1
"""Version of what this release writes."""
READABLE = range(1, SCHEMA + 2)
"""Versions that this release reads."""


class TooNew(Exception):
    """What was read is of a later release than this one can read; the text says which."""


UNREADABLE = (TooNew, msgspec.MsgspecError, ValueError, KeyError, struct.error)
"""What reading may raise."""


def reason(exc: BaseException) -> str:
    """Why something cannot be read."""
    return str(exc) if isinstance(exc, TooNew | msgspec.MsgspecError) else f"it is malformed: {exc!r}"


def readable(read: Callable[[bytes], T], packed: Iterable[bytes]) -> list[T]:
    """All that can be read; who cannot be is of a later release, and not for this one to judge."""
    found = []
    for one in packed:
        with contextlib.suppress(*UNREADABLE):
            found.append(read(one))
    return found


class WireEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry."""

    schema: int
    id: str
    model: str
    input: str
    tier: int
    tenant: str
    gateway: str
    queue_timeout: float
    timeout: float
    parameters: bytes = b""


class WireReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One answer of a batch; `place` is its place in the batch, `queued` the seconds it waited."""

    place: int
    id: str
    tenant: str
    output: str | None
    failure: Failure | None
    queued: float


class WireRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answers of one batch for one gateway."""

    schema: int
    worker: str
    replies: list[WireReply]


class WireFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a batch failed; `cause` is the value of a `Cause`."""

    cause: str
    message: str
    worker: str
    shown: str = ""


_entry = msgspec.msgpack.Decoder(WireEntry)
_run = msgspec.msgpack.Decoder(WireRun)
_failure = msgspec.msgpack.Decoder(WireFailure)
_lates = msgspec.msgpack.Decoder(list[tuple[str, str, int, bool]])
_places = msgspec.msgpack.Decoder(list[int])
_worker = msgspec.msgpack.Decoder(WorkerInfo)
_member = msgspec.msgpack.Decoder(Member)
_capacity = msgspec.msgpack.Decoder(Capacity)
encode = msgspec.msgpack.Encoder().encode

_HEAD = struct.Struct(">BHdd")
_LETTER = struct.Struct(">ddI")
_STAMP = struct.Struct("<d")
_LOAD = struct.Struct("<13d")


def key_of(tenant: str, id: str) -> bytes:
    """The key of an entry inside the server. Raises ValueError for an id with a NUL in it: a key must have one meaning."""
    if "\0" in id:
        raise ValueError(f"id {id!r} holds a NUL")
    return f"{tenant}\0{id}".encode()


def pack_head(entry: Entry) -> bytes:
    """What the server has to know of an entry to queue it: tier, timeouts, key, gateway."""
    key = key_of(entry.tenant, entry.id)
    return _HEAD.pack(entry.tier, len(key), entry.queue_timeout, entry.timeout) + key + entry.gateway.encode()


def pack_entry(entry: Entry) -> bytes:
    """An entry as it is stored."""
    return encode(
        WireEntry(
            SCHEMA,
            entry.id,
            entry.model,
            entry.input,
            entry.tier,
            entry.tenant,
            entry.gateway,
            entry.queue_timeout,
            entry.timeout,
            entry.parameters,
        )
    )


def read_entry(payload: bytes) -> Entry:
    """The entry of a payload. Raises TooNew, and msgspec's errors for what is no entry at all."""
    found = _entry.decode(payload)
    _check(found.schema)
    return Entry(
        found.id,
        found.model,
        found.input,
        found.tier,
        found.tenant,
        found.gateway,
        found.queue_timeout,
        found.timeout,
        found.parameters,
    )


def pack_failure(failure: BatchFailure) -> bytes:
    """Why a batch failed."""
    return encode(WireFailure(failure.cause.value, failure.message, failure.worker, failure.shown))


def read_failure(packed: bytes) -> WireFailure:
    """The reverse; `cause` may be of a later release, or `item`."""
    return _failure.decode(packed)


def batch_failure(found: WireFailure) -> BatchFailure:
    """The failure of a whole batch; a cause that is not known here counts as an exception."""
    known = {cause.value: cause for cause in Cause}
    return BatchFailure(known.get(found.cause, Cause.RAISED), found.message, found.worker, found.shown)


def pack_letter(died_at: float, attempts: int, failure: bytes, payload: bytes) -> bytes:
    """A dead letter of an entry's payload and a packed failure."""
    return _LETTER.pack(died_at, attempts, len(failure)) + failure + payload


def read_letter(packed: bytes) -> DeadLetter:
    """A dead letter."""
    died_at, attempts, length = _LETTER.unpack_from(packed)
    start = _LETTER.size
    failure = read_failure(packed[start : start + length])
    return DeadLetter(
        entry=read_entry(packed[start + length :]),
        error=failure.message,
        cause=failure.cause,
        attempts=int(attempts),
        worker=failure.worker,
        died_at=died_at,
    )


def read_load(packed: bytes) -> tuple[float, float, Load]:
    """The instant, the queue's birth, and what was known of it then."""
    now, born, rate, alpha, beta, slots, limit, depth, utilisation, wait, departures, *service = _LOAD.unpack(packed)
    load = Load(rate, alpha, beta, int(slots), int(limit), int(depth), utilisation, wait, int(departures), *service)
    return now, born, load


def read_stamped(packed: bytes) -> tuple[float, bytes]:
    """An instant and what follows it."""
    return _STAMP.unpack_from(packed)[0], packed[_STAMP.size :]


def read_instants(packed: bytes) -> tuple[float, ...]:
    """Instants, one after the other."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def read_bell(packed: bytes) -> tuple[float, bytes, str]:
    """The instant at which to claim (0: now), the packed load, and the worker."""
    end = _STAMP.size + _LOAD.size
    return _STAMP.unpack_from(packed)[0], packed[_STAMP.size : end], packed[end:].decode()


def read_outcomes(fields: dict[bytes, bytes]) -> list[Reply]:
    """The replies of one entry of a gateway's stream."""
    _check(int(fields[b"v"]))
    left_at, ended_at, size = float(fields[b"t"]), float(fields[b"e"]), int(fields[b"n"])
    if fields[b"k"] == b"ran":
        run = _run.decode(fields[b"d"])
        _check(run.schema)
        ran = Ran(run.worker, size, ended_at - left_at, left_at)
        attempts = int(fields[b"a"])
        gone = frozenset(_places.decode(fields[b"x"])) if fields[b"x"] else ()
        return [
            Reply(one.id, one.tenant, one.output, one.failure, ran, one.queued, attempts)
            for one in run.replies
            if one.place not in gone
        ]
    return _failed(fields, left_at, ended_at, size)


def _failed(fields: dict[bytes, bytes], left_at: float, ended_at: float, size: int) -> list[Reply]:
    kind, slots = fields[b"k"], int(float(fields[b"s"]))
    batch = None if kind == b"late" else batch_failure(read_failure(fields[b"f"]))
    ran = None if batch is None else Ran(batch.worker, size, ended_at - left_at, left_at)
    replies = []
    for key, waited, attempts, queue_due in _lates.decode(fields[b"d"]):
        tenant, _, id = key.rpartition("\0")
        queued = float(waited)
        if batch is None:
            failure = verdicts.lateness(queued, attempts, slots, queue_due)
        elif kind == b"dead":
            failure = verdicts.death(batch)
        else:
            failure = verdicts.spent(batch, size)
        replies.append(Reply(id, tenant, None, failure, ran, queued, attempts))
    return replies


def read_worker(packed: bytes) -> WorkerInfo:
    """A line of the registry, stamped by the server."""
    seen, rest = read_stamped(packed)
    return msgspec.structs.replace(_worker.decode(rest), last_heartbeat=seen)


def read_member(packed: bytes) -> Member:
    """A process of the fleet, stamped by the server."""
    seen, rest = read_stamped(packed)
    return msgspec.structs.replace(_member.decode(rest), last_seen=seen)


def read_capacity(packed: bytes) -> Capacity:
    """A capacity, stamped by the server."""
    seen, rest = read_stamped(packed)
    return msgspec.structs.replace(_capacity.decode(rest), measured_at=seen)


def _check(schema: int) -> None:
    if schema not in READABLE:
        raise TooNew(
            f"written by a later release: schema {schema}, and this one reads {READABLE.start} to {READABLE.stop - 1}; "
            "upgrade this process"
        )
