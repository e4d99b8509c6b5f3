"""What is written into the server, as msgpack arrays: never pickle. Each begins with its schema version.

New members are only ever added at the end, with a default. So a process reads what one of the release before or after it
has written; what is newer than that it refuses, rather than guess.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from headway import errors
from headway.core import failures, ratelimit
from headway.core.departure import Load
from headway.model import (
    BatchFailure,
    BatchRun,
    Capacity,
    Cause,
    DeadLetter,
    DedupKey,
    DedupKind,
    Entry,
    Failure,
    Limit,
    ProcessInfo,
    Reply,
    WorkerInfo,
)

T = TypeVar("T")

SCHEMA = 1
"""Version of what this release writes."""
READABLE = range(1, SCHEMA + 2)
"""Versions that this release reads."""


SHED, SCARCE, CONFLICT, MISUSE, NO_TASK, CANCELLED, TOO_LARGE, CULPRIT, OVER = 1, 2, 3, 4, 5, 6, 7, 8, 16
"""Why an entry is refused, besides 0, the queue is too long; from OVER on, the place of a limit among its own."""


class TooNew(Exception):
    """What was read is of a later release than this one can read; the text says which."""


UNREADABLE = (TooNew, msgspec.MsgspecError, ValueError, KeyError, OverflowError, RecursionError, struct.error)
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


class WireShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An answer that an entry may have in common with others; `kind` is the value of a `DedupKind`."""

    kind: str
    key: str
    digest: bytes
    keep: float
    joins: bool


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
    shares: tuple[WireShare, ...] = ()
    nonce: int = 0
    caller: str = ""


class WireReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One answer of a batch; `place` is its place in the batch, `queued` the seconds it waited."""

    place: int
    id: str
    tenant: str
    output: str | None
    failure: Failure | None
    queued: float
    nonce: int = 0


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
_lates = msgspec.msgpack.Decoder(list[tuple[str, str, int, bool, int]])
_passed = msgspec.msgpack.Decoder(list[tuple[str, str, bool, int]])
_refusals = msgspec.msgpack.Decoder(list[tuple[str, str, int, str, int]])
_places = msgspec.msgpack.Decoder(list[int])
_worker = msgspec.msgpack.Decoder(WorkerInfo)
_member = msgspec.msgpack.Decoder(ProcessInfo)
_capacity = msgspec.msgpack.Decoder(Capacity)
encode = msgspec.msgpack.Encoder().encode

_HEAD = struct.Struct(">BHHddd")
_NONCE = struct.Struct(">d")
_LETTER = struct.Struct(">ddI")
_STAMP = struct.Struct("<d")
_LOAD = struct.Struct("<13d")


def key_of(tenant: str, id: str) -> bytes:
    """The key of an entry inside the server. Raises ValueError for an id with a NUL in it: a key must have one meaning."""
    if "\0" in id:
        raise ValueError(f"id {id!r} holds a NUL")
    return f"{tenant}\0{id}".encode()


def name_of(tenant: str, id: str, nonce: int) -> bytes:
    """The name of a submission inside the server: its nonce, and the entry's key."""
    return _NONCE.pack(nonce) + key_of(tenant, id)


def pack_head(entry: Entry) -> bytes:
    """What the server has to know of an entry to queue it: tier, lengths of key and tenant, timeouts, nonce, key, gateway."""
    key = key_of(entry.tenant, entry.id)
    head = _HEAD.pack(entry.tier, len(key), key.rindex(0), entry.queue_timeout, entry.timeout, entry.nonce)
    return head + key + entry.gateway.encode()


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
            tuple(WireShare(s.kind.value, s.key, s.digest, s.keep, s.joins) for s in entry.shares)
            if entry.shares
            else (),
            entry.nonce,
            entry.caller,
        )
    )


def place_of(member: str) -> int:
    """Where a member of an entry stands in its payload, as Lua counts."""
    return WireEntry.__struct_fields__.index(member) + 1


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
        (),
        tuple(DedupKey(DedupKind(s.kind), s.key, s.digest, s.keep, s.joins) for s in found.shares)
        if found.shares
        else (),
        found.nonce,
        b"",
        found.caller,
    )


def pack_extras(entries: Sequence[Entry], counts: int) -> bytes:
    """What of these entries counts and is shared, as the server's library takes it; nothing when nothing does.

    Arguments:
        entries: of one call.
        counts: over how many limits of whole tiers are spread.
    """
    if not any(entry.limits or entry.shares or entry.digest for entry in entries):
        return b""
    limits = limits_of(entries)
    places = {limit: place for place, limit in enumerate(limits)}
    charged = [[places[limit] for limit in entry.limits] for entry in entries]
    shares = {place: _pack_shares(entry) for place, entry in enumerate(entries, 1) if entry.shares}
    digests = {place: entry.digest.hex() for place, entry in enumerate(entries, 1) if entry.digest}
    return encode(([_pack_limit(limit, counts) for limit in limits], charged, shares, digests))


def limits_of(entries: Iterable[Entry]) -> Sequence[Limit]:
    """The limits that entries count towards, each once."""
    return list(dict.fromkeys(limit for entry in entries for limit in entry.limits))


def _pack_limit(limit: Limit, counts: int) -> tuple[str, float, float]:
    if counts > 1 and limit.name == "tier":
        limit = Limit(limit.id, limit.name, limit.rate / counts, max(1.0, limit.burst / counts))
    return limit.id, ratelimit.interval(limit), ratelimit.tolerance(limit)


def _pack_shares(entry: Entry) -> list[tuple[str, str, str, float, bool, bool]]:
    return [
        (
            share.kind.value,
            f"{share.kind.value}\0{key_of(entry.tenant, share.key).decode()}",
            share.digest.hex(),
            share.keep,
            share.joins,
            share.kind is DedupKind.TASK and share.key != entry.id,
        )
        for share in entry.shares
    ]


def worth(failure: Failure | None) -> int:
    """What the outcome of a run is worth to those who ask later, as the library takes it: 2 an output, 1 the verdict that
    the model rejects the input, 0 nothing."""
    if failure is None:
        return 2
    return int(failure.code == errors.REJECTED_BY_MODEL)


def refusal(why: int, wait: float) -> Failure:
    """What the library's number for a refusal means; those of limits are not among them."""
    if why == CONFLICT:
        return failures.conflict()
    if why == MISUSE:
        return failures.misuse()
    if why == NO_TASK:
        return failures.no_task()
    if why == CANCELLED:
        return failures.cancelled()
    if why == TOO_LARGE:  # In place of a wait it says by how many bytes.
        return failures.too_large(int(wait))
    if why == CULPRIT:
        return failures.known_culprit()
    return failures.scarcity(wait) if why == SCARCE else failures.refusal(wait, why == SHED)


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


def pack_numbers(numbers: Sequence[float]) -> bytes:
    """Numbers, one after the other."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def read_numbers(packed: bytes) -> tuple[float, ...]:
    """The reverse."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def read_bell(packed: bytes) -> tuple[float, bytes, str]:
    """The instant at which to claim (0: now), the packed load, and the worker."""
    end = _STAMP.size + _LOAD.size
    return _STAMP.unpack_from(packed)[0], packed[_STAMP.size : end], packed[end:].decode()


def read_outcomes(fields: Mapping[bytes, bytes]) -> list[Reply]:
    """The replies of one entry of a gateway's stream."""
    _check(int(fields[b"v"]))
    replies = _outcomes(fields)
    if b"p" not in fields:
        return replies
    [found] = replies  # One entry's outcome, for these.
    return [_passed_on(found, *to) for to in _passed.decode(fields[b"p"])]


def _passed_on(found: Reply, key: str, kind: str, kept: bool, nonce: int) -> Reply:
    tenant, _, id = key.rpartition("\0")
    shared = DedupKind(kind) if kind else None
    return Reply(id, tenant, found.output, found.failure, found.ran, found.queued, found.attempts, shared, kept, nonce)


def _outcomes(fields: Mapping[bytes, bytes]) -> list[Reply]:
    left_at, ended_at, size = float(fields[b"t"]), float(fields[b"e"]), int(fields[b"n"])
    if fields[b"k"] == b"ran":
        run = _run.decode(fields[b"d"])
        _check(run.schema)
        ran = BatchRun(run.worker, size, ended_at - left_at, left_at)
        attempts = int(fields[b"a"])
        gone = frozenset(_places.decode(fields[b"x"])) if fields[b"x"] else ()
        return [
            Reply(
                one.id,
                one.tenant,
                one.output,
                one.failure and _known(one.failure),
                ran,
                one.queued,
                attempts,
                None,
                False,
                one.nonce,
            )
            for one in run.replies
            if one.place not in gone
        ]
    return _failed(fields, left_at, ended_at, size)


def _known(failure: Failure) -> Failure:
    """A failure with a code that can be answered here: a worker of a later release may have more of them."""
    if failure.code in errors.STATUS:
        return failure
    return msgspec.structs.replace(failure, code=errors.INTERNAL)


def _failed(fields: Mapping[bytes, bytes], left_at: float, ended_at: float, size: int) -> list[Reply]:
    if fields[b"k"] == b"refused":
        return [
            Reply(id, tenant, failure=refusal(why, float(wait)), queued=float(waited), nonce=nonce)
            for key, wait, why, waited, nonce in _refusals.decode(fields[b"d"])
            for tenant, _, id in [key.rpartition("\0")]
        ]
    kind, slots = fields[b"k"], int(float(fields[b"s"]))
    batch = None if kind == b"late" else batch_failure(read_failure(fields[b"f"]))
    ran = None if batch is None else BatchRun(batch.worker, size, ended_at - left_at, left_at)
    replies = []
    for key, waited, attempts, queue_due, nonce in _lates.decode(fields[b"d"]):
        tenant, _, id = key.rpartition("\0")
        queued = float(waited)
        if batch is None:
            failure = failures.lateness(queued, attempts, slots, queue_due)
        elif kind == b"dead":
            failure = failures.death(batch)
        else:
            failure = failures.spent(batch, size)
        replies.append(Reply(id, tenant, None, failure, ran, queued, attempts, nonce=nonce))
    return replies


def read_worker(packed: bytes) -> WorkerInfo:
    """A line of the registry, stamped by the server."""
    seen, rest = read_stamped(packed)
    return msgspec.structs.replace(_worker.decode(rest), last_heartbeat=seen)


def read_member(packed: bytes) -> ProcessInfo:
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
