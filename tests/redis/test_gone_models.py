"""Queues of models that nobody serves any more, after all processes have ended and others have come."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import Lease, Reply, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, LIMITS, ask, slot, story
from tests.contracts.dedup_keys import task
from tests.redis.stand import Stand
from tests.redis.test_old_queues import FORGOTTEN, pass_time

GONE = "gone"
LOOKED = 12
"""Seconds within which a process has told the server that something is known in a queue of a model."""


@pytest.mark.parametrize("comes_back", [False, True])
@story
async def test_what_waits_for_a_model_is_kept_through_a_full_restart_and_ends_in_its_time(
    harness: Stand, comes_back: bool
) -> None:
    before = await harness.another()
    before.know({GONE: LIMITS})
    await before.heartbeat(WorkerInfo(worker_id="gpu", model=GONE, status=WorkerStatus.HEALTHY))
    kept = ask("a", model=GONE, dedup_keys=(task("t"),), id="t", timeout=300.0, queue_timeout=300.0)
    assert await before.enqueue([kept, ask("b", model=GONE, id="b", timeout=300.0, queue_timeout=300.0)]) == [None] * 2
    for _ in range(LOOKED):
        await harness.advance(1.0)
        await before.workers()
        await before.reap()
    await before.close()
    await harness.advance(FORGOTTEN)

    after = await harness.another()
    after.know({}, others=True)
    await pass_time(harness, after, 100.0)
    if comes_back:
        again = await harness.another()
        again.know({GONE: LIMITS})
        lease = await again.claim(slot("gpu", GONE), AT_ONCE)
        assert isinstance(lease, Lease)
        assert {one.id for one in lease.entries} == {"t", "b"}
        return
    await pass_time(harness, after, 100.0)
    found = await after.outcome("t", "t")
    assert isinstance(found, Reply)
    replies, _ = await after.replies("g", 0)
    assert {reply.id for reply in replies} >= {"b"}
    for reply in (found, *replies):
        assert reply.failure is not None
        assert reply.failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
