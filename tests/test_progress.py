"""Line on a terminal while workers load."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from headway.app.progress import Progress
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import run

Clock = Callable[[], float]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, workers: int = 2) -> str:
    """Everything written while workers load for 2 s and then serve for 2 s."""

    async def main(clock: Clock) -> None:
        backends = [FakeBackend(0.1) for _ in range(workers)]
        for backend in backends:
            backend.start_seconds = 2.2
        stand = Stand(clock, *backends)
        progress = Progress(stand.pool, stream, clock)
        progress.begin()
        async with stand:
            await asyncio.sleep(2.0)
            progress.end()
            progress.end()
            await asyncio.sleep(2.0)

    run(main)
    return stream.getvalue()


def test_a_terminal_shows_who_is_loading_and_for_how_long() -> None:
    lines = shown(Terminal()).split("\r")
    assert lines[0] == "\x1b[2Kloading gpu-0, gpu-1 … 0 s"
    assert lines[3] == "\x1b[2Kloading gpu-0, gpu-1 … 2 s"
    assert lines[4:] == ["\x1b[2K"], "it is taken away at the end"


def test_of_many_workers_some_are_named() -> None:
    assert "loading gpu-0, gpu-1, gpu-2, gpu-3 and 6 more … " in shown(Terminal(), workers=10)


def test_where_no_terminal_is_nothing_is_written() -> None:
    assert shown(io.StringIO()) == ""
