"""The order in which a process comes up and goes down.

    up     workers load and pass their warm-up batch → loops start → ports open
    down   ports take no new connection → what is held is answered → workers finish and end → loops stop

A second signal while going down answers what is still held with 503 and ends at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from headway import errors
from headway.batcher import Batcher
from headway.config import Settings
from headway.gateway import Gateway
from headway.model import Failure
from headway.ports import Broker
from headway.supervisor import Supervisor

log = structlog.get_logger(__name__)


class Door(Protocol):
    """A listening port."""

    async def open(self) -> None:
        """Listen. Raises SettingError when the address cannot be had."""
        ...

    async def drain(self) -> None:
        """Take no new connection, and let each open one go as soon as its answer is written."""
        ...

    async def close(self) -> None:
        """Cut what is left."""
        ...


class Service:
    """One process: batchers, a gateway, and its doors, over one broker.

    Arguments:
        settings: for the drain's time-out.
        broker: shared by all.
        gateway: holds the clients.
        batchers: one for each slot.
        doors: the public one first; the last to close is the last.
    """

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        gateway: Gateway,
        batchers: Sequence[Batcher],
        doors: Sequence[Door],
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._gateway = gateway
        self._batchers = batchers
        self._doors = doors
        self._supervisor = Supervisor()
        self._serving: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Come up.

        Raises:
            TargetError: a worker does not come up.
            SettingError: a port cannot be had.
        """
        try:
            await self._start_workers()
            self._supervisor.start("reaper", self._reap_on)
            self._gateway.start(self._supervisor)
            self._serving = [batcher.run(self._supervisor) for batcher in self._batchers]
            for door in self._doors:
                await door.open()
        except BaseException:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Go down without failing a request, within the drain time-out."""
        self._gateway.draining = True
        public, *others = self._doors
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1000):
                await public.drain()
                await self._gateway.emptied()
                for batcher in self._batchers:
                    batcher.drain()
                await asyncio.gather(*self._serving)
                for door in others:
                    await door.drain()
        except TimeoutError:
            log.warning("drain time-out: answering what is left with 503", held=self._gateway.pending)

    async def stop(self) -> None:
        """End at once: answer what is held with 503, kill the workers, close the ports."""
        self._gateway.closed = True
        self._gateway.refuse_all(Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining"))
        for door in self._doors:
            await door.close()
        await self._supervisor.stop()
        await asyncio.gather(*(batcher.stop() for batcher in self._batchers))

    async def replace_workers(self) -> None:
        """Swap every worker for a fresh one, one after the other; the first that fails ends it, the rest go on."""
        for batcher in self._batchers:
            await batcher.replace()

    async def _start_workers(self) -> None:
        starts = [asyncio.ensure_future(batcher.start()) for batcher in self._batchers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise

    async def _reap_on(self) -> None:
        """Expire what is overdue, on time even when no worker asks for work."""
        while True:
            pause = await self._broker.reap()
            await asyncio.sleep(max(pause, REAP_GRAIN))


REAP_GRAIN = 0.01
"""Least seconds between two reaps."""


async def until_signalled(service: Service, ready: Callable[[], None]) -> None:
    """Come up, call `ready`, serve until SIGTERM or SIGINT, then drain; a second signal ends the drain.

    Raises:
        HeadwayError: the service does not come up.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        if await _unless(first, service.start()):
            ready()
            await first.wait()
            log.info("draining")
            await _unless(second, service.drain())
    finally:
        await service.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _unless(signalled: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, but give it up when the signal comes first; True when it was done."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            return False
        await doing
        return True
    finally:
        doing.cancel()
        waiting.cancel()
