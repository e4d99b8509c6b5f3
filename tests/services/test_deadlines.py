"""Deadlines of pending requests are told in time, whatever times they have and in whichever order they come and leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from headway.gateway.deadlines import DEADLINE_GRAIN, Deadlines
from headway.gateway.pending import NOBODY, Key, PendingRequest, PendingTable
from headway.model import Entry, Principal
from tests.virtual_time import Clock

USUAL = 4.0
ANYBODY = Principal("u", "t", 0)


class Story:
    """A table whose requests are watched, and what was told of them and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.pending, self.told = clock, PendingTable(), dict[str, float]()
        self.deadlines = Deadlines(clock, self.pending, USUAL, self._passed)

    def ask(self, id: str, timeout: float = USUAL) -> float:
        """A request comes; its deadline."""
        now, key = self.clock(), ("t", id)
        entry = Entry(id, "m", "input", 0, "t", "gateway", 1.0, timeout)
        self.pending[key] = PendingRequest(NOBODY, ANYBODY, entry, now, now + timeout, None)
        self.deadlines.watch(key, now + timeout, timeout)
        return now + timeout

    def answer(self, id: str) -> None:
        del self.pending["t", id]

    def _passed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if (one := self.pending.get(key)) is not None and one.deadline <= self.clock():
                del self.pending[key]
                assert key[1] not in self.told
                self.told[key[1]] = self.clock()


async def test_a_request_that_stays_is_told_of_however_many_come_and_leave_around_it(clock: Clock) -> None:
    story = Story(clock)
    for number in range(5):
        story.ask(f"before {number}")
    due = story.ask("stays")
    for number in range(5):
        story.answer(f"before {number}")
    for number in range(400):
        story.ask(f"after {number}")
        await asyncio.sleep(0.01)
        story.answer(f"after {number}")
    await asyncio.sleep(1.0)
    assert due <= story.told["stays"] <= due + DEADLINE_GRAIN
    assert len(story.told) == 1


async def test_a_long_request_ahead_hides_no_deadline(clock: Clock) -> None:
    story = Story(clock)
    due = {"long": story.ask("long", 60.0), "short": story.ask("short", 0.5), "usual": story.ask("usual")}
    await asyncio.sleep(61.0)
    for id, deadline in due.items():
        assert deadline <= story.told[id] <= deadline + DEADLINE_GRAIN


async def test_nothing_is_looked_at_while_nobody_waits(clock: Clock) -> None:
    story = Story(clock)
    story.ask("once")
    story.answer("once")
    await asyncio.sleep(2 * USUAL)
    assert story.deadlines.runs is False
    due = story.ask("again")
    await asyncio.sleep(2 * USUAL)
    assert due <= story.told["again"] <= due + DEADLINE_GRAIN


@pytest.mark.parametrize("seed", range(20))
async def test_each_is_told_of_once_and_in_time(seed: int, clock: Clock) -> None:
    rng, story, due = random.Random(seed), Story(clock), dict[str, float]()
    for number in range(400):
        timeout = USUAL if rng.random() < 0.7 else rng.choice([0.01, 1.0, 3.99, 30.0])
        due[str(number)] = story.ask(str(number), timeout)
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.05]))
        while story.pending and rng.random() < 0.5:
            _, id = rng.choice(list(story.pending))
            story.answer(id)
            del due[id]
    await asyncio.sleep(31.0)
    assert story.told.keys() == due.keys()
    assert all(due[id] <= told <= due[id] + DEADLINE_GRAIN + 1e-6 for id, told in story.told.items())
