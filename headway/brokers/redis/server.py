"""Client of one Redis or Valkey server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError, RedisError, ResponseError

from headway.brokers.redis.sentinels import Address

KEPT = 2
"""Most idle connections that are kept where there may be any number: one for each kind of blocking read."""


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
    """

    def __init__(self, redis: Redis, most: int | None = None) -> None:
        self._redis = redis
        self._places = None if most is None else asyncio.Semaphore(most)
        self._kept = KEPT if most is None else most
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._outdated: set[Any] = set()
        """Busy connections that are to be dropped once they are free."""
        self._closed = False

    async def ask(self, *command: Any) -> Any:
        """Answer to a command, as redis-py reads it."""
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call(self, *command: Any, large: bool = False) -> Any:
        """Plain answer to a command of bytes, text and numbers.

        Where the command or its answer is `large`, its bytes are copied less often; the answer is no list then.

        It is `ask` without the work of redis-py around each command, which takes more time than the command. Each call
        has a connection to itself while it lasts, and waits for one where as many as may be are busy. A connection that
        breaks is closed, and with it all idle ones: they most likely broke too.

        Raises:
            Deposed: the server is not the one to ask; see `leave`.
        """
        if self._places is None:
            return await self._call(command, large)
        async with self._places:
            return await self._call(command, large)

    async def _call(self, command: tuple[Any, ...], large: bool) -> Any:
        connection = self._idle.pop() if self._idle else self._new()
        self._busy.add(connection)
        try:
            if _was_closed(connection):
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                await connection.connect()
                if connection in self._outdated:  # While it connected, it was told not to, or to do so anew.
                    self._outdated.discard(connection)
                    await connection.disconnect(nowait=True)
                    await connection.connect()
            await connection.send_packed_command(_pieces(command) if large else hiredis.pack_command(command))
            answer = await (_read_large(connection) if large else connection.read_response())
        except ResponseError as exc:
            await self._free(connection)
            if _refuses(exc):
                raise Deposed(str(exc), (connection.host, connection.port)) from exc
            raise
        except BaseException as exc:
            await self._free(connection)
            await self._disconnect(nowait=True)
            if _refuses(exc) or isinstance(exc.__context__, ReadOnlyError):  # How redis-py tells of it under Sentinels.
                raise Deposed(str(exc), (connection.host, connection.port)) from exc
            raise
        finally:
            self._busy.discard(connection)
        if self._outdated:
            await self._free(connection)
        elif len(self._idle) < self._kept:
            self._idle.append(connection)
        else:
            await connection.disconnect(nowait=True)
        if self._closed:
            await self._disconnect()
        return answer

    async def leave(self, address: Address) -> None:
        """Close all connections to an address. Calls that wait there end as if the server had closed them."""
        for connection in self._idle:
            if (connection.host, connection.port) == address:
                await connection.disconnect(nowait=True)
        for connection in self._busy:
            if (connection.host, connection.port) == address:
                if connection._writer is None:
                    self._outdated.add(connection)
                else:
                    connection._writer.close()
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

    async def _free(self, connection: Any) -> None:
        if connection in self._outdated:
            self._outdated.discard(connection)
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)

    def _new(self) -> Any:
        return self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]

    async def _disconnect(self, nowait: bool = False) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=nowait)


def _pieces(command: Sequence[Any]) -> list[Any]:
    """Pieces of a command, of which the arguments that are bytes are not copied; a body may be a bytearray."""
    pieces: list[Any] = [b"*%d\r\n" % len(command)]
    for one in command:
        argument = one if isinstance(one, bytes | bytearray | memoryview) else str(one).encode()
        pieces += (b"$%d\r\n" % len(argument), argument, b"\r\n")
    return pieces


async def _read_large(connection: Any) -> bytes | None:
    """Read an answer that is no list past the connection's parser, which would copy it piece by piece."""
    reader: asyncio.StreamReader = connection._reader
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server closed the connection")
    if line[:1] == b"-":
        raise connection._parser.parse_error(line[1:-2].decode(errors="replace"))
    if line[:1] != b"$":
        return line[1:-2]
    length = int(line[1:])
    if length < 0:
        return None
    reader._limit = max(reader._limit, length)  # type: ignore[attr-defined] # Else it pauses at every 128 KiB.
    answer = await reader.readexactly(length)
    await reader.readexactly(2)
    return answer


def _was_closed(connection: Any) -> bool:
    """Whether the server has closed a connection while it lay idle, as when it was restarted."""
    reader = connection._reader
    return reader is not None and (reader.at_eof() or reader.exception() is not None)


def _refuses(exc: BaseException) -> bool:
    """Whether an error says that the server should not be asked again before the right one is known."""
    return isinstance(exc, BusyLoadingError | MasterDownError | ReadOnlyError) or str(exc).startswith("NOREPLICAS")
