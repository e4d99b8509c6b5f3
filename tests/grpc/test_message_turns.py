"""Turns in which messages are taken in: how many in one turn of the loop, whose come next, and what becomes of those that leave."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from headway.grpc.message_turns import SHARE, MessageTurns
from tests.scenes import Scene, scene


class Loop:
    """Turns of the event loop by number, and a clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn = 0
        self.done: list[tuple[int, str]] = []
        self.turns = MessageTurns(lambda: self.now)
        self._count()

    def _count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._count)

    def work(self, name: str, cost: float = SHARE / 2) -> Callable[[float], str]:
        """Piece of work that takes some time."""

        def run(waited: float) -> str:
            self.done.append((self.turn, name))
            self.now += cost
            return f"{name} waited {waited / SHARE:g}"

        return run

    def take(self, owner: str, name: str) -> asyncio.Task[str]:
        """Have a piece of work done for an owner."""
        return asyncio.ensure_future(self.turns.take(owner, self.work(name)))


def in_turns(main: Callable[[Loop], object]) -> None:
    async def run() -> None:
        await main(Loop())  # type: ignore[misc]

    asyncio.run(run())


def on_loop() -> Callable[[Scene], Callable[..., None]]:
    """Make a test of a coroutine function of a loop."""
    return scene(in_turns)


@on_loop()
async def test_a_flood_of_one_owner_is_taken_in_bit_by_bit_and_others_come_between(loop: Loop) -> None:
    flood = [loop.take("flood", f"f{number}") for number in range(8)]
    other = loop.take("other", "o")
    await asyncio.gather(*flood, other)
    turns = [turn for turn, _ in loop.done]
    assert [turns.count(turn) for turn in sorted(set(turns))] == [2, 2, 2, 2, 1]
    assert [name for _, name in loop.done][:5] == ["f0", "f1", "f2", "o", "f3"]
    assert other.result() == "o waited 0.5"


@on_loop()
async def test_a_message_that_comes_alone_waits_for_nothing(loop: Loop) -> None:
    before = loop.turn
    assert await loop.turns.take("a", loop.work("a")) == "a waited 0"
    assert loop.turn == before


@on_loop()
async def test_the_turn_of_a_call_that_has_ended_goes_to_the_next(loop: Loop) -> None:
    asked = [loop.take("a", str(number)) for number in range(5)]
    await asyncio.sleep(0)
    asked[2].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert [name for _, name in loop.done] == ["0", "1", "3", "4"]


@on_loop()
async def test_an_error_of_the_work_is_its_callers_alone(loop: Loop) -> None:
    def fail(loop: Loop, waited: float) -> None:
        loop.now += SHARE
        raise ValueError("no message")

    asked = [asyncio.ensure_future(loop.turns.take("a", partial(fail, loop))) for _ in range(2)]
    last = loop.take("a", "last")
    for one in asked:
        with pytest.raises(ValueError, match="no message"):
            await one
    assert await last == "last waited 1"


@on_loop()
async def test_what_waits_lets_other_processes_go_first(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: loop.done.append((loop.turn, "others")))
    await loop.turns.take("a", loop.work("a"))
    await asyncio.sleep(0)
    assert [name for _, name in loop.done] == ["a"], "nothing waited"
    await asyncio.gather(*(loop.take("b", name) for name in ("b", "c", "d")))
    assert [name for _, name in loop.done] == ["a", "b", "c", "others", "d"]


@on_loop()
async def test_an_error_holds_nothing_of_its_work_once_its_caller_has_it(loop: Loop) -> None:
    """Bodies of 1 MB that were wrong stayed until the garbage collector came, thousands of objects later."""

    class Body:
        pass

    def fail(body: Body, waited: float) -> None:
        raise ValueError("no message")

    bodies = [Body() for _ in range(3)]
    left = [weakref.ref(body) for body in bodies]
    first = loop.take("a", "first"), loop.take("a", "second")
    asked = [asyncio.ensure_future(loop.turns.take("a", partial(fail, bodies.pop()))) for _ in left]
    gc.disable()
    try:
        while asked:
            with pytest.raises(ValueError, match="no message") as found:
                await asked.pop()
            del found
        await asyncio.sleep(0)  # The loop holds the one for which it has waited.
        assert [ref() for ref in left] == [None] * 3
    finally:
        gc.enable()
    await asyncio.gather(*first)
