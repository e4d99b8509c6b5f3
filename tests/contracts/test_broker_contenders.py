"""Contenders for a GPU that several models share: every broker says the same of what waits, so the same one is chosen."""

from __future__ import annotations

import math

import pytest

from headway.core.locality.turns import FairOrder
from headway.model import Slot, WorkerInfo, WorkerStatus
from tests.contracts.brokers import MAX_BATCH, Harness, ask, story
from tests.contracts.dedup_keys import admit

SLOTS = Slot("m/gpu-0", "m", MAX_BATCH), Slot("other/gpu-0", "other", MAX_BATCH)


async def warm(harness: Harness, m: float = 0.1, other: float = 0.1) -> None:
    """Have both models on the GPU, with batches of so many seconds."""
    for one, seconds in zip(SLOTS, (m, other), strict=True):
        runs = ((1, seconds), (MAX_BATCH, seconds))
        info = WorkerInfo(worker_id=one.worker, model=one.model, status=WorkerStatus.HEALTHY, warm_up=runs)
        await harness.broker.heartbeat(info)


async def order(harness: Harness) -> list[str]:
    """Order in which models that have had the same are asked for a batch."""
    return FairOrder().order(await harness.broker.contenders(SLOTS))


@story
async def test_a_model_for_which_nothing_waits_is_asked_last(harness: Harness) -> None:
    await warm(harness)
    nothing = await harness.broker.contenders(SLOTS)
    assert [(one.model, one.slack, one.waits) for one in nothing] == [
        ("m", math.inf, False),
        ("other", math.inf, False),
    ]
    await admit(harness, ask(model="other"))
    assert [one.waits for one in await harness.broker.contenders(SLOTS)] == [False, True]
    assert await order(harness) == ["other", "m"]


@story
async def test_the_model_goes_first_whose_first_entry_is_due_first(harness: Harness) -> None:
    await warm(harness)
    await admit(harness, ask(timeout=9.0, queue_timeout=9.0), ask(model="other", timeout=5.0, queue_timeout=5.0))
    await harness.advance(1.0)
    found = await harness.broker.contenders(SLOTS)
    assert [one.slack for one in found] == pytest.approx([8.0, 4.0], abs=0.01)
    assert await order(harness) == ["other", "m"]
    await admit(harness, ask(timeout=2.0, queue_timeout=2.0))
    assert await order(harness) == ["m", "other"], "whoever came first"


@story
async def test_slack_counts_in_run_times_of_the_next_batch(harness: Harness) -> None:
    await warm(harness, m=1.0, other=0.1)
    await admit(harness, ask(timeout=6.0, queue_timeout=6.0), ask(model="other", timeout=4.0, queue_timeout=4.0))
    found = await harness.broker.contenders(SLOTS)
    assert [one.seconds for one in found] == pytest.approx([1.0, 0.1], rel=0.01)
    assert await order(harness) == ["m", "other"], "6 run times are less than 40"


@story
async def test_what_has_left_is_not_due_any_more(harness: Harness) -> None:
    await warm(harness)
    await admit(harness, ask(timeout=1.0, queue_timeout=1.0), ask(model="other", timeout=5.0, queue_timeout=5.0))
    assert await order(harness) == ["m", "other"]
    lease = await harness.claim(SLOTS[0].worker)
    assert [entry.model for entry in lease.entries] == ["m"]
    assert await order(harness) == ["other", "m"]
    await harness.answer(lease)
