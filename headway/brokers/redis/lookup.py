"""Lookup of entries and tasks in all queues, and claims of the ids of tasks.

An id that a client chose for a task belongs to one model of its tenant, although the models' queues know nothing of each other:

    claim the id for the model ──▶ it is this model's ──▶ offer the task
             │ another model's
             ▼
    is anything under it? ── no, and the claim is old ──▶ claim it after all
             │ waits or runs: 409; has its outcome: 422

A claim only says which model may use the id. Whether a task exists, only the queues know, so a stale claim does harm for
CLAIM_SECONDS at most.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.function_library import CLAIM_SECONDS
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.shard_queue import Queue
from headway.brokers.redis.shard_router import ShardRouter
from headway.brokers.redis.together import all_of
from headway.core import failures
from headway.model import DedupKind, Entry, EntryState, Failure, QueueName, Reply

T = TypeVar("T")

_SPECIAL = re.compile(r"[*?\[\]\\]")


class Lookup:
    """Lookup of one process.

    If nothing is found in the known queues, it asks the servers for others that this process doesn't know yet, or has forgotten.
    """

    def __init__(self, queues: QueueTable, router: ShardRouter) -> None:
        self._queues, self._router = queues, router

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """See Broker. Without a tenant all queues are searched, part by part."""
        if tenant is None:
            await self._look_again()
            states = await all_of(*(_state_of_any(queue, id) for queue in list(self._queues.every)))
            return next((state for state in states if state is not None), None)
        return await self._found(tenant, id, lambda queue, key: queue.state(key))

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        return await self._found(tenant, id, lambda queue, key: queue.outcome(key))

    async def cancel_task(self, tenant: str, id: str) -> None:
        await self._look_again()
        await all_of(*(queue.cancel_task(wire.key_of(tenant, id)) for queue in list(self._queues.every)))
        self._router.forget([(tenant, id)])

    async def knows(self, tenant: str, id: str) -> bool:
        return await self._found(tenant, id, _name_of) is not None

    async def queue_with(self, tenant: str, id: str) -> QueueName:
        """Return the name of the queue that has a task, or of the first queue if none has it."""
        return await self._found(tenant, id, _name_of) or self._queues.every[0].name

    async def _found(self, tenant: str, id: str, ask: Callable[[Queue, bytes], Awaitable[T | None]]) -> T | None:
        """Ask the queue in which an entry was placed, then all queues, because its id may belong to another entry now."""
        key, queues = wire.key_of(tenant, id), list(self._router.where((tenant, id)))
        answers = await all_of(*(ask(queue, key) for queue in queues))
        if not any(answers):
            await self._look_again()
            answers = await all_of(*(ask(queue, key) for queue in list(self._queues.every)))
        return next((answer for answer in answers if answer is not None), None)

    async def _look_again(self) -> None:
        await self._router.read_registry()
        await self._queues.look(at_once=True)


async def _name_of(queue: Queue, key: bytes) -> QueueName | None:
    return queue.name if await queue.knows(key) else None


async def _state_of_any(queue: Queue, id: str) -> EntryState | None:
    """Return the state of the first entry with this id in a queue, whatever its tenant."""
    prefix = wire.prefix_of(queue.connection.prefix, queue.name, queue.shard)
    ending, cursor = _SPECIAL.sub(r"\\\g<0>", id), b"0"
    while True:
        cursor, owners = await queue.connection.call("owners", prefix, cursor, ending)
        for key in owners:
            if (state := await queue.state(key)) is not None:
                return state
        if cursor == b"0":
            return None


class TaskIds:
    """Claims of ids for one process."""

    def __init__(self, connection: RedisConnection, lookup: Lookup) -> None:
        self._connection, self._lookup = connection, lookup

    async def offer(
        self, entries: Sequence[Entry], offer: Callable[[Sequence[Entry]], Awaitable[Sequence[Failure | None]]]
    ) -> list[Failure | None]:
        """Claim ids for entries that need it, and offer the entries whose claims hold. Returns their verdicts in order.

        The claim of a refused entry ends soon, so refusals take no memory for long.
        """
        tasks = [position for position, entry in enumerate(entries) if entry.claims]
        claims = dict(zip(tasks, await all_of(*(self._claim(entries[position]) for position in tasks)), strict=True))
        verdicts = [claim if isinstance(claim := claims.get(at), Failure) else None for at in range(len(entries))]
        offered = [position for position, failure in enumerate(verdicts) if failure is None]
        answers = await offer([entries[position] for position in offered])
        for position, answer in zip(offered, answers, strict=True):
            verdicts[position] = answer
        void = [(entries[at], claims[at]) for at in offered if claims.get(at) and verdicts[at] is not None]
        await all_of(*(self._call("unclaim_id", task, mark, math.ceil(CLAIM_SECONDS)) for task, mark in void))
        return verdicts

    async def _claim(self, task: Entry) -> Failure | bytes:
        """Claim a task's id for its model. Returns the mark of a new claim, an empty mark for an old claim, or a failure."""
        keep = max(dedup_key.keep for dedup_key in task.dedup_keys if dedup_key.kind is DedupKind.TASK)
        void = b""
        while True:
            seconds = math.ceil(task.timeout + keep + CLAIM_SECONDS)
            instant = self._connection.clock_text()
            held, owner, *others = await self._call("claim_id", task, instant, task.model, seconds, void)
            if not others:
                return b"" if held else bytes(owner)
            [on_its_way] = others
            if await self._lookup.state(task.tenant, task.id) is not None:
                return failures.conflict()
            if await self._lookup.knows(task.tenant, task.id):
                return failures.misuse()
            if on_its_way:
                return failures.conflict()
            void = owner

    async def _call(self, function: str, task: Entry, *arguments: Any) -> Any:
        name = hashlib.blake2b(wire.key_of(task.tenant, task.id), digest_size=16).hexdigest()
        key = f"{self._connection.prefix}:{{id:{name}}}:o"
        return await self._connection.call(function, key, *arguments)
