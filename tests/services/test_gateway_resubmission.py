"""What a gateway offers again to a broker that is back, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway import errors
from headway.gateway.broker_session import PROBE_AFTER, Replied
from headway.gateway.outbox import CHUNK, SPREAD
from headway.model import Entry, Failure, Limit, Principal
from tests.services.calls import offered, once
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.services.troubled import Connection
from tests.virtual_time import Clock


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "half-open"])
async def test_what_the_broker_lost_is_offered_again_without_being_asked(cut: bool, clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.3), max_batch=1) as fleet:
        await fleet.answered(fleet.ask("so that the cursor is not at its beginning"))
        asked = [fleet.ask(f"text {number}") for number in range(4)]
        await asyncio.sleep(0.5)
        fleet.server.lose_everything()
        if cut:
            fleet.server.cut()
        assert await fleet.answered(*asked) == ["ok"] * 4
        assert clock() - asked[0].at < 0.3 * 5 + PROBE_AFTER * 2 + SPREAD + 0.1
        assert all(fleet.runs(one.text) <= 2 for one in asked)


async def test_everything_is_offered_again_in_chunks_once_for_each_return(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(3.0), max_batch=100) as fleet:
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))
        asked = [fleet.ask(f"text {number}", timeout=25.0) for number in range(1000)]
        await asyncio.sleep(0.1)
        before = len(fleet.server.named("enqueue"))
        for _ in range(9):  # Its lines break again and again, and it is there in between.
            fleet.server.cut()
            await asyncio.sleep(0.1)
        calls = fleet.server.named("enqueue")[before:]
        assert [len(entries) for _, _, entries in calls] == [CHUNK] * (1000 // CHUNK) + [1000 % CHUNK]
        assert {entry.input for _, _, entries in calls for entry in entries} == {one.text for one in asked}
        assert not any(one.replies for one in asked)


async def test_gateways_do_not_return_all_at_once(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(3.0), gateways=5, max_batch=100) as fleet:
        for number in range(5):
            fleet.ask(f"text {number}", gateway=number)
        await asyncio.sleep(0.1)
        fleet.server.lose_everything()
        fleet.server.cut()
        before = len(fleet.server.named("enqueue"))
        await asyncio.sleep(0.5)
        instants = sorted(at for at, _, _ in fleet.server.named("enqueue")[before:])
        assert len(instants) == 5
        assert instants[-1] - instants[0] > 0.05


async def test_a_refusal_of_what_is_offered_again_is_the_answer(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(3.0)) as fleet:
        asked = fleet.ask("x")
        await asyncio.sleep(0.1)
        full = Failure(errors.SERVICE_OVERLOADED, "full", 2.0, "overloaded")

        async def refuse(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            return [full] * len(entries)

        fleet.server.lose_everything()
        fleet.server.inner.enqueue = refuse  # type: ignore[method-assign]
        assert await fleet.answered(asked) == [errors.SERVICE_OVERLOADED]
        assert asked.reply.failure == full
        assert fleet.gateway.pending == 0


@pytest.mark.parametrize("refused", [False, True], ids=["once", "twice"])
async def test_what_is_offered_again_is_not_charged_again(refused: bool, clock: Clock) -> None:
    limit = Limit("user-1", "user", 600.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))
    async with Fleet(clock, FakeBackend(2.0), max_batch=100) as fleet:
        asked = [fleet.ask(f"text {number}", caller=caller, timeout=20.0) for number in range(10)]
        await asyncio.sleep(1.0)
        asked += [fleet.ask(f"late {number}", caller=caller, timeout=20.0) for number in range(10)]
        await asyncio.sleep(0.1)
        assert [one.replies for one in asked] == [[]] * 20
        fleet.server.lose_everything()
        if refused:
            fleet.server.script = once("enqueue", "refuse")
        fleet.server.cut()
        assert await fleet.answered(*asked) == ["ok"] * 20
        assert fleet.server.inner.rate_limit_debt(limit) == 0.0


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_what_is_on_its_way_is_not_offered_beside_it(
    large: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Two offers of one request could end in two ways: its client would be told the one, and the broker go by the other."""
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        fleet.server.script = once("enqueue", "refuse")
        enqueue = fleet.server.inner.enqueue

        async def slowly(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            await asyncio.sleep(0.6)
            return await enqueue(entries)

        fleet.server.inner.enqueue = slowly  # type: ignore[method-assign]
        if large:
            monkeypatch.setattr(type(fleet.server.inner), "apart_from", 10)
        text = "x" * 100
        assert await fleet.answered(fleet.ask(text)) == ["ok"]
        await asyncio.sleep(2.0)
        assert [entry.input for entry in offered(fleet)] == [text] * 2


async def test_what_was_never_charged_is_charged_when_it_is_offered_again(clock: Clock) -> None:
    limit = Limit("user-1", "user", 6.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        fleet.server.script = once("enqueue", "refuse")
        assert await fleet.answered(fleet.ask("hello", caller=caller)) == ["ok"]
        assert fleet.server.inner.rate_limit_debt(limit) == pytest.approx(10.0, abs=0.3)


async def test_a_broker_without_memory_may_refuse_what_it_has_and_is_not_believed(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0)) as fleet:
        held = fleet.ask("held")
        await asyncio.sleep(0.1)

        async def refuse(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            return [Failure(errors.SHED, "no memory", 1.0, "memory")] * len(entries)

        fleet.server.inner.enqueue = refuse  # type: ignore[method-assign]
        fleet.server.cut()
        await asyncio.sleep(0.5)
        assert await fleet.answered(fleet.ask("new")) == [errors.SHED]
        assert await fleet.answered(held) == ["ok"]


async def test_what_is_answered_while_it_is_offered_again_does_not_run_again(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.5), max_batch=1) as fleet:
        asked = fleet.ask("first")
        await asyncio.sleep(0.01)
        others = [fleet.ask(f"then {number}") for number in range(2)]
        await asyncio.sleep(0.1)
        real = fleet.server.inner.enqueue

        async def slow(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            await asyncio.sleep(0.5)
            return await real(entries)

        fleet.server.inner.enqueue = slow  # type: ignore[method-assign]
        fleet.server.cut()
        assert await fleet.answered(asked, *others) == ["ok"] * 3
        await asyncio.sleep(3)
        assert fleet.runs("first") == 1


async def test_a_task_that_is_refused_while_it_is_offered_again_does_not_run(clock: Clock) -> None:
    """Its first offer is under way when all that may be lost is offered again."""
    caller = Principal("somebody", "acme", 1, (Limit("user-1", "user", 6.0, 10.0),))
    over = Failure(errors.RATE_LIMITED, "over the limit", 1.0, "rate")
    async with Fleet(clock, FakeBackend(0.2)) as fleet:
        running = fleet.ask("running")
        await asyncio.sleep(0.1)
        overtaken = list[Entry]()

        async def enqueue(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            if any(entry.limits for entry in entries):
                await asyncio.sleep(0.8)
                return [over] * len(entries)
            overtaken.extend(entries)
            return [None] * len(entries)

        fleet.server.inner.enqueue = enqueue  # type: ignore[method-assign]
        fleet.server.cut()
        asked = fleet.ask("x", caller=caller, task=True)
        assert await fleet.answered(running, asked) == ["ok", errors.RATE_LIMITED]
        await asyncio.sleep(3.0)
        assert overtaken == []
        assert await fleet.gateway.outcome("acme", asked.id) is None
        assert fleet.runs("x") == 0


async def test_each_process_finds_out_for_itself_what_was_lost(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        other = Connection(fleet.server)
        await other.depths()
        fleet.server.lose_everything()
        known = other.epoch
        await other.depths()
        assert other.epoch != known


async def test_a_reply_that_is_read_again_is_not_told_again(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        asked = fleet.ask("x")
        await fleet.answered(asked)
        fleet.gateway.on_event(fleet.gateway._shared, Replied(asked.replies * 3))
        assert await fleet.answered(asked) == ["ok"]
        assert fleet.counters.gateway.requests == {("m", "paid", "ok"): 1}


async def test_a_refusal_of_what_is_offered_beside_clients_that_leave_is_no_outage(clock: Clock) -> None:
    """Entries are offered anew beside withdrawals, too: that alone says nothing of the broker."""
    async with Fleet(clock, FakeBackend(0.5), max_batch=1) as fleet:
        for number in range(6):
            fleet.ask(f"{number}", timeout=30.0, tier=2)
        await asyncio.sleep(0.6)
        leaves, hurried = fleet.ask("leaves", timeout=30.0), fleet.ask("hurried", timeout=0.2, tier=2)
        fleet.gateway.abandon(leaves, ANYBODY.tenant, leaves.id)
        await hurried.told.wait()
        assert hurried.reply.failure is not None
        assert hurried.reply.failure.reason != "broker"
