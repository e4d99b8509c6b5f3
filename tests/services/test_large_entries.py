"""Large entries of a gateway go to the broker by themselves, and keep nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway.errors import BrokerUnavailable
from headway.gateway import large_entries
from headway.gateway.large_entries import AT_ONCE, LargeEntries
from headway.model import Entry
from tests.contracts.brokers import ask, ids


async def test_they_go_in_order_some_at_once_and_the_others_are_left() -> None:
    calls, offered = asyncio.Queue[list[str]](), asyncio.Queue[None]()
    go = asyncio.Semaphore(0)

    async def offer(entries: Sequence[Entry]) -> None:
        calls.put_nowait(ids(entries))
        await go.acquire()
        raise BrokerUnavailable("away")  # That does not end it.

    line = LargeEntries(offer, lambda: offered.put_nowait(None))
    running = asyncio.ensure_future(line.run())
    large = [ask("x" * 20, id=f"{number}") for number in range(AT_ONCE + 2)]
    small = ask("x", id="small")
    assert line.split([large[0], small, *large[1:]], 10) == ([small], [])
    assert await calls.get() == [f"{number}" for number in range(AT_ONCE)]
    assert line.has("t", "0")  # It is on its way.
    assert line.has("t", f"{AT_ONCE}")  # It waits.
    assert not line.has("t", "small")
    go.release()
    assert await calls.get() == [f"{AT_ONCE}", f"{AT_ONCE + 1}"]
    go.release()
    for _ in range(2):
        await offered.get()
    assert not line.has("t", f"{AT_ONCE}")
    running.cancel()


async def test_a_tenant_with_many_keeps_no_other_waiting_for_all_of_them() -> None:
    calls, go = asyncio.Queue[list[str]](), asyncio.Semaphore(0)

    async def offer(entries: Sequence[Entry]) -> None:
        calls.put_nowait(ids(entries))
        await go.acquire()

    line = LargeEntries(offer, lambda: None)
    running = asyncio.ensure_future(line.run())
    line.split([ask("x" * 20, id=f"{number}", tenant="greedy") for number in range(3 * AT_ONCE)], 10)
    assert await calls.get() == [f"{number}" for number in range(AT_ONCE)]
    line.split([ask("x" * 20, id=id, tenant="modest") for id in ("a", "b")], 10)
    go.release()
    rest = AT_ONCE - 2
    assert await calls.get() == ["8", "a", "9", "b", *(f"{AT_ONCE + number}" for number in range(2, rest))]
    go.release()
    assert await calls.get() == [f"{AT_ONCE + rest + number}" for number in range(AT_ONCE)]
    running.cancel()


async def test_the_turns_of_tenants_go_on_from_call_to_call() -> None:
    calls = asyncio.Queue[list[str]]()

    async def offer(entries: Sequence[Entry]) -> None:
        calls.put_nowait(ids(entries))

    line = LargeEntries(offer, lambda: None)
    tenants = [f"tenant {number}" for number in range(AT_ONCE + 2)]
    line.split([ask("x" * 20, id=f"{tenant} {n}", tenant=tenant) for n in range(2) for tenant in tenants], 10)
    running = asyncio.ensure_future(line.run())
    order = [id for _ in range(3) for id in await calls.get()]
    assert order == [f"{tenant} {n}" for n in range(2) for tenant in tenants]
    running.cancel()


async def test_no_further_entry_joins_a_call_that_has_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry of a call waits until all inputs of that call are stored."""
    monkeypatch.setattr(large_entries, "MOST_BYTES", 100)
    calls = asyncio.Queue[list[str]]()

    async def offer(entries: Sequence[Entry]) -> None:
        calls.put_nowait(ids(entries))

    line = LargeEntries(offer, lambda: None)
    line.split([ask("x" * size, id=f"{size}") for size in (60, 61, 200, 62, 20, 30)], 10)
    running = asyncio.ensure_future(line.run())
    assert [await calls.get() for _ in range(3)] == [["60", "61"], ["200"], ["62", "20", "30"]]
    running.cancel()


def test_what_another_session_has_taken_over_waits_no_longer() -> None:
    line = LargeEntries(lambda entries: asyncio.sleep(0), lambda: None)
    entries = [ask("x" * 20, id=f"{n}", tenant=f"{n % 2}") for n in range(5)]
    line.split(entries, 10)
    line.waiting.keep(lambda entry: entry.id in ("1", "4"))
    assert sorted(ids(list(line.waiting))) == ["1", "4"]
    assert len(line.waiting) == 2
    assert line.has("1", "1")
    assert not line.has("0", "0")
