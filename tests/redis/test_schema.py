"""Releases side by side: data from other releases, functions of two, and data that no release should have."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from headway import errors
from headway.brokers.redis import entry_wire, function_library, wire
from headway.brokers.redis.connection import RedisConnection
from headway.model import Capacity, DedupKey, DedupKind, Entry, Failure, ItemResult, Lease, NoWork, Octets
from tests.contracts.brokers import AT_ONCE, ask, attend, drained, fail_all, failure_of, granted, ids, output, slot
from tests.redis.stand import Stand

pack_entry = entry_wire.pack_entry


def of_release(later: int) -> Callable[[Entry], bytes]:
    """A packer as in the release `later` releases from now, with unknown members."""

    def pack(entry: Entry) -> bytes:
        schema, *members = msgspec.msgpack.decode(wire.encode(entry_wire.StoredEntry(*msgspec.structs.astuple(entry))))
        return msgspec.msgpack.encode([schema + later, *members, "new", {"newer": 1}])

    return pack


def packing(
    pack: Callable[[Entry], bytes],
) -> Callable[[Sequence[Entry], float], tuple[list[bytes], dict[int, Entry], bool]]:
    """A packer for the entries of a call that uses `pack` for each."""

    def pack_small(entries: Sequence[Entry], threshold: float) -> tuple[list[bytes], dict[int, Entry], bool]:
        return [part for one in entries for part in (entry_wire.pack_head(one), pack(one))], {}, True

    return pack_small


def test_entries_of_a_call_are_packed_as_each_by_itself() -> None:
    usual = ask("text", id="a")
    others: list[dict[str, Any]] = [
        {"tenant": "größer", "id": "b"}, {"tier": 2, "timeout": 7.0}, {"parameters": b'{"a":1}'}, {"gateway": "other", "nonce": 7},
        {"version": "3", "pinned": True}, {"caller": "c", "weight": 9}, {"input": Octets(b"x")}, {"trace": b"trace"},
        {"dedup_keys": (DedupKey(DedupKind.KEY, "k"),)}, {"input": b"[1]"}, {"count": 3}, {"payer": 5}, {"input": "y" * 5000},
    ]  # fmt: skip
    entries = [usual, *(msgspec.structs.replace(usual, **changed) for changed in others), usual]
    packed, large, rare = entry_wire.pack_small(entries, 10_000)
    assert packed == packing(pack_entry)(entries, 0)[0]
    assert not large and rare
    assert not entry_wire.pack_small([usual], 10_000)[2]
    assert entry_wire.pack_small([usual, entries[-2]], 4000)[1] == {2: entries[-2]}


def test_an_entry_of_a_release_after_the_next_one_says_so() -> None:
    entry = ask("text", id="a")
    with pytest.raises(wire.TooNew, match="schema 3, but this release reads 1 to 2; upgrade this process"):
        entry_wire.read_payloads([pack_entry(entry), of_release(2)(entry)])


async def settled(harness: Stand, *entries: Entry) -> None:
    for _ in range(60):
        if not any(one.depth for one in await harness.broker.depths()):
            return
        claimed = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(claimed, Lease):
            await harness.answer(claimed)
        else:
            await harness.advance(0.05)
    raise AssertionError("it goes on and on")


async def test_an_entry_and_a_reply_of_the_next_release_are_read(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_wire, "pack_small", packing(of_release(1)))
    entry = ask("text", id="a")
    await harness.broker.enqueue([entry])
    lease = await harness.claim()
    assert lease.entries == (entry,)
    monkeypatch.setattr(wire, "SCHEMA", wire.SCHEMA + 1)
    await harness.answer(lease)
    assert (await drained(harness))["a"].output == output("text")


ALIENS: dict[str, Callable[[Entry], bytes]] = {
    "later": of_release(2),
    "empty": lambda _: b"",
    "unknown": lambda _: b"\xc1",
    "short": lambda _: b"\x91\x01",
}


async def test_entries_that_cannot_be_read_cost_nobody_else_the_answer(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [ask(id=f"good {number}") for number in range(4)]
    await harness.broker.enqueue(good[:2])
    for id, alien in ALIENS.items():
        with monkeypatch.context() as patched:
            patched.setattr(entry_wire, "pack_small", packing(alien))
            await harness.broker.enqueue([ask(id=id)])
    await harness.broker.enqueue(good[2:])
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)
    await settled(harness)
    replies = await drained(harness)
    assert set(replies) == {*ALIENS, *ids(good)}
    assert all(replies[entry.id].output == output(entry.input) for entry in good)
    for id in ALIENS:
        failure = failure_of(replies[id])
        assert failure.code == errors.BACKEND_ERROR
        assert "cannot be read" in failure.message
    assert await harness.dead.count() == len(ALIENS)


async def test_an_unreadable_dead_letter_hides_no_other(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    for id, pack in (("old", pack_entry), ("alien", of_release(2)), ("new", pack_entry)):
        monkeypatch.setattr(entry_wire, "pack_small", packing(pack))
        monkeypatch.setattr(entry_wire, "pack_entry", pack)
        await harness.broker.enqueue([ask(id=id)])
        await fail_all(harness)
    for name in ("z", "zl"):
        harness.server.command("HSET", harness.key(name), "t\0junk", b"x")
    harness.server.command("ZADD", harness.key("o"), 99, "t\0junk")
    assert await harness.dead.count() == 4
    assert [letter.entry.id for letter in await harness.dead.list()] == ["new", "old"]
    for id in ("alien", "junk"):
        assert list(await harness.dead.find(id)) == []
        assert await harness.dead.remove(id)
    assert await harness.dead.count() == 2


NO_REPLIES: list[list[bytes | str]] = [
    ["v", "9", "k", "ran", "d", b"\x90", "t", "1", "e", "1", "n", "1", "a", "1", "x", ""],  # From a future release.
    ["v", "1", "k", "ran", "d", b"\x94\x09\xa1w\xa0\x90", *"t1e1n1a1", "x", ""],  # A batch of one.
    ["v", "1", "k", "ran", "d", b"\xc1", *"t1e1n1a1", "x", ""],  # Not a batch.
    ["v", "1"],  # No kind.
    ["v", "one", *"k0d0t0e0n0s0f0"],  # Not a number.
    ["hello", "world"],
]


async def test_replies_that_cannot_be_read_keep_back_no_others(harness: Stand) -> None:
    for number, alien in enumerate(NO_REPLIES):
        await harness.broker.enqueue([ask(id=f"{number}")])
        await harness.answer(await harness.claim())
        harness.server.command("XADD", harness.key("r:g"), "*", *alien)
    await harness.broker.enqueue([ask(id="last")])
    await harness.answer(await harness.claim())
    assert list(await drained(harness)) == [*map(str, range(len(NO_REPLIES))), "last"]
    await harness.acknowledged()
    assert harness.server.command("XLEN", harness.key("r:g")) == 0


async def test_a_cause_of_a_later_release_is_the_models(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "pack_failure", lambda *found: wire.encode(wire.WireFailure("molten", "it melted", "w")))
    await harness.broker.enqueue([ask(id="a")])
    await fail_all(harness)
    failure = failure_of((await drained(harness))["a"])
    assert (failure.code, failure.message) == (errors.REJECTED_BY_MODEL, "it melted")
    assert [letter.cause for letter in await harness.dead.list()] == ["molten"]


async def test_a_bell_that_cannot_be_read_is_not_the_last(harness: Stand) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    harness.server.command("RPUSH", harness.key(f"b:{harness._links[0].process}"), "x", b"\xff" * 200)
    await harness.advance(1.0)
    assert not listening.done()
    await harness.peer().enqueue([ask()])
    await listening


async def test_what_a_later_release_says_of_itself_hides_nobody(harness: Stand) -> None:
    await harness.healthy("gpu-0")
    await attend(harness.fleet, "a")
    await harness.fleet.publish(Capacity(model="m", healthy=1, degraded=0, items_per_second=1.0, usable_per_second=1.0))
    for key in ("w", "k", "capacity"):
        [(name, known)] = harness.server.command("HGETALL", f"headway:{{fleet}}:{key}").items()
        said = msgspec.msgpack.decode(known[8:])
        harness.server.command(
            "HSET", f"headway:{{fleet}}:{key}", name, known[:8] + wire.encode({**said, "mood": "calm"})
        )
        unknown = known[:8] + wire.encode({**said, "status": "resting", "role": "cook", "model": None})
        harness.server.command("HSET", f"headway:{{fleet}}:{key}", "later", unknown)
    assert [worker.worker_id for worker in await harness.broker.workers()] == ["gpu-0"]
    assert [member.id for member in await harness.fleet.members()] == ["a"]
    assert [capacity.model for capacity in await harness.fleet.capacities()] == ["m"]


def test_a_code_of_a_later_release_is_answered_as_a_fault_of_the_server() -> None:
    newer = wire.WireReply(0, "a", "t", None, Failure("FROM_THE_FUTURE", "why"), 0.0)
    known = wire.WireReply(1, "b", "t", None, Failure(errors.REJECTED_BY_MODEL, "why"), 0.0)
    run = wire.encode(wire.WireRun(wire.SCHEMA, "gpu-0", "", [newer, known]))
    fields = {b"v": b"1", b"k": b"ran", b"t": b"1", b"e": b"2", b"n": b"2", b"a": b"1", b"x": b"", b"d": run}
    codes = [reply.failure.code for reply in wire.read_outcomes(fields) if reply.failure is not None]
    assert codes == [errors.INTERNAL, errors.REJECTED_BY_MODEL]


ANOTHER = f"{function_library.LAYOUT}_another"


def of_another_release(connection: RedisConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a connection load and call functions under another name. What they store is the same."""
    call = RedisConnection._run.__get__(connection)

    async def run(client: Any, function: str, key: str, arguments: tuple[Any, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(function_library, "VERSION", ANOTHER)
            return await call(client, function, key, arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(function_library, "VERSION", ANOTHER)
        monkeypatch.setattr(connection, "_source", function_library.source())
    monkeypatch.setattr(connection, "_run", run)


async def test_two_releases_serve_one_queue(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_release(harness._links[1], monkeypatch)
    entries = [ask(tier=number % 3, tenant="ab"[number % 2]) for number in range(20)]
    offered, ran = iter(entries), 0
    brokers = itertools.cycle([harness.broker, harness.peer(), harness.peer(), harness.broker, harness.peer()])
    while ran < len(entries):
        for entry in itertools.islice(offered, 2):
            assert await next(brokers).enqueue([entry]) == [None]
        assert await next(brokers).depths() == await next(brokers).depths()
        lease = await granted(next(brokers), slot(limit=3))
        assert await next(brokers).extend(lease)
        done = await next(brokers).complete(lease, [ItemResult(output(entry.input)) for entry in lease.entries])
        ran += done.answered
        await harness.advance(0.01)
    libraries = str(harness.server.command("FUNCTION", "LIST"))
    assert function_library.VERSION in libraries
    assert ANOTHER in libraries
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {entry.id: output(entry.input) for entry in entries}
