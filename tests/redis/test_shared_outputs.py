"""Large outputs that several entries have in common, or that are kept: where they lie in the server, and when they go."""

from __future__ import annotations

from typing import Any

import pytest

from headway.brokers.redis.function_library import OUTPUT_SECONDS
from headway.brokers.redis.large_values import LargeValues
from headway.model import DedupKey, ItemResult, Reply, Value
from tests.contracts.brokers import drained, leave, story
from tests.contracts.dedup_keys import TTL, admit, key, poll, same, sharing, task
from tests.redis.stand import Stand

LARGE = "x" * 5000


@pytest.fixture
def apart_from() -> float:
    return 1000


def names(harness: Stand) -> list[str]:
    return sorted(harness.keys())


def stored(harness: Stand) -> list[str]:
    """Kinds of what the server has of outputs apart: the outputs, and who reads or keeps them."""
    return sorted(name[0] for name in names(harness) if name[:2] in ("R:", "Q:", "K:"))


async def run(harness: Stand, output: Value = LARGE) -> None:
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(output) for _ in lease.entries])


async def acknowledged(harness: Stand, gateway: str = "g") -> dict[str, Reply]:
    """Read all replies to a gateway, and let the server know."""
    await drained(harness, gateway)
    replies, cursor = await harness.broker.replies(gateway, 0)
    await drained(harness, gateway, after=cursor)
    await harness.advance(0.1)
    return {reply.id: reply for reply in replies}


def sizes(harness: Stand) -> list[int]:
    """Bytes of the longest value of each stream and each kept outcome."""
    found = []
    for name in names(harness):
        if name.startswith("k:"):
            found.append(harness.server.command("STRLEN", harness.key(name)))
        if name.startswith("r:"):
            entries = harness.server.command("XRANGE", harness.key(name), "-", "+")
            found += [len(value) for _, fields in entries for value in fields]
    return found


@pytest.mark.parametrize("share", [task("first"), key(), same()])
@story
async def test_an_outcome_that_is_kept_has_its_output_apart_for_as_long(harness: Stand, share: DedupKey) -> None:
    await admit(harness, sharing("first", share))
    await run(harness)
    assert max(sizes(harness)) < 300
    assert (await acknowledged(harness))["first"].output == LARGE
    assert stored(harness) == ["K", "R"]
    if share.kind.value != "task":
        await admit(harness, sharing("later", share))
        assert (await drained(harness, after=1))["later"].output == LARGE
    else:
        await admit(harness, poll("later", "first"))
        assert (await drained(harness, after=1))["later"].output == LARGE
        reply = await harness.peer().outcome("t", "first")
        assert isinstance(reply, Reply)
        assert reply.output == LARGE
    assert stored(harness) == ["K", "Q", "R"]
    await harness.advance(TTL)
    await harness.broker.reap()
    assert stored(harness) == ["Q", "R"], "who came last has not said yet that it was read"
    for name in ("Q", "R"):
        [lasts] = [
            harness.server.command("TTL", harness.key(one)) for one in names(harness) if one.startswith(f"{name}:")
        ]
        assert 0 < lasts <= OUTPUT_SECONDS


@story
async def test_followers_of_two_gateways_read_an_output_once_each_and_the_last_lets_it_go(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = LargeValues.output_of

    async def noted(values: LargeValues, queue: str, name: str, *more: Any) -> Value | None:
        reads.append(name)
        return await read(values, queue, name, *more)

    monkeypatch.setattr(LargeValues, "output_of", noted)
    await admit(harness, sharing("first", same(keep=0.0)))
    for number in range(30):
        await admit(harness, sharing(f"one {number}", same(keep=0.0)))
        await admit(harness, sharing(f"two {number}", same(keep=0.0), gateway="h"))
    await run(harness)
    reads.clear()
    found = await acknowledged(harness)
    assert len(found) == 31
    assert len({id(reply.output) for name, reply in found.items() if name != "first"}) == 1
    assert {reply.output for reply in found.values()} == {LARGE}
    assert len(reads) == 2, "that of the first, and that of its followers"
    assert stored(harness) == ["Q", "R"]
    assert {reply.output for reply in (await acknowledged(harness, "h")).values()} == {LARGE}
    assert stored(harness) == []


@story
async def test_a_receipt_that_comes_twice_takes_the_output_from_nobody(harness: Stand) -> None:
    await admit(harness, sharing("first", same(keep=0.0)), sharing("second", same(keep=0.0), gateway="h"))
    await run(harness)
    with harness.losing("acknowledge"):
        await acknowledged(harness)
    await harness.advance(1.0)
    assert stored(harness) == ["Q", "R"]
    assert (await acknowledged(harness, "h"))["second"].output == LARGE
    assert stored(harness) == []


@story
async def test_an_output_goes_with_the_last_key_under_which_it_is_kept(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness)
    await acknowledged(harness)
    await harness.broker.cancel_task("t", "first")
    assert stored(harness) == ["K", "R"]
    await admit(harness, sharing("later", key()))
    assert (await acknowledged(harness))["later"].output == LARGE
    await harness.advance(TTL)
    await harness.broker.reap()
    assert stored(harness) == []


@story
async def test_outputs_go_with_what_has_to_go_for_the_budgets(harness: Stand) -> None:
    for number in range(40):
        await admit(harness, sharing(f"{number}", key(f"{number}")))
        await run(harness, "x" * 10_000)
        await acknowledged(harness)
    assert stored(harness) == ["K"] * 8 + ["R"] * 8
    held = sum(harness.server.command("STRLEN", harness.key(name)) for name in names(harness) if name[:2] == "R:")
    assert held == 8 * 10_000


@story
async def test_an_output_that_was_lost_is_forgotten_with_its_outcome(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness)
    await acknowledged(harness)
    [lost] = [harness.key(name) for name in names(harness) if name.startswith("R:")]
    harness.server.command("DEL", lost)
    assert await harness.peer().outcome("t", "first") is None
    await admit(harness, sharing("again", key()))
    await run(harness, "y" * 5000)
    assert (await acknowledged(harness))["again"].output == "y" * 5000


@story
async def test_an_output_that_nobody_wants_any_more_goes_at_once(harness: Stand) -> None:
    first = sharing("first", same(keep=0.0))
    second = sharing("second", same(keep=0.0))
    await admit(harness, first, second)
    lease = await harness.claim()
    await leave(harness.broker, first)
    await leave(harness.broker, second)
    await harness.broker.complete(lease, [ItemResult(LARGE)])
    assert stored(harness) == []


@story
async def test_an_output_that_the_first_no_longer_wants_is_there_for_who_follows(harness: Stand) -> None:
    first, second = sharing("first", same(keep=0.0)), sharing("second", same(keep=0.0))
    await admit(harness, first, second)
    lease = await harness.claim()
    await leave(harness.broker, first)
    await harness.broker.complete(lease, [ItemResult(LARGE)])
    assert (await acknowledged(harness))["second"].output == LARGE
    assert stored(harness) == []


@story
async def test_an_output_too_large_to_be_kept_goes_when_it_was_read(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()), sharing("second", key()))
    await run(harness, "x" * 30_000)
    found = await acknowledged(harness)
    assert {name: len(reply.output or "") for name, reply in found.items()} == {"first": 30_000, "second": 30_000}
    assert stored(harness) == []
