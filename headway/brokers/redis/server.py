"""Clients of Redis or Valkey: the interface for any kind of URL, and the client of one server."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Protocol

import hiredis
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError, RedisError, ResponseError

from headway.brokers.redis.link import Address, Link

KEPT = 2
"""Maximum number of idle connections of a client without a bound, which makes two kinds of blocking reads."""

_DEPOSED = "NOREPLICAS", "UNBLOCKED"
"""Errors of a server without its replicas, and for blocking reads on a server that has just become a replica."""


class Client(Protocol):
    """Client of the servers behind a URL. It connects at the first call.

    Attributes:
        mode: `cluster`, `sentinel` or `standalone`.
    """

    mode: str

    @property
    def left_at(self) -> float:
        """Event loop instant at which a server was last left because it wasn't the primary, or minus infinity."""

    def watch(self) -> None:
        """Start listening for changes of the primary if Sentinels announce them."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        """Send a command to the server of a key, and return its answer. See `Server.call`."""

    async def everywhere(self, *command: Any) -> list[Any]:
        """Send a command without keys to all servers with keys. Returns their answers as parsed by redis-py."""

    def server_of(self, key: str) -> str:
        """Return the name of the server that has a key."""

    async def leave(self, address: Address) -> None:
        """Stop using a server that raised Deposed, and find the primary."""

    async def renew(self) -> None:
        """Replace all connections, using the present content of the URL's files."""

    async def close(self) -> None: ...


class Deposed(RedisError):
    """The server at `address` takes no writes. It isn't the primary, lacks its replicas, or is still loading."""

    def __init__(self, text: str, address: Address) -> None:
        super().__init__(text)
        self.address = address


class Server:
    """Client of one Redis server.

    `redis` determines the kind of connections, and `most` their maximum number. None is no bound, for blocking calls.
    """

    def __init__(self, redis: Redis, most: int | None = None) -> None:
        self._redis = redis
        self._places = None if most is None else asyncio.Semaphore(most)
        self._kept = KEPT if most is None else most
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._outdated: set[Link] = set()
        """Busy links that must be dropped once they are free."""
        self._closed = False
        self.left_at = -math.inf

    async def ask(self, *command: Any) -> Any:
        """Send a command. Returns the answer as parsed by redis-py."""
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call(self, *command: Any, large: bool = False) -> Any:
        """Send a command of bytes, text and numbers. Returns its raw answer. A `large` command may be large or have a large answer.

        Each call uses a link alone, and waits if all are busy. When a link breaks, all idle links are closed too, because they most
        likely broke as well.

        Raises:
            Deposed: the server takes no writes. See `leave`.
        """
        if self._places is None:
            return await self._call(command, large)
        async with self._places:
            return await self._call(command, large)

    async def _call(self, command: tuple[Any, ...], large: bool) -> Any:
        link = self._idle.pop() if self._idle else Link(self._new())
        self._busy.add(link)
        try:
            if not link.is_up:
                await self._connect(link)
            if large:
                answer = await link.ask_large(command)
            else:
                answer = await link.ask(hiredis.pack_command(command))
                if isinstance(answer, RedisError):
                    raise answer
        except BaseException as exc:
            await self._free(link)
            if not isinstance(exc, ResponseError):
                await self._disconnect(nowait=True)
            if _refuses(exc):
                raise Deposed(str(exc), link.address) from exc
            raise
        finally:
            self._busy.discard(link)
        if self._outdated:
            await self._free(link)
        elif len(self._idle) < self._kept:
            self._idle.append(link)
        else:
            await link.connection.disconnect(nowait=True)
        if self._closed:
            await self._disconnect()
        return answer

    async def _connect(self, link: Link) -> None:
        await link.connect()
        if link in self._outdated:  # The link was left or renewed while it connected.
            self._outdated.discard(link)
            await link.connect()

    async def leave(self, address: Address) -> None:
        """Close all connections to an address. Waiting calls fail as if the server had closed them."""
        self.left_at = asyncio.get_running_loop().time()
        for link in self._idle:
            if link.address == address:
                await link.connection.disconnect(nowait=True)
        for link in self._busy:
            if link.address == address:
                if link.is_up:
                    link.close()
                else:
                    self._outdated.add(link)
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def renew(self) -> None:
        """See Client. Busy connections are replaced once they are free."""
        self._outdated |= self._busy
        await self._disconnect()
        pool = self._redis.connection_pool
        await pool.disconnect(inuse_connections=False)
        pool._available_connections.clear()

    async def close(self) -> None:
        """Close all connections. A connection with a running call closes when the call ends."""
        self._closed = True
        await self._disconnect()
        await self._redis.aclose()

    async def _free(self, link: Link) -> None:
        if link in self._outdated:
            self._outdated.discard(link)
            await link.connection.disconnect(nowait=True)
        else:
            self._idle.append(link)

    def _new(self) -> Any:
        return self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]

    async def _disconnect(self, nowait: bool = False) -> None:
        while self._idle:
            await self._idle.pop().connection.disconnect(nowait=nowait)


def _refuses(exc: BaseException) -> bool:
    """Return True for an error of a server that takes no writes."""
    return isinstance(exc, BusyLoadingError | MasterDownError | ReadOnlyError) or str(exc).startswith(_DEPOSED)
