"""Tenants are isolated: whatever they and their requests are called, nobody gets another's answer or place."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.memory_watch import MemoryWatch
from headway.core.retention import OVERHEAD
from headway.model import Entry, EntryState, ItemResult, Lease, Limit
from tests.contracts.brokers import AT_ONCE, KEPT_LIMITS, ask, drained, leave, output, slot
from tests.contracts.dedup_keys import TTL, admit, key, run_alone, same, sharing, task
from tests.redis.stand import Stand
from tests.servers.redis import RedisServer

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.text("\0:{}!ab", max_size=4)
IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8) | st.text(
    ":{}!ab", max_size=4
)


numbers = itertools.count()


@given(asked=st.lists(st.tuples(NAMES, IDS), min_size=1, max_size=12, unique=True))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@settings(max_examples=20)
def test_keys_are_alike_only_when_tenant_and_id_are(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (wire.key_of(*one) == wire.key_of(*other)) == (one == other)


def test_an_id_that_would_make_keys_ambiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        wire.key_of("t", "a\0b")
    with pytest.raises(ValueError, match="NUL"):
        entry_wire.pack_head(ask(id="a\0b"))


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a\0"), ("a\0b", "a\0c"), ("", "\0"), ("{a}", "{a")])
async def test_tenants_have_their_own_turns_whatever_they_are_called(harness: Stand, names: tuple[str, str]) -> None:
    """A flood from one doesn't hold up the other, as it would if they were mistaken for one tenant."""
    flood, guest = names
    await harness.broker.enqueue([ask(tenant=flood) for _ in range(20)])
    await harness.broker.enqueue([ask(tenant=guest) for _ in range(2)])
    lease = await harness.claim()
    assert [rider.tenant for rider in lease.entries].count(guest) == 2


KEY = Limit("key:k", "key", 600.0, 50.0)
COUNTS = "headway:{limits}:w"


async def test_nothing_is_left_when_nothing_is_owed(harness: Stand) -> None:
    others = [Limit(f"user:{number}", "user", 60.0, 5.0) for number in range(20)]
    entries = [ask(limits=(KEY, other)) for other in others]
    await harness.broker.enqueue(entries)
    assert harness.server.command("ZCARD", COUNTS) == 1 + len(others) + 1
    await leave(harness.broker, *entries)
    await harness.reaping(1.1)
    assert harness.server.command("EXISTS", COUNTS) == 1
    await harness.reaping(1.0)
    assert harness.server.command("EXISTS", COUNTS) == 0


@pytest.mark.parametrize("step", [-3600.0, -1.0, -0.1])
async def test_the_clock_is_put_back_and_nobody_is_locked_out(harness: Stand, step: float) -> None:
    await harness.broker.enqueue([ask(limits=(KEY,)) for _ in range(50)])
    harness.clock_error += step
    [verdict] = await harness.peer().enqueue([ask(limits=(KEY,))])
    assert verdict is not None
    assert verdict.retry_after == pytest.approx(0.1, abs=0.11)
    await harness.advance(1.0 + (abs(step) if step > -0.5 else 0.0))
    verdicts = await harness.peer().enqueue([ask(tenant=f"t-{number}", limits=(KEY,)) for number in range(12)])
    assert [verdict is None for verdict in verdicts] == [True] * 10 + [False] * 2


async def test_what_is_owed_is_forgotten_with_the_servers_state(harness: Stand) -> None:
    await harness.broker.enqueue([ask(limits=(KEY,)) for _ in range(50)])
    assert harness.broker.rate_limit_debt(KEY) == pytest.approx(5.0)
    harness.server.flush()
    await harness.advance(0.1)
    await harness.broker.reap()
    assert harness.broker.rate_limit_debt(KEY) == 0.0


def test_a_limit_of_a_tier_is_spread_over_counts_and_others_are_not() -> None:
    tier, user = Limit("tier:1", "tier", 600.0, 2.0), Limit("user:u", "user", 600.0, 2.0)
    assert [entry_wire._pack_limit(limit, 4) for limit in (tier, user)] == [("tier:1", 0.4, 0.4), ("user:u", 0.1, 0.2)]
    assert entry_wire.pack_extras([ask()], [], 4) == b""


async def test_a_tier_is_owed_its_mean_and_others_the_most(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits across tenants are spread over two counts."""
    tier, user = Limit("tier:1", "tier", 600.0, 2.0), Limit("user:u", "user", 600.0, 2.0)
    debts = [SimpleNamespace(seconds=lambda limit, owed=owed: owed) for owed in (3.0, 1.0)]
    shards = [SimpleNamespace(counts=2, debts=owed) for owed in debts]
    monkeypatch.setattr(harness.broker, "_queues", {"m": shards})
    assert isinstance(harness.broker, RedisBroker)
    assert [RedisBroker.rate_limit_debt(harness.broker, limit) for limit in (tier, user)] == [2.0, 3.0]


def lasting(harness: Stand) -> dict[str, int]:
    """The kept outcomes, with their remaining milliseconds."""
    there = harness.keys()
    kept = [name for name in there if name.startswith("k:")]
    return {name.split("\0")[-1]: harness.server.command("PTTL", harness.key(name)) for name in kept}


async def test_what_has_ended_by_the_servers_clock_is_not_found(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run_alone(harness, "first")
    assert len(lasting(harness)) == 2
    harness.clock_error -= 1000.0  # The clock goes back, but nothing is kept longer than planned.
    await harness.broker.reap()
    assert await harness.broker.outcome("t", "first") is None
    harness.clock_error += 1000.0 + 2 * TTL
    await admit(harness, sharing("second", key()))
    await run_alone(harness, "second")


async def test_in_a_shortage_shared_outputs_are_not_kept(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await admit(harness, sharing("first", task("first"), key(), same()), sharing("second", key()))
    lease = await harness.claim()
    monkeypatch.setattr(MemoryWatch, "pressure", True)
    await harness.answer(lease)
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == dict.fromkeys(
        ["first", "second"], output("asked")
    )
    assert set(lasting(harness)) == {"first", "k"}
    monkeypatch.undo()
    await admit(harness, sharing("third", same()))
    await run_alone(harness, "third")


def test_what_is_kept_is_counted_over_all_shards_of_a_server(kind: str, own: Callable[[str], RedisServer]) -> None:
    """Ten tenants together keep more than is allowed. What is dropped may be in any shard."""
    harness = Stand(own(kind), shards=4)

    workers = [f"gpu-{number}" for number in range(12)]

    async def keep_all() -> list[int]:
        await harness.healthy(*workers)
        for number in range(40):
            await admit(harness, sharing(f"{number}", task(f"{number}"), tenant=f"tenant {number % 10}"))
            for worker in workers:
                claimed = await harness.broker.claim(slot(worker), AT_ONCE)
                if isinstance(claimed, Lease):
                    await harness.broker.complete(claimed, [ItemResult("x" * 12_000)])
                    break
        found = [await harness.peer().outcome(f"tenant {number % 10}", f"{number}") for number in range(40)]
        return [number for number, reply in enumerate(found) if reply is not None]

    kept = harness.run(keep_all())
    harness.close()
    assert len(kept) == KEPT_LIMITS.total // (12_000 + OVERHEAD)
    assert set(kept) >= {*range(30, 40)}, "the newest of each"
