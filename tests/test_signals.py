"""How a process reacts to signals while it starts, runs and ends."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import uvloop

from headway.app.lifecycle import Service
from headway.app.runner import until_signalled

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Slow(Service):
    def __init__(self) -> None:
        self.done: list[str] = []

    async def start(self) -> None:
        self.done.append("started")

    def ends(self, reason: str) -> None:
        self.reason = reason

    async def drain(self) -> None:
        self.done.append("drains")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(10.0)
        self.done.append("drained")

    async def stop(self) -> None:
        self.done.append("stopped")

    async def reread(self) -> None:
        self.done.append("reread")
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers afterwards."""
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_no_signal_finds_its_default_from_the_start_to_the_end() -> None:
    service, defaults = Slow(), list[int]()

    def look(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != until_signalled.__code__.co_filename:
            return None
        if service.done:
            defaults.extend(number for number in ALL if signal.getsignal(number) == signal.SIG_DFL)
        return look

    traced = sys.gettrace()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.settrace(look)
        try:
            runner.run(until_signalled(service, lambda: os.kill(os.getpid(), signal.SIGHUP)))
        finally:
            sys.settrace(traced)
    assert service.done == ["started", "reread", "drains", "stopped"]
    assert defaults == []
    assert {signal.getsignal(number) for number in ALL} == {signal.SIG_IGN}
