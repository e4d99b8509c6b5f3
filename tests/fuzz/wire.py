"""Data read from Redis, written by this release, a later one, or something else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.entry_wire import pack_letter, read_letter
from headway.errors import STATUS
from headway.model import (
    Capacity,
    DedupKey,
    DedupKind,
    Entry,
    Failure,
    ProcessInfo,
    Reply,
    Role,
    Value,
    WorkerInfo,
    WorkerStatus,
)

_ENTRY = Entry(
    "0190b9a5-0000-7000-8000-000000000000", "default", "hello", 1, "acme", "gateway", 1.0, 5.0, b'{"a":1}',
    dedup_keys=(DedupKey(DedupKind.KEY, "k", b"digest", 600.0, True),),
)  # fmt: skip
_PLAIN = Entry("id", "default", "héllo", 0, "t", "g", 1.0, 5.0)
_FAILURE = wire.encode(wire.WireFailure("raised", "ValueError: x", "gpu-0", "", "7", "gpu-0@1.000000"))

ENTRIES = (entry_wire.pack_entry(_ENTRY), entry_wire.pack_entry(_PLAIN), _FAILURE)
LETTERS = (pack_letter(1000.0, 3, _FAILURE, entry_wire.pack_entry(_ENTRY)),)

_RUN = wire.encode(
    wire.WireRun(
        1,
        "gpu-0",
        "7",
        [
            wire.WireReply(0, "id", "t", "HELLO", None, 0.1),
            wire.WireReply(1, "other", "t", None, Failure("INTERNAL", "why", 1.0, "gpu"), 0.1),
        ],
    )
)
_LATES = wire.encode([("t\0id", "0.5", 1, True, 1)])


def _fields(**changed: bytes) -> bytes:
    fields = {"v": b"1", "t": b"1000.5", "e": b"1001", "n": b"2", "a": b"1", "x": b"", "s": b"2", "f": _FAILURE}
    return wire.encode({name.encode(): value for name, value in {**fields, **changed}.items()})


REPLIES = (
    _fields(k=b"ran", d=_RUN),
    _fields(k=b"ran", d=_RUN, x=wire.encode([1]), p=wire.encode([("t\0a", "same", True, 1), ("t\0b", "", False, 2)])),
    _fields(k=b"late", d=_LATES),
    _fields(k=b"dead", d=_LATES),
    _fields(k=b"spent", d=_LATES),
    _fields(k=b"refused", d=wire.encode([("t\0id", "1.5", 3, "0.5", 1)])),
)

_STAMP = struct.pack("<d", 1000.0)
REGISTRY = (
    _STAMP + wire.encode(WorkerInfo(worker_id="gpu-0", model="default", status=WorkerStatus.HEALTHY)),
    _STAMP + wire.encode(ProcessInfo(id="id", role=Role.GATEWAY, host="host", pid=1)),
    _STAMP
    + msgspec.msgpack.encode(
        Capacity(model="default", healthy=1, degraded=0, items_per_second=10.0, usable_per_second=8.0)
    ),
    _STAMP * (wire._LOAD.size // 8),
    _STAMP * (1 + wire._LOAD.size // 8) + b"gpu-0",
)

WORDS = (
    b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\x91" * 2000, b"\x81\xa1a" * 500, b"\xc7\x0c\xff", b"\xd6\xff", b"\x02", b"inf", b"nan", b"1e308", b"-1", b"same", b"key", b"ran", b"late",
)  # fmt: skip


def _quietly(read: Callable[[bytes], object], data: bytes) -> object:
    try:
        return read(data)
    except wire.UNREADABLE as exc:
        assert wire.reason(exc)
        return None


def check_entry(data: bytes) -> None:
    """An entry or a failure is read completely or not at all."""
    entry = _quietly(lambda data: entry_wire.entry_of(entry_wire.read_payload(data)), data)
    if entry is not None:
        assert isinstance(entry, Entry)
        assert isinstance(entry.input, Value)
        assert isinstance(entry.tier, int)
    _quietly(wire.read_failure, data)


def check_letter(data: bytes) -> None:
    _quietly(read_letter, data)


_PACKED = (b"d", b"f", b"p", b"x")


def unpacked_fields(data: bytes) -> Any:
    """Decode a stream entry's fields, including the values packed in them."""
    fields = msgspec.msgpack.decode(data)
    return {
        name: msgspec.msgpack.decode(value) if name in _PACKED and value else value for name, value in fields.items()
    }


def packed_fields(tree: Any) -> bytes:
    """Reverse `unpacked_fields`."""
    if isinstance(tree, dict):
        tree = {name: wire.encode(value) if name in _PACKED and value != b"" else value for name, value in tree.items()}
    return wire.encode(tree)


def read_reply(data: bytes) -> list[Reply]:
    """Read the replies from packed fields of a stream's entry. Raises UNREADABLE."""
    return wire.read_outcomes(msgspec.msgpack.decode(data, type=dict[bytes, bytes]))


def check_reply(data: bytes) -> None:
    replies = _quietly(read_reply, data)
    for reply in replies if isinstance(replies, list) else ():
        assert reply.failure is None or reply.failure.code in STATUS


def check_registry(data: bytes) -> None:
    for read in (wire.read_worker, wire.read_member, wire.read_capacity, wire.read_load, wire.read_wakeup):
        _quietly(read, data)
    _quietly(wire.read_numbers, data)
    _quietly(wire.read_stamped, data)
