"""Budgets in bytes of a server, and what each queue has of them."""

from __future__ import annotations

from collections.abc import Callable

from headway.brokers.redis.connection import RedisConnection
from headway.core.retention import KeptLimits

KEPT_SHARE = 0.25
"""Most of a server's `maxmemory` for kept outcomes, as a share, so that they never cause a refusal."""
ROOM_SHARE = 0.5
"""Most of a server's `maxmemory` for large entries, as a share, so that they leave room for small ones."""


class Budgets:
    """Budgets of the queues. On one server they share them; in a cluster each has its part, as it is counted there.

    Arguments:
        connection: connection to the server.
        kept: budgets of kept outcomes, of each server.
        queue_bytes: most bytes of large entries that have no outcome yet.
        shards: queues that each model is split into.
        queues: returns the number of all queues.
    """

    def __init__(
        self, connection: RedisConnection, kept: KeptLimits, queue_bytes: int, shards: int, queues: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._kept, self._queue_bytes = kept, queue_bytes
        self._shards, self._queues = shards, queues
        self._found: tuple[tuple[int, int], KeptLimits] | None = None

    def kept(self) -> KeptLimits:
        """Budgets of kept outcomes of one queue."""
        found = servers, memory = self._connection.servers, self._connection.smallest_memory
        if self._found is not None and self._found[0] == found:
            return self._found[1]
        parts = self._shards if self._connection.clustered else 1
        kept = self._kept.within(int(KEPT_SHARE * memory) * min(servers, parts)) if memory else self._kept
        kept = kept.split(parts)
        self._found = found, kept
        return kept

    def room(self) -> int:
        """Bytes of the room for large entries."""
        servers, memory = self._connection.servers, self._connection.smallest_memory
        room = min(self._queue_bytes, int(ROOM_SHARE * memory) * servers) if memory else self._queue_bytes
        return room // max(self._queues(), 1) if self._connection.clustered else room
