"""Promises of every broker on bulk entries: they take what is left, and what happens to them is nobody else's trouble."""

from typing import Any

import pytest

from headway import errors
from headway.core.bulk import BATCHES_WAITING, QUIET
from headway.core.failures import CROWDED
from headway.model import Cause, Entry, EntryState, ItemResult, WorkerInfo, WorkerStatus
from tests.contracts.brokers import (
    AT_ONCE,
    LIMITS,
    MAX_BATCH,
    WHEN_FULL,
    Harness,
    ask,
    drained,
    failed,
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


async def test_empty_seats_are_taken(harness: Harness) -> None:
    waiting = await feed(harness, *(line() for _ in range(MAX_BATCH)))
    [asked] = entries = [ask()]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    assert ids(lease.entries) == [asked.id, *waiting[: MAX_BATCH - 1]]
    assert [entry.tier for entry in lease.entries] == [asked.tier, *[LIMITS.tiers] * (MAX_BATCH - 1)]
    await harness.answer(lease)
    assert set(await drained(harness)) == {asked.id}
    assert set(await drained(harness, "feeder")) == set(waiting[: MAX_BATCH - 1])


async def test_others_go_first_and_lose_no_seat(harness: Harness) -> None:
    await feed(harness, line())
    asked = [ask() for _ in range(MAX_BATCH)]
    await harness.broker.enqueue(asked)
    assert ids((await harness.claim()).entries) == ids(asked)


async def test_no_batch_leaves_for_their_sake_while_others_wait(harness: Harness) -> None:
    await harness.broker.enqueue([ask()])
    await feed(harness, *(line() for _ in range(MAX_BATCH)))
    holds(await harness.broker.claim(slot(), WHEN_FULL))
    assert sum(one.depth for one in await harness.broker.depths()) == 1


async def test_an_idle_fleet_runs_whole_batches(harness: Harness) -> None:
    waiting = await feed(harness, *(line() for _ in range(MAX_BATCH + 1)))
    lease = await harness.claim()
    assert (lease.reason, ids(lease.entries)) == ("bulk", waiting[:MAX_BATCH])
    await harness.answer(lease)
    assert ids((await harness.claim()).entries) == waiting[MAX_BATCH:]


async def test_the_last_gpu_is_kept_free_after_a_delay_until_nobody_has_asked_for_a_while(harness: Harness) -> None:
    status = WorkerStatus.HEALTHY
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-0", model="m", status=status))
    await harness.broker.enqueue([ask()])
    await harness.answer(await harness.claim())
    await feed(harness, line(), line())
    begun = await harness.claim()
    assert begun.reason == "bulk", "right after a request"
    await harness.broker.enqueue([ask()])
    await harness.advance(1.0)
    await harness.answer(begun)
    await harness.answer(await harness.claim())
    assert [one.delayed for one in await harness.broker.bulk_queues()] == [1]
    await feed(harness, line())
    holds(await harness.broker.claim(slot(), AT_ONCE))
    await harness.advance(QUIET)
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-0", model="m", status=status))
    assert (await harness.claim()).reason == "bulk"


async def test_enough_of_them_wait(harness: Harness) -> None:
    most = BATCHES_WAITING * MAX_BATCH
    verdicts = await harness.broker.enqueue_bulk([line() for _ in range(most + 1)])
    assert [verdict is None for verdict in verdicts] == [True] * most + [False]
    assert verdicts[-1] is not None
    assert verdicts[-1].code == errors.SHED


async def test_offered_again_they_are_the_same(harness: Harness) -> None:
    entry = line()
    await feed(harness, entry)
    await feed(harness, entry)
    assert ids((await harness.claim()).entries) == [entry.id]
    await feed(harness, entry)
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))


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


async def test_what_never_ran_goes_first(harness: Harness) -> None:
    lines = await feed(harness, *(line() for _ in range(3)))
    await harness.broker.release(await harness.claim(limit=2))
    assert ids((await harness.claim()).entries) == lines


async def test_those_that_ride_apart_ride_with_their_shape_alone(harness: Harness) -> None:
    lines = await feed(harness, line(shape=1), line(shape=2), line(), line(shape=1))
    await harness.broker.enqueue([ask()])
    with_others = await harness.claim()
    assert ids(with_others.entries)[1:] == [lines[2]]
    await harness.answer(with_others)
    await harness.advance(QUIET)
    assert ids((await harness.claim()).entries) == [lines[0], lines[3]]


async def test_they_can_be_withdrawn(harness: Harness) -> None:
    first, apart, last = entries = [line(), line(shape=1), line()]
    await feed(harness, *entries)
    assert await harness.broker.state(first.tenant, first.id) is EntryState.QUEUED
    await harness.broker.withdraw([first.submission, apart.submission], "feeder")
    assert ids((await harness.claim()).entries) == [last.id]
    assert await harness.broker.state(last.tenant, last.id) is EntryState.PROCESSING


async def test_they_leave_no_letter_and_no_trace_in_what_decides(harness: Harness) -> None:
    await feed(harness, *(line() for _ in range(5)))
    assert not any(one.depth for one in await harness.broker.depths())
    load = next(iter((await harness.broker.loads()).values()))
    assert (load.depth, load.rate) == (0, 0.0)


async def test_one_whose_output_was_left_out_is_told_so_and_leaves_no_letter(harness: Harness) -> None:
    [fits, crowded] = await feed(harness, line(), line())
    [asked] = entries = [ask()]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("one"), ItemResult("two"), ItemResult(None, crowded=True)])
    told = await drained(harness, "feeder")
    assert told[fits].output == "two"
    failure = told[crowded].failure
    assert failure is not None and failure.reason == CROWDED
    assert (await drained(harness))[asked.id].output == "one"
    assert not await harness.dead.count()


async def test_a_request_whose_output_was_left_out_runs_again_and_lines_beside_it_do_not(harness: Harness) -> None:
    [fits, crowded] = await feed(harness, line(), line())
    [asked] = entries = [ask()]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    items = [ItemResult(None, left_out=5 << 20), ItemResult("two"), ItemResult(None, crowded=True)]
    await harness.broker.complete(lease, items)
    told = await drained(harness, "feeder")
    assert told[fits].output == "two"
    assert (failure := told[crowded].failure) is not None and failure.reason == CROWDED
    lease = await harness.claim()
    assert ids(lease.entries) == [asked.id]
    await harness.answer(lease)
    assert (await drained(harness))[asked.id].output == output(asked.input)


async def test_the_run_time_of_what_rides_apart_says_nothing_of_others(harness: Harness) -> None:
    for shape, known in ((1, False), (0, True)):
        await feed(harness, line(shape=shape))
        lease = await harness.claim()
        await harness.advance(0.2)
        await harness.answer(lease)
        assert (max(load.alpha for load in (await harness.broker.loads()).values()) > 0.0) is known
        await harness.advance(QUIET)
