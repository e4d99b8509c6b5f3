"""Wire format of entries in the server: the head by which the server queues one, its payload, and its dead letter.

See `wire` for what holds of all formats.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headway.brokers.redis.codes import PackedDedupKey
from headway.brokers.redis.wire import SCHEMA, check_schema, encode, key_of, read_failure, read_value
from headway.core import ratelimit
from headway.core.memory_room import SMALL, bytes_of
from headway.model import DeadLetter, DedupKey, DedupKind, Entry, Limit, Octets, Value

TOKEN_BYTES = 11
"""Characters of the token of an input that is stored apart."""
MOST_COUNTED = (1 << 32) - 1
"""Most bytes of an entry that are counted."""


class WireDedupKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A dedup key; `kind` is the value of a `DedupKind`."""

    kind: str
    key: str
    digest: bytes
    keep: float
    joins: bool


class WireEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry; `input` is a Value, of which octets travel as their bytes: `octets` tells them from JSON.

    `apart` is the kind and the token of an input that is stored apart, the kind in upper case where the parameters lie ahead of
    it; `input` is None and `parameters` empty then, and `length` is the bytes of both.
    """

    schema: int
    id: str
    model: str
    input: Any
    tier: int
    tenant: str
    gateway: str
    queue_timeout: float
    timeout: float
    parameters: bytes = b""
    dedup_keys: tuple[WireDedupKey, ...] = ()
    nonce: int = 0
    caller: str = ""
    weight: int = 1
    octets: bool = False
    version: str = ""
    pinned: bool = False
    apart: str = ""
    length: int = 0


class TracedWireEntry(WireEntry, frozen=True, array_like=True, gc=False):
    """An entry of a request whose trace is sampled. Any other does not have this member at all."""

    trace: bytes = b""


ENTRY_KIND = struct.Struct(">HBddIIH")
"""Beginning of a head, by which the server queues the entry: length of this and the gateway, tier, timeouts, weight, bytes of
the room, inputs that come with it; the gateway follows. Most entries of a call have it in common, and the server reads it once.
"""
ENTRY_NAME = struct.Struct(">dHB")
"""Middle of a head: nonce, lengths of the tenant and of what names an input apart; that name and the key follow."""
LETTER = struct.Struct(">ddI")
"""Head of a dead letter: the instant, the runs, the length of the packed failure."""

Apart = tuple[Value, bytes]
"""Input and parameters that were stored apart."""

_entry = msgspec.msgpack.Decoder(TracedWireEntry)
_LIMITS, _SCHEMA = attrgetter("limits"), attrgetter("schema")


def pack_head(entry: Entry, apart: bytes = b"") -> bytes:
    """Pack what the server needs to queue an entry.

    Arguments:
        entry: the entry.
        apart: token of its input, where that is stored apart, and the digest of that, where it is asked for.
    """
    key, gateway = key_of(entry.tenant, entry.id), entry.gateway.encode()
    large = len(entry.input) + len(entry.parameters) > SMALL
    kind = ENTRY_KIND.pack(
        ENTRY_KIND.size + len(gateway), entry.tier, entry.queue_timeout, entry.timeout, entry.weight,
        min(bytes_of(entry), MOST_COUNTED) if large else 0, entry.count,
    )  # fmt: skip
    return b"".join((kind, gateway, ENTRY_NAME.pack(entry.nonce, key.rindex(0), len(apart)), apart, key))


def pack_entry(entry: Entry, apart: str = "", length: int = 0) -> bytes:
    """Pack an entry as it is stored.

    Arguments:
        entry: the entry.
        apart: kind and token of its input, where that is stored apart; empty where it is not.
        length: bytes that are stored apart.
    """
    raw = isinstance(entry.input, Octets)
    found = WireEntry(
        SCHEMA,
        entry.id,
        entry.model,
        None if apart else entry.input.content if isinstance(entry.input, Octets) else entry.input,
        entry.tier,
        entry.tenant,
        entry.gateway,
        entry.queue_timeout,
        entry.timeout,
        b"" if apart else entry.parameters,
        tuple(WireDedupKey(s.kind.value, s.key, s.digest, s.keep, s.joins) for s in entry.dedup_keys)
        if entry.dedup_keys
        else (),
        entry.nonce,
        entry.caller,
        entry.weight,
        raw,
        entry.version,
        entry.pinned,
        apart,
        length,
    )
    if entry.trace:
        return encode(TracedWireEntry(*(*msgspec.structs.astuple(found), entry.trace)))
    return encode(found)


def position_of(member: str) -> int:
    """Position of a member of an entry in its payload, as Lua counts."""
    return WireEntry.__struct_fields__.index(member) + 1


def read_payload(payload: bytes) -> TracedWireEntry:
    """Read a payload. Raises TooNew, and msgspec's errors for what is no entry at all."""
    found = _entry.decode(payload)
    check_schema(found.schema)
    return found


def read_payloads(payloads: Iterable[bytes]) -> list[TracedWireEntry]:
    """Read several payloads; see `read_payload`."""
    found = list(map(_entry.decode, payloads))
    for schema in set(map(_SCHEMA, found)):
        check_schema(schema)
    return found


def entry_of(found: TracedWireEntry, apart: Apart | None = None) -> Entry:
    """Make the entry of a payload; `apart` is what was stored apart of it."""
    if apart is not None:
        value, parameters = apart
    else:
        value = found.input if type(found.input) is str else read_value(found.input, found.octets)
        parameters = found.parameters
    return Entry(
        found.id,
        found.model,
        value,
        found.tier,
        found.tenant,
        found.gateway,
        found.queue_timeout,
        found.timeout,
        parameters,
        (),
        tuple(DedupKey(DedupKind(s.kind), s.key, s.digest, s.keep, s.joins) for s in found.dedup_keys)
        if found.dedup_keys
        else (),
        found.nonce,
        b"",
        found.caller,
        found.weight,
        found.version,
        found.pinned,
        found.trace,
    )


def pack_small(entries: Sequence[Entry], threshold: float) -> tuple[list[bytes], dict[int, Entry], bool]:
    """Pack heads and payloads, one after the other, of entries that are not stored apart.

    Returns them, the entries above the threshold by their positions, of which head and payload are empty, and whether any entry
    has dedup keys, a digest, or others that come with it.

    Arguments:
        entries: entries of one call.
        threshold: most bytes of input and parameters of an entry that is not stored apart.
    """
    packed: list[bytes] = []
    large: dict[int, Entry] = {}
    rare, small, known, kind = False, min(SMALL, threshold), None, b""
    name, size = ENTRY_NAME.pack, ENTRY_KIND.size
    for entry in entries:
        text, parameters, tier, gateway = entry.input, entry.parameters, entry.tier, entry.gateway
        queue_timeout, timeout, weight, nonce = entry.queue_timeout, entry.timeout, entry.weight, entry.nonce
        length, common = len(text) + len(parameters), type(text) is str and not entry.trace
        if entry.dedup_keys or entry.digest or entry.count > 1 or entry.payer:
            rare, common = True, False
        if length > small or not common:
            if length > threshold:
                large[len(packed)] = entry
                packed += b"", b""
            else:
                packed += pack_head(entry), pack_entry(entry)
            continue
        asked = tier, queue_timeout, timeout, weight, gateway
        if asked != known:
            known, whose = asked, gateway.encode()
            kind = ENTRY_KIND.pack(size + len(whose), tier, queue_timeout, timeout, weight, 0, 1) + whose
        tenant, id = entry.tenant, entry.id
        if "\0" in id:
            key_of(tenant, id)  # It raises.
        whose = tenant.encode()
        packed.append(b"%b%b%b\0%b" % (kind, name(nonce, len(whose), 0), whose, id.encode()))
        packed.append(encode((
            SCHEMA, id, entry.model, text, tier, tenant, gateway, queue_timeout, timeout, parameters, (), nonce, entry.caller, weight,
            False, entry.version, entry.pinned, "", 0,
        )))  # fmt: skip
    return packed, large, rare


def pack_extras(entries: Sequence[Entry], limits: Sequence[Limit], counts: int, rare: bool = True) -> bytes:
    """Pack the limits and dedup keys of these entries, and which pays for which, as the library takes them; empty for nothing of it.

    Arguments:
        entries: entries of one call.
        limits: limits that they count towards, each once.
        counts: number of counts that limits of whole tiers are spread over.
        rare: whether any of them may have more than limits.
    """
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
        paid = {at: payers[one.payer] for at, one in enumerate(entries, 1) if one.count == 1 and one.payer in payers}
    return encode((packed, charges, charged, dedup_keys, digests, paid))


def payer_of(entries: Sequence[Entry], position: int) -> Entry:
    """Entry that the one at a position is judged with: itself, or the one that pays for it."""
    entry = entries[position]
    if entry.limits or not entry.payer:
        return entry
    return next((one for one in entries if one.nonce == entry.payer), entry)


def limits_of(entries: Iterable[Entry]) -> Sequence[Limit]:
    """The limits that entries count towards, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(map(_LIMITS, entries)))))


def _pack_limit(limit: Limit, counts: int) -> tuple[str, float, float]:
    if counts > 1 and limit.name == "tier":
        limit = Limit(limit.id, limit.name, limit.rate / counts, max(1.0, limit.burst / counts))
    return limit.id, ratelimit.interval(limit), ratelimit.tolerance(limit)


def _pack_dedup_keys(entry: Entry) -> list[PackedDedupKey]:
    return [
        PackedDedupKey(
            dedup_key.kind.value,
            f"{dedup_key.kind.value}\0{key_of(entry.tenant, dedup_key.key).decode()}",
            dedup_key.digest.hex(),
            dedup_key.keep,
            dedup_key.joins,
            dedup_key.kind is DedupKind.TASK and dedup_key.key != entry.id,
        )
        for dedup_key in entry.dedup_keys
    ]


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
