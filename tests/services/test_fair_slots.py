"""Places for what a process does at once: tenants take turns, and no place is lost."""

from __future__ import annotations

import asyncio

from headway.runtime.fair_turns import FairSlots


class Stage:
    """What goes on at once, two things at most; each ends when it is told to."""

    def __init__(self) -> None:
        self.slots = FairSlots(2)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, *names: str) -> None:
        """Want places; a name begins with the letter of its tenant."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.get_running_loop().create_task(self._act(name))

    async def _act(self, name: str) -> None:
        async with self.slots.of(name[0]):
            self.begun.append(name)
            await self.ends[name].wait()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await self.settle()


async def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    stage = Stage()
    stage.ask("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await stage.settle()
    assert stage.begun == ["a1", "a2"]
    for name in ("a1", "a2", "a3", "b1", "c1", "a4", "b2"):
        await stage.end(name)
    assert stage.begun == ["a1", "a2", "a3", "b1", "c1", "a4", "b2"]
    stage.ask("d1", "d2", "d3")
    await stage.settle()
    assert stage.begun[-2:] == ["d1", "d2"], "all places are free again"


async def test_who_left_is_passed_over() -> None:
    stage = Stage()
    stage.ask("a1", "a2", "a3", "b1")
    await stage.settle()
    stage.tasks["a3"].cancel()
    await stage.settle()
    await stage.end("a1")
    assert stage.begun == ["a1", "a2", "b1"]


async def test_who_leaves_as_its_place_comes_gives_it_on() -> None:
    stage = Stage()
    async with stage.slots.of("z"):
        stage.ask("a1", "a2", "b1")
        await stage.settle()
    stage.tasks["a2"].cancel()  # It has got the place in this turn of the loop, and has not heard of it.
    await stage.settle()
    assert stage.begun == ["a1", "b1"]


async def test_a_place_is_free_again_after_an_error() -> None:
    stage = Stage()
    stage.ask("a1", "a2", "b1")
    await stage.settle()
    stage.tasks["a1"].cancel()
    await stage.settle()
    assert stage.begun == ["a1", "a2", "b1"]
