"""Tenants do not meet: whatever they and their requests are called, nobody gets another's answer or place."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.brokers.redis import entry_wire, wire
from headway.model import Entry, EntryState
from tests.contracts.brokers import MAX_QUEUE, ask, drained, leave, output
from tests.redis.stand import Stand

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.text("\0:{}!ab", max_size=4)
IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8) | st.text(
    ":{}!ab", max_size=4
)


numbers = itertools.count()


@given(asked=st.lists(st.tuples(NAMES, IDS), min_size=1, max_size=12, unique=True))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everybody_gets_their_own_answer_whatever_they_are_called(harness: Stand, asked: list[tuple[str, str]]) -> None:
    async def tell() -> None:
        harness.server.flush()
        gateway = f"gateway {next(numbers)}"
        entries = [ask(f"{number}", tenant=tenant, id=id, gateway=gateway) for number, (tenant, id) in enumerate(asked)]
        assert await harness.broker.enqueue(entries) == [None] * len(entries)
        for entry in entries:
            assert await harness.peer().state(entry.tenant, entry.id) is EntryState.QUEUED
        gone, *others = entries
        await leave(harness.peer(), gone)
        ran: list[Entry] = []
        while len(ran) < len(others):
            lease = await harness.claim()
            ran += lease.entries
            await harness.answer(lease)
        assert sorted(str(rider.input) for rider in ran) == sorted(str(entry.input) for entry in others)
        if others:
            replies, cursor = await harness.broker.replies(gateway, 0)
            told = {(reply.tenant, reply.id): reply.output for reply in replies}
            assert told == {(entry.tenant, entry.id): output(entry.input) for entry in others}
            assert cursor == len(others)

    harness.run(tell())


@given(one=st.tuples(NAMES, IDS), other=st.tuples(NAMES, IDS))
def test_keys_are_alike_only_when_tenant_and_id_are(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (wire.key_of(*one) == wire.key_of(*other)) == (one == other)


def test_an_id_that_would_make_keys_ambiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        wire.key_of("t", "a\0b")
    with pytest.raises(ValueError, match="NUL"):
        entry_wire.pack_head(ask(id="a\0b"))


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a\0"), ("a\0b", "a\0c"), ("", "\0"), ("{a}", "{a")])
async def test_tenants_have_their_own_turns_whatever_they_are_called(harness: Stand, names: tuple[str, str]) -> None:
    """A flood of one does not push the other back, as it would if they were taken for the same."""
    flood, guest = names
    await harness.broker.enqueue([ask(tenant=flood) for _ in range(20)])
    await harness.broker.enqueue([ask(tenant=guest) for _ in range(2)])
    lease = await harness.claim()
    assert [rider.tenant for rider in lease.entries].count(guest) == 2


async def test_a_reply_without_an_output_names_its_tenant_too(harness: Stand) -> None:
    await harness.broker.enqueue([ask(tenant="ä\0:", id="late", queue_timeout=0.1)])
    await harness.reaping(0.5)
    reply = (await drained(harness))["late"]
    assert (reply.tenant, reply.output) == ("ä\0:", None)


async def test_entries_of_each_tenant_are_counted_only_while_many_wait(harness: Stand) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    assert "tw" in harness.keys(model="m")
    while "tw" in harness.keys(model="m"):
        await harness.answer(await harness.claim())
    assert sum(one.depth for one in await harness.broker.depths()) > 0
