"""What every keeper of dead letters promises: bounded, newest first."""

from __future__ import annotations

import asyncio

from headway.brokers.memory import DeadLetterBox
from headway.model import DeadLetter, Entry


def letter(id: str, size: int = 10) -> DeadLetter:
    entry = Entry(id, "m", "x" * size, 0, "t", "g", 1.0, 1.0)
    return DeadLetter(entry=entry, error="bad", cause="raised", attempts=3, worker="gpu-0", died_at=0.0)


def kept(box: DeadLetterBox) -> list[str]:
    return [one.entry.id for one in asyncio.run(_list(box))]


async def _list(box: DeadLetterBox) -> list[DeadLetter]:
    return list(await box.list())


def test_the_oldest_go_when_there_are_too_many() -> None:
    box = DeadLetterBox(capacity=2)
    for id in "abc":
        asyncio.run(box.add(letter(id)))
    assert kept(box) == ["c", "b"]


def test_the_oldest_go_when_they_are_too_large_together() -> None:
    box = DeadLetterBox(capacity_bytes=10_000)
    for id in "abc":
        asyncio.run(box.add(letter(id, 1_000)))
    assert kept(box) == ["c", "b"]
    assert asyncio.run(box.remove("b"))
    asyncio.run(box.add(letter("d", 1_000)))
    assert kept(box) == ["d", "c"]
    asyncio.run(box.add(letter("huge", 100_000)))
    assert kept(box) == []


def test_a_letter_that_comes_again_is_kept_once() -> None:
    box = DeadLetterBox(capacity_bytes=10_000)
    for _ in range(10):
        asyncio.run(box.add(letter("a", 1_000)))
    assert kept(box) == ["a"]
