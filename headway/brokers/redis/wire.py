"""Wire format of the data in the server: msgpack arrays that begin with a schema version.

New members are only added at the end, and have defaults. So a process can read data from the releases immediately before and after
its own, and refuses data from later releases."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from headway import errors
from headway.brokers.redis.codes import RefusalCode, Worth
from headway.core import failures
from headway.core.admission import Refused
from headway.core.departure import Load, Rule
from headway.core.slot_factors import FACTORS, paces
from headway.model import (
    BatchFailure,
    BatchRun,
    Capacity,
    Cause,
    DedupKind,
    Departed,
    Drain,
    Failure,
    Lease,
    Octets,
    ProcessInfo,
    QueueName,
    Reply,
    Rollout,
    Tensors,
    TokenCount,
    Value,
    WorkerInfo,
)
from headway.model.board import Notice, ScalingChange

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

SCHEMA = 1  # Format version that this release writes.
READABLE = range(1, SCHEMA + 2)  # Format versions that this release reads.


class TooNew(Exception):
    """The data is too new for this release. The message contains its schema."""


UNREADABLE = (TooNew, msgspec.MsgspecError, ValueError, KeyError, OverflowError, RecursionError, struct.error)
"""Exceptions that reading may raise."""


def reason(exc: BaseException) -> str:
    """Return why data can't be read."""
    return str(exc) if isinstance(exc, TooNew | msgspec.MsgspecError) else f"it is malformed: {exc!r}"


def readable(read: Callable[[bytes], T], packed: Iterable[bytes]) -> list[T]:
    """Read the values that this release can read, and skip the others."""
    values = []
    for value in packed:
        with contextlib.suppress(*UNREADABLE):
            values.append(read(value))
    return values


class WireReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer for the entry at `position` in the batch. `output` is a value for `read_value`, a StoredApart, or None."""

    position: int
    id: str
    tenant: str
    output: Any
    failure: Failure | None
    queued: float
    nonce: int = 0
    tokens: TokenCount | None = None


class WireRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answers from one batch for one gateway. `version` is the version of the model that ran the batch."""

    schema: int
    worker: str
    version: str
    replies: list[WireReply]


class WireFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Failure of a batch or an item. `cause` is "item", the value of a `Cause`, or a value that a later release added.
    `version` is the version of the model."""

    cause: str
    message: str
    worker: str
    shown: str = ""
    version: str = ""
    batch_id: str = ""
    places: tuple[int, ...] = ()


class WireUnanswered(msgspec.Struct, array_like=True, gc=False):
    """Entry without an output. `queue_due` is True if its queue deadline has passed, `hung` if its last run hung."""

    key: str
    waited: str
    attempts: int
    queue_due: bool
    nonce: int
    hung: bool = False


_run = msgspec.msgpack.Decoder(WireRun)
_unanswered = msgspec.msgpack.Decoder(list[WireUnanswered])
_passed = msgspec.msgpack.Decoder(list[tuple[str, str, bool, int]])
_refusals = msgspec.msgpack.Decoder(list[tuple[str, str, int, str, int]])
_positions = msgspec.msgpack.Decoder(list[int])
read_failure = msgspec.msgpack.Decoder(WireFailure).decode
read_rollout = msgspec.msgpack.Decoder(Rollout).decode
read_drain = msgspec.msgpack.Decoder(Drain).decode
read_notice = msgspec.msgpack.Decoder(Notice).decode
read_scaling_change = msgspec.msgpack.Decoder(ScalingChange).decode
encode = msgspec.msgpack.Encoder().encode

NONCE = struct.Struct(">d")
LOAD = tuple(name for name in Load.__struct_fields__ if name not in ("paces", "past"))
"""Order of a load's numbers. The time, and when the queue's state was created, come first. The slots of each pace come last."""
RULE = tuple(name for name in Rule.__struct_fields__ if name != "company")
"""Order of a rule's numbers. The time and the slots of its load come first. Only a look-ahead sets `company`."""
_STAMP = struct.Struct("<d")
LOAD_FORMAT = "<" + "d" * (2 + len(LOAD)) + "H" * len(FACTORS)
_LOAD = struct.Struct(LOAD_FORMAT)
_WHOLE = tuple(LOAD.index(name) for name, kind in Load.__annotations__.items() if name in LOAD and kind == "int")
"""Positions of the integers."""
_OUTPUT = attrgetter("output")
_RULE_OF, _HEADWAY_AT = attrgetter(*RULE), RULE.index("headway")


def key_of(tenant: str, id: str) -> bytes:
    """Return the key of an entry. Raises ValueError if the id contains a NUL, because keys would be ambiguous."""
    if "\0" in id:
        raise ValueError(f"id {id!r} contains a NUL")
    return f"{tenant}\0{id}".encode()


def name_of(tenant: str, id: str, nonce: int) -> bytes:
    """Return the name of a submission: its nonce and its entry's key."""
    return NONCE.pack(nonce) + key_of(tenant, id)


def prefix_of(prefix: str, queue: QueueName, shard: int) -> str:
    """Return the prefix of the keys of one shard of a queue. All versions of a model share the part in braces. Colons in the version
    become percent signs, which versions can't contain."""
    ending = QueueName("", queue.version.replace(":", "%"))
    return f"{prefix}:{{{queue.model}:{shard}}}{ending}:"


def queue_of(model: str, ending: bytes) -> QueueName:
    """Return the name of the model's queue whose prefix has this suffix."""
    return QueueName(model, ending.decode()[1:-1].replace("%", ":"))


def worth(failure: Failure | None) -> int:
    """Return how useful an outcome is to later requests (the integer value of a Worth)."""
    if failure is None:
        return Worth.ANSWER.value
    return (Worth.VERDICT if failure.code == errors.REJECTED_BY_MODEL else Worth.WORTHLESS).value


_PLAIN_REFUSALS = {
    RefusalCode.CONFLICT: failures.conflict,
    RefusalCode.MISUSE: failures.misuse,
    RefusalCode.NO_TASK: failures.no_task,
    RefusalCode.CANCELLED: failures.cancelled,
    RefusalCode.LOST: failures.lost_input,
}
_TOO_MANY = (RefusalCode.TOO_MANY, RefusalCode.TOO_MANY_APART)
_APART = (RefusalCode.APART, RefusalCode.TOO_MANY_APART)


def refusal(why: int, wait: float, error: bytes = b"") -> Failure:
    """Return the failure for a refusal code that isn't about a rate limit. `error` is the error of a known culprit."""
    if why in _PLAIN_REFUSALS:
        return _PLAIN_REFUSALS[RefusalCode(why)]()
    if why == RefusalCode.TOO_LARGE:  # The wait is a number of bytes.
        return failures.too_large(int(wait))
    if why == RefusalCode.CULPRIT:
        return failures.known_culprit(error.decode(errors="ignore"))  # The error may be truncated within a character.
    if why in (RefusalCode.ROOM, RefusalCode.SCARCE):
        return failures.scarcity(wait)
    most = int(wait) if why in _TOO_MANY else 0
    return failures.refusal(Refused(wait, why == RefusalCode.SHED, most, why in _APART))


def pack_failure(failure: BatchFailure, lease: Lease) -> bytes:
    """Pack the failure of a lease's batch."""
    cause, message, worker, shown = failure.cause.value, failure.message, failure.worker, failure.shown
    return encode(WireFailure(cause, message, worker, shown, lease.slot.runs.version, lease.batch_id, failure.places))


def pack_run(worker: str, version: str, replies: Sequence[WireReply]) -> tuple[bytes, Sequence[tuple[int, int]]]:
    """Pack a batch's replies to one gateway. Also return where each reply begins and ends in the bytes."""
    each = [encode(reply) for reply in replies]
    packed = encode((SCHEMA, worker, version, [msgspec.Raw(reply) for reply in each]))
    ends = list(itertools.accumulate((len(reply) for reply in each), initial=len(packed) - sum(map(len, each))))
    return packed, list(itertools.pairwise(ends))


def head_of_one(worker: str, version: str) -> bytes:
    """Return the bytes that, put before a packed reply, turn it into a packed WireRun with only this reply."""
    return encode((SCHEMA, worker, version, [None]))[:-1]


def batch_failure(failure: WireFailure) -> BatchFailure:
    """Convert the failure of a batch. An unknown cause is treated as an exception."""
    known = {cause.value: cause for cause in Cause}
    return BatchFailure(known.get(failure.cause, Cause.RAISED), failure.message, failure.worker, failure.shown)


def read_load(packed: bytes) -> tuple[float, float, Load]:
    """Return the server's time, when the queue's state was created, and the queue's load."""
    now, born, *numbers = _LOAD.unpack(packed)
    figures, counts = numbers[: len(LOAD)], numbers[len(LOAD) :]
    for position in _WHOLE:
        figures[position] = int(figures[position])
    load = Load(*figures)
    return now, born, msgspec.structs.replace(load, paces=paces(counts, load.slots)) if any(counts) else load


def pack_rule(made_at: float, slots: int, rule: Rule | None) -> bytes:
    """Pack `rule`, if any, after the time (`made_at`) and the slots of the load that it is based on. In the packed rule, a
    negative headway means that batches aren't spaced."""
    if rule is None:
        return pack_numbers((made_at, slots))
    numbers = list(_RULE_OF(rule))
    numbers[_HEADWAY_AT] = -1.0 if rule.headway is None else max(rule.headway, 0.0)
    return pack_numbers((made_at, slots, *numbers))


def read_stamped(packed: bytes) -> tuple[float, bytes]:
    """Split stamped bytes into the time and the content."""
    return _STAMP.unpack_from(packed)[0], packed[_STAMP.size :]


def pack_numbers(numbers: Sequence[float]) -> bytes:
    """Pack numbers as doubles."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def read_numbers(packed: bytes) -> tuple[float, ...]:
    """Unpack doubles."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def read_wakeup(packed: bytes) -> tuple[float, bytes, str]:
    """Return a wake-up's time at which to claim (0 for now), packed load, and worker."""
    end = _STAMP.size + _LOAD.size
    return _STAMP.unpack_from(packed)[0], packed[_STAMP.size : end], packed[end:].decode()


StoredApart = tuple[str, int]  # In place of a separately stored value: its kind and token, and its length in bytes.
Apart = dict[int, StoredApart]  # Separately stored outputs, by the positions of their replies.


def read_outcomes(fields: Mapping[bytes, bytes], apart: Apart | None = None) -> list[Reply]:
    """Return the replies of a stream entry. Outputs that still have to be read are added to `apart`."""
    check_schema(int(fields[b"v"]))
    replies = _outcomes(fields, {} if apart is None else apart)
    if b"p" not in fields:
        return replies
    [reply] = replies  # Several entries share this outcome.
    passed = [_passed_on(reply, key, kind, kept, nonce) for key, kind, kept, nonce in _passed.decode(fields[b"p"])]
    if apart:
        apart.update(dict.fromkeys(range(len(passed)), apart[0]))
    return passed


def _passed_on(reply: Reply, key: str, kind: str, kept: bool, nonce: int) -> Reply:
    tenant, _, id = key.rpartition("\0")
    shared = DedupKind(kind) if kind else None
    return msgspec.structs.replace(reply, id=id, tenant=tenant, nonce=nonce, shared=shared, kept=kept)


def _outcomes(fields: Mapping[bytes, bytes], apart: Apart) -> list[Reply]:
    left_at, ended_at, size = float(fields[b"t"]), float(fields[b"e"]), int(fields[b"n"])
    if fields[b"k"] == b"ran":
        run = _run.decode(fields[b"d"])
        check_schema(run.schema)
        ran = BatchRun(run.worker, size, ended_at - left_at, left_at, run.version)
        attempts = int(fields[b"a"])
        gone = frozenset(_positions.decode(fields[b"x"])) if fields[b"x"] else ()
        wanted = [reply for reply in run.replies if reply.position not in gone] if gone else run.replies
        if list in map(type, map(_OUTPUT, wanted)):
            apart.update((at, apart_of) for at, reply in enumerate(wanted) if (apart_of := stored_apart(reply.output)))
        return [
            Reply(
                reply.id,
                reply.tenant,
                reply.output if type(reply.output) is str else _read_output(reply.output),
                reply.failure and _known(reply.failure),
                ran,
                reply.queued,
                attempts,
                reply.nonce,
                tokens=reply.tokens,
            )
            for reply in wanted
        ]
    return _failed(fields, left_at, ended_at, size)


def read_value(content: object) -> Value:
    """Convert decoded data to a value. Strings and bytes are unchanged. Lists that contain bytes become octets or tensors."""
    match content:
        case str() | bytes():
            return content
        case [bytes(content)]:
            return Octets(content)
        case [bytes(content), True]:
            return Tensors(content)
    raise ValueError(f"expected a value, not {type(content).__name__}")


def stored_apart(content: object) -> StoredApart | None:
    """Convert decoded data to a StoredApart, or return None for other data."""
    match content:
        case [str(name), int(length)]:
            return name, length
    return None


def _read_output(content: object) -> Value | None:
    return None if content is None or stored_apart(content) else read_value(content)


def _known(failure: Failure) -> Failure:
    """Return the failure. If a later release wrote it, with a code that this release doesn't know, the code becomes INTERNAL."""
    if failure.code in errors.STATUS:
        return failure
    return msgspec.structs.replace(failure, code=errors.INTERNAL)


def _failed(fields: Mapping[bytes, bytes], left_at: float, ended_at: float, size: int) -> list[Reply]:
    if fields[b"k"] == b"refused":
        return [
            Reply(id, tenant, failure=refusal(why, float(wait), fields[b"f"]), queued=float(waited), nonce=nonce)
            for key, wait, why, waited, nonce in _refusals.decode(fields[b"d"])
            for tenant, _, id in [key.rpartition("\0")]
        ]
    kind, slots = fields[b"k"], int(float(fields[b"s"]))
    cause = None if kind in (b"late", b"lost") else read_failure(fields[b"f"])
    batch = None if cause is None else batch_failure(cause)
    ran = None if cause is None else BatchRun(cause.worker, size, ended_at - left_at, left_at, cause.version)
    replies = []
    for entry in _unanswered.decode(fields[b"d"]):
        tenant, _, id = entry.key.rpartition("\0")
        queued = float(entry.waited)
        if kind == b"lost":
            failure = failures.lost_input()
        elif batch is None:
            failure = failures.lateness(queued, entry.attempts, slots, entry.queue_due, entry.hung)
        elif kind == b"dead":
            failure = failures.death(batch)
        else:
            failure = failures.spent(batch, size)
        replies.append(Reply(id, tenant, None, failure, ran, queued, entry.attempts, nonce=entry.nonce))
    return replies


def _stamped(kind: type[R], field: str) -> Callable[[bytes], R]:
    """Return a function that reads records stamped by the server. The stamp becomes the member `field`."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(packed: bytes) -> R:
        seen, record = read_stamped(packed)
        return msgspec.structs.replace(decode(record), **{field: seen})

    return read


read_worker = _stamped(WorkerInfo, "last_heartbeat")
read_member = _stamped(ProcessInfo, "last_seen")
read_departed = _stamped(Departed, "at")
read_capacity = _stamped(Capacity, "measured_at")


def check_schema(schema: int) -> None:
    """Raise TooNew if data with this schema is too new for this release."""
    if schema not in READABLE:
        raise TooNew(
            f"written by a later release: it has schema {schema}, but this release reads {READABLE.start} to "
            f"{READABLE.stop - 1}; upgrade this process"
        )
