"""Completion of leases: how the outcomes of a batch reach the server.

A server that moves hundreds of MB at once is blocked for seconds, and the whole fleet takes it for dead. So large outputs are
sent in several steps after the small outputs, and their total is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.steps import Steps
from headway.core import failures
from headway.core.retention import weight
from headway.core.values import octets
from headway.errors import BrokerUnavailable
from headway.model import Completion, Entry, ItemResult, Lease, Value
from headway.runtime.logger import get_logger

_OUTPUT = attrgetter("output")

log = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Maximum bytes of outputs in the replies of one batch, without outputs stored apart."""
PART_BYTES = 8 << 20
"""Bytes of outputs in one step. A larger output gets a step of its own."""
NONE_APART: Mapping[int, str] = MappingProxyType({})
TOO_MUCH = "the outputs of its batch come to more than {most} MiB, and there was no room for this one; try again"


class LeaseCompletions:
    """Completions of one queue's leases. `learn` is called with the packed load that each completion returns."""

    def __init__(
        self, steps: Steps, connection: RedisConnection, values: LargeValues, key: str, learn: Callable[[bytes], None]
    ) -> None:
        self._steps, self._connection, self._values = steps, connection, values
        self._key, self._learn = key, learn

    async def complete(
        self, fence: int, lease: Lease, items: Sequence[ItemResult], waited: Sequence[float]
    ) -> Completion:
        """End a lease with the result of each entry and the seconds that each `waited`. Large outputs come last.

        After BrokerUnavailable, some entries may have been answered.
        """
        large, delivered = self._large(items), 0
        left_out: dict[int, int] = {}
        if None in map(_OUTPUT, items):
            left_out = {position: item.left_out for position, item in enumerate(items) if item.left_out}
        storable = set(large)
        items = fitting(lease.entries, items, storable)
        *ahead, last = parts(items, large)
        if left_out:
            ahead = [[position for position in positions if position not in left_out] for positions in (*ahead, last)]
            last = []
        for positions in ahead:
            items, apart = await self._store(lease, items, positions, storable)
            answered = await self._deliver(fence, pack(lease, items, waited, positions, apart))
            if answered is None:
                last = []  # The lease is over, so the completion will be fenced.
                break
            delivered += answered
        if left_out:
            return await self._leave_out(fence, left_out, len(items), delivered)
        items, apart = await self._store(lease, items, last, storable)
        settled = await self._complete(fence, pack(lease, items, waited, last, apart))
        if delivered:
            departed = max(settled.departed - delivered, 0)
            settled = Completion(settled.answered + delivered, departed, settled.fenced)
        return settled

    def _large(self, items: Sequence[ItemResult]) -> Collection[int]:
        if length_of_all(items) <= self._values.threshold:  # The usual case.
            return ()
        return {position for position, item in enumerate(items) if self._values.is_large(item.output)}

    async def _store(
        self, lease: Lease, items: Sequence[ItemResult], positions: Sequence[int], storable: set[int]
    ) -> tuple[Sequence[ItemResult], Mapping[int, str]]:
        """Store outputs apart. Returns the items, and kind and token of each stored output by position.

        If the server has no room for an output, it stays in its reply or becomes a failure, and is no longer `storable`.
        """
        wanted = [position for position in positions if position in storable] if storable else []
        if not wanted:
            return items, NONE_APART
        apart: dict[int, str] = {}

        async def store(position: int, output: Value) -> None:
            with contextlib.suppress(OutOfMemory):
                apart[position] = await self._values.bring_output(self._key, output, lease.entries[position].tenant)

        outputs = [(position, items[position].output) for position in wanted]
        await asyncio.gather(*(store(position, output) for position, output in outputs if output is not None))
        if len(apart) < len(wanted):
            storable.difference_update(position for position in wanted if position not in apart)
            items = fitting(lease.entries, items, storable)
        return items, apart

    async def _deliver(self, fence: int, outcomes: Outcomes) -> int | None:
        """Answer entries ahead of the lease's completion. Returns their number, or None if the lease is no longer valid."""
        positions = wire.encode(list(outcomes.positions))
        answer = await self._steps.call("deliver", fence, positions, *self._arguments(outcomes))
        if not answer:
            await self._drop(outcomes.apart.values())
        return int(answer[0]) if answer else None

    async def _leave_out(self, fence: int, sizes: Mapping[int, int], size: int, delivered: int) -> Completion:
        """End a lease. Entries left out, by position with the bytes of their outputs, run again apart. The others were answered."""
        answer = await self._steps.call("leave_out", fence, wire.encode(list(sizes.items())))
        if not answer:
            return Completion(0, 0, fenced=True)
        again, load = answer
        self._learn(load)
        return Completion(delivered, max(size - delivered - int(again), 0))

    async def _complete(self, fence: int, outcomes: Outcomes) -> Completion:
        answer = await self._steps.call("complete", fence, *self._arguments(outcomes))
        if not answer:
            await self._drop(outcomes.apart.values())
            return Completion(0, 0, fenced=True)
        answered, departed, load = answer
        self._learn(load)
        return Completion(answered, departed)

    def _arguments(self, outcomes: Outcomes) -> list[object]:
        arguments: list[object] = [len(outcomes.runs)]
        for gateway, run in outcomes.runs.items():
            arguments += (gateway, run)
        keeps = not outcomes.shared or not self._connection.memory_pressure
        apart = [(position, name[1:]) for position, name in outcomes.apart.items()]
        arguments += (len(outcomes.shared), int(keeps), outcomes.head, wire.encode(apart) if apart else b"")
        arguments.append(outcomes.ran)
        for outcome in outcomes.shared:
            arguments += outcome
        for position, failure in outcomes.bad:
            arguments += (position, failure)
        return arguments

    async def _drop(self, names: Iterable[str]) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._connection.drop([f"{self._key}R:{name[1:]}" for name in names])


def fitting(
    entries: Sequence[Entry], items: Sequence[ItemResult], apart: Collection[int] = (), most: int = MOST_BYTES
) -> Sequence[ItemResult]:
    """Turn outputs into failures if the replies of a batch would carry more than `most` bytes.

    Tenants share the bytes, and the smallest outputs of a tenant come first. Outputs at the positions `apart` don't count.
    """
    if 4 * length_of_all(items) <= most:  # The usual case. No character takes more than 4 bytes.
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
    """Packed outcomes of some entries of a lease.

    Attributes:
        runs: packed replies by gateway.
        head: bytes that precede a kept or shared reply of a single entry.
        shared: position of each entry with dedup keys, worth and bytes of its outcome, number of its gateway among `runs` from 1,
            and begin and end of its reply there in Lua's counting.
        ran: version of the model and code that ran the entries, or empty if none is shared.
        bad: positions and packed failures of items that failed.
        apart: kind and token of each output stored apart, by position.
    """

    positions: Sequence[int]
    runs: dict[str, bytes]
    head: bytes
    shared: Sequence[tuple[int, int, int, int, int, int]]
    ran: str
    bad: Sequence[tuple[int, bytes]]
    apart: Mapping[int, str]


def pack(
    lease: Lease,
    items: Sequence[ItemResult],
    waited: Sequence[float],
    positions: Sequence[int],
    names: Mapping[int, str] = NONE_APART,
) -> Outcomes:
    """Pack the outcomes of the entries at some positions. `names` are kind and token of each output stored apart, by position."""
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
            stored_failure = wire.WireFailure("item", item.error or "", worker, "", version, lease.batch_id)
            bad.append((position, wire.encode(stored_failure)))
        reply = wire.WireReply(
            position, entry.id, entry.tenant, item.output, failure, waited[position], entry.nonce, tokens=item.tokens
        )  # fmt: skip
        if position in apart:
            reply = replace(reply, output=(apart[position], _bytes(item.output)))
        runs.setdefault(entry.gateway, []).append(reply)
        if entry.dedup_keys:
            worths[position] = wire.worth(failure), weight(item.output)
    if not worths:
        packed = {
            gateway: wire.encode(wire.WireRun(wire.SCHEMA, worker, version, replies))
            for gateway, replies in runs.items()
        }
        return Outcomes(positions, packed, b"", (), "", bad, apart)
    packed, shared = {}, []
    for number, (gateway, replies) in enumerate(runs.items(), 1):
        packed[gateway], spans = wire.pack_run(worker, version, replies)
        for reply, (begin, end) in zip(replies, spans, strict=True):
            if reply.position in worths:
                shared.append((reply.position, *worths[reply.position], number, begin + 1, end))
    ran = f"{version}#{lease.slot.runs.target}"
    return Outcomes(positions, packed, wire.head_of_one(worker, version), shared, ran, bad, apart)


def parts(items: Sequence[ItemResult], large: Collection[int] = (), most: int = PART_BYTES) -> Sequence[Sequence[int]]:
    """Split the items' positions into steps of `most` bytes of outputs. The `large` outputs come last and delay no others."""
    positions = range(len(items))
    if not large and 4 * length_of_all(items) <= most:
        return [positions]
    steps: list[list[int]] = []
    for chosen in ([position for position in positions if position not in large], sorted(large)):
        room = -1
        for position in chosen:
            size = _bytes(items[position].output)
            if size > room:
                steps.append([])
                room = most
            steps[-1].append(position)
            room = max(room - size, 0)
    return steps or [positions]


def length_of_all(items: Sequence[ItemResult]) -> int:
    """Return the total length of the outputs. Texts count in characters, others in bytes."""
    return sum(map(len, filter(None, map(_OUTPUT, items))))


def _bytes(output: Value | None) -> int:
    return len(octets(output)) if isinstance(output, str) and not output.isascii() else len(output or b"")
