"""Ids that clients have chosen for tasks: each is one model's of its tenant, though the models' queues know nothing of one another.

    claim the id for the model ──▶ the model's own ──▶ offer the task
             │ another model's
             ▼
    is there something under it? ── no, and the claim is old ──▶ claim it after all
             │ waits or runs: 409; has its outcome: 422

The claim is a step of its own, in a key of the id's. It says who may use the id, and not that a task is there: that is looked up in
the queues. So a claim that is left over harms nobody for longer than CLAIM_SECONDS.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.function_library import CLAIM_SECONDS
from headway.brokers.redis.lookup import Lookup
from headway.brokers.redis.together import all_of
from headway.core import failures
from headway.model import DedupKind, Entry, Failure


class TaskIds:
    """Claims of ids for one process.

    Arguments:
        connection: connection to the server.
        lookup: lookup of what is under an id.
    """

    def __init__(self, connection: RedisConnection, lookup: Lookup) -> None:
        self._connection, self._lookup = connection, lookup

    async def offer(
        self, entries: Sequence[Entry], offer: Callable[[Sequence[Entry]], Awaitable[Sequence[Failure | None]]]
    ) -> list[Failure | None]:
        """Claim ids for the entries that ask for it, and offer what may be offered; verdicts in order, None for an admitted entry.

        A claim that is made for an entry which is then refused ends soon, so that refusals take no memory for long.
        """
        tasks = [position for position, entry in enumerate(entries) if entry.claims]
        claims = dict(zip(tasks, await all_of(*(self._claim(entries[position]) for position in tasks)), strict=True))
        found = [claim if isinstance(claim := claims.get(at), Failure) else None for at in range(len(entries))]
        rest = [position for position, failure in enumerate(found) if failure is None]
        answers = await offer([entries[position] for position in rest])
        for position, answer in zip(rest, answers, strict=True):
            found[position] = answer
        void = [(entries[at], claims[at]) for at in rest if claims.get(at) and found[at] is not None]
        await all_of(*(self._call("unclaim_id", task, mark, math.ceil(CLAIM_SECONDS)) for task, mark in void))
        return found

    async def _claim(self, task: Entry) -> Failure | bytes:
        """Claim the id of a task for its model: the mark of a new claim, empty for one that was there, or why it cannot be."""
        keep = max(one.keep for one in task.dedup_keys if one.kind is DedupKind.TASK)
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
