"""The registry of workers: one list for all queues, and one of the models in which something may be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.core.health import believed
from headway.model import WorkerInfo


class Registry:
    """Worker registry in the server: the last heartbeat of each worker.

    Arguments:
        connection: connection to the server.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = f"{connection.prefix}:{{fleet}}:"

    async def record(self, worker: WorkerInfo) -> None:
        """Write down a heartbeat."""
        await self._connection.join(
            "register", self._key, self._connection.clock_text(), worker.worker_id, wire.encode(worker)
        )

    async def look(self, known_until: Mapping[str, float]) -> tuple[Sequence[WorkerInfo], Sequence[str]]:
        """Recent workers, each with the status to believe now; and names of the models in which something may be known.

        `known_until`: instants, on the server's clock, until which that is so of some models; others hear of these from then on.
        """
        told = chain.from_iterable((repr(until), model) for model, until in known_until.items())
        now, packed, models = await self._connection.join("workers", self._key, self._connection.clock_text(), *told)
        workers = [believed(worker, float(now)) for worker in wire.readable(wire.read_worker, packed)]
        return workers, [name.decode() for name in models]
