"""`headway` in an event loop that writes down what held it: the CPU time of each callback, by its name.

    HOLDS=FOLDER python -m bench.stand.holding serve TARGET …

CPU time tells of the work of one callback, however busy the machine is. The loop is Python's own in place of uvloop, whose
callbacks cannot be watched. Each process writes FOLDER/PID.json when it ends in order: name to the milliseconds of its
callbacks that took MOST_SHORT milliseconds or more.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import time
from asyncio.events import Handle
from pathlib import Path
from typing import Any

import uvloop

MOST_SHORT = 0.5
"""Milliseconds below which a callback is not written down."""

_held: dict[str, list[float]] = {}
_run = Handle._run


def _timed(handle: Any) -> None:
    begun = time.thread_time()
    _run(handle)
    took = (time.thread_time() - begun) * 1000
    if took >= MOST_SHORT:
        _held.setdefault(_name(handle._callback), []).append(took)


def _name(callback: Any) -> str:
    """Name of what a callback belongs to: the coroutine of a task, the protocol of a transport."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner))
    name = str(getattr(callback, "__qualname__", callback))
    protocol = getattr(owner, "_protocol", None)
    return name if protocol is None else f"{name} for {type(protocol).__name__}"


def _write(folder: Path) -> None:
    (folder / f"{os.getpid()}.json").write_text(json.dumps(_held))


def main() -> None:
    """Run `headway` with the arguments of the process."""
    setattr(Handle, "_run", _timed)  # noqa: B010 - typeshed has it as a method
    setattr(uvloop, "new_event_loop", asyncio.SelectorEventLoop)  # noqa: B010
    atexit.register(_write, Path(os.environ["HOLDS"]))
    from headway.__main__ import main

    main()


if __name__ == "__main__":
    main()
