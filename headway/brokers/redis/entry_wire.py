"""Wire format of entries: the headers that the server uses to queue them, their payloads, and dead letters. See also `wire`."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headway.brokers.redis.codes import PackedDedupKey
from headway.brokers.redis.wire import (
    SCHEMA,
    StoredApart,
    check_schema,
    encode,
    key_of,
    read_failure,
    read_value,
    stored_apart,
)
from headway.core import ratelimit
from headway.core.queue_limits import SMALL, bytes_of
from headway.model import DeadLetter, DedupKind, Entry, Limit, Value

TOKEN_BYTES = 11
MOST_COUNTED = (1 << 32) - 1  # Maximum size of an entry that a header can hold, in bytes.


class StoredEntry(Entry, frozen=True, array_like=True, tag=SCHEMA, gc=False):
    """Entry in its stored form, in which the schema comes first. Members that few entries need come last, and are omitted if
    none of them is set. `input` is a value for `read_value`, or a StoredApart. If the kind of a StoredApart is in upper case,
    the parameters are stored before the input in the same value, and `parameters` is empty."""

    input: Any

    @property
    def apart(self) -> StoredApart | None:
        return stored_apart(self.input)


class NextStoredEntry(StoredEntry, frozen=True, tag=SCHEMA + 1, gc=False):
    """Entry that was stored by the next release."""


class _Versioned(msgspec.Struct, array_like=True):
    """Payload from any release. Only its schema is read."""

    schema: int


ENTRY_KIND = struct.Struct(">HBddIIHd")
"""Beginning of a header: its own length including the gateway, tier, timeouts, weight, bytes of memory to reserve, number of inputs,
and shape. The gateway follows. Most entries of a call share this beginning, so the server parses it once."""
ENTRY_NAME = struct.Struct(">dHB")  # Middle of a header: nonce, lengths of tenant and input token. Then token and key.
LETTER = struct.Struct(">ddI")  # Header of a dead letter: time, number of runs, and length of the packed failure.

Apart = tuple[Value, bytes]  # Input and parameters that were stored separately.

_entry: msgspec.msgpack.Decoder[StoredEntry] = msgspec.msgpack.Decoder(StoredEntry | NextStoredEntry)
_versioned = msgspec.msgpack.Decoder(_Versioned)
_LIMITS = attrgetter("limits")
_MEMBERS = Entry.__struct_fields__
_STORED = attrgetter(*_MEMBERS[: _MEMBERS.index("limits")])
_USUAL = attrgetter(*_MEMBERS[: _MEMBERS.index("dedup_keys")])  # Members of every entry. Others have defaults.


def pack_head(entry: Entry, apart: bytes = b"") -> bytes:
    """Pack the header of an entry. `apart` is the token of a separately stored input, followed by its digest if requested."""
    key, gateway = key_of(entry.tenant, entry.id), entry.gateway.encode()
    large = len(entry.input) + len(entry.parameters) > SMALL
    kind = ENTRY_KIND.pack(
        ENTRY_KIND.size + len(gateway), entry.tier, entry.queue_timeout, entry.timeout, entry.weight,
        min(bytes_of(entry), MOST_COUNTED) if large else 0, entry.count, entry.shape,
    )  # fmt: skip
    return b"".join((kind, gateway, ENTRY_NAME.pack(entry.nonce, key.rindex(0), len(apart)), apart, key))


def pack_entry(entry: Entry, apart: str = "", length: int = 0) -> bytes:
    """Pack the payload of an entry. For a separately stored input, `apart` is its kind and token, and `length` its size in bytes."""
    if apart:
        stored = StoredEntry(*_STORED(entry))
        return encode(msgspec.structs.replace(stored, input=(apart, length), parameters=b""))
    members = _STORED if entry.dedup_keys or entry.trace else _USUAL
    return encode((SCHEMA, *members(entry)))


def position_of(member: str) -> int:
    """Return the Lua index of a member in an entry's payload."""
    return StoredEntry.__struct_fields__.index(member) + 2  # The schema comes first.


def read_payload(payload: bytes) -> StoredEntry:
    """Read a payload. Raises TooNew, or one of msgspec's errors if the data isn't an entry."""
    try:
        return _entry.decode(payload)
    except msgspec.ValidationError:
        check_schema(_versioned.decode(payload).schema)
        raise


def read_payloads(payloads: Sequence[bytes]) -> list[StoredEntry]:
    """Like `read_payload`, for several payloads."""
    try:
        return list(map(_entry.decode, payloads))
    except msgspec.ValidationError:
        return list(map(read_payload, payloads))


def entry_of(stored: StoredEntry, apart: Apart | None = None) -> Entry:
    """Make an entry from its payload. `apart` is its input and parameters if these are stored separately."""
    entry = Entry(*msgspec.structs.astuple(stored))
    if apart is not None:
        value, parameters = apart
        return msgspec.structs.replace(entry, input=value, parameters=parameters)
    return entry if type(entry.input) is str else msgspec.structs.replace(entry, input=read_value(entry.input))


def pack_small(entries: Sequence[Entry], threshold: float) -> tuple[list[bytes], dict[int, Entry], bool]:
    """Pack the header and payload of each entry in one call. They alternate in the result. Entries of more than `threshold`
    bytes get an empty header and payload, and are returned by position. The last result is True if any entry has dedup keys
    or a digest, pays for other entries, or is paid for by one."""
    packed: list[bytes] = []
    large: dict[int, Entry] = {}
    rare, small, known, kind = False, min(SMALL, threshold), None, b""
    name, size = ENTRY_NAME.pack, ENTRY_KIND.size
    for entry in entries:
        text, parameters, tier, gateway = entry.input, entry.parameters, entry.tier, entry.gateway
        queue_timeout, timeout, weight, nonce = entry.queue_timeout, entry.timeout, entry.weight, entry.nonce
        length, usual = len(text) + len(parameters), not (entry.trace or entry.shape)
        if entry.dedup_keys or entry.digest or entry.count > 1 or entry.payer:
            rare, usual = True, False
        if length > small or not usual:
            if length > threshold:
                large[len(packed)] = entry
                packed += b"", b""
            else:
                packed += pack_head(entry), pack_entry(entry)
            continue
        start = tier, queue_timeout, timeout, weight, gateway
        if start != known:
            known, whose = start, gateway.encode()
            kind = ENTRY_KIND.pack(size + len(whose), tier, queue_timeout, timeout, weight, 0, 1, 0) + whose
        tenant, id = entry.tenant, entry.id
        if "\0" in id:
            key_of(tenant, id)  # This raises.
        whose = tenant.encode()
        packed.append(b"%b%b%b\0%b" % (kind, name(nonce, len(whose), 0), whose, id.encode()))
        packed.append(encode((  # Like `pack_entry`, but takes two thirds of the time.
            SCHEMA, id, entry.model, text, tier, tenant, gateway, queue_timeout, timeout, parameters, nonce, entry.caller, weight,
            entry.version, entry.pinned,
        )))  # fmt: skip
    return packed, large, rare


def pack_extras(entries: Sequence[Entry], limits: Sequence[Limit], counts: int, rare: bool = True) -> bytes:
    """Pack the limits and dedup keys of entries, and which entry is charged for which. Return b"" if there are none. `limits`
    are those of all entries, without duplicates. Tier limits are spread over `counts` counters. If `rare` is False, no entry
    has anything but limits."""
    if not (limits or rare):
        return b""
    positions = {limit: position for position, limit in enumerate(limits)}
    lists = {of: number for number, of in enumerate(dict.fromkeys(map(_LIMITS, entries)))}
    charged = [lists[entry.limits] for entry in entries] if len(lists) > 1 else []
    charges = [[positions[limit] for limit in of] for of in lists]
    packed = [_pack_limit(limit, counts) for limit in limits]
    if not rare:
        return encode((packed, charges, charged, {}, {}, {}))
    payers = {entry.nonce: position for position, entry in enumerate(entries, 1) if entry.count > 1}
    having = [(position, entry) for position, entry in enumerate(entries, 1) if entry.dedup_keys or entry.digest]
    if not (limits or payers or having):
        return b""
    dedup_keys = {position: _pack_dedup_keys(entry) for position, entry in having if entry.dedup_keys}
    digests = {position: entry.digest.hex() for position, entry in having if entry.digest}
    paid = {}
    if payers:
        paid = {
            at: payers[entry.payer] for at, entry in enumerate(entries, 1) if entry.count == 1 and entry.payer in payers
        }
    return encode((packed, charges, charged, dedup_keys, digests, paid))


def payer_of(entries: Sequence[Entry], position: int) -> Entry:
    """Return the entry whose limits are charged for the entry at a position."""
    entry = entries[position]
    if entry.limits or not entry.payer:
        return entry
    return next((other for other in entries if other.nonce == entry.payer), entry)


def limits_of(entries: Iterable[Entry]) -> Sequence[Limit]:
    """Return the limits of all entries, without duplicates."""
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(map(_LIMITS, entries)))))


def _pack_limit(limit: Limit, counts: int) -> tuple[str, float, float]:
    if counts > 1 and limit.name == "tier":
        limit = Limit(limit.id, limit.name, limit.rate / counts, max(1.0, limit.burst / counts))
    return limit.id, ratelimit.interval(limit), ratelimit.tolerance(limit)


def _pack_dedup_keys(entry: Entry) -> list[PackedDedupKey]:
    return [
        PackedDedupKey(
            dedup_key.kind.value,
            f"{dedup_key.kind.value}\0{key_of(entry.tenant, dedup_key.key).decode()}"
            f"{'#' if dedup_key.kind is DedupKind.SAME else ''}",
            dedup_key.digest.hex(),
            dedup_key.keep,
            dedup_key.joins,
            dedup_key.kind is DedupKind.TASK and dedup_key.key != entry.id,
            dedup_key.renews,
        )
        for dedup_key in entry.dedup_keys
    ]


def pack_letter(died_at: float, attempts: int, failure: bytes, payload: bytes) -> bytes:
    """Pack a dead letter."""
    return LETTER.pack(died_at, attempts, len(failure)) + failure + payload


def payload_of(letter: bytes) -> StoredEntry:
    """Like `read_payload`, for the payload of a dead letter."""
    length = LETTER.unpack_from(letter)[2]
    return read_payload(letter[LETTER.size + length :])


def read_letter(packed: bytes, apart: Apart | None = None) -> DeadLetter:
    """Read a dead letter. `apart` is the entry's input and parameters if these are stored separately."""
    died_at, attempts, length = LETTER.unpack_from(packed)
    start = LETTER.size
    failure = read_failure(packed[start : start + length])
    return DeadLetter(
        entry=entry_of(read_payload(packed[start + length :]), apart), error=failure.message, cause=failure.cause, attempts=int(attempts),
        worker=failure.worker, died_at=died_at, version=failure.version, batch_id=failure.batch_id,
    )  # fmt: skip
