"""Outcomes of one batch as Redis takes them, and the bounds on their bytes.

A server that takes or sends hundreds of MB does nothing else for seconds, and every process of the fleet takes it for
gone. So large outputs go in several steps, between which it serves others, and there is a bound on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.core import failures
from headway.core.retention import weight
from headway.core.values import octets
from headway.model import Entry, ItemResult, Lease, Octets, Value
from headway.runtime.logger import get_logger

_OUTPUT = attrgetter("output")

log = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Most bytes of the outputs that the replies of one batch carry; outputs that are stored apart are not among them."""
PART_BYTES = 8 << 20
"""Bytes of outputs that one step carries. A larger output goes in a step of its own."""
TOO_MUCH = "the outputs of its batch come to more than {most} MiB, and there was no room for this one; try again"


def fitting(
    entries: Sequence[Entry], items: Sequence[ItemResult], apart: Collection[int] = (), most: int = MOST_BYTES
) -> Sequence[ItemResult]:
    """Cut the outputs of a batch to the bytes that its replies may carry; the other outputs become failures.

    Tenants share the bytes, and each one's smallest outputs come first. Outputs at the positions `apart` take none of them.
    """
    if 4 * length_of_all(items) <= most:  # Mostly; no character takes more than 4 bytes.
        return items
    sizes = [0 if position in apart else _bytes(item.output) for position, item in enumerate(items)]
    if sum(sizes) <= most:
        return items
    used: dict[str, int] = {}
    order = []
    for position in sorted(range(len(items)), key=sizes.__getitem__):
        tenant = entries[position].tenant
        used[tenant] = used.get(tenant, 0) + sizes[position]
        order.append((used[tenant], position))
    fitted, room = list(items), most
    for _, position in sorted(order):
        if sizes[position] <= room:
            room -= sizes[position]
        else:
            fitted[position] = ItemResult(None, TOO_MUCH.format(most=most >> 20), fault=True)
    failed = sum(after is not before for after, before in zip(fitted, items, strict=True))
    log.warning("outputs of a batch do not fit into one completion", size=len(items), failed=failed, bytes=sum(sizes))
    return fitted


class Outcomes(msgspec.Struct, frozen=True):
    """Outcomes of some entries of a lease, packed.

    Attributes:
        positions: positions of the entries in the lease.
        runs: packed replies by gateway.
        head: what precedes the reply of a single entry where that is kept or told to others.
        shared: for each entry with dedup keys: its position, the worth and the bytes of its outcome, the number of its
            gateway among `runs`, from 1, and where its reply begins and ends there, as Lua counts.
        version: version of the model that ran them.
        bad: positions of items that failed, and the packed failures.
        apart: kind and token of each output that is stored apart, by position.
    """

    positions: Sequence[int]
    runs: dict[str, bytes]
    head: bytes
    shared: Sequence[tuple[int, int, int, int, int, int]]
    version: str
    bad: Sequence[tuple[int, bytes]]
    apart: Mapping[int, str]


def pack(
    lease: Lease,
    items: Sequence[ItemResult],
    waited: Sequence[float],
    positions: Sequence[int],
    names: Mapping[int, str] = MappingProxyType({}),
) -> Outcomes:
    """Pack the outcomes of some entries of a lease.

    Arguments:
        lease: the lease.
        items: what came of each of its entries.
        waited: seconds that each entry waited.
        positions: positions of the entries.
        names: kind and token of each output of the lease that is stored apart, by position.
    """
    apart = {position: names[position] for position in positions if position in names} if names else {}
    runs: dict[str, list[wire.WireReply]] = {}
    worths: dict[int, tuple[int, int]] = {}
    bad: list[tuple[int, bytes]] = []
    worker, version = lease.slot.worker, lease.slot.runs.version
    for position in positions:
        entry, item, failure = lease.entries[position], items[position], None
        if item.output is None:
            failure = failures.item_failure(item)
        if failure is not None and not item.elsewhere:
            told = wire.WireFailure("item", item.error or "", worker, "", version, lease.batch_id)
            bad.append((position, wire.encode(told)))
        reply = wire.WireReply(
            position, entry.id, entry.tenant, item.output, failure, waited[position], entry.nonce, version,
            tokens=item.tokens,
        )  # fmt: skip
        if position in apart:
            name, length = apart[position], _bytes(item.output)
            reply = replace(reply, output=None, apart=name, length=length)
        elif isinstance(item.output, Octets):
            reply = replace(reply, output=item.output.content, octets=True)
        runs.setdefault(entry.gateway, []).append(reply)
        if entry.dedup_keys:
            worths[position] = wire.worth(failure), weight(item.output)
    if not worths:
        packed = {gateway: wire.encode(wire.WireRun(wire.SCHEMA, worker, replies)) for gateway, replies in runs.items()}
        return Outcomes(positions, packed, b"", (), version, bad, apart)
    packed, shared = {}, []
    for number, (gateway, replies) in enumerate(runs.items(), 1):
        packed[gateway], spans = wire.pack_run(worker, replies)
        for reply, (begin, end) in zip(replies, spans, strict=True):
            if reply.position in worths:
                shared.append((reply.position, *worths[reply.position], number, begin + 1, end))
    return Outcomes(positions, packed, wire.head_of_one(worker), shared, version, bad, apart)


def parts(items: Sequence[ItemResult], large: Collection[int] = (), most: int = PART_BYTES) -> Sequence[Sequence[int]]:
    """Positions of the items, cut into steps of at most `most` bytes of outputs; one step where they fit.

    Large outputs come last, so that no other waits for their bytes.

    Arguments:
        items: what came of each entry.
        large: positions of the large outputs.
        most: bytes of a step.
    """
    positions = range(len(items))
    if not large and 4 * length_of_all(items) <= most:
        return [positions]
    found: list[list[int]] = []
    for chosen in ([one for one in positions if one not in large], sorted(large)):
        room = -1
        for position in chosen:
            size = _bytes(items[position].output)
            if size > room:
                found.append([])
                room = most
            found[-1].append(position)
            room = max(room - size, 0)
    return found or [positions]


def length_of_all(items: Sequence[ItemResult]) -> int:
    """Length of all outputs together: characters of texts, bytes of others."""
    return sum(map(len, filter(None, map(_OUTPUT, items))))


def _bytes(output: Value | None) -> int:
    return len(octets(output)) if isinstance(output, str) and not output.isascii() else len(output or b"")
