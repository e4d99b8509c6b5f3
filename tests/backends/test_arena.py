"""Large values between a worker process and its host. They use shared memory while it has room, otherwise frames."""

import asyncio
import gc
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headway.backends.process.arena import LARGE
from headway.backends.process.backend import TURN, ProcessBackend
from headway.config.target import ModuleTarget
from headway.errors import WorkerCrashed
from headway.model import ItemResult, Octets
from tests.backends.entries import batch
from tests.backends.worker_process import LONG, descriptors, started

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="there is no such memory")]


MB = 1 << 20


def arenas() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("headway-arena")


@asynccontextmanager
async def shared(name: str, size: int = 4 * MB) -> AsyncIterator[tuple[ProcessBackend, Counter[tuple[str, bool]]]]:
    """Yield a backend with an arena, and the counts. Afterwards, check that nothing leaked."""
    before, counted = (arenas(), descriptors()), Counter[tuple[str, bool]]()
    target = ModuleTarget("tests.targets.large", *name.strip(")").split("("))
    async with started(
        target, arena_bytes=size, count=lambda direction, by_arena: counted.update([(direction, by_arena)])
    ) as (backend, _):
        yield backend, counted
    await asyncio.sleep(0)
    assert (arenas(), descriptors()) == before


async def test_large_texts_go_and_come_by_the_arena_and_small_ones_in_the_frame() -> None:
    texts = ["small", "x" * LARGE, "é" * 300_000, "x" * (LARGE - 1), "漢\0" * LARGE]
    async with shared("echo") as (backend, counted):
        for _ in range(3):
            assert await backend.run(batch(*texts), LONG) == [ItemResult(text) for text in texts]
    assert counted == {("in", True): 9, ("out", True): 9}


@pytest.mark.parametrize(
    ("keeps", "seen", "placed"), [("False", [b"aaa", b"released", b"released"], 3), ("True", [b"aaa"] * 3, 1)]
)
async def test_a_view_ends_with_its_batch_and_the_arena_is_given_up_where_something_is_made_of_one_and_kept(
    keeps: str, seen: list[bytes], placed: int
) -> None:
    async with shared(f"Keeps({keeps})") as (backend, counted):
        for letter, content in zip((b"a", b"b", b"c"), seen, strict=True):
            assert await backend.run(batch(Octets(letter * LARGE)), LONG) == [ItemResult(Octets(content))]
        assert arenas() == (keeps == "False")
    assert counted == {("in", True): placed}


async def test_values_for_which_the_arena_has_no_room_go_in_the_frame() -> None:
    texts = ["a" * 300_000, "b" * 500_000, "c" * 100_000]
    async with shared("echo", size=512 << 10) as (backend, counted):
        for _ in range(2):
            assert await backend.run(batch(*texts), LONG) == [ItemResult(text) for text in texts]
    assert counted == {("in", True): 4, ("in", False): 2, ("out", True): 2, ("out", False): 4}


async def test_without_an_arena_all_goes_in_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    async with shared("echo", size=MB) as (backend, counted):
        assert arenas() == 0
        assert await backend.run(batch("x" * 3 * MB), LONG) == [ItemResult("x" * 3 * MB)]
    assert counted == {}


async def test_the_event_loop_goes_on_after_a_turn_of_large_values() -> None:
    turns, seen = [0], dict[str, list[int]]({"in": [], "out": []})
    loop = asyncio.get_running_loop()

    def turn() -> None:
        turns[0] += 1
        loop.call_soon(turn)

    async with started(
        ModuleTarget("tests.targets.large", "echo"),
        arena_bytes=16 * MB,
        count=lambda direction, by_arena: seen[direction].append(turns[0]),
    ) as (backend, _):
        turn()
        for size, taken in ((TURN, 5), (LARGE, 1)):
            await backend.run(batch(*("x" * size for _ in range(5))), LONG)
            assert {direction: len(set(at)) for direction, at in seen.items()} == {"in": taken, "out": taken}
            seen = {"in": [], "out": []}


async def test_the_child_cannot_change_the_size_of_the_arena() -> None:
    async with shared("attacks") as (backend, _):
        [told] = await backend.run(batch("x"), LONG)
        assert told.output == "shrink PermissionError grow PermissionError seal PermissionError punch done"
        assert await backend.run(batch("x"), LONG) == [told]


@pytest.mark.parametrize(
    ("target", "lies"),
    [("lies", [f"{4 * MB} 1 0 0", "128 10 999 0"]), ("scribbles", ["scribble"])],
    ids=["places that cannot be", "no text where it says"],
)
async def test_a_child_that_says_what_is_not_so_is_killed_and_replaced(target: str, lies: list[str]) -> None:
    async with shared(target) as (backend, _):
        for lie in lies:
            with pytest.raises(WorkerCrashed, match="sent a wrong answer"):
                await backend.run(batch(lie, "x" * LARGE), LONG)
            await backend.start()
        assert await backend.run(batch("x" * LARGE), LONG) == [ItemResult("x" * LARGE)]


async def test_children_that_are_killed_with_large_values_in_hand_leave_nothing_behind() -> None:
    async with shared("dies") as (backend, _):
        for _ in range(2):
            with pytest.raises(WorkerCrashed, match="SIGKILL"):
                await backend.run(batch("die" + "x" * MB, "y" * MB), LONG)
            assert arenas() == 0
            await backend.start()
            assert arenas() == 1
        assert await backend.run(batch("x" * MB), LONG) == [ItemResult("x" * MB)]
