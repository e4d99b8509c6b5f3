"""Slots that are not equally fast: the broker learns which, and wakes the fastest."""

from __future__ import annotations

import asyncio

from headway.core.departure import Rule
from headway.core.slot_factors import FACTORS, USUAL
from headway.model import Lease, NoWork, QueueName
from tests.contracts.brokers import MAX_BATCH, Fixed, Harness, ask, slot, story

TELLS_APART = Fixed(Rule(size=1, headway=10.0, team=2.0, speed=1.5))


async def run(harness: Harness, worker: str, seconds: float) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
    lease = await harness.broker.claim(slot(worker), TELLS_APART)
    assert isinstance(lease, Lease)
    await harness.advance(seconds)
    await harness.answer(lease)


async def one_slow(harness: Harness) -> None:
    for _ in range(12):
        await harness.healthy("gpu-0", "gpu-1", "gpu-2")
        for worker in ("gpu-0", "gpu-1", "gpu-2"):
            await run(harness, worker, 0.1 if worker != "gpu-0" else 0.2)


@story
async def test_the_load_tells_how_many_slots_are_how_fast(harness: Harness) -> None:
    await harness.healthy("gpu-0", "gpu-1", "gpu-2")
    assert (await harness.broker.loads())[QueueName("m")].paces == ()
    await one_slow(harness)
    load = (await harness.peer().loads())[QueueName("m")]
    known = [position for position, count in enumerate(load.paces) for _ in range(count)]
    assert len(known) == 3
    assert known[0] == known[1] < known[2]
    assert known[0] <= USUAL
    assert FACTORS[known[2]] / FACTORS[known[0]] > 1.6


@story
async def test_of_idle_slots_the_fastest_is_woken(harness: Harness) -> None:
    await one_slow(harness)
    listeners = []
    for worker in ("gpu-0", "gpu-1"):
        wait = await harness.broker.claim(slot(worker), TELLS_APART)
        assert isinstance(wait, NoWork)
        listeners.append(asyncio.create_task(harness.broker.wait_for_work(slot(worker), wait.until)))
        await harness.settle()
    await harness.broker.enqueue([ask()])
    await harness.settle()
    assert [listener.done() for listener in listeners] == [False, True]
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)
