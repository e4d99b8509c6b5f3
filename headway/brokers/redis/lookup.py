"""Lookup of entries and tasks in the queues of one process, and in those that others have used meanwhile."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.brokers.redis import wire
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.shard_queue import Queue
from headway.brokers.redis.shard_router import ShardRouter
from headway.brokers.redis.together import all_of
from headway.model import EntryState, QueueName, Reply

T = TypeVar("T")

_SPECIAL = re.compile(r"[*?\[\]\\]")


class Lookup:
    """Lookup of one process.

    Before something is not found, the servers are asked which queues there are: it may be in one that this process
    has not heard of yet, or has forgotten before others used it anew.

    Arguments:
        queues: queues of the process.
        router: router that remembers the queues of entries.
    """

    def __init__(self, queues: QueueTable, router: ShardRouter) -> None:
        self._queues, self._router = queues, router

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """See Broker. Without a tenant all queues are looked through, a part at a time."""
        if tenant is None:
            await self._look_again()
            found = await all_of(*(_state_of_any(queue, id) for queue in list(self._queues.every)))
            return next((one for one in found if one is not None), None)
        return await self._found(tenant, id, lambda queue, key: queue.state(key))

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """See Broker."""
        return await self._found(tenant, id, lambda queue, key: queue.outcome(key))

    async def cancel_task(self, tenant: str, id: str) -> None:
        """See Broker."""
        await self._look_again()
        await all_of(*(queue.cancel_task(wire.key_of(tenant, id)) for queue in list(self._queues.every)))
        self._router.forget([(tenant, id)])

    async def knows(self, tenant: str, id: str) -> bool:
        """Whether a task of the tenant's is in any queue, or its outcome."""
        return await self._found(tenant, id, _name_of) is not None

    async def queue_with(self, tenant: str, id: str) -> QueueName:
        """Name of a queue in which a task is; of a task that is nowhere that of the first one."""
        return await self._found(tenant, id, _name_of) or self._queues.every[0].name

    async def _found(self, tenant: str, id: str, ask: Callable[[Queue, bytes], Awaitable[T | None]]) -> T | None:
        """Answer of the queue that knows an entry: one that it went to before or, as its id may be another's now, any."""
        key, queues = wire.key_of(tenant, id), list(self._router.where((tenant, id)))
        found = await all_of(*(ask(queue, key) for queue in queues))
        if not any(found):
            await self._look_again()
            found = await all_of(*(ask(queue, key) for queue in list(self._queues.every)))
        return next((one for one in found if one is not None), None)

    async def _look_again(self) -> None:
        await self._router.read_registry()
        await self._queues.look(at_once=True)


async def _name_of(queue: Queue, key: bytes) -> QueueName | None:
    """Name of a queue, if a task is there."""
    return queue.name if await queue.knows(key) else None


async def _state_of_any(queue: Queue, id: str) -> EntryState | None:
    """State of the first entry of an id that is found in a queue."""
    prefix = wire.prefix_of(queue.connection.prefix, queue.name, queue.shard)
    ending, cursor = _SPECIAL.sub(r"\\\g<0>", id), b"0"
    while True:
        cursor, owners = await queue.connection.call("owners", prefix, cursor, ending)
        for key in owners:
            if (state := await queue.state(key)) is not None:
                return state
        if cursor == b"0":
            return None
