"""A batcher while the broker is unreachable, and once it is back."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.brokers.memory.broker import LEASE_SECONDS
from headway.core.policies.paced import Paced
from headway.errors import BatchRaised
from headway.model import CostLine, CostShape, Entry, Lease, WorkerStatus
from headway.worker.batcher import HELD_BACK
from tests.services.calls import once
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.services.troubled import CALL_TIMEOUT
from tests.virtual_time import Clock


async def test_claims_pause_longer_and_longer_and_begin_again_when_the_broker_is_back(fleet: Fleet) -> None:
    await asyncio.sleep(1)
    await fleet.server.fail()
    before = len(fleet.server.named("claim"))
    await asyncio.sleep(10)
    instants = [at for at, _, _ in fleet.server.named("claim")[before:]]
    gaps = [later - sooner for sooner, later in itertools.pairwise(instants)]
    assert gaps[0] < 0.05 and min(gaps[8:]) >= 0.25 and max(gaps) <= 0.5
    await fleet.server.become("fine")
    await asyncio.sleep(0.5)
    assert await fleet.answered(asked := fleet.ask("x")) == ["ok"]
    assert fleet.clock() - asked.at == pytest.approx(0.1, abs=0.002)


async def test_a_slot_stays_capacity_in_an_outage_and_tells_a_broker_that_forgot_it(fleet: Fleet, clock: Clock) -> None:
    await asyncio.sleep(1.2)
    await fleet.server.fail()
    await asyncio.sleep(5.05)
    fleet.server.lose_everything()
    await fleet.server.become("fine")
    back = clock()
    await asyncio.sleep(0.55)
    [worker] = await fleet.server.inner.workers()
    assert worker.status is WorkerStatus.HEALTHY
    [claim, *_] = [at for at, _, _ in fleet.server.named("claim") if at >= back]
    assert claim in [at for at, _, _ in fleet.server.named("beat") if at >= back]
    assert fleet.backends[0].starts == 1


@pytest.mark.parametrize("mode", ["refuse", "lose", "stall"])
async def test_what_was_computed_is_told_until_the_broker_answers(mode: str, fleet: Fleet) -> None:
    fleet.server.script = once("complete", mode, times=3 if mode == "refuse" else 1)
    asked = fleet.ask("x")
    assert await fleet.answered(asked) == ["ok"]
    await asyncio.sleep(15)
    assert await fleet.answered(asked) == ["ok"]
    assert fleet.runs("x") == 1
    assert sum(fleet.counters.worker.batches.values()) == 1


async def test_what_failed_is_told_until_the_broker_answers(clock: Clock) -> None:
    fail = [BatchRaised("once")]
    backend = FakeBackend(0.1, lambda entries: fail.pop() if fail else None)
    async with Fleet(clock, backend) as fleet:
        fleet.server.script = once("release", "refuse", times=4)
        asked = fleet.ask("x")
        assert await fleet.answered(asked) == ["ok"]
        assert asked.reply.attempts == 2
        assert clock() - asked.at < 0.5


async def test_an_outage_in_which_an_answer_waits_does_not_slow_the_slot_down_in_its_figures(fleet: Fleet) -> None:
    for number in range(4):
        assert await fleet.answered(fleet.ask(f"{number}")) == ["ok"]
    pace = fleet.batchers[0].figures.items_per_second
    fleet.server.script = lambda name: "refuse" if name == "complete" else None
    asked = fleet.ask("x", timeout=30.0)
    await asyncio.sleep(20)
    fleet.server.script = lambda name: None
    assert await fleet.answered(asked) == ["ok"]
    assert fleet.batchers[0].figures.items_per_second == pytest.approx(pace, rel=0.1)


async def test_an_answer_that_nobody_waits_for_any_more_is_given_up(fleet: Fleet) -> None:
    fleet.server.script = lambda name: "refuse" if name == "complete" else None
    with capture_logs() as lines:
        assert await fleet.answered(fleet.ask("x", timeout=3.0)) == [errors.DEADLINE_EXCEEDED]
        await asyncio.sleep(1.5)
    assert "the outcome of a batch could not be handed in" in [line["event"] for line in lines]
    fleet.server.script = lambda name: None
    assert await fleet.answered(fleet.ask("next")) == ["ok"]


@pytest.mark.parametrize("mode", ["refuse", "stall"])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.fleet(0.5)
async def test_a_drain_ends_with_the_broker_away(mode: str, busy: bool, fleet: Fleet) -> None:
    if busy:
        fleet.ask("x", timeout=3.0)
    await asyncio.sleep(0.1)
    await fleet.server.fail(mode)
    await asyncio.sleep(0.05)
    fleet.batchers[0].wind_down()
    async with asyncio.timeout(5.0 if busy else 2.5):
        await asyncio.gather(*fleet.serving)
        await fleet.batchers[0].stop()


@pytest.mark.parametrize("mode", ["refuse", "stall"])
@pytest.mark.fleet(2.0)
async def test_a_drain_with_the_broker_away_ends_with_the_lease_of_a_batch_of_tasks(mode: str, fleet: Fleet) -> None:
    fleet.ask("x", timeout=600.0, task=True)
    await asyncio.sleep(1.2)
    await fleet.server.fail(mode)
    fleet.batchers[0].wind_down()
    with capture_logs() as lines:
        async with asyncio.timeout(LEASE_SECONDS + CALL_TIMEOUT):
            await asyncio.gather(*fleet.serving)
    assert "the outcome of a batch could not be handed in" in [line["event"] for line in lines]


@pytest.mark.fleet(2.0, 2.0)
async def test_a_draining_slot_hands_in_its_tasks_when_the_broker_is_back_in_its_lease(fleet: Fleet) -> None:
    asked = fleet.ask("x", timeout=600.0, task=True)
    await asyncio.sleep(1.2)
    await fleet.server.fail()
    for batcher in fleet.batchers:
        batcher.wind_down()
    await asyncio.sleep(LEASE_SECONDS - 2.0)
    await fleet.server.become("fine")
    assert await fleet.answered(asked) == ["ok"]
    await asyncio.gather(*fleet.serving)
    assert fleet.runs("x") == 1


async def test_a_drain_that_begins_after_the_lease_of_a_batch_of_tasks_has_run_out_ends_at_once(fleet: Fleet) -> None:
    fleet.server.script = lambda name: "refuse" if name in ("complete", "extend") else None
    fleet.ask("x", timeout=600.0, task=True)
    await asyncio.sleep(LEASE_SECONDS * 3)
    fleet.batchers[0].wind_down()
    async with asyncio.timeout(CALL_TIMEOUT):
        await asyncio.gather(*fleet.serving)


@pytest.mark.fleet(0.1, 0.1)
async def test_a_batch_that_is_granted_while_the_slot_drains_is_handed_back_uncharged(fleet: Fleet) -> None:
    first, second = fleet.batchers
    await asyncio.sleep(0.1)
    second.wind_down()
    await asyncio.sleep(0.1)
    real = fleet.server.inner.claim

    async def slow(*how: object) -> object:
        claimed = await real(*how)  # type: ignore[arg-type]
        if isinstance(claimed, Lease):
            first.wind_down()
        return claimed

    fleet.server.inner.claim = slow  # type: ignore[method-assign, assignment]
    fleet.ask("x")
    await fleet.serving[0]
    assert fleet.runs("x") == 0
    [(_, _, (lease, failure))] = fleet.server.named("release")
    assert failure is None
    claimed = await real(lease.slot, Paced(None))
    assert isinstance(claimed, Lease)
    [running] = fleet.server.inner._running.values()
    assert [member.attempts for member in running.departure.members] == [1]


async def test_a_batch_is_not_run_on_a_backend_that_went_during_the_claim(clock: Clock) -> None:
    backend = FakeBackend(0.1)
    async with Fleet(clock, backend) as fleet:
        await asyncio.sleep(0.1)
        real = fleet.server.inner.claim
        ran_dead: list[Sequence[Entry]] = []

        def script(entries: Sequence[Entry]) -> None:
            if backend.dead.is_set():
                ran_dead.append(entries)

        backend.script = script

        async def slow(*how: object) -> object:
            claimed = await real(*how)  # type: ignore[arg-type]
            if isinstance(claimed, Lease) and backend.starts == 1:
                backend.dead.set()
                await asyncio.sleep(0.01)
            return claimed

        fleet.server.inner.claim = slow  # type: ignore[method-assign, assignment]
        asked = fleet.ask("x")
        assert await fleet.answered(asked) == ["ok"]
        assert asked.reply.attempts == 1
        assert backend.starts == 2 and not ran_dead


async def test_a_batch_whose_slot_was_silent_for_too_long_goes_to_another_and_is_answered_once(clock: Clock) -> None:
    """The process is paused. After it resumes, its completion is fenced off."""

    def paused(entries: Sequence[Entry]) -> None:
        fleet.batchers[0]._keeper.lease = None  # So its heartbeat has no lease to renew.

    slow, other = FakeBackend(15.0, paused), FakeBackend(0.1)
    fleet = Fleet(clock, slow, other, request_timeout_ms=30_000, gpu_timeout_ms=30_000, queue_timeout_ms=30_000)
    async with fleet:
        fleet.batchers[1].wind_down()
        await fleet.serving[1]
        asked = fleet.ask("x", timeout=30.0)
        await asyncio.sleep(0.5)
        assert slow.batches == [["x"]]
        fleet.batchers[1]._winding_down = False
        fleet.batchers[1].run(fleet._supervisor)
        assert await fleet.answered(asked) == ["ok"]
        assert asked.answered_at - asked.at < 11
        await asyncio.sleep(10)
        assert await fleet.answered(asked) == ["ok"]
        assert other.batches == [["x"]]


def padding_backend() -> FakeBackend:
    backend = FakeBackend(0.1)
    backend.cost = CostLine(CostShape.PADDED, 0.05, 0.05)
    return backend


async def test_the_next_batch_is_claimed_with_the_outcome_of_the_last_and_runs_once_that_was_taken(
    clock: Clock,
) -> None:
    async with Fleet(clock, padding_backend(), max_batch=1) as fleet:
        fleet.server.script = once("complete", "stall")
        first, second = fleet.ask("x"), fleet.ask("y")
        await asyncio.sleep(0.15)
        [told] = [at for at, _, _ in fleet.server.named("complete")]
        assert told in [at for at, _, _ in fleet.server.named("claim")], "one round trip for both"
        assert (fleet.runs("y"), fleet.batchers[0].figures.batches) == (0, 0)
        await fleet.server.become("fine")
        assert await fleet.answered(first, second) == ["ok", "ok"]
        assert second.answered_at == pytest.approx(told + 0.15, abs=0.01)
        assert (fleet.runs("x"), fleet.runs("y")) == (1, 1)


async def test_a_batch_claimed_ahead_goes_back_at_once_if_the_outcome_of_the_last_is_not_taken(clock: Clock) -> None:
    async with Fleet(clock, padding_backend(), max_batch=1) as fleet:
        fleet.server.script = once("complete", "stall")
        first, second = fleet.ask("x"), fleet.ask("y")
        await asyncio.sleep(0.1 + HELD_BACK + CALL_TIMEOUT / 2)
        [(_, _, (lease, failure))] = fleet.server.named("release")
        assert (lease.entries[0].input, failure) == ("y", None)
        assert await fleet.answered(first, second) == ["ok", "ok"]
        assert [fleet.runs(text) for text in "xy"] == [1, 1]
        assert second.reply.attempts == 1, "nothing is charged"


@pytest.mark.fleet(max_batch=1)
async def test_where_all_batches_take_the_same_time_the_next_is_claimed_once_the_outcome_was_taken(
    fleet: Fleet,
) -> None:
    fleet.server.script = once("complete", "stall")
    fleet.ask("x")
    await asyncio.sleep(0.15)
    [handed_in] = [at for at, _, _ in fleet.server.named("complete")]
    assert all(at < handed_in for at, _, _ in fleet.server.named("claim"))
    await fleet.server.become("fine")


async def test_a_slot_that_ends_while_an_outcome_is_on_its_way_waits_for_it(clock: Clock) -> None:
    async with Fleet(clock, padding_backend(), max_batch=1) as fleet:
        fleet.server.script = once("complete", "stall")
        first = fleet.ask("x")
        await asyncio.sleep(0.15)
        fleet.batchers[0].wind_down()
        await asyncio.sleep(0.05)
        assert not fleet.serving[0].done()
        await fleet.server.become("fine")
        await asyncio.gather(*fleet.serving)
        assert await fleet.answered(first) == ["ok"]
