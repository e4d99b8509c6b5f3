"""Wake-ups of this process's idle slots, by one blocking read of a list that the process owns.

A wake-up names its slot and the instant at which the slot should claim. If the slot isn't listening then, its next wait returns
at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.errors import BrokerUnavailable
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

GRAIN = 0.0005
"""Minimum delay of a timer in seconds."""


class _Sleeper:
    """Slot that listens."""

    __slots__ = ("at", "timer", "woken")

    def __init__(self) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at = math.inf
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    def set(self, at: float, delay: float) -> None:
        """Wake at instant `at`, in `delay` seconds, or sooner if that was set before."""
        if at < self.at:
            if self.timer is not None:
                self.timer.cancel()
            self.at = at
            self.timer = asyncio.get_running_loop().call_later(max(delay, GRAIN), self.wake)


class Wakeups:
    """Wake-ups of one queue for the slots of this process. `learn` is called with the packed load of each wake-up."""

    def __init__(
        self, connection: RedisConnection, key: str, now: Callable[[], float], learn: Callable[[bytes], None]
    ) -> None:
        self._connection = connection
        self._key = key
        self._now = now
        self._learn = learn
        self._sleepers: dict[str, _Sleeper] = {}
        self._rung: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._read_on())

    def forget(self, worker: str) -> None:
        """Drop the wake-ups of a slot that claims."""
        self._rung.pop(worker, None)

    async def sleep(self, worker: str, until: float | None) -> None:
        """Return when the slot is woken, or at instant `until`. Raises BrokerUnavailable."""
        self.start()
        sleeper = self._sleepers[worker] = _Sleeper()
        try:
            for at in (until, self._rung.pop(worker, None)):
                if at is not None:
                    sleeper.set(at, at - self._now())
            await sleeper.woken
        finally:
            if sleeper.timer is not None:
                sleeper.timer.cancel()
            if self._sleepers.get(worker) is sleeper:
                del self._sleepers[worker]

    def wake(self, worker: str) -> None:
        sleeper = self._sleepers.get(worker)
        if sleeper is not None:
            sleeper.wake()

    def wake_all(self) -> None:
        for sleeper in self._sleepers.values():
            sleeper.wake()

    async def close(self) -> None:
        self._closed = True
        await end(self._task)

    async def _read_on(self) -> None:
        try:
            while True:
                message = await self._connection.pop(self._key)
                if message is not None:
                    self._wake(message)
        except BrokerUnavailable as exc:
            # Nothing suspends before this task ends, so later callers see that it doesn't run, and start it again.
            for sleeper in self._sleepers.values():
                if not sleeper.woken.done():
                    sleeper.woken.set_exception(exc)

    def _wake(self, message: bytes) -> None:
        try:
            at, load, worker = wire.read_wakeup(message)
        except wire.UNREADABLE as exc:
            log.error("a wake-up cannot be read", error=wire.reason(exc))
            return
        self._learn(load)
        sleeper = self._sleepers.get(worker)
        if sleeper is None:
            self._rung[worker] = min(at, self._rung.get(worker, math.inf))
        elif at == 0.0:
            sleeper.wake()
        else:
            sleeper.set(at, at - self._now())
