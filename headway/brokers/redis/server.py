"""Clients of Redis or Valkey: what each can do, whatever lies behind its URL, and the client of one server."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Protocol

import hiredis
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError, RedisError, ResponseError

from headway.brokers.redis.link import Address, Link

KEPT = 2
"""Most idle connections that are kept where there may be any number: one for each kind of blocking read."""

_DEPOSED = "NOREPLICAS", "UNBLOCKED"
"""Errors of a server without its replicas, and to blocking reads of one that has just become a replica."""


class Client(Protocol):
    """Client of the servers behind a URL. It connects at the first call.

    Attributes:
        mode: `cluster`, `sentinel` or `standalone`.
    """

    mode: str

    @property
    def left_at(self) -> float:
        """Instant of the event loop at which a server was last found not to be the one to ask; minus infinity: never."""

    def watch(self) -> None:
        """Start listening for a change of the primary, where Sentinels announce it."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        """Plain answer of the server that has a key, to a command of bytes, text and numbers; `large`: see `Server.call`."""

    async def everywhere(self, *command: Any) -> list[Any]:
        """Answers of all servers that have keys to a command without any, as redis-py reads them."""

    def server_of(self, key: str) -> str:
        """Name of the server that has a key."""

    async def leave(self, address: Address) -> None:
        """Stop asking a server that said that it is not the one to ask, and find out anew which one is."""

    async def renew(self) -> None:
        """Make all connections anew, with the present content of the files of the URL."""

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
        redis: client of redis-py, whose kind of connections is used.
        most: most connections for calls; None: as many as there are calls at once, as for those that block, of which a few
            are kept.

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
        """Busy links that are to be dropped once they are free."""
        self._closed = False
        self.left_at = -math.inf

    async def ask(self, *command: Any) -> Any:
        """Answer to a command, as redis-py reads it."""
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call(self, *command: Any, large: bool = False) -> Any:
        """Plain answer to a command of bytes, text and numbers.

        Where the command or its answer is `large`, its bytes are copied less often; the answer is no list then.

        It is `ask` without the work of redis-py around each command, which takes more time than the command. Each call
        has a link to itself while it lasts, and waits for one where as many as may be are busy. A link that
        breaks is closed, and with it all idle ones: they most likely broke too.

        Raises:
            Deposed: the server is not the one to ask; see `leave`.
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
        if link in self._outdated:  # While it connected, it was told not to, or to do so anew.
            self._outdated.discard(link)
            await link.connect()

    async def leave(self, address: Address) -> None:
        """Close all connections to an address. Calls that wait there end as if the server had closed them."""
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
        """Make every connection anew, with the present content of its files; a busy one as soon as it is free."""
        self._outdated |= self._busy
        await self._disconnect()
        pool = self._redis.connection_pool
        await pool.disconnect(inuse_connections=False)
        pool._available_connections.clear()

    async def close(self) -> None:
        """Close all connections; those of running calls as soon as the calls end."""
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
    """Whether an error says that the server should not be asked again before the right one is known."""
    return isinstance(exc, BusyLoadingError | MasterDownError | ReadOnlyError) or str(exc).startswith(_DEPOSED)
