"""Batches of 4,096 inputs."""

import pytest

from headway.config.settings import MAX_BATCH
from headway.core.queue_limits import QueueLimits
from headway.errors import REJECTED_BY_MODEL
from headway.model import Entry
from tests.contracts.brokers import Harness, ask, drained, failed, failure_of, leave, output

LIMITS = QueueLimits(tiers=3, max_batch=MAX_BATCH, reserved_share=0.25, max_queue=20_000)
pytestmark = pytest.mark.parametrize("harness", ["memory", "valkey"], indirect=True)


@pytest.fixture
def bounds() -> dict[str, QueueLimits]:
    return {"limits": LIMITS}


async def enqueued(harness: Harness, **how: float) -> list[Entry]:
    entries = [ask(**how) for _ in range(MAX_BATCH)]  # type: ignore[arg-type]
    assert not any(await harness.broker.enqueue(entries))
    return entries


async def nothing_waits(harness: Harness) -> bool:
    return not any(depth.depth for depth in await harness.broker.depths())


async def test_one_culprit_among_4096_is_found_and_the_others_are_answered_in_order(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = await enqueued(harness)
    culprit = entries[1234]
    lease = await harness.claim(limit=MAX_BATCH)
    assert [entry.id for entry in lease.entries] == [entry.id for entry in entries]
    await harness.broker.release(lease, failed())
    runs = 1
    while not await nothing_waits(harness):
        await harness.advance(0.1)
        lease = await harness.claim(limit=MAX_BATCH)
        runs += 1
        if culprit.id in {entry.id for entry in lease.entries}:
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)
    replies = await drained(harness)
    wrong = [entry.id for entry in entries if replies[entry.id].output != output(entry.input)]
    assert wrong == [culprit.id]
    assert failure_of(replies[culprit.id]).code == REJECTED_BY_MODEL
    assert runs <= 30, "the search halves"


@pytest.mark.parametrize("how", ["waits", "suspected", "withdrawn"])
async def test_4096_that_are_late_or_withdrawn_are_gone(harness: Harness, how: str) -> None:
    await harness.healthy("gpu-0")
    entries = await enqueued(harness, queue_timeout=0.5, timeout=1.0)
    if how == "suspected":
        await harness.broker.release(await harness.claim(limit=MAX_BATCH), failed())
    elif how == "withdrawn":
        await leave(harness.broker, *entries)
    await harness.reaping(1.1)
    late = {reply.id for reply in (await drained(harness)).values() if reply.failure is not None}
    assert late == (set() if how == "withdrawn" else {entry.id for entry in entries})
    assert await nothing_waits(harness)
