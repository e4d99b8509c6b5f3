"""Loops that call a function at even intervals."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor
from tests.virtual_time import Clock, run


def test_who_stops_waiting_for_the_last_call_does_not_start_the_loop_again() -> None:
    calls = list[str]()

    async def act() -> None:
        calls.append("begun")
        await asyncio.Event().wait()

    async def story(clock: Clock) -> None:
        supervisor = Supervisor()
        periodic = Periodic("looks", act, clock)
        periodic.start(supervisor)
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(periodic.stop())
        await asyncio.sleep(0.1)
        stopping.cancel()
        await asyncio.sleep(100.0)
        assert stopping.cancelled()
        await supervisor.stop()

    with capture_logs() as logs:
        run(story)
    assert (calls, logs) == (["begun"], [])
