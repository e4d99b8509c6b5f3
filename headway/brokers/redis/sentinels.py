"""Sentinels, which are asked for the primary and listened to for failovers.

During a failover Sentinels disagree, because their leader knows the new primary first. All are asked at once, and the answer
with the highest configuration epoch wins, as among Sentinels themselves. Within one epoch, an address that has just refused to
be the primary comes last. A deposed primary takes writes that will be lost until it is told, seconds later. Sentinels publish
a failover at once, so listeners leave that server sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.exceptions import RedisError, ResponseError

from headway.brokers.redis.link import Address
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

Vote = tuple[int, Address]
"""Configuration epoch of a failover, and the primary since then."""

CHANNELS = ("+promoted-slave", "+switch-master")
"""Channels of a failover's first announcement, by the leading Sentinel, and of its last, by all Sentinels."""
QUIET = 5.0
"""Seconds of silence after which a Sentinel is pinged, and seconds after the ping until it counts as gone."""
AGAIN = 1.0
"""Seconds between two votes on the primary while a Sentinel can't be listened to."""


class Sentinels(Sentinel):
    """Sentinels of one primary, which they call `service`.

    `asking` are options of connections to them. `leave` closes the connections to an address that is no longer the primary's.
    """

    def __init__(
        self,
        hosts: Sequence[Address],
        service: str,
        asking: dict[str, Any],
        leave: Callable[[Address], Awaitable[None]],
    ) -> None:
        super().__init__(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        self._service = service
        self._leave = leave
        self._listening: list[asyncio.Task[None]] = []
        self._refused: Address | None = None
        self._config_epoch = 0
        self._primary: Address | None = None
        self._voting: asyncio.Task[Vote] | None = None
        self._next: asyncio.Task[Vote] | None = None

    def watch(self) -> None:
        """Start listening for failovers."""
        if not self._listening:
            loop = asyncio.get_running_loop()
            self._listening = [loop.create_task(self._follow(sentinel)) for sentinel in self.sentinels]

    def avoid(self, address: Address) -> None:
        """Prefer any other primary that a Sentinel names to this address."""
        self._refused = address

    async def renew(self) -> None:
        """Connect again with the present content of the URL's files."""
        for sentinel in self.sentinels:
            await sentinel.connection_pool.disconnect(inuse_connections=False)
            sentinel.connection_pool._available_connections.clear()
        if self._listening:
            await end(*self._listening)
            self._listening = []
            self.watch()

    async def aclose(self) -> None:
        await end(*self._listening, self._voting, self._next)
        await super().aclose()

    async def discover_master(self, service_name: str) -> Address:
        """Return the address of the primary. Slow Sentinels aren't waited for once most have answered.

        If the primary has changed, all connections to the old one are closed, because it may still take requests that will be lost.

        Raises:
            MasterNotFoundError: no Sentinel names a primary that is up.
            ResponseError: a host isn't a Sentinel.
        """
        while True:
            known = self._config_epoch
            config_epoch, address = await self._shared_vote(service_name)
            # A newer epoch became known during the vote.
            if config_epoch >= self._config_epoch or known == self._config_epoch:
                break
        before, self._config_epoch, self._primary = self._primary, config_epoch, address
        if before is not None and before != address:
            log.info("the broker's primary is another one", was=_shown(before), now=_shown(address))
            await self._leave(before)
        return address

    async def _shared_vote(self, service: str) -> Vote:
        """Take part in a vote that begins now or later. All callers during a vote share the next vote."""
        running = self._voting
        if running is None or running.done():
            self._voting = asked = _begun(self._vote(service))
        elif self._next is None:
            self._next = asked = _begun(self._vote_after(running, service))
        else:
            asked = self._next
        return await asyncio.shield(asked)

    async def _vote_after(self, running: asyncio.Task[Vote], service: str) -> Vote:
        await asyncio.wait({running})
        self._voting, self._next = self._next, None
        return await self._vote(service)

    async def _vote(self, service: str) -> Vote:
        votes: Counter[Vote] = Counter()
        errors: list[BaseException] = []
        asked = {asyncio.ensure_future(_primary(sentinel, service)) for sentinel in self.sentinels}
        try:
            while asked and not self._agreed(votes):
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for vote in done:
                    if (error := vote.exception()) is not None:
                        errors.append(error)
                    elif (answer := vote.result()) is not None:
                        votes[answer] += 1
        finally:
            await end(*asked)
        if votes:
            return max(votes, key=lambda vote: (vote[0], vote[1] != self._refused, votes[vote]))
        for error in errors:
            if isinstance(error, ResponseError):
                raise error
        reasons = ", ".join(f"{type(error).__name__}: {error}" for error in errors)
        raise MasterNotFoundError(f"No master found for {service!r}{f' : {reasons}' if reasons else ''}")

    def _agreed(self, votes: Counter[Vote]) -> bool:
        """Return True if most Sentinels agree on a primary that hasn't refused, in an epoch not older than the known epoch."""
        believed = (
            count
            for (config_epoch, address), count in votes.items()
            if address != self._refused and config_epoch >= self._config_epoch
        )
        return 2 * max(believed, default=0) > len(self.sentinels)

    async def _follow(self, sentinel: Redis) -> None:
        """Listen to one Sentinel for ever. While it is silent or refuses this user, a vote is repeated instead."""
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._listen(sentinel)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self.discover_master(self._service)
            await asyncio.sleep(AGAIN)

    async def _listen(self, sentinel: Redis) -> None:
        connection = sentinel.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            await connection.send_command("SUBSCRIBE", *CHANNELS)
            for _ in CHANNELS:
                await connection.read_response()
            await self.discover_master(self._service)  # Catch up with earlier events.
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
                self.avoid(deposed)
                await self._leave(deposed)  # Clients then ask for the new primary.


def deposed_by(event: str, service: str) -> Address | None:
    """Return the address that a Sentinel's event deposes, or None if the event is about another service.

    Events are `SERVICE HOST PORT HOST PORT`, with the old address first, and `slave NAME HOST PORT @ SERVICE HOST PORT`.
    """
    words = event.partition(" @ ")[2].split() or event.split()[:3]
    return (words[1], int(words[2])) if words[0] == service else None


def _begun(vote: Coroutine[Any, Any, Vote]) -> asyncio.Task[Vote]:
    """Start a vote as a task whose error is ignored once all callers are gone."""
    task = asyncio.get_running_loop().create_task(vote)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _primary(sentinel: Redis, name: str) -> Vote | None:
    """Return the primary that one Sentinel names, or None if it knows none that is up."""
    # In this order a new primary may be believed late. The other order could pair an old primary with a new epoch.
    masters: Any = await sentinel.sentinel_masters()
    address = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)  # type: ignore[no-untyped-call]
    if address is None:
        return None
    host, port = address[0].decode() if isinstance(address[0], bytes) else address[0], int(address[1])
    state = masters.get(name, {})
    if (state.get("is_sdown") or state.get("is_odown")) and (state["ip"], state["port"]) == (host, port):
        return None
    return state.get("config-epoch", 0), (host, port)


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
