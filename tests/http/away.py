import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headway.errors import BrokerUnavailable
from tests.services.stand import Stand


class Away:
    """A stand's broker, board and dead letters. Until `back` is set, calls fail immediately or, if `hangs`, wait."""

    def __init__(self, stand: Stand, hangs: bool = False) -> None:
        self._stand, self._hangs = stand, hangs
        self.back = asyncio.Event()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any) -> Any:
            if self._hangs:
                await self.back.wait()
            if not self.back.is_set():
                raise BrokerUnavailable("connection refused")
            for part in (self._stand.broker, self._stand.fleet, self._stand.dead):
                if hasattr(part, name):
                    return await getattr(part, name)(*arguments)
            raise AttributeError(name)

        return ask
