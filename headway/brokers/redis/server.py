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
"""Maximum number of idle connections kept without a bound: one for each kind of blocking read."""

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
        """Event loop instant at which a server last turned out to be the wrong one to ask; minus infinity if never."""

    def watch(self) -> None:
        """Start listening for changes of the primary if Sentinels announce them."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        """Call the server of a key with a command of bytes, text and numbers. Returns its raw answer. `large`: see `Server.call`."""

    async def everywhere(self, *command: Any) -> list[Any]:
        """Answers of all servers with keys to a command without keys, as parsed by redis-py."""

    def server_of(self, key: str) -> str:
        """Name of the server that has a key."""

    async def leave(self, address: Address) -> None:
        """Stop asking a server that refused because it is the wrong one, and find the right one."""

    async def renew(self) -> None:
        """Replace all connections, using the present content of the URL's files."""

    async def close(self) -> None:
        """Close all connections."""


class Deposed(RedisError):
    """Error of a server that takes no writes: no primary, deposed, without its replicas, or still loading.

    Arguments:
        text: text of its answer.
        address: address of the server.
    """

    def __init__(self, text: str, address: Address) -> None:
        super().__init__(text)
        self.address = address


class Server:
    """Client of one Redis server.

    Arguments:
        redis: client of redis-py, which determines the kind of connections.
        most: maximum number of connections for calls; None for one per call, of which a few are kept, as for blocking calls.

    Attributes:
        left_at: see Client.
    """

    def __init__(self, redis: Redis, most: int | None = None) -> None:
        self._redis = redis
        self._places = None if most is None else asyncio.Semaphore(most)
        self._kept = KEPT if most is None else most
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._outdated: set[Link] = set()
        """Busy links to drop once they are free."""
        self._closed = False
        self.left_at = -math.inf

    async def ask(self, *command: Any) -> Any:
        """Send a command. Returns the answer as parsed by redis-py."""
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call(self, *command: Any, large: bool = False) -> Any:
        """Send a command of bytes, text and numbers. Returns its raw answer.

        With `large`, the bytes of a large command or answer are copied less often, and the answer isn't a list.

        It avoids redis-py's work around each command, which takes longer than the command. Each call uses a link alone, and waits if all are
        busy. When a link breaks, all idle links are closed too, because they most likely broke as well.

        Raises:
            Deposed: the server is the wrong one to ask; see `leave`.
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
        if link in self._outdated:  # It was told to close or renew while it connected.
            self._outdated.discard(link)
            await link.connect()

    async def leave(self, address: Address) -> None:
        """Close all connections to an address. Waiting calls end as if the server had closed them."""
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
        """Replace every connection, using the present content of the files. Busy connections are replaced once they are free."""
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
    """Return True if an error says not to ask this server again before the right one is known."""
    return isinstance(exc, BusyLoadingError | MasterDownError | ReadOnlyError) or str(exc).startswith(_DEPOSED)
