"""Promises of every broker about bulk entries: they only use spare places, and their failures affect nobody else."""

from typing import Any

import pytest

from headway import errors
from headway.core.bulk import BATCHES_WAITING
from headway.core.failures import CROWDED
from headway.model import Cause, Entry, EntryState, ItemResult
from tests.contracts.brokers import (
    AT_ONCE,
    LIMITS,
    MAX_BATCH,
    Harness,
    ask,
    drained,
    failed,
    failure_of,
    holds,
    ids,
    in_mailbox,
    output,
    slot,
)


def line(**how: Any) -> Entry:
    return ask(tier=LIMITS.tiers, gateway="feeder", queue_timeout=3600.0, timeout=3600.0, **how)


async def feed(harness: Harness, *lines: Entry) -> list[str]:
    assert not any(await harness.broker.enqueue_bulk(lines))
    return ids(lines)


@pytest.mark.parametrize("cause", [Cause.RAISED, Cause.CRASHED, Cause.REMOTE])
async def test_a_batch_that_fails_with_them_is_forgiven_the_others(harness: Harness, cause: Cause) -> None:
    lines = await feed(harness, line(), line())
    asked = [ask(), ask()]
    await harness.broker.enqueue(asked)
    await harness.broker.release(await harness.claim(), failed(cause))
    told = await in_mailbox(harness, "feeder")
    assert {reply.id: reply.failure and reply.failure.reason for reply in told} == dict.fromkeys(lines, cause.value)
    assert not await harness.dead.count()
    again = await harness.claim()
    assert (ids(again.entries), again.attempt) == (ids(asked), 1)
    await harness.answer(again)
    assert all(reply.output is not None for reply in (await drained(harness)).values())


async def test_bulk_entries_are_let_in_once_up_to_a_bound_and_can_be_withdrawn(harness: Harness) -> None:
    most = BATCHES_WAITING * MAX_BATCH
    entries = [line(shape=1), *(line() for _ in range(most))]
    verdicts = await harness.broker.enqueue_bulk(entries)
    assert [verdict and verdict.code for verdict in verdicts] == [None] * most + [errors.SHED]
    apart, *others, last = entries[:most]
    await feed(harness, last)
    await harness.broker.withdraw([one.submission for one in (apart, *others)], "feeder")
    assert await harness.broker.state(last.tenant, last.id) is EntryState.QUEUED
    assert ids((await harness.claim()).entries) == [last.id]
    assert await harness.broker.state(last.tenant, last.id) is EntryState.PROCESSING
    await feed(harness, last)
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))


@pytest.mark.parametrize("left_out", [0, 5 << 20])
async def test_bulk_entries_whose_outputs_are_left_out_fail_and_requests_run_again(
    harness: Harness, left_out: int
) -> None:
    [fits, crowded] = await feed(harness, line(), line())
    await harness.broker.enqueue([asked := ask()])
    lease = await harness.claim()
    first = ItemResult(None, left_out=left_out) if left_out else ItemResult(output(asked.input))
    await harness.broker.complete(lease, [first, ItemResult("two"), ItemResult(None, crowded=True)])
    replies = await drained(harness, "feeder")
    assert replies[fits].output == "two"
    assert failure_of(replies[crowded]).reason == CROWDED
    if left_out:
        lease = await harness.claim()
        assert ids(lease.entries) == [asked.id]
        await harness.answer(lease)
    assert (await drained(harness))[asked.id].output == output(asked.input)
    assert not await harness.dead.count()
