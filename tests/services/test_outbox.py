"""What waits in a gateway: calls to the broker, small or large, recalls of stored outcomes, and replies to pass on."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest

from headway.core.dedup import follower
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.gateway import broker_session
from headway.gateway.broker_session import (
    AT_ONCE,
    CHUNK,
    LARGE,
    MOST_OFFERED,
    MOST_READS,
    MOST_REPLIES,
    LargeEntries,
    Outbox,
    OutcomeReader,
    in_turns,
)
from headway.model import Entry, EntryState, Failure, Octets, Reply, Value
from headway.runtime.counters import BrokerCounts
from headway.runtime.fair_turns import FairSlots
from headway.runtime.race import end
from tests.contracts.brokers import ask, ids
from tests.services.calls import offered, once
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.services.troubled import Connection, Server
from tests.virtual_time import Clock


def filled(**tenants: int) -> Outbox:
    outbox, nonces = Outbox(), count(1)
    for tenant, number in tenants.items():
        for at in range(number):
            add(outbox, ask(id=f"{tenant}{at}", tenant=tenant, nonce=next(nonces)))
    return outbox


def add(outbox: Outbox, entry: Entry) -> None:
    outbox.fresh[entry.nonce] = entry


def test_tenants_take_turns_in_a_call_that_does_not_take_all() -> None:
    outbox = filled(a=5, b=2, c=1)
    assert ids(outbox.take(4)) == ["a0", "b0", "c0", "a1"]
    add(outbox, ask(id="d0", tenant="d", nonce=100))
    assert len(outbox) == 5
    assert ids(outbox.take(3)) == ["b1", "a2", "d0"]
    assert ids(outbox.take(3)) == ["a3", "a4"]
    assert (len(outbox), outbox.take(3)) == (0, [])
    assert ids(filled(a=2, b=1).take(3)) == ["a0", "a1", "b0"], "what fits into one call keeps its order"


def test_what_comes_back_from_a_call_goes_first_of_its_tenant() -> None:
    outbox = filled(a=4, b=4)
    outbox.put_back(outbox.take(4))
    assert len(outbox) == 8
    found = ids(outbox.take(8))
    assert [id for id in found if id[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [id for id in found if id[0] == "b"] == ["b0", "b1", "b2", "b3"]


def test_an_entry_is_dropped_wherever_it_waits_and_once() -> None:
    outbox = filled(a=3, b=1)
    entries = list(outbox)
    assert outbox.drop(entries[1].submission)
    assert not outbox.drop(entries[1].submission)
    assert ids(outbox.take(1)) == ["a0"]
    assert outbox.drop(entries[3].submission)
    assert not outbox.drop(entries[0].submission)
    assert (len(outbox), ids(list(outbox))) == (1, ["a2"])
    outbox.keep(lambda entry: False)
    assert (len(outbox), outbox.take(1)) == (0, [])


@pytest.mark.fleet(max_batch=100)
async def test_a_request_waits_for_no_more_than_a_share_of_anothers_parts(fleet: Fleet) -> None:
    session = fleet.gateway._session
    fleet.server.script = once("enqueue", "stall")
    session.offer(ask(id="first", nonce=1, tenant="greedy"))
    await asyncio.sleep(0.01)  # Its call is now in flight.
    for nonce in range(2, 400):
        session.offer(ask(id=f"{nonce}", nonce=nonce, tenant="greedy"))
    session.offer(ask(id="modest", nonce=400, tenant="modest"))
    await fleet.server.become("fine")
    await asyncio.sleep(0.1)
    calls = [ids(entries) for _, _, entries in fleet.server.named("enqueue")]
    assert max(map(len, calls)) == MOST_OFFERED
    assert [at for at, call in enumerate(calls) if "modest" in call] == [1]


async def test_what_fills_calls_does_not_gather(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "linger", 0.05)
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        await fleet.answered(fleet.ask("so that it has been called"))
        before, began = len(fleet.server.named("enqueue")), clock()
        for nonce in range(1000, 1000 + 5 * MOST_OFFERED):
            fleet.gateway._session.offer(ask(id=f"{nonce}", nonce=nonce))
        await asyncio.sleep(1.0)
        calls = fleet.server.named("enqueue")[before:]
        assert [len(entries) for _, _, entries in calls] == [MOST_OFFERED] * 5
        assert calls[-1][0] - began < 0.05


@pytest.mark.fleet(max_batch=100)
async def test_requests_in_a_rush_go_to_the_broker_together_and_a_lone_one_goes_at_once(fleet: Fleet) -> None:
    for number in range(300):
        fleet.ask(f"{number}")
        await asyncio.sleep(0.0001)
    await asyncio.sleep(10)
    sizes = [len(entries) for _, _, entries in fleet.server.named("enqueue")]
    assert sum(sizes) == 300
    assert len(sizes) < 150
    assert await fleet.answered(lone := fleet.ask("lone")) == ["ok"]
    assert fleet.server.named("enqueue")[-1][0] == lone.at


async def test_a_request_waits_for_no_more_than_a_share_of_the_withdrawals(fleet: Fleet) -> None:
    await fleet.answered(fleet.ask("so that all is known"))
    session, before = fleet.gateway._session, len(fleet.server.calls)
    departed = [ask(id=f"{nonce}", nonce=nonce, tenant="greedy") for nonce in range(1000, 1000 + 3 * CHUNK)]
    for entry in departed:
        session.withdraw(entry.submission)
    session.offer(ask(id="modest", nonce=1, tenant="modest"))
    session.offer(
        ask(id=departed[-1].id, nonce=2, tenant="greedy")
    )  # It has to wait for the withdrawal with the same id.
    await asyncio.sleep(0.1)
    calls = [(name, len(what)) for _, name, what in fleet.server.calls[before:] if name in ("withdraw", "enqueue")]
    assert calls == [("withdraw", CHUNK), ("enqueue", 1), ("withdraw", CHUNK), ("withdraw", CHUNK), ("enqueue", 1)]
    assert [entry.nonce for entry in offered(fleet)][-2:] == [1, 2]
    assert not session._departed_ids, "what is withdrawn is forgotten"


class Line(LargeEntries):
    """A line whose `calls` has the ids of each call. Calls end when `go` is released, or immediately with `at_once`."""

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__(self._note_call)
        self.calls = asyncio.Queue[list[str]]()
        self.go = asyncio.Semaphore(1_000 if at_once else 0)

    async def _note_call(self, entries: Sequence[Entry]) -> None:
        self.calls.put_nowait(ids(entries))
        await self.go.acquire()
        raise BrokerUnavailable("away")  # This doesn't end the line.


@asynccontextmanager
async def running(line: Line) -> AsyncIterator[Line]:
    task = asyncio.ensure_future(line.run())
    yield line
    task.cancel()


async def test_large_entries_go_in_order_some_at_once_and_who_follows_one_goes_behind_it() -> None:
    async with running(Line()) as line:
        large = [ask("x" * 20, id=f"{number}") for number in range(AT_ONCE + 2)]
        small = ask("x", id="small")
        assert line.split([large[0], small, *large[1:]], 10) == ([small], [])
        assert await line.calls.get() == [f"{number}" for number in range(AT_ONCE)]
        on_its_way, waits, elsewhere, another = (
            follower(f"of {task}", task, tenant, "g", 60.0)
            for task, tenant in (("0", "t"), (f"{AT_ONCE}", "t"), ("small", "t"), ("0", "t2"))
        )
        assert line.split([on_its_way, waits, elsewhere, another], 10) == ([elsewhere, another], [])
        line.go.release()
        assert await line.calls.get() == [f"{AT_ONCE}", f"{AT_ONCE + 1}", "of 0", f"of {AT_ONCE}"]
        line.go.release()
        for _ in range(3):
            await asyncio.sleep(0)
        assert line.split([waits], 10) == ([waits], []), "its task has been offered"


async def test_who_follows_a_large_task_of_the_same_call_goes_behind_it() -> None:
    line = Line()
    large, small = ask("x" * 20, id="large"), ask("x", id="small")
    following = [follower(f"of {task}", task, "t", "g", 60.0) for task in ("large", "small")]
    assert line.split([large, small, *following], 10) == ([small, following[1]], [])
    assert ids(list(line.waiting)) == ["large", "of large"]


async def test_a_tenant_with_many_keeps_no_other_waiting_for_all_of_them() -> None:
    async with running(Line()) as line:
        line.split([ask("x" * 20, id=f"{number}", tenant="greedy") for number in range(3 * AT_ONCE)], 10)
        assert await line.calls.get() == [f"{number}" for number in range(AT_ONCE)]
        line.split([ask("x" * 20, id=id, tenant="modest") for id in ("a", "b")], 10)
        line.go.release()
        left = AT_ONCE - 2
        assert await line.calls.get() == ["8", "a", "9", "b", *(f"{AT_ONCE + number}" for number in range(2, left))]
        line.go.release()
        assert await line.calls.get() == [f"{AT_ONCE + left + number}" for number in range(AT_ONCE)]


async def test_the_turns_of_tenants_go_on_from_call_to_call() -> None:
    tenants = [f"tenant {number}" for number in range(AT_ONCE + 2)]
    async with running(Line(at_once=True)) as line:
        line.split([ask("x" * 20, id=f"{tenant} {n}", tenant=tenant) for n in range(2) for tenant in tenants], 10)
        order = [id for _ in range(3) for id in await line.calls.get()]
        assert order == [f"{tenant} {n}" for n in range(2) for tenant in tenants]


async def test_no_further_entry_joins_a_call_that_has_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry waits until all inputs in its call are stored."""
    monkeypatch.setattr(broker_session, "MOST_BYTES", 100)
    async with running(Line(at_once=True)) as line:
        line.split([ask("x" * size, id=f"{size}") for size in (60, 61, 200, 62, 20, 30)], 10)
        assert [await line.calls.get() for _ in range(3)] == [["60", "61"], ["200"], ["62", "20", "30"]]


def test_what_another_session_has_taken_over_waits_no_longer() -> None:
    line = Line()
    line.split([ask("x" * 20, id=f"{n}", tenant=f"{n % 2}") for n in range(5)], 10)
    line.waiting.keep(lambda entry: entry.id in ("1", "4"))
    assert sorted(ids(list(line.waiting))) == ["1", "4"]
    assert len(line.waiting) == 2


def test_small_replies_go_first_and_together_as_many_as_a_turn_takes() -> None:
    sizes = {"a": 0, "b": LARGE, "c": 5, "d": LARGE - 1, "e": LARGE + 1}
    replies = [Reply(id, "t", Octets(b"x" * size)) for id, size in sizes.items()]
    replies.append(Reply("f", "t", None, Failure("INTERNAL", "no")))
    assert [[reply.id for reply in turn] for turn in in_turns(replies)] == [["a", "c", "d", "f"], ["b"], ["e"]]
    assert [[reply.id for reply in turn] for turn in in_turns([replies[1]])] == [["b"]]
    assert in_turns(replies[:1]) == [replies[:1]]
    many = [Reply(f"{number}", "t", "x") for number in range(2 * MOST_REPLIES + 3)]
    assert [len(turn) for turn in in_turns(many)] == [MOST_REPLIES, MOST_REPLIES, 3]
    assert [reply for turn in in_turns(many) for reply in turn] == many
    assert list(map(len, in_turns([*many, replies[1]])))[-2:] == [3, 1]


async def test_a_place_is_given_on_by_who_fails_and_who_leaves_as_it_comes(clock: Clock) -> None:
    slots, begun = FairSlots(1), list[str]()

    async def act(name: str) -> None:
        async with slots.of(name):
            begun.append(name)

    with pytest.raises(ValueError, match="lost"):
        async with slots.of("z"):
            waited, left, stays = [asyncio.ensure_future(act(name)) for name in "abc"]
            await asyncio.sleep(0)
            waited.cancel()
            raise ValueError("lost")
    left.cancel()  # It got the place in this turn of the loop, but hasn't resumed yet.
    await stays
    assert begun == ["c"]


class SlowRecalls(Connection):
    """Takes a second for each recall, then returns how often the outcome was requested, or fails if `cut`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Server(clock, QueueLimits(tiers=3, max_batch=8), BrokerCounts()))
        self.asked: list[tuple[str, str]] = []
        self.cut = False
        self.under_way = 0
        self.peak = 0

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        self.asked.append((tenant, id))
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        nth = self.asked.count((tenant, id))
        try:
            await asyncio.sleep(1.0)
        finally:
            self.under_way -= 1
        if self.cut:
            raise BrokerUnavailable("no answer")
        return Reply(id, tenant, f"call {nth}", None)


@pytest.fixture
def broker(clock: Clock) -> SlowRecalls:
    return SlowRecalls(clock)


@pytest.fixture
def recalls(broker: SlowRecalls) -> OutcomeReader:
    return OutcomeReader(broker, lambda: False)


def asking(recalls: OutcomeReader, tenant: str, *ids: str) -> list[asyncio.Task[Reply | EntryState | None]]:
    return [asyncio.ensure_future(recalls.outcome(tenant, id)) for id in ids]


async def told(*tasks: asyncio.Task[Reply | EntryState | None]) -> list[Value | None]:
    found = await asyncio.gather(*tasks)
    return [one.output if isinstance(one, Reply) else None for one in found]


async def test_many_who_ask_for_one_outcome_cost_two_calls(
    broker: SlowRecalls, recalls: OutcomeReader, clock: Clock
) -> None:
    began = clock()
    first = asking(recalls, "t", "big")
    await asyncio.sleep(0.5)
    assert await told(*first, *asking(recalls, "t", *["big"] * 59)) == ["call 1"] + ["call 2"] * 59
    assert (broker.peak, clock() - began) == (1, 2.0)


async def test_few_calls_run_and_nobody_is_refused(broker: SlowRecalls, recalls: OutcomeReader, clock: Clock) -> None:
    began = clock()
    ids = [f"{number}" for number in range(5 * MOST_READS)]
    assert await told(*asking(recalls, "t", *ids)) == ["call 1"] * len(ids)
    assert (broker.peak, clock() - began) == (MOST_READS, 5.0)


async def test_a_tenant_waits_for_one_turn_of_another_that_asks_for_much(recalls: OutcomeReader, clock: Clock) -> None:
    began = clock()
    many = asking(recalls, "greedy", *(f"{number}" for number in range(100)))
    await asyncio.sleep(0.5)
    assert await told(*asking(recalls, "modest", "one")) == ["call 1"]
    assert clock() - began <= 2.0
    await end(*many)


async def test_who_has_left_costs_no_call(broker: SlowRecalls, recalls: OutcomeReader, clock: Clock) -> None:
    first = asking(recalls, "t", *(f"{number}" for number in range(MOST_READS)))
    left = asking(recalls, "t", "left", "also")
    await asyncio.sleep(0.5)
    stays = asking(recalls, "t", "also")
    for task in left:
        task.cancel()
    assert await told(*first, *stays) == ["call 1"] * (MOST_READS + 1)
    assert ("t", "left") not in broker.asked


@pytest.mark.parametrize("out_of_reach", [False, True])
async def test_failures_are_for_askers_outages_for_all(out_of_reach: bool, broker: SlowRecalls, clock: Clock) -> None:
    began = clock()
    recalls = OutcomeReader(broker, lambda: out_of_reach)
    tasks = asking(recalls, "t", *(f"{number}" for number in range(10 * MOST_READS)))
    await asyncio.sleep(0.5)
    broker.cut = True
    await asyncio.wait(tasks[:MOST_READS])
    broker.cut = False
    failed = [isinstance(one, BrokerUnavailable) for one in await asyncio.gather(*tasks, return_exceptions=True)]
    assert failed == [place < MOST_READS or out_of_reach for place in range(len(tasks))]
    assert clock() - began == (1.0 if out_of_reach else 10.0)
    assert await told(*asking(recalls, "t", "new")) == ["call 1"]  # Later requests are still tried.


@pytest.mark.fleet(1.0, gateways=2, model="m")
async def test_polls_of_one_task_at_a_gateway_share_their_calls(fleet: Fleet) -> None:
    asked = fleet.ask("a", task=True)
    assert await fleet.answered(asked) == ["ok"]
    polls = [fleet.gateways[1].outcome(ANYBODY.tenant, asked.id) for _ in range(60)]
    found = await asyncio.gather(*polls)
    assert {one.output if isinstance(one, Reply) else None for one in found} == {"A"}
    assert len(fleet.server.named("recall")) == 1
