"""Promises of every broker on outputs that were left out of their batch, as all are too large together: nobody else's are, and those run again."""

from headway.core.departure import APART, RETRY
from headway.core.suspects import APART_SECONDS
from headway.model import MOST_OUTPUT, Entry, ItemResult, Lease, NoWork
from tests.contracts.brokers import AT_ONCE, Harness, ask, drained, failure_of, ids, leave, output, slot
from tests.contracts.dedup_keys import admit, same

SIZE = 5 << 20


def large(caller: str = "eve", **how: object) -> Entry:
    return ask(f"large {caller}", tenant="evil", caller=caller, **how)  # type: ignore[arg-type]


def is_large(entry: Entry) -> bool:
    return str(entry.input).startswith("large")


async def left_out(harness: Harness, lease: Lease) -> None:
    items = [
        ItemResult(None, left_out=SIZE) if is_large(one) else ItemResult(output(one.input)) for one in lease.entries
    ]
    settled = await harness.broker.complete(lease, items)
    assert (settled.answered, settled.departed) == (sum(not is_large(one) for one in lease.entries), 0)


async def test_the_others_are_answered_and_those_left_out_run_again_apart(harness: Harness) -> None:
    entries = [ask(), large(), large("mallory"), large()]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    assert len(lease.entries) == 4
    await harness.advance(1.0)
    await left_out(harness, lease)
    told = await drained(harness)
    assert set(told) == {entry.id for entry in entries if not is_large(entry)}
    callers = []
    for _ in range(2):
        lease = await harness.claim()
        assert lease.reason == RETRY
        callers.append({entry.caller for entry in lease.entries})
        await harness.advance(1.0)
        await harness.answer(lease)
    assert not any(load.alpha for load in (await harness.broker.loads()).values()), "their time is nobody else's pace"
    assert callers in ([{"eve"}, {"mallory"}], [{"mallory"}, {"eve"}])
    told = await drained(harness)
    assert {id: reply.output for id, reply in told.items()} == {one.id: output(one.input) for one in entries}
    assert not await harness.dead.count()
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)


async def test_whose_outputs_were_left_out_rides_apart_for_a_while_as_many_as_have_room(harness: Harness) -> None:
    await harness.broker.enqueue([large(), ask()])
    await left_out(harness, await harness.claim())
    await harness.answer(await harness.claim())
    await harness.broker.enqueue([*(large() for _ in range(4)), ask()])
    await harness.advance(0.6)
    batches = [await harness.claim("gpu-0"), await harness.claim("gpu-1"), await harness.claim("gpu-2")]
    assert sorted(len(lease.entries) for lease in batches) == [1, 1, MOST_OUTPUT // SIZE]
    assert sorted(lease.reason == APART for lease in batches) == [False, True, True]
    for lease in batches:
        await harness.answer(lease)
    await harness.advance(APART_SECONDS)
    await harness.broker.enqueue([large(), ask()])
    assert len((await harness.claim()).entries) == 2


async def test_who_shares_an_answer_gets_it_from_the_next_run_and_who_is_late_or_gone_gets_none(
    harness: Harness,
) -> None:
    await harness.healthy("gpu-0")
    first, second = (large(dedup_keys=(same(),)) for _ in range(2))
    late, gone = large(timeout=1.0, queue_timeout=1.0), large()
    await admit(harness, first, second, late, gone, ask())
    lease = await harness.claim()
    await leave(harness.broker, gone)
    items = [ItemResult(None, left_out=SIZE) if is_large(one) else ItemResult("out") for one in lease.entries]
    assert (await harness.broker.complete(lease, items)).departed == 1
    await harness.reaping(1.1)
    lease = await harness.claim()
    assert ids(lease.entries) == [first.id]
    await harness.answer(lease)
    replies = await drained(harness)
    assert replies[first.id].output == replies[second.id].output == output(first.input)
    assert failure_of(replies[late.id]).code == "DEADLINE_EXCEEDED"
    assert gone.id not in replies
