"""Answers in common as they lie in the server: between gateways, after losses, when memory runs out, and what is left."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.connection import RedisConnection
from headway.core.retention import OVERHEAD
from headway.model import Entry, ItemResult, Lease, Reply
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, KEPT_LIMITS, ask, failed, holds, output, slot
from tests.contracts.dedup_keys import TTL, admit, key, nothing_runs, poll, run_alone, same, sharing, task
from tests.redis.stand import Stand
from tests.redis.test_leftovers import FIGURES, HOUSEKEEPING, LETTERS, acknowledged
from tests.servers.redis import RedisServer


async def heard(broker: Broker, gateway: str) -> dict[str, Reply]:
    replies, _ = await broker.replies(gateway, 0)
    return {reply.id: reply for reply in replies}


async def test_after_a_loss_the_first_that_comes_again_leads(harness: Stand) -> None:
    first, second = sharing("first", key(), same(), gateway="g1"), sharing("second", key(), gateway="g2")
    await admit(harness, first)
    assert list(await harness.peer().enqueue([second])) == [None]
    before = await harness.claim()
    harness.server.flush()
    assert list(await harness.peer().enqueue([second])) == [None]
    await admit(harness, first)
    assert (await harness.broker.complete(before, [ItemResult("lost")])).fenced
    await run_alone(harness, "second")
    await nothing_runs(harness)
    assert (await heard(harness.broker, "g1"))["first"].output == output("asked")
    assert (await heard(harness.peer(), "g2"))["second"].output == output("asked")


async def test_a_leader_that_ended_unnoticed_leads_nobody(harness: Stand) -> None:
    """A worker of an earlier release has answered the leader."""
    await admit(harness, sharing("first", same()), sharing("second", same()))
    await harness.claim()
    harness.server.command("HSET", harness.key("e"), wire.key_of("t", "first"), b"!g")
    await admit(harness, sharing("third", same()))
    await run_alone(harness, "third")
    assert {"second", "third"} <= set(await heard(harness.broker, "g"))


def lasting(harness: Stand) -> dict[str, int]:
    """The outcomes that are kept, and for how many milliseconds."""
    there = harness.keys()
    kept = [name for name in there if name.startswith("k:")]
    return {name.split("\0")[-1]: harness.server.command("PTTL", harness.key(name)) for name in kept}


async def test_what_is_kept_ends_and_nothing_else_is_left(harness: Stand) -> None:
    await harness.healthy("gpu-0")
    for round in range(3):
        one = f"one {round}"
        await admit(
            harness,
            sharing(one, task(one), key(one), same(one), tenant="t"),
            sharing(f"two {round}", key(one), same(f"other {round}", keep=0.0)),
            sharing(f"left {round}", key(one)),
            sharing(f"hasty {round}", same(one), timeout=0.1),
            poll(f"poll {round}", one),
        )
        await harness.broker.withdraw([("t", f"left {round}", 0)], "g")
        if round == 1:
            await harness.broker.cancel_task("t", one)
        if round == 2:
            await harness.broker.release(await harness.claim(), failed())
        await harness.reaping(0.5)
        await harness.answer(await harness.claim())
        await admit(harness, sharing(f"hit {round}", key(one)))
    await admit(harness, sharing("gone", same()), sharing("too", same()))
    await harness.broker.withdraw([("t", "gone", 0), ("t", "too", 0)], "g")
    assert await acknowledged(harness) >= 3 * 4
    await harness.healthy("gpu-0")
    await harness.reaping(1.0)
    kept = lasting(harness)
    assert {name.removesuffix("#") for name in kept} == {"one 0", "one 1", "one 2"}
    assert all(0 < left <= TTL * 1000 for left in kept.values())
    there = harness.keys()
    assert {name for name in there if not name.startswith("k:")} <= FIGURES | HOUSEKEEPING | LETTERS | {"r:g"}
    await harness.broker.cancel_task("t", "one 0")
    assert await harness.broker.outcome("t", "one 0") is None


async def test_what_has_ended_by_the_servers_clock_is_not_found(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run_alone(harness, "first")
    assert len(lasting(harness)) == 2
    harness.clock_error -= 1000.0  # The clock is put back: nothing is kept for longer than it was to be.
    await harness.broker.reap()
    assert await harness.broker.outcome("t", "first") is None
    harness.clock_error += 1000.0 + 2 * TTL
    await admit(harness, sharing("second", key()))
    await run_alone(harness, "second")


async def test_in_a_shortage_shared_outputs_are_not_kept(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await admit(harness, sharing("first", task("first"), key(), same()), sharing("second", key()))
    lease = await harness.claim()
    monkeypatch.setattr(RedisConnection, "memory_pressure", True)
    await harness.answer(lease)
    assert {id: reply.output for id, reply in (await heard(harness.broker, "g")).items()} == dict.fromkeys(
        ["first", "second"], output("asked")
    )
    assert set(lasting(harness)) == {"first", "k"}
    monkeypatch.undo()
    await admit(harness, sharing("third", same()))
    await run_alone(harness, "third")


class _Entry0(msgspec.Struct, array_like=True):
    """An entry as a release without shares writes it."""

    schema: int
    id: str
    model: str
    input: str
    tier: int
    tenant: str
    gateway: str
    queue_timeout: float
    timeout: float
    parameters: bytes = b""


def test_releases_with_and_without_shares_read_each_others_entries() -> None:
    entry = sharing("id", task("id"), key(), same(joins=False))
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))).dedup_keys == entry.dedup_keys
    plain: Entry = ask(id="plain")
    theirs = msgspec.msgpack.decode(entry_wire.pack_entry(entry), type=_Entry0)
    assert (theirs.id, theirs.timeout) == (entry.id, entry.timeout)
    fields: Sequence[object] = msgspec.structs.astuple(
        _Entry0(wire.SCHEMA, "plain", "m", str(plain.input), 1, "t", "g", 60.0, 120.0)
    )
    assert entry_wire.entry_of(entry_wire.read_payload(msgspec.msgpack.encode(fields))) == plain


async def test_an_entry_without_shares_leaves_no_record(harness: Stand) -> None:
    await admit(harness, ask(id="plain"))
    assert not harness.keys() & {"v", "vs", "vd"}
    await harness.broker.withdraw([("t", "plain", 0)], "g")
    holds(await harness.broker.claim(slot(), AT_ONCE))
    assert await acknowledged(harness) == 0


def test_what_is_kept_is_counted_over_all_shards_of_a_server(kind: str, own: Callable[[str], RedisServer]) -> None:
    """Twenty tenants keep more than there may be together; what goes lies in whatever shard."""
    harness = Stand(own(kind), shards=4)

    workers = [f"gpu-{number}" for number in range(12)]

    async def keep_all() -> list[int]:
        await harness.healthy(*workers)
        for number in range(60):
            await admit(harness, sharing(f"{number}", task(f"{number}"), tenant=f"tenant {number % 20}"))
            for worker in workers:
                claimed = await harness.broker.claim(slot(worker), AT_ONCE)
                if isinstance(claimed, Lease):
                    await harness.broker.complete(claimed, [ItemResult("x" * 12_000)])
                    break
        found = [await harness.peer().outcome(f"tenant {number % 20}", f"{number}") for number in range(60)]
        return [number for number, reply in enumerate(found) if reply is not None]

    kept = harness.run(keep_all())
    harness.close()
    assert len(kept) == KEPT_LIMITS.total // (12_000 + OVERHEAD)
    assert set(kept) >= {*range(40, 60)}, "the newest of each"
