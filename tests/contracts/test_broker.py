"""Promises of every broker: which entries are admitted, which ride, and that each answer comes back once."""

from __future__ import annotations

import asyncio

import pytest

from headway import errors
from headway.core.departure import Load, Rule
from headway.model import Completion, EntryState, ItemResult, Lease, NoWork, WorkerInfo, WorkerStatus
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    MAX_QUEUE,
    MODELS,
    WHEN_FULL,
    Fixed,
    Harness,
    ask,
    crowd,
    drained,
    failed,
    holds,
    ids,
    output,
    slot,
    story,
)


@story
async def test_an_admitted_entry_is_claimed_run_and_answered(harness: Harness) -> None:
    entry = ask("hello")
    assert list(await harness.broker.enqueue([entry])) == [None]
    await harness.advance(0.5)
    claimed_at = harness.now()
    lease = await harness.claim("gpu-7")
    assert list(lease.entries) == [entry]
    await harness.advance(0.25)
    assert await harness.broker.complete(lease, [ItemResult(output("hello"))]) == Completion(answered=1, departed=0)
    [reply] = (await drained(harness)).values()
    assert (reply.id, reply.tenant, reply.output, reply.failure) == (entry.id, entry.tenant, output("hello"), None)
    assert reply.attempts == 1
    assert reply.queued == pytest.approx(0.5, abs=harness.grain)
    assert reply.ran is not None
    assert (reply.ran.worker, reply.ran.size) == ("gpu-7", 1)
    assert reply.ran.seconds == pytest.approx(0.25, abs=harness.grain)
    assert reply.ran.claimed_at == pytest.approx(claimed_at, abs=harness.grain)


@story
async def test_a_batch_has_one_item_for_each_entry_or_stays_as_it_is(harness: Harness) -> None:
    await harness.broker.enqueue([ask("one"), ask("two")])
    lease = await harness.claim()
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=rf"^{count} items for a lease of 2 entries"):
            await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await harness.broker.complete(lease, [ItemResult("1"), ItemResult("2")]) == Completion(
        answered=2, departed=0
    )


@story
async def test_verdicts_come_in_the_order_of_the_entries(harness: Harness) -> None:
    await harness.broker.enqueue(crowd(MAX_QUEUE - 1))
    verdicts = await harness.broker.enqueue([ask(), ask(), ask(model="other")])
    assert [verdict is None for verdict in verdicts] == [True, False, True]


@story
async def test_a_full_queue_refuses_and_says_for_how_long(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    refused = ask()
    [verdict] = await harness.broker.enqueue([refused])
    assert verdict is not None
    assert verdict.code == errors.SERVICE_OVERLOADED
    assert verdict.reason
    assert verdict.retry_after is not None
    assert verdict.retry_after > 0.0
    assert await harness.broker.state(refused.tenant, refused.id) is None
    assert await drained(harness) == {}


@story
async def test_a_refused_entry_may_ask_again(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    refused = ask()
    assert list(await harness.broker.enqueue([refused])) != [None]
    await harness.claim()
    assert list(await harness.broker.enqueue([refused])) == [None]


async def measure(harness: Harness, seconds: float, workers: tuple[str, ...] = ("gpu-0",)) -> None:
    """Let the broker see batches that take so long."""
    await harness.healthy(*workers)
    for _ in range(3):
        await harness.broker.enqueue([ask(gateway="nobody") for _ in range(MAX_BATCH)])
        lease = await harness.claim()
        await harness.advance(seconds)
        await harness.answer(lease)


@story
async def test_what_cannot_be_answered_in_time_is_refused_at_the_door(harness: Harness) -> None:
    """One GPU of 8 in 100 ms drains 80 a second: within 500 ms it takes some 31 that wait, and not 60."""
    await measure(harness, 0.1)
    verdicts = await harness.broker.enqueue([ask(timeout=0.5) for _ in range(MAX_QUEUE)])
    admitted = [verdict is None for verdict in verdicts]
    assert admitted == sorted(admitted, reverse=True)
    assert 20 <= sum(admitted) <= 32
    assert all(verdict is None or verdict.retry_after for verdict in verdicts)


@story
async def test_the_lowest_tier_is_shed_while_the_highest_is_admitted(harness: Harness) -> None:
    await measure(harness, 0.1)
    await harness.broker.enqueue([ask(timeout=0.5, tier=2) for _ in range(MAX_QUEUE)])
    free, enterprise = await harness.broker.enqueue([ask(timeout=0.5, tier=2), ask(timeout=0.5, tier=0)])
    assert free is not None
    assert free.code == errors.SHED
    assert enterprise is None


@story
async def test_an_idle_system_admits_whatever_it_believes(harness: Harness) -> None:
    await measure(harness, 5.0)
    assert list(await harness.broker.enqueue([ask(timeout=0.05, tier=2)])) == [None]


@story
async def test_enqueue_is_idempotent_by_tenant_and_id(harness: Harness) -> None:
    entry, foreign = ask(id="same", tenant="a"), ask(id="same", tenant="b")
    assert list(await harness.broker.enqueue([entry, entry, foreign])) == [None, None, None]
    assert list(await harness.peer().enqueue([entry])) == [None]
    lease = await harness.claim()
    assert sorted(rider.tenant for rider in lease.entries) == ["a", "b"]
    assert list(await harness.broker.enqueue([entry])) == [None]  # While it runs.
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))
    await harness.answer(lease)
    assert list(await harness.broker.enqueue([entry])) == [None]  # Answered, but nobody has read it.
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))
    replies, _ = await harness.broker.replies("g", 0)
    assert sorted((reply.tenant, reply.id) for reply in replies) == [("a", "same"), ("b", "same")]


@story
async def test_what_is_in_flight_at_another_gateway_is_refused_and_can_be_asked_anew_once_it_is_answered(
    harness: Harness,
) -> None:
    here, there = ask(id="same", gateway="g1"), ask(id="same", gateway="g2")
    await harness.broker.enqueue([here])
    [while_it_waits] = await harness.peer().enqueue([there])
    lease = await harness.claim()
    [while_it_runs] = await harness.peer().enqueue([there])
    for verdict in (while_it_waits, while_it_runs):
        assert verdict is not None
        assert verdict.code == errors.IDEMPOTENCY_CONFLICT
    await harness.answer(lease)
    assert list(await harness.peer().enqueue([there])) == [None]
    await harness.answer(await harness.claim())
    assert list(await drained(harness, "g1")) == ["same"]
    assert list(await drained(harness, "g2")) == ["same"]


@story
async def test_nothing_to_run_is_a_wait_without_end(harness: Harness) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)


@story
async def test_models_have_queues_of_their_own(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", model="m"), ask(id="b", model="other")])
    assert ids((await harness.claim(model="other")).entries) == ["b"]
    assert ids((await harness.claim(model="m")).entries) == ["a"]


@story
async def test_no_entry_is_handed_to_two_slots(harness: Harness) -> None:
    entries = [ask() for _ in range(4 * MAX_BATCH)]
    await asyncio.gather(*(harness.broker.enqueue(entries[start::4]) for start in range(4)))
    brokers = [harness.broker, harness.peer()]
    claimed = await asyncio.gather(*(brokers[n % 2].claim(slot(f"gpu-{n}"), AT_ONCE) for n in range(6)))
    leases = [lease for lease in claimed if isinstance(lease, Lease)]
    ridden = [rider.id for lease in leases for rider in lease.entries]
    assert sorted(ridden) == sorted(ids(entries))
    assert len({lease.fence for lease in leases}) == len(leases)


@story
async def test_batches_form_across_gateways_and_each_hears_its_own(harness: Harness) -> None:
    for gateway in ("g1", "g2", "g3"):
        await harness.peer().enqueue([ask(id=gateway, gateway=gateway)])
    lease = await harness.claim()
    assert len(lease.entries) == 3
    await harness.answer(lease)
    for gateway in ("g1", "g2", "g3"):
        assert list(await drained(harness, gateway)) == [gateway]


@pytest.mark.parametrize("limit", [1, 5, MAX_BATCH])
@story
async def test_a_batch_is_no_larger_than_its_slot_takes(harness: Harness, limit: int) -> None:
    await harness.broker.enqueue([ask() for _ in range(20)])
    assert len((await harness.claim(limit=limit)).entries) == limit


@story
async def test_the_lease_says_whose_it_is_since_when_and_until_when(harness: Harness) -> None:
    await harness.broker.enqueue([ask(timeout=9.0), ask(timeout=5.0), *(ask() for _ in range(MAX_BATCH))])
    await harness.advance(1.0)
    first, second = await harness.claim("gpu-1"), await harness.claim("gpu-2")
    assert first.slot == slot("gpu-1")
    assert second.fence > first.fence
    assert first.reason == "full"
    assert first.expires_at - first.granted_at == pytest.approx(harness.lease_seconds)
    assert first.patience == pytest.approx(4.0, abs=harness.grain)


@story
async def test_a_policy_that_holds_says_until_when(harness: Harness) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    await harness.broker.enqueue([ask()])
    wait = holds(await harness.broker.claim(slot(), patient))
    assert wait.until is not None
    assert wait.until == pytest.approx(harness.now() + 0.5, abs=harness.grain)
    await harness.advance(wait.until - harness.now())
    lease = await harness.broker.claim(slot(), patient)
    assert isinstance(lease, Lease)
    assert lease.reason == "window"


@story
async def test_higher_tiers_ride_first_and_a_share_is_kept_for_the_lower(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id=f"free-{n}", tier=2) for n in range(10)])
    await harness.advance(0.1)
    await harness.broker.enqueue([ask(id=f"paid-{n}", tier=1) for n in range(10)])
    await harness.broker.enqueue([ask(id=f"enterprise-{n}", tier=0) for n in range(10)])
    lease = await harness.claim()
    assert ids(lease.entries) == [*(f"enterprise-{n}" for n in range(6)), "free-0", "free-1"]


@story
async def test_tenants_of_a_tier_share_its_places(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id=f"flood-{n}", tenant="flood") for n in range(40)])
    await harness.broker.enqueue([ask(id=f"small-{n}", tenant="small") for n in range(4)])
    assert {"small-0", "small-1", "small-2"} <= set(ids((await harness.claim()).entries))


@story
async def test_one_input_that_fails_leaves_its_batch_mates_alone(harness: Harness) -> None:
    good, bad, odd = ask(id="good"), ask(id="bad"), ask(id="odd")
    await harness.broker.enqueue([good, bad, odd])
    lease = await harness.claim()
    items = [
        ItemResult("yes"),
        ItemResult(None, "cannot read this"),
        ItemResult(None, "returned 3, not a string", fault=True),
    ]
    await harness.broker.complete(lease, items)
    replies = await drained(harness)
    assert replies["good"].output == "yes"
    bad_failure, odd_failure = replies["bad"].failure, replies["odd"].failure
    assert bad_failure is not None
    assert (bad_failure.code, bad_failure.message) == (errors.REJECTED_BY_MODEL, "cannot read this")
    assert odd_failure is not None
    assert odd_failure.code == errors.BACKEND_ERROR
    [letter] = await harness.dead.find("bad")
    assert (letter.entry, letter.error, letter.attempts) == (bad, "cannot read this", 1)
    assert await harness.dead.count() == 2


@pytest.mark.parametrize("count", [0, 1, 3])
@story
async def test_a_wrong_number_of_items_is_an_error_and_loses_nothing(harness: Harness, count: int) -> None:
    await harness.broker.enqueue([ask(), ask()])
    lease = await harness.claim()
    with pytest.raises(ValueError, match=f"{count} items"):
        await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await drained(harness) == {}
    await harness.answer(lease)
    assert len(await drained(harness)) == 2


@story
async def test_a_lease_ends_once(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    await harness.answer(lease)
    assert await harness.broker.complete(lease, [ItemResult("late")]) == Completion(0, 0, fenced=True)
    assert not await harness.broker.release(lease)
    assert not await harness.broker.release(lease, failed())
    assert not await harness.broker.extend(lease)
    assert (await drained(harness))["a"].output == output("input of a")
    holds(await harness.broker.claim(slot(), AT_ONCE))


@story
async def test_replies_wait_for_whoever_asks(harness: Harness) -> None:
    reader = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    assert not reader.done()
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    replies, cursor = await reader
    assert ids(replies) == ["a"]
    assert cursor > 0


@story
async def test_the_same_cursor_repeats_and_a_later_one_acknowledges(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    await harness.answer(await harness.claim(limit=1))
    first, cursor = await harness.broker.replies("g", 0)
    await harness.answer(await harness.claim(limit=1))
    again, further = await harness.broker.replies("g", 0)
    assert (ids(first), ids(again)) == (["a"], ["a", "b"])
    rest, end = await harness.broker.replies("g", cursor)
    assert (ids(rest), end) == (["b"], further)
    assert await drained(harness, after=end) == {}


@story
async def test_replies_survive_a_reconnect(harness: Harness) -> None:
    """A reader that went away, before the answer or with it, has taken nothing with it."""
    lost = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    lost.cancel()
    await harness.broker.enqueue([ask(id="a")])
    abandoned = asyncio.ensure_future(harness.broker.replies("g", 0))
    reconnected = asyncio.ensure_future(harness.peer().replies("g", 0))
    await harness.settle()
    await harness.answer(await harness.claim())
    abandoned.cancel()
    replies, _ = await reconnected
    assert ids(replies) == ["a"]


@story
async def test_a_second_reader_does_not_leave_the_first_waiting(harness: Harness) -> None:
    first = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second.cancel()
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    await harness.settle()
    assert first.done()
    assert ids((await first)[0]) == ["a"]


@story
async def test_an_acknowledged_entry_is_forgotten(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, after=cursor) == {}
    await harness.broker.enqueue([entry])
    assert ids((await harness.claim()).entries) == ["a"]


@story
async def test_a_cancelled_entry_never_reaches_a_gpu(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    await harness.peer().withdraw([("t", "a", 0)], "g")
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_an_entry_cancelled_while_it_runs_is_not_replied_to(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    settled = await harness.broker.complete(lease, [ItemResult("A"), ItemResult("B")])
    assert settled == Completion(answered=1, departed=1)
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == {"b": "B"}


@story
async def test_an_entry_cancelled_while_it_runs_does_not_run_again(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.broker.release(lease, failed())
    await harness.advance(1.0)
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_an_entry_that_waits_to_run_again_can_be_cancelled(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await harness.broker.release(await harness.claim(), failed())
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.advance(1.0)
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert await drained(harness) == {}


@story
async def test_cancelling_is_by_tenant_and_what_is_unknown_is_nothing(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", tenant="mine")])
    await harness.broker.withdraw([("theirs", "a", 0), ("mine", "unknown", 0)], "g")
    assert ids((await harness.claim()).entries) == ["a"]


@story
async def test_a_cancelled_entry_can_be_enqueued_anew(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    stale = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    assert list(await harness.broker.enqueue([entry])) == [None]
    fresh = await harness.claim("gpu-1")
    await harness.broker.complete(stale, [ItemResult("stale")])
    assert await drained(harness) == {}
    await harness.broker.complete(fresh, [ItemResult("fresh")])
    assert (await drained(harness))["a"].output == "fresh"


@story
async def test_cancelling_what_is_answered_leaves_the_answer_the_only_one(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.broker.enqueue([entry])
    holds(await harness.broker.claim(slot(), AT_ONCE))
    assert list(await drained(harness)) == ["a"]


@story
async def test_the_stage_of_an_entry(harness: Harness) -> None:
    stage = harness.broker.state
    assert await stage("t", "a") is None
    await harness.broker.enqueue([ask(id="a")])
    assert await stage("t", "a") is EntryState.QUEUED
    assert await stage("other tenant", "a") is None
    lease = await harness.claim()
    assert await stage("t", "a") is EntryState.PROCESSING
    await harness.broker.release(lease, failed())
    assert await stage("t", "a") is EntryState.QUEUED
    await harness.advance(1.0)
    await harness.answer(await harness.claim())
    assert await stage("t", "a") is None


@story
async def test_depths_by_model_and_tier(harness: Harness) -> None:
    await harness.broker.enqueue([ask(tier=0), ask(tier=2)])
    await harness.advance(1.5)
    await harness.broker.enqueue([ask(tier=2), ask(tier=1, model="other")])
    depths = {(one.model, one.tier): one for one in await harness.peer().depths()}
    assert {key: one.depth for key, one in depths.items()} == {
        ("m", 0): 1,
        ("m", 1): 0,
        ("m", 2): 2,
        ("other", 0): 0,
        ("other", 1): 1,
        ("other", 2): 0,
    }
    assert depths["m", 2].oldest_seconds == pytest.approx(1.5, abs=harness.grain)
    assert depths["m", 1].oldest_seconds == 0.0
    lease = await harness.claim()
    assert sum(one.depth for one in await harness.broker.depths()) == 1
    await harness.broker.release(lease)
    assert sum(one.depth for one in await harness.broker.depths()) == 4


@story
async def test_the_registry_goes_by_the_last_heartbeat(harness: Harness) -> None:
    await harness.broker.heartbeat(
        WorkerInfo(
            worker_id="gpu-0",
            model="m",
            status=WorkerStatus.HEALTHY,
            utilisation=0.5,
            in_flight=1,
            last_heartbeat=-1.0,
            restarts=2,
            pid=77,
        )
    )
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.STARTING))
    first = {one.worker_id: one for one in await harness.peer().workers()}
    assert first["gpu-0"].last_heartbeat == pytest.approx(harness.now(), abs=harness.grain)
    assert (first["gpu-0"].utilisation, first["gpu-0"].in_flight) == (0.5, 1)
    assert (first["gpu-0"].restarts, first["gpu-0"].pid) == (2, 77)
    seen = []
    for seconds in (1.4, 0.2, 8.3, 0.2):
        await harness.advance(seconds)
        seen.append({one.worker_id: one.status.value for one in await harness.broker.workers()})
    assert [one["gpu-0"] for one in seen] == ["healthy", "degraded", "degraded", "offline"]
    assert [one["gpu-1"] for one in seen] == ["starting", "starting", "starting", "offline"]
    await harness.healthy("gpu-0")
    assert {one.worker_id: one.status.value for one in await harness.broker.workers()}["gpu-0"] == "healthy"


@story
async def test_only_healthy_workers_are_capacity(harness: Harness) -> None:
    told = []

    class Curious:
        def rule(self, load: Load) -> Rule:
            told.append(load.slots)
            return Rule(size=1)

    async def slots() -> int:
        holds(await harness.broker.claim(slot(), Curious()))
        return told[-1]

    await harness.healthy("gpu-0", "gpu-1")
    await harness.healthy("elsewhere", model="other")
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-2", model="m", status=WorkerStatus.STARTING))
    assert await slots() == 2
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.DEGRADED))
    assert await slots() == 1
    await harness.reaping(4.0)
    assert await slots() == 0


@story
async def test_what_policies_go_by_is_told_to_all(harness: Harness) -> None:
    idle = await harness.peer().loads()
    assert set(idle) == set(MODELS)
    assert [(one.rate, one.alpha, one.slots, one.depth, one.departures) for one in idle.values()] == [
        (0, 0, 0, 0, 0)
    ] * 2
    await measure(harness, 0.1, workers=("gpu-0", "gpu-1"))
    await harness.broker.enqueue([ask() for _ in range(5)])
    load = (await harness.peer().loads())["m"]
    assert (load.slots, load.depth, load.departures, load.max_batch) == (2, 5, 3, MAX_BATCH)
    assert load.rate > 0.0
    assert load.batch_seconds(MAX_BATCH) == pytest.approx(0.1, rel=0.05)
    assert 0.0 < load.utilisation <= 1.0
    other = (await harness.broker.loads())["other"]
    assert (other.rate, other.slots, other.depth, other.departures) == (0.0, 0, 0, 0)


@story
async def test_the_epoch_stands_while_nothing_is_lost(harness: Harness) -> None:
    seen = set()
    for _ in range(3):
        await harness.broker.enqueue([ask()])
        await harness.answer(await harness.claim())
        await drained(harness)
        await harness.reaping(1.0)
        seen.add(harness.broker.epoch)
    assert len(seen) == 1
    assert seen != {""}


@story
async def test_a_held_batch_keeps_filling(harness: Harness) -> None:
    """The queue is the batch until it leaves: who comes later rides along, and the highest tier first."""
    await harness.broker.enqueue([ask(id=f"free-{n}", tier=2) for n in range(MAX_BATCH - 1)])
    holds(await harness.broker.claim(slot(), WHEN_FULL))
    await harness.broker.enqueue([ask(id="enterprise", tier=0)])
    lease = await harness.broker.claim(slot(), WHEN_FULL)
    assert isinstance(lease, Lease)
    assert ids(lease.entries)[0] == "enterprise"
    assert len(lease.entries) == MAX_BATCH
