"""An event loop whose clock jumps: timers fire in order without anybody waiting for them.

    run(main)  runs the coroutine function `main(clock)` where `clock()` is the loop's time in seconds.

When nothing is ready and no timer is left, the loop would wait for ever; that is an error here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Polls real files without waiting, and moves the loop's clock to the next timer instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("virtual time stands still: no timer is set and nothing is ready")
        self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop on virtual time; starts at 1,000 s so that a forgotten zero shows."""

    def __init__(self) -> None:
        selector = _Selector()
        self.now = 1000.0
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))
