"""What waits at a gateway for a call to the broker: short calls, in turns, and none for those who have left."""

from __future__ import annotations

import asyncio
from itertools import count

from headway.gateway.broker_session import MOST_OFFERED
from headway.gateway.outbox import Outbox
from headway.model import Entry
from tests.contracts.brokers import ask, ids
from tests.services.calls import offered, once
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.virtual_time import Clock


def filled(**tenants: int) -> Outbox:
    """An outbox with so many entries of each tenant, which came one tenant after the other."""
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


def test_what_fits_into_one_call_goes_in_the_order_in_which_it_came() -> None:
    assert ids(filled(a=2, b=1).take(3)) == ["a0", "a1", "b0"]


def test_what_comes_back_from_a_call_goes_first_of_its_tenant() -> None:
    outbox = filled(a=4, b=4)
    taken = outbox.take(4)
    outbox.put_back(taken)
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


async def test_a_request_waits_for_no_more_than_a_share_of_anothers_parts(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.1), max_batch=100) as fleet:
        session = fleet.gateway._session
        fleet.server.script = once("enqueue", "stall")
        session.offer(ask(id="first", nonce=1, tenant="greedy"))
        await asyncio.sleep(0.01)  # Its call is under way.
        for nonce in range(2, 400):
            session.offer(ask(id=f"{nonce}", nonce=nonce, tenant="greedy"))
        session.offer(ask(id="modest", nonce=400, tenant="modest"))
        await fleet.server.become("fine")
        await asyncio.sleep(0.1)
        calls = [ids(entries) for _, _, entries in fleet.server.named("enqueue")]
        assert max(map(len, calls)) == MOST_OFFERED
        assert [at for at, call in enumerate(calls) if "modest" in call] == [1]


async def test_who_leaves_before_being_offered_costs_the_broker_no_call(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        await fleet.answered(fleet.ask("so that all is known"))
        before, withdrawn = len(fleet.server.named("enqueue")), len(fleet.server.named("withdraw"))
        gone, there = fleet.ask("gone"), fleet.ask("there")
        fleet.gateway.abandon(gone, ANYBODY.tenant, gone.id)
        assert await fleet.answered(there) == ["ok"]
        assert [entry.input for entry in offered(fleet, before)] == ["there"]
        assert len(fleet.server.named("withdraw")) == withdrawn
