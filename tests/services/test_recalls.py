"""Recalls of kept outcomes: few calls at once, one call for all who ask for the same, and turns between tenants."""

from __future__ import annotations

import asyncio

import pytest

from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.gateway.broker_session import MOST_READS, OutcomeReader
from headway.model import EntryState, Reply, Value
from headway.runtime.counters import BrokerCounts
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.services.troubled import Connection, Server
from tests.virtual_time import Clock


class SlowRecalls(Connection):
    """Takes a second for each recall, and then tells how often this outcome was asked for; or fails, when it is `cut`."""

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


async def test_who_asks_while_a_call_is_under_way_is_not_told_what_that_one_brings(
    recalls: OutcomeReader, clock: Clock
) -> None:
    first = asking(recalls, "t", "a")
    await asyncio.sleep(0.9)
    later = asking(recalls, "t", "a", "a")
    assert await told(*first, *later) == ["call 1", "call 2", "call 2"]


async def test_few_calls_are_under_way_at_once_and_nobody_is_refused(
    broker: SlowRecalls, recalls: OutcomeReader, clock: Clock
) -> None:
    began = clock()
    ids = [f"{number}" for number in range(5 * MOST_READS)]
    assert await told(*asking(recalls, "t", *ids)) == ["call 1"] * len(ids)
    assert (broker.peak, clock() - began) == (MOST_READS, 5.0)


async def test_a_tenant_waits_for_one_turn_of_another_that_asks_for_much(recalls: OutcomeReader, clock: Clock) -> None:
    began = clock()
    many = asking(recalls, "greedy", *(f"{number}" for number in range(100)))
    await asyncio.sleep(0.5)
    one = asking(recalls, "modest", "one")
    assert await told(*one) == ["call 1"]
    assert clock() - began <= 2.0
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)


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
async def test_a_failure_is_for_those_it_was_made_for_and_an_outage_for_all(
    out_of_reach: bool, broker: SlowRecalls, clock: Clock
) -> None:
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
    assert await told(*asking(recalls, "t", "new")) == ["call 1"]  # Who comes later is tried for.


async def test_polls_of_one_task_at_a_gateway_share_their_calls(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0), gateways=2, model="m") as fleet:
        asked = fleet.ask("a", task=True)
        assert await fleet.answered(asked) == ["ok"]
        polls = [fleet.gateways[1].outcome(ANYBODY.tenant, asked.id) for _ in range(60)]
        found = await asyncio.gather(*polls)
        assert {one.output if isinstance(one, Reply) else None for one in found} == {"A"}
        assert len(fleet.server.named("recall")) == 1
