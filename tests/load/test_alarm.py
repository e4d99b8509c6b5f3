from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import pytest
import uvloop

from headway.load.schedule import Alarm

Body = Callable[[Callable[[Callable[[], None]], Alarm]], Awaitable[None]]


@pytest.fixture(params=[True, False], ids=["precise", "plain"])
def precise(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, precise: bool) -> Callable[[Body], None]:
    def run(body: Body) -> None:
        async def drive() -> None:
            loop = asyncio.get_running_loop()
            await body(lambda ring: Alarm(loop, ring, precise=precise))

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(drive())

    return run


def test_an_alarm_rings_once_and_not_too_early(run: Callable[[Body], None]) -> None:
    async def body(make: Callable[[Callable[[], None]], Alarm]) -> None:
        rung: list[float] = []
        first = asyncio.Event()

        def ring() -> None:
            rung.append(perf_counter())
            first.set()

        alarm = make(ring)
        start = perf_counter()
        alarm.arm(0.004)
        await first.wait()
        # uvloop rounds its own timers to the nearest millisecond.
        assert rung[0] - start >= 0.003
        await ring_after(make, 0.003)
        assert len(rung) == 1
        alarm.close()

    run(body)


def test_arming_again_replaces_and_zero_rings_at_once(run: Callable[[Body], None]) -> None:
    async def body(make: Callable[[Callable[[], None]], Alarm]) -> None:
        first = asyncio.Event()
        alarm = make(first.set)
        alarm.arm(3_600.0)
        alarm.arm(0.0)
        await first.wait()
        alarm.close()

    run(body)


def test_a_closed_alarm_does_not_ring(run: Callable[[Body], None]) -> None:
    async def body(make: Callable[[Callable[[], None]], Alarm]) -> None:
        rung: list[None] = []
        alarm = make(lambda: rung.append(None))
        alarm.arm(0.0)
        alarm.close()
        alarm.close()
        await ring_after(make, 0.002)
        assert rung == []

    run(body)


async def ring_after(make: Callable[[Callable[[], None]], Alarm], seconds: float) -> None:
    """Wait until another alarm, armed now, has rung."""
    rung = asyncio.Event()
    alarm = make(rung.set)
    alarm.arm(seconds)
    await rung.wait()
    alarm.close()
