"""Tasks whose deadline passes while they run: what is noted of them is what whoever asks for them is told."""

from __future__ import annotations

import asyncio

import pytest

from headway.gateway import late_tasks
from headway.gateway.late_tasks import LATE_SECONDS
from headway.model import Reply
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Asked, Fleet
from tests.services.test_gateway_tasks import scene
from tests.virtual_time import Clock


async def late(fleet: Fleet) -> Asked:
    """A task that nobody waits for, half a second before its end and just after its deadline."""
    asked = fleet.ask("a", task=True, timeout=0.5)
    await asked.was_admitted.wait()
    fleet.gateways[0].detach(ANYBODY.tenant, asked.id)
    await asyncio.sleep(0.55)
    return asked


@scene(gateways=1)
async def test_a_task_that_runs_on_beyond_its_deadline_is_noted_as_it_ends(fleet: Fleet, clock: Clock) -> None:
    asked = await late(fleet)
    assert fleet.journals[0].outcomes == []
    await asyncio.sleep(1.0)
    found = await fleet.gateways[0].outcome(ANYBODY.tenant, asked.id)
    assert isinstance(found, Reply)
    assert found.output == "A"
    assert fleet.journals[0].outcomes == [("a", "ok")]
    assert asked.replies == []
    await asyncio.sleep(2 * LATE_SECONDS)
    assert fleet.journals[0].outcomes == [("a", "ok")]


@scene(gateways=1)
async def test_a_task_that_waits_when_its_deadline_passes_is_late(fleet: Fleet, clock: Clock) -> None:
    fleet.ask("busy")
    await asyncio.sleep(0.05)
    await late(fleet)
    await asyncio.sleep(1.5)
    assert ("a", "DEADLINE_EXCEEDED") in fleet.journals[0].outcomes


@scene(gateways=1, gpu_timeout_ms=600_000)
async def test_a_late_task_whose_outcome_never_comes_is_noted_as_late(fleet: Fleet, clock: Clock) -> None:
    fleet.backends[0].seconds = 1000.0
    await late(fleet)
    await asyncio.sleep(LATE_SECONDS)
    assert fleet.journals[0].outcomes == [("a", "DEADLINE_EXCEEDED")]


@scene(gateways=1)
async def test_the_end_of_a_gateway_waits_for_no_late_task(fleet: Fleet, clock: Clock) -> None:
    await late(fleet)
    now = clock()
    await fleet.gateways[0].emptied()
    assert clock() == now
    assert fleet.journals[0].outcomes == [("a", "DEADLINE_EXCEEDED")]


@scene(gateways=1)
async def test_a_task_that_is_waited_for_is_told_of_its_deadline_when_that_passes(fleet: Fleet, clock: Clock) -> None:
    asked = fleet.ask("a", task=True, timeout=0.5)
    assert await fleet.answered(asked) == ["DEADLINE_EXCEEDED"]
    assert clock() - asked.at < 0.6
    assert fleet.journals[0].outcomes == [("a", "DEADLINE_EXCEEDED")]


@pytest.mark.parametrize(("bound", "most"), [("MOST", 3), ("MOST_BYTES", 3 * 5_000)])
async def test_late_tasks_are_bounded_and_the_oldest_is_noted_first(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(late_tasks, bound, most)
    texts = [f"{number}" * 3_900 for number in range(5)]
    async with Fleet(clock, FakeBackend(1.0), gateways=1, model="m") as fleet:
        fleet.ask("busy")
        await asyncio.sleep(0.05)
        for text in texts:
            asked = fleet.ask(text, task=True, timeout=1.5)
            await asked.was_admitted.wait()
            fleet.gateways[0].detach(ANYBODY.tenant, asked.id)
        await asyncio.sleep(1.6)
        late = [(text, "DEADLINE_EXCEEDED") for text in texts[:2]]
        assert fleet.journals[0].outcomes == [("busy", "ok"), *late]
        await asyncio.sleep(1.5)
        assert fleet.journals[0].outcomes[3:] == [(text, "ok") for text in texts[2:]]
