"""Large entries of a gateway go to the broker by themselves, and keep nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.errors import BrokerUnavailable
from headway.gateway.large_entries import AT_ONCE, LargeEntries
from headway.gateway.several_inputs import PART
from headway.model import DedupKey, DedupKind, Entry
from tests.contracts.brokers import ask, ids


def test_they_go_in_order_some_at_once_and_the_others_are_left() -> None:
    async def main() -> None:
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
        assert line.split([large[0], small, *large[1:]], 10) == [small]
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

    asyncio.run(main())


def test_what_comes_under_the_key_of_a_large_one_goes_behind_it() -> None:
    line = LargeEntries(_never, lambda: None)
    large, part = keyed("k", "x" * 20), keyed(f"k{PART}1", "b")
    other, later, keyless = keyed("other", "c"), keyed(f"k{PART}2", "d"), ask("no key")
    assert line.split([part, other, large], 10) == [other]
    assert line.split([later, keyless], 10) == [keyless]
    assert line.waiting == [part, large, later]


async def _never(entries: Sequence[Entry]) -> None:
    raise AssertionError("it does not run")


def keyed(name: str, text: str) -> Entry:
    return ask(text, id=name, dedup_keys=(DedupKey(DedupKind.KEY, name),))
