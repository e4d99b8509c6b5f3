"""Worker processes that tests start: on which targets, for how long, and what is left of them."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headway.backends.process.backend import ProcessBackend
from headway.config.target import FileTarget, ModuleTarget
from tests.backends.recorder import Recorder

LONG = 30.0
FAULTS = ModuleTarget("tests.targets.faults", "answer")


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


def without_collector(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def descriptors() -> int:
    gc.collect()  # What others have left behind is not to go in between.
    return len(list(Path("/proc/self/fd").iterdir()))
