"""How long a gateway lets entries gather: as long as no slot is free, within bounds that follow the headway."""

from __future__ import annotations

import pytest

from headway.core.departure import Load, Rule
from headway.model import Lease, WorkerInfo, WorkerStatus
from tests.contracts.brokers import ask, slot, story
from tests.redis.stand import Stand

LEAST, MOST = 0.001, 0.004
BATCH = 0.01


class Spaced:
    """Policy of batches that leave a headway of so many seconds after each other."""

    def __init__(self, headway: float) -> None:
        self._headway = headway

    def rule(self, load: Load) -> Rule:
        return Rule(1, self._headway)


async def serving(harness: Stand, *workers: str, model: str = "m", batch_seconds: float = BATCH) -> None:
    """Workers whose batches take so many seconds."""
    for worker in workers:
        warm_up = ((1, batch_seconds), (8, batch_seconds))
        await harness.broker.heartbeat(
            WorkerInfo(worker_id=worker, model=model, status=WorkerStatus.HEALTHY, warm_up=warm_up)
        )


@story
async def test_entries_gather_while_no_slot_is_free_and_are_there_when_one_is(harness: Stand) -> None:
    await serving(harness, "gpu-0")
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == LEAST
    lease = await harness.claim()
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == MOST
    await harness.advance(0.006)
    assert harness.broker.linger == pytest.approx(BATCH - 0.006 - 0.001, abs=1e-4)
    await harness.advance(0.003)
    assert harness.broker.linger == LEAST
    await harness.answer(lease)
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == LEAST


@story
async def test_of_several_slots_the_next_one_is_free_sooner(harness: Stand) -> None:
    await serving(harness, "gpu-0", "gpu-1", "gpu-2", "gpu-3")
    for worker in ("gpu-0", "gpu-1", "gpu-2", "gpu-3"):
        assert harness.broker.linger == LEAST
        await harness.broker.enqueue([ask()])
        await harness.claim(worker)
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == pytest.approx(BATCH / 4 - 0.001, abs=1e-4)


@story
async def test_what_gathers_for_one_model_keeps_none_of_another_waiting(harness: Stand) -> None:
    await serving(harness, "gpu-0")
    await serving(harness, "gpu-1", model="other")
    await harness.broker.enqueue([ask()])
    await harness.claim()
    await harness.broker.enqueue([ask(), ask(model="other")])
    assert harness.broker.linger == LEAST


@pytest.mark.parametrize(("headway", "gathered"), [(0.001, MOST), (0.016, 0.008), (0.5, 0.012)])
@story
async def test_while_no_slot_is_free_entries_gather_for_half_a_headway_unless_another_model_may_be_asked(
    harness: Stand, headway: float, gathered: float
) -> None:
    alone = await harness.another(served=["m"])
    await serving(harness, "gpu-0", batch_seconds=1.0)
    await harness.broker.enqueue([ask()])
    assert isinstance(await harness.broker.claim(slot("gpu-0"), Spaced(headway)), Lease)
    for broker, most in ((alone, gathered), (harness.broker, MOST)):
        await broker.enqueue([ask()])
        assert broker.linger == pytest.approx(most, abs=1e-6)
