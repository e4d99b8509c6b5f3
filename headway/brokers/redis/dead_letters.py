"""Dead letters in the server. `lua/10_outcomes.lua` stores them next to the queues of their entries."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.entry_wire import Apart, pack_letter, payload_of, read_letter
from headway.brokers.redis.large_values import LargeValues
from headway.model import DeadLetter, QueueName
from headway.ports import DeadLetters
from headway.runtime.logger import get_logger

log = get_logger(__name__)


class RedisDeadLetters(DeadLetters):
    """Dead letters in Redis. See `headway.ports.DeadLetters`. The step that ends an entry also writes its dead letter, so `add` is
    only needed for letters from other sources. `queues` may grow."""

    def __init__(self, connection: RedisConnection, queues: Collection[QueueName], shards: int = 1) -> None:
        self._connection = connection
        self._queues = queues
        self._shards = shards
        self._values = LargeValues(connection.values, math.inf)

    @property
    def _keys(self) -> list[str]:
        prefix, shards = self._connection.prefix, range(self._shards)
        return [wire.prefix_of(prefix, name, shard) for name in self._queues for shard in shards]

    async def add(self, letter: DeadLetter) -> None:
        stored_failure = wire.WireFailure(
            letter.cause, letter.error, letter.worker, "", letter.version, letter.batch_id
        )
        failure = wire.encode(stored_failure)
        entry = letter.entry
        names = (entry.queue, QueueName(entry.model))
        name = next((name for name in names if name in self._queues), next(iter(self._queues)))
        key = wire.prefix_of(self._connection.prefix, name, 0)
        packed = pack_letter(letter.died_at, letter.attempts, failure, entry_wire.pack_entry(entry))
        await self._connection.call("bury", key, wire.key_of(entry.tenant, entry.id), packed)

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        read = [_read(packed) for _, each, _ in await self._listed(limit) for packed in each]
        letters = sorted((letter for letter in read if letter is not None), key=lambda letter: letter.died_at)
        # If an entry failed again in another shard, use its newest letter.
        newest = {(letter.entry.tenant, letter.entry.id): letter for letter in letters}
        return sorted(newest.values(), key=lambda letter: letter.died_at, reverse=True)[:limit]

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]:
        keys = self._keys  # Queues may be added before the answers arrive.
        answers = await self._ask("letters_of", *_whose(id, tenant))
        read = [self._whole(key, packed) for key, each in zip(keys, answers, strict=True) for packed in each]
        letters = [letter for letter in await asyncio.gather(*read) if letter is not None]
        letters.sort(key=lambda letter: letter.died_at)
        return list({letter.entry.tenant: letter for letter in letters}.values())

    async def remove(self, id: str, tenant: str | None = None) -> int:
        return sum(await self._ask("unbury", *_whose(id, tenant)))

    async def count(self) -> int:
        return sum(count for count, _, _ in await self._listed(0))

    async def counts(self) -> Mapping[str, int]:
        return await self._counted(0)

    async def totals(self) -> Mapping[str, int]:
        return await self._counted(2)

    async def _counted(self, which: int) -> Mapping[str, int]:
        names = [name for name in self._queues for _ in range(self._shards)]
        counts = Counter[str]()
        for name, numbers in zip(names, await self._listed(0), strict=True):
            counts[name.model] += numbers[which]
        return counts

    async def _whole(self, queue: str, packed: bytes) -> DeadLetter | None:
        """Read a dead letter including its input, even if that is stored separately. Return None if it can't be read."""
        apart: Apart | None = None
        with contextlib.suppress(*wire.UNREADABLE):
            payload = payload_of(packed)
            if (stored := payload.apart) is not None:
                key = f"{queue}zp:{payload.tenant}\0{payload.id}"
                # A newer letter with the same id may replace the input at any time.
                apart = await self._values.read_input(key, payload.tenant, stored, whole=True)
        return _read(packed, apart)

    async def _listed(self, limit: int) -> Sequence[Any]:
        return await asyncio.gather(*(self._connection.join("letters", key, limit) for key in self._keys))

    async def _ask(self, function: str, *arguments: object) -> Sequence[Any]:
        return await asyncio.gather(*(self._connection.call(function, key, *arguments) for key in self._keys))


def _whose(id: str, tenant: str | None) -> tuple[str, ...]:
    return (id,) if tenant is None else (id, tenant)


def _read(packed: bytes, apart: Apart | None = None) -> DeadLetter | None:
    """Read a dead letter, or return None if its input is lost or if only a later release can read it."""
    try:
        return read_letter(packed, apart)
    except wire.UNREADABLE as exc:
        log.warning("a dead letter cannot be read", error=wire.reason(exc))
        return None
