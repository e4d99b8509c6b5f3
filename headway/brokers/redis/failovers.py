"""Failovers, as Sentinels announce them.

A primary that was deposed goes on for seconds until it is told so, and takes what nobody will find. Sentinels publish
each failover as soon as they know of it, so whoever listens to them leaves that server before it is told itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headway.brokers.redis.sentinels import Address, Sentinels

CHANNELS = ("+promoted-slave", "+switch-master")
"""Channels on which the Sentinel that leads a failover publishes first, and on which every one does in the end."""
QUIET = 5.0
"""Seconds without a word after which a Sentinel is asked for one, and after which it is taken for gone."""
AGAIN = 1.0
"""Seconds between two looks at who is the primary, as long as a Sentinel cannot be listened to."""


class Failovers:
    """Listener to each Sentinel.

    Arguments:
        sentinels: Sentinels of one primary.
        service: name of the primary in their configuration.
    """

    def __init__(self, sentinels: Sentinels, service: str) -> None:
        self._sentinels = sentinels
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        """Start listening, if that is not done yet."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._follow(one)) for one in self._sentinels.sentinels]

    async def renew(self) -> None:
        """Connect anew, with the present content of the files of the URL."""
        if self._tasks:
            await self.close()
            self._tasks = []
            self.watch()

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, sentinel: Redis) -> None:
        """Listen to one Sentinel for ever.

        While it does not talk, or refuses this user, all Sentinels are asked again and again.
        """
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._listen(sentinel)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._sentinels.discover_master(self._service)
            await asyncio.sleep(AGAIN)

    async def _listen(self, sentinel: Redis) -> None:
        """Listen to one Sentinel until it falls silent."""
        connection = sentinel.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            await connection.send_command("SUBSCRIBE", *CHANNELS)
            for _ in CHANNELS:
                await connection.read_response()
            await self._sentinels.discover_master(self._service)  # Whatever it has told before.
            asked = False
            while True:
                message = await connection.read_response(timeout=QUIET)
                if message is not None:
                    await self._hear(message)
                elif asked:
                    return
                else:
                    await connection.send_command("PING")
                asked = message is None
        finally:
            await connection.disconnect(nowait=True)

    async def _hear(self, message: Any) -> None:
        if message[0] == b"message":
            deposed = deposed_by(message[2].decode(), self._service)
            if deposed is not None:
                await self._sentinels.depose(deposed)


def deposed_by(event: str, service: str) -> Address | None:
    """Address that is no longer the primary's, by an event that a Sentinel published; None for another service.

    The texts are `SERVICE HOST PORT HOST PORT`, the old address first, and `slave NAME HOST PORT @ SERVICE HOST PORT`.
    """
    words = event.partition(" @ ")[2].split() or event.split()[:3]
    return (words[1], int(words[2])) if words[0] == service else None
