"""Client of a Redis Cluster, with a map of the nodes that have each key.

The cluster client of redis-py sends every function call to a node to ask for its keys, and while one node is silent, calls to all
others wait.

    map not known ──first call──▶ known ──a node is silent, or has moved──▶ in doubt
                                    ▲                                         │ asked for in the background
                                    └─────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError, ResponseError

from headway.brokers.redis.link import Address
from headway.brokers.redis.server import Client, Server
from headway.errors import BrokerUnavailable
from headway.runtime.race import end

MOVES = 4
"""Maximum number of redirections of a call whose key has moved."""
REFRESH_EVERY = 0.1
"""Minimum seconds between two reads of the map."""


class Cluster(Client):
    """Client of the nodes of a cluster. `seeds` are addresses of some nodes, and `timeout` is in seconds or infinite."""

    mode = "cluster"

    def __init__(self, seeds: Sequence[Address], make: Callable[[str, int], Server], timeout: float) -> None:
        self._seeds = seeds
        self._make = make
        self._call_timeout = None if math.isinf(timeout) else timeout / 4
        self._servers: dict[Address, Server] = {}
        self._ends: list[int] = []
        self._owners: list[Address] = []
        self._moved: dict[int, Address] = {}
        self._silent: set[Address] = set()
        self._doubtful = True
        self._looked_at = self._left_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    @property
    def left_at(self) -> float:
        return self._left_at

    def watch(self) -> None:
        """See Client. A cluster announces no failover. Its nodes are asked when one of them is in doubt."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        if self._doubtful:
            await self._look()
        slot = key_slot(key.encode())
        for _ in range(MOVES):
            address = self._owner(slot)
            try:
                return await self._server(address).call(*command, large=large)
            except MovedError as exc:
                self._moved[slot] = (exc.host or address[0], exc.port)
                self._doubt()
            except AskError as exc:
                # A function must see all of its keys, but they are on two nodes now.
                raise BrokerUnavailable(f"the keys of {key} are being moved to {exc.host}:{exc.port}") from exc
            except ResponseError:
                raise
            except BaseException:  # A deadline cancels the call.
                self._silent.add(address)
                self._doubtful = True
                raise
        raise BrokerUnavailable(f"the nodes of the cluster do not agree on who has {key}")

    async def everywhere(self, *command: Any) -> list[Any]:
        self._doubtful, self._looked_at = True, -math.inf
        await self._look(wait=True)
        owners = dict.fromkeys(self._owners)
        return list(await asyncio.gather(*(self._server(owner).ask(*command) for owner in owners)))

    def server_of(self, key: str) -> str:
        host, port = self._owner(key_slot(key.encode()))
        return f"{host}:{port}"

    async def leave(self, address: Address) -> None:
        self._doubt()
        if address in self._servers:
            await self._servers[address].leave(address)

    async def renew(self) -> None:
        for server in self._servers.values():
            await server.renew()

    async def close(self) -> None:
        await end(self._looking)
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _doubt(self) -> None:
        self._doubtful, self._left_at = True, asyncio.get_running_loop().time()

    def _server(self, address: Address) -> Server:
        server = self._servers.get(address)
        if server is None:
            host, port = address
            server = self._servers[address] = self._make(host, port)
        return server

    def _owner(self, slot: int) -> Address:
        moved = self._moved.get(slot)
        if moved is not None:
            return moved
        index = bisect_left(self._ends, slot)
        if index == len(self._ends):
            raise BrokerUnavailable(f"no node of the cluster has slot {slot}")
        return self._owners[index]

    async def _look(self, wait: bool = False) -> None:
        """Read the map again. A call with an old map uses it meanwhile unless it must `wait`."""
        loop = asyncio.get_running_loop()
        if (self._looking is None or self._looking.done()) and loop.time() - self._looked_at >= REFRESH_EVERY:
            self._looked_at = loop.time()
            self._looking = loop.create_task(self._learn())
        if self._looking is not None and (wait or not self._owners):
            await asyncio.shield(self._looking)

    async def _learn(self) -> None:
        """Read the map from the first node that answers. Silent nodes come last."""
        known = dict.fromkeys([*self._owners, *self._seeds])
        failed: RedisError | OSError | TimeoutError | None = None
        for address in sorted(known, key=lambda address: address in self._silent):
            try:
                async with asyncio.timeout(self._call_timeout):
                    slots = await self._server(address).ask("CLUSTER SLOTS")
            except (RedisError, OSError, TimeoutError) as exc:
                self._silent.add(address)
                failed = exc
                continue
            self._read(slots, address[0])
            return
        if failed is not None and not self._owners:
            raise failed

    def _read(self, slots: Any, host: str) -> None:
        rows = sorted((int(last), node[0], int(node[1])) for _, last, node, *_ in slots)
        self._ends = [last for last, _, _ in rows]
        self._owners = [(_text(named) or host, port) for _, named, port in rows]
        self._moved.clear()
        self._silent.clear()
        self._doubtful = False


def _text(name: str | bytes | None) -> str:
    """Return the host of a node, or an empty text if the node doesn't know its own."""
    text = name.decode() if isinstance(name, bytes) else name or ""
    return "" if text == "?" else text
