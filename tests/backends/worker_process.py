"""Starts worker processes for tests, and checks that they end."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headway.backends.process.backend import ProcessBackend
from headway.config.target import FileTarget, ModuleTarget

LONG = 30.0
FAULTS = ModuleTarget("tests.targets.faults", "answer")


class Recorder:
    """Replaces a structlog logger and records its lines. `until` waits for one."""

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


def kind(name: str, arguments: str = "") -> ModuleTarget:
    return ModuleTarget("tests.targets.kinds", name, arguments)


def build(target: ModuleTarget | FileTarget, log: Recorder, **settings: Any) -> ProcessBackend:
    arguments = {"worker": "gpu-0", "device": "0", "start_timeout": LONG, **settings}
    return ProcessBackend(target, log=log, **arguments)


@asynccontextmanager
async def started(target: ModuleTarget | FileTarget, **settings: Any) -> AsyncIterator[tuple[ProcessBackend, Recorder]]:
    log = Recorder()
    backend = build(target, log, **settings)
    await backend.start()
    pid = backend.pid
    assert alive(pid)
    try:
        yield backend, log
    finally:
        last = backend.pid
        await backend.stop()
    assert not alive(pid)
    assert not last or not alive(last)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptors() -> int:
    gc.collect()  # Otherwise garbage could be closed between two counts.
    return len(list(Path("/proc/self/fd").iterdir()))
