"""Who rests tells and asks more seldom, and who works as often as ever."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from headway.controller.controller import LEADS_FOR
from headway.core.health import DEGRADED_AFTER, HEARTBEAT_EVERY, REST_AFTER, REST_EVERY
from headway.model import Capacity, WorkerInfo, WorkerStatus
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets, asking
from tests.services.stand import Stand
from tests.virtual_time import Clock


def noting(of: Any, name: str, clock: Clock) -> list[tuple[float, Any]]:
    """Have the calls of a method noted: when, and the first argument."""
    noted: list[tuple[float, Any]] = []
    act = getattr(of, name)

    async def call(*arguments: Any) -> Any:
        noted.append((clock(), arguments[0] if arguments else None))
        return await act(*arguments)

    setattr(of, name, call)
    return noted


def pauses(noted: list[tuple[float, Any]], since: float) -> list[float]:
    """Seconds between the calls since an instant."""
    return [round(b - a, 3) for a, b in pairwise(at for at, _ in noted if at >= since)]


async def test_a_slot_that_rests_beats_once_a_second_and_says_so(clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.3))
    beats = noting(stand.broker, "heartbeat", clock)
    async with stand:
        await asyncio.sleep(REST_AFTER + 1.0)
        rests = clock()
        await asyncio.sleep(5.0)
        assert pauses(beats, rests) == [REST_EVERY] * (len(pauses(beats, rests)))
        assert len(pauses(beats, rests)) >= 3 and beats[-1][1].every == REST_EVERY
        works = clock()
        for _ in range(20):
            await stand.ask("text")
        busy = [(at, told) for at, told in beats if at >= works + REST_EVERY * 1.1]
        assert {told.every for _, told in busy} == {HEARTBEAT_EVERY}
        assert pauses(busy, works) == [HEARTBEAT_EVERY] * (len(busy) - 1) and len(busy) > 6


async def test_the_utilisation_is_the_same_however_often_it_is_told(clock: Clock) -> None:
    stand = Stand(clock, FakeBackend(0.3))
    async with stand:
        [batcher] = stand.pool.batchers
        shares = []
        for every in (0.5, 1.0):
            batcher.figures.utilisation, now = 0.8, clock()
            batcher.figures.note_utilisation(now, 0.0)
            batcher.figures.utilisation = 0.8
            for step in range(1, round(4.0 / every) + 1):
                batcher.figures.note_utilisation(now + step * every, 0.0)
            shares.append(batcher.figures.utilisation)
        assert shares[0] == pytest.approx(shares[1])


async def test_a_leader_of_a_fleet_that_rests_looks_once_a_second_and_tells_what_is_new(
    fleets: Fleets, clock: Clock
) -> None:
    await fleets.worker("host", FakeBackend(0.3)).start()
    control, controller = fleets.controller("control")
    asked = noting(fleets.fleet, "acquire_leadership", clock)
    told = noting(fleets.fleet, "publish", clock)
    await control.start()
    entrance, gateway = fleets.gateway()
    await entrance.start()
    await asyncio.sleep(REST_AFTER + 2.0)
    rests = clock()
    await asyncio.sleep(10.0)
    assert set(pauses(asked, rests)) == {REST_EVERY} and set(pauses(told, rests)) == {REST_EVERY}
    assert controller.leads_now
    await fleets.broker.heartbeat(WorkerInfo(worker_id="new", model="m", status=WorkerStatus.HEALTHY))
    await asyncio.sleep(1.1 * REST_EVERY)
    newest: Capacity = told[-1][1]
    assert newest.healthy == 2, "what has changed is told with the next look"
    await asyncio.sleep(DEGRADED_AFTER)
    works = clock()
    for _ in range(20):
        await asking(gateway, "text")
    assert set(pauses(asked, works + 2 * REST_EVERY)) == {0.5} == set(pauses(told, works + 2 * REST_EVERY))


async def test_another_controller_leads_as_soon_as_ever_after_one_that_is_gone(fleets: Fleets) -> None:
    other, controller = fleets.controller("other")
    await fleets.fleet.acquire_leadership("gone", LEADS_FOR)
    await other.start()
    assert not controller.leads
    await asyncio.sleep(3.5)
    assert controller.leads


async def test_a_gateway_that_rests_looks_at_the_fleet_once_a_second(fleets: Fleets, clock: Clock) -> None:
    await fleets.worker("host", FakeBackend(0.1)).start()
    entrance, gateway = fleets.gateway()
    looks = noting(fleets.fleet, "capacities", clock)
    await entrance.start()
    await asyncio.sleep(2.0)
    rests = clock()
    await asyncio.sleep(5.0)
    assert set(pauses(looks, rests)) == {REST_EVERY}
    works = clock()
    for _ in range(40):
        await asking(gateway, "text")
    assert set(pauses(looks, works + REST_EVERY)) == {HEARTBEAT_EVERY}
