"""Large values between a worker's process and its host: by shared memory while there is room, else in frames."""

import asyncio
import gc
import os
import select
import subprocess
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
from tests.backends.recorder import Recorder
from tests.backends.worker_process import LONG, build, descriptors

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="there is no such memory")]


MB = 1 << 20


def arenas() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("headway-arena")


@asynccontextmanager
async def started(
    name: str, arena_bytes: int = 4 * MB
) -> AsyncIterator[tuple[ProcessBackend, Counter[tuple[str, bool]]]]:
    """A backend with an arena, and what was counted. Nothing of it is left."""
    before = arenas(), descriptors()
    counted = Counter[tuple[str, bool]]()
    backend = build(
        ModuleTarget("tests.targets.large", *name.strip(")").split("(")),
        Recorder(),
        arena_bytes=arena_bytes,
        count=lambda direction, by_arena: counted.update([(direction, by_arena)]),
    )
    await backend.start()
    try:
        yield backend, counted
    finally:
        await backend.stop()
    await asyncio.sleep(0)
    assert (arenas(), descriptors()) == before


async def test_large_texts_go_and_come_by_the_arena_and_small_ones_in_the_frame() -> None:
    texts = ["small", "x" * LARGE, "é" * 300_000, "x" * (LARGE - 1), "漢\0" * LARGE]
    async with started("echo") as (backend, counted):
        for _ in range(3):
            assert await backend.run(batch(*texts), LONG) == [ItemResult(text) for text in texts]
    assert counted == {("in", True): 9, ("out", True): 9}


async def test_octets_go_and_come_as_they_are_by_the_arena_and_in_the_frame() -> None:
    values = [Octets(os.urandom(size)) for size in (0, 3, LARGE, 700_000)]
    async with started("reverse") as (backend, counted):
        items = await backend.run(batch(*values, "YWI="), LONG)
        assert items == [ItemResult(Octets(one.content[::-1])) for one in [*values, Octets(b"ab")]]
    assert counted == {("in", True): 2, ("out", True): 2}


async def test_a_view_that_is_kept_ends_with_its_batch() -> None:
    async with started("Keeps(False)") as (backend, counted):
        for letter, seen in ((b"a", b"aaa"), (b"b", b"released")):
            assert await backend.run(batch(Octets(letter * LARGE)), LONG) == [ItemResult(Octets(seen))]
    assert counted == {("in", True): 2}


async def test_what_is_made_of_a_view_and_kept_stays_as_it_was_and_the_arena_is_given_up() -> None:
    async with started("Keeps(True)") as (backend, counted):
        for letter in (b"a", b"b", b"c"):
            assert await backend.run(batch(Octets(letter * LARGE)), LONG) == [ItemResult(Octets(b"aaa"))]
        assert arenas() == 0
    assert counted == {("in", True): 1}


async def test_values_for_which_the_arena_has_no_room_go_in_the_frame() -> None:
    texts = ["a" * 300_000, "b" * 500_000, "c" * 100_000]
    async with started("echo", arena_bytes=512 << 10) as (backend, counted):
        for _ in range(2):
            assert await backend.run(batch(*texts), LONG) == [ItemResult(text) for text in texts]
    assert counted == {("in", True): 4, ("in", False): 2, ("out", True): 2, ("out", False): 4}


async def test_without_an_arena_all_goes_in_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    async with started("echo", arena_bytes=MB) as (backend, counted):
        assert arenas() == 0
        assert await backend.run(batch("x" * 3 * MB), LONG) == [ItemResult("x" * 3 * MB)]
    assert counted == {}


async def test_the_event_loop_goes_on_after_a_turn_of_large_values() -> None:
    turns, seen = [0], dict[str, list[int]]({"in": [], "out": []})
    loop = asyncio.get_running_loop()
    backend = build(
        ModuleTarget("tests.targets.large", "echo"),
        Recorder(),
        arena_bytes=16 * MB,
        count=lambda direction, by_arena: seen[direction].append(turns[0]),
    )
    await backend.start()

    def turn() -> None:
        turns[0] += 1
        loop.call_soon(turn)

    turn()
    for size, turns_taken in ((TURN, 5), (LARGE, 1)):
        await backend.run(batch(*("x" * size for _ in range(5))), LONG)
        assert {direction: len(set(at)) for direction, at in seen.items()} == {"in": turns_taken, "out": turns_taken}
        seen = {"in": [], "out": []}
    await backend.stop()


async def test_the_child_cannot_change_the_size_of_the_arena() -> None:
    async with started("attacks") as (backend, _):
        [told] = await backend.run(batch("x"), LONG)
        assert told.output == "shrink PermissionError grow PermissionError seal PermissionError punch done"
        assert await backend.run(batch("x"), LONG) == [told]


async def test_a_child_that_names_places_that_cannot_be_is_killed_and_replaced() -> None:
    async with started("lies") as (backend, _):
        for lie in (f"{4 * MB} 1 0 0", "128 10 999 0"):
            with pytest.raises(WorkerCrashed, match="sent a wrong answer"):
                await backend.run(batch(lie, "x" * LARGE), LONG)
            await backend.start()
        assert await backend.run(batch("x" * LARGE), LONG) == [ItemResult("x" * LARGE)]


async def test_a_child_that_leaves_no_text_where_it_says_is_killed_and_replaced() -> None:
    async with started("scribbles") as (backend, _):
        with pytest.raises(WorkerCrashed, match="sent a wrong answer"):
            await backend.run(batch("scribble"), LONG)
        await backend.start()
        assert await backend.run(batch("x" * LARGE), LONG) == [ItemResult("x" * LARGE)]


async def test_children_that_are_killed_with_large_values_in_hand_leave_nothing_behind() -> None:
    async with started("dies") as (backend, _):
        for _ in range(2):
            with pytest.raises(WorkerCrashed, match="SIGKILL"):
                await backend.run(batch("die" + "x" * MB, "y" * MB), LONG)
            assert arenas() == 0
            await backend.start()
            assert arenas() == 1
        assert await backend.run(batch("x" * MB), LONG) == [ItemResult("x" * MB)]


HOST = """
import asyncio, sys
from headway.config.target import ModuleTarget
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import LONG, build

async def main():
    backend = build(ModuleTarget("tests.targets.large", "echo"), Recorder(), arena_bytes=8 << 20)
    await backend.start()
    print(backend.pid, flush=True)
    while True:
        await backend.run(batch("x" * (1 << 20)), LONG)

asyncio.run(main())
"""


def test_a_host_that_is_killed_leaves_no_process_that_holds_the_arena() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            child = int(host.stdout.readline())
            assert "headway-arena" in Path(f"/proc/{child}/maps").read_text()
            watched = os.pidfd_open(child)
        finally:
            host.kill()
    assert select.select([watched], [], [], LONG)[0], "the child has ended"
    os.close(watched)
