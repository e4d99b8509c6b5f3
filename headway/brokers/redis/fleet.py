"""The fleet in the server: workers, processes, the leader, and capacities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.core.capacity import FORGOTTEN_AFTER
from headway.core.health import OFFLINE_AFTER, believed, lost
from headway.model import Capacity, Departed, Drain, ProcessInfo, Rollout, WorkerInfo
from headway.ports import Fleet

LONGEST_DRAIN = 365 * 86400.0


class RedisFleet(Fleet):
    """Fleet in Redis. See `headway.ports.Fleet`."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = f"{connection.prefix}:{{fleet}}:"

    async def heartbeat(self, member: ProcessInfo) -> Collection[str]:
        return {name.decode() for name in await self._ask("attend", member.id, wire.encode(member))}

    async def leave(self, id: str) -> None:
        await self._call("leave", id)

    async def depart(self, gone: Departed) -> None:
        await self._ask("depart", gone.id, wire.encode(gone))

    async def departed(self) -> Sequence[Departed]:
        """See Fleet. A process that stopped reporting is included with its last heartbeat."""
        notes, silent = await self._share("departed")
        departed = wire.readable(wire.read_departed, notes)
        return [*departed, *map(lost, wire.readable(wire.read_member, silent))]

    async def members(self) -> Sequence[ProcessInfo]:
        return wire.readable(wire.read_member, await self._share("notes", "k", OFFLINE_AFTER))

    async def acquire_leadership(self, candidate: str, seconds: float) -> float:
        return float(await self._ask("lead", candidate, seconds))

    async def acquire_load(self, model: str, candidate: str, seconds: float) -> bool:
        """See Fleet. The server stores a separate leader for each model."""
        connection, key = self._connection, f"{self._key}load:{model}:"
        return float(await connection.call("lead", key, connection.clock_text(), candidate, seconds)) == 0.0

    async def publish(self, capacity: Capacity) -> None:
        await self._ask("note", "capacity", capacity.model, wire.encode(capacity))

    async def withdraw_capacity(self, model: str) -> None:
        await self._call("drop_notes", "capacity", model)

    async def capacities(self) -> Sequence[Capacity]:
        return wire.readable(wire.read_capacity, await self._share("notes", "capacity", FORGOTTEN_AFTER))

    async def rollouts(self) -> Sequence[Rollout]:
        notes = await self._share("rollouts")
        return wire.readable(wire.read_rollout, (packed for _, packed in map(wire.read_stamped, notes)))

    async def drains(self) -> Sequence[Drain]:
        notes = await self._share("notes", "drain", LONGEST_DRAIN)
        return wire.readable(wire.read_drain, (packed for _, packed in map(wire.read_stamped, notes)))

    async def drain(self, drains: Sequence[Drain], seen: Collection[str] | None = None) -> bool:
        notes = [text for drain in drains for text in (drain.name, wire.encode(drain))]
        expected = [-1] if seen is None else [len(set(seen)), *set(seen)]
        return bool(await self._call("drain", *expected, *notes))

    async def undrain(self, names: Collection[str]) -> None:
        if names:
            await self._call("drop_notes", "drain", *names)

    async def keep_rollout(self, rollout: Rollout) -> bool:
        """See Fleet. The revision serves as the stamp."""
        packed = wire.pack_numbers((rollout.revision,)) + wire.encode(rollout)
        return bool(await self._call("keep_rollout", rollout.model, rollout.revision, packed))

    async def _call(self, function: str, *arguments: object) -> Any:
        return await self._connection.call(function, self._key, self._connection.clock_text(), *arguments)

    async def _ask(self, function: str, *arguments: object) -> Any:
        return await self._connection.join(function, self._key, self._connection.clock_text(), *arguments)

    async def _share(self, function: str, *arguments: object) -> Any:
        return await self._connection.share(function, self._key, self._connection.clock_text(), *arguments)


class Registry:
    """Worker registry in the server: each worker's last heartbeat, and the names of models that may have data there."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = f"{connection.prefix}:{{fleet}}:"

    async def record(self, worker: WorkerInfo) -> None:
        await self._connection.join(
            "note", self._key, self._connection.clock_text(), "w", worker.worker_id, wire.encode(worker)
        )

    async def look(self, known_until: Mapping[str, float]) -> tuple[Sequence[WorkerInfo], Sequence[str]]:
        """Return the recent workers with their current status, and the names of models that may have data in the server. `known_until` maps
        further models to the server times until which they may have data. Other processes then learn about these models."""
        arguments = chain.from_iterable((repr(until), model) for model, until in known_until.items())
        ask = self._connection.join if known_until else self._connection.share
        now, packed, models = await ask("workers", self._key, self._connection.clock_text(), *arguments)
        workers = [believed(worker, float(now)) for worker in wire.readable(wire.read_worker, packed)]
        return workers, [name.decode() for name in models]
