"""Waits of which the first that is over ends the others, and the ends of waits that lose their cancellation."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from headway.runtime.race import MOST_TRIES, end, race
from tests.virtual_time import Clock


async def over(seconds: float, ended: list[float], fails: bool = False) -> float:
    """Wait, and note when the wait has ended, however that is. It takes a moment to end."""
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.sleep(0.01)
        ended.append(seconds)
    if fails:
        raise ValueError("lost")
    return seconds


async def test_the_first_that_is_over_ends_the_others(clock: Clock) -> None:
    ended: list[float] = []
    first, second, third = await race(over(3.0, ended), over(1.0, ended), over(2.0, ended))
    assert first is third is None and second is not None and second.result() == 1.0
    assert sorted(ended) == [1.0, 2.0, 3.0], "all of them have ended"
    assert clock() == pytest.approx(1000.0 + 1.02)


async def test_one_that_fails_is_over(clock: Clock) -> None:
    first, second = await race(over(1.0, [], fails=True), over(2.0, []))
    assert second is None and first is not None and isinstance(first.exception(), ValueError)


async def test_who_cancels_a_race_ends_all_of_it(clock: Clock) -> None:
    ended: list[float] = []
    racing = asyncio.ensure_future(race(over(1.0, ended), over(2.0, ended)))
    await asyncio.sleep(0.5)
    racing.cancel()
    await asyncio.gather(racing, return_exceptions=True)
    assert racing.cancelled() and sorted(ended) == [1.0, 2.0]


async def deaf(times: int) -> None:
    """Lose so many cancellations."""
    for _ in range(times + 1):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_what_loses_its_cancellation_is_cancelled_again_and_named(clock: Clock, lost: int) -> None:
    task = asyncio.get_running_loop().create_task(deaf(lost), name="deaf")
    await asyncio.sleep(0)
    began = clock()
    with capture_logs() as logs:
        await end(None, task, tidies=2.0)
    assert task.done() and clock() - began == 2.0 * lost
    assert [line["tasks"] for line in logs] == [["deaf: deaf"]] * lost


async def test_what_heeds_no_cancellation_is_left_running_and_named(clock: Clock) -> None:
    task = asyncio.get_running_loop().create_task(deaf(MOST_TRIES), name="deaf")
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end(task)
    assert not task.done()
    assert (logs[-1]["event"], logs[-1]["tasks"]) == ("task does not end, and is left running", ["deaf: deaf"])
    await end(task)
