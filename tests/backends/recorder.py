"""A log that remembers."""

import asyncio
from collections.abc import Callable
from typing import Any


class Recorder:
    """Takes the place of a structlog logger. `seen` can wait for an event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._more = asyncio.Event()

    def info(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))
        self._more.set()

    def warning(self, event: str, **fields: Any) -> None:
        self.info(event, **fields)

    def lines(self, stream: str) -> list[str]:
        return [fields["line"] for fields in self.of("worker output") if fields["stream"] == stream]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._more.clear()
            await self._more.wait()
