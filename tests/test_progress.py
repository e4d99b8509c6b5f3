"""Line on a terminal while workers load."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from structlog.testing import capture_logs

from headway.app.runner import Progress
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import run

Clock = Callable[[], float]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, workers: int = 2, seconds: float = 2.2) -> str:
    """Everything written while workers load, and then serve for 2 s."""

    async def main(clock: Clock) -> None:
        backends = [FakeBackend(0.1) for _ in range(workers)]
        for backend in backends:
            backend.start_seconds = seconds
        stand = Stand(clock, *backends)
        progress = Progress(stand.pool, stream, clock)
        progress.begin()
        async with stand:
            await asyncio.sleep(seconds - 0.2)
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


def test_where_no_terminal_is_the_log_tells_it_at_growing_intervals() -> None:
    with capture_logs() as logs:
        assert shown(io.StringIO(), workers=2, seconds=31.0) == ""
    told = [(line["workers"], line["seconds"]) for line in logs if line["event"] == "still loading"]
    assert told == [(2, 2.0), (2, 6.0), (2, 14.0), (2, 30.0)]
