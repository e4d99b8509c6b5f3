"""Loops end when their supervisor stops, whatever they wait for."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable
from headway.runtime.periodic import Periodic
from headway.runtime.race import TIDIES
from headway.runtime.supervisor import Supervisor
from tests.virtual_time import Clock


async def test_who_is_cancelled_as_the_broker_answers_ends(clock: Clock) -> None:
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(within_answer_time(answer))
    await asyncio.sleep(0)
    answer.set_result("here")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_loop_that_loses_its_cancellation_is_cancelled_again(lost: int, clock: Clock) -> None:
    heard = 0

    async def loop() -> None:
        nonlocal heard
        while heard <= lost:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard += 1

    supervisor = Supervisor()
    supervisor.start("deaf", loop)
    await asyncio.sleep(1.0)
    began = clock()
    with capture_logs() as logs:
        await supervisor.stop()
    assert clock() - began == pytest.approx(lost * TIDIES)
    assert [line["event"] for line in logs] == ["task does not end, cancelling it again"] * lost


async def test_a_loop_has_time_to_tidy_up(clock: Clock) -> None:
    tidied = False

    async def loop() -> None:
        nonlocal tidied
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.9 * TIDIES)
            tidied = True

    supervisor = Supervisor()
    supervisor.start("tidy", loop)
    await asyncio.sleep(1.0)
    await supervisor.stop()
    assert tidied


async def test_a_loop_whose_call_fails_as_it_is_cancelled_ends_at_once(clock: Clock) -> None:
    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise BrokerUnavailable("the connection was closed") from None

    async def act() -> None:
        await asyncio.gather(failing(), asyncio.Event().wait())

    supervisor = Supervisor()
    Periodic("asking", act, clock).start(supervisor)
    await asyncio.sleep(1.0)
    began = clock()
    with capture_logs() as logs:
        await supervisor.stop()
    assert clock() == began
    assert "task does not end, cancelling it again" not in [line["event"] for line in logs]


async def test_who_stops_waiting_for_the_last_call_of_a_loop_does_not_start_it_again(clock: Clock) -> None:
    calls, supervisor = list[str](), Supervisor()

    async def act() -> None:
        calls.append("begun")
        await asyncio.Event().wait()

    periodic = Periodic("looks", act, clock)
    with capture_logs() as logs:
        periodic.start(supervisor)
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(periodic.stop())
        await asyncio.sleep(0.1)
        stopping.cancel()
        await asyncio.sleep(100.0)
        assert stopping.cancelled()
        await supervisor.stop()
    assert (calls, logs) == (["begun"], [])
