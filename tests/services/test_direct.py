"""Direct mode: a gateway's own broker while the shared one is away."""

from __future__ import annotations

import asyncio

import pytest

from headway import errors
from headway.gateway.broker_session import Down, Up
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.virtual_time import Clock


async def gone_direct(fleet: Fleet) -> None:
    """The broker goes, and the gateway notices."""
    await fleet.server.become("refuse")
    fleet.server.cut()
    await asyncio.sleep(2.0)
    assert fleet.direct is not None and fleet.gateway.broker is fleet.direct.broker


async def test_who_waits_too_long_hears_so_while_the_only_slot_is_busy(clock: Clock) -> None:
    async with Fleet(clock, fallback=FakeBackend(3.0), max_batch=1, queue_timeout_ms=500) as fleet:
        await gone_direct(fleet)
        fleet.ask("runs")
        await asyncio.sleep(0.01)
        waits = fleet.ask("waits")
        assert await fleet.answered(waits) == [errors.DEADLINE_EXCEEDED]
        assert waits.answered_at - waits.at == pytest.approx(0.5, abs=0.06)


async def test_a_broker_that_comes_and_goes_in_one_moment_costs_nobody_an_answer(clock: Clock) -> None:
    async with Fleet(clock, fallback=FakeBackend(0.1)) as fleet:
        await gone_direct(fleet)
        gateway = fleet.gateway
        direct = fleet.ask("direct")
        gateway.on_event(gateway._shared, Up())
        shared = fleet.ask("shared")
        gateway.on_event(gateway._shared, Down())
        assert await fleet.answered(direct, shared) == ["ok", "ok"]
