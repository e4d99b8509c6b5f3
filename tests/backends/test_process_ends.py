"""What a worker's process leaves behind: nothing, whoever ended, and however."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from headway.backends.process.child_process import ChildProcess
from headway.errors import BackendError, BatchTimeout, WorkerCrashed
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import FAULTS, LONG, build, descriptors, kind, started, without_collector

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("word", ["raise", "exit", "hang", "scribble", "forge"])
def test_a_process_that_died_leaves_nothing_for_the_garbage_collector(word: str) -> None:
    async def main() -> None:
        backend = build(FAULTS, Recorder())
        await backend.start()
        assert isinstance(backend._child, ChildProcess)
        left: list[weakref.ref[Any]] = [weakref.ref(backend._child), *map(weakref.ref, backend._child._outputs)]
        with contextlib.suppress(BackendError):
            await backend.run(batch("a", word), 0.1 if word == "hang" else LONG)
        await backend.stop()
        await asyncio.sleep(0)  # What was called back last lets go.
        assert [one for one in left if one() is not None] == []

    without_collector(main)


async def test_a_child_leaves_signals_to_its_parent() -> None:
    async with started(kind("with_fork")) as (backend, _):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(backend.pid, number)
        assert await backend.run(batch("a"), LONG) == [ItemResult("-15")]


async def test_what_a_child_has_started_ends_with_it() -> None:
    async with started(kind("with_child")) as (backend, _):
        [item] = await backend.run(batch("a"), LONG)
        left = int(str(item.output or 0))
        pidfd = os.pidfd_open(left)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await backend.stop()
        async with asyncio.timeout(LONG):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_restarts_leak_no_descriptor() -> None:
    backend = build(FAULTS, Recorder())
    await backend.start()
    before = descriptors()
    for round_ in range(6):
        if round_ % 2:
            os.kill(backend.pid, signal.SIGKILL)
        await backend.start()
    assert descriptors() == before
    await backend.stop()


async def test_without_pidfd_a_thread_tells_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    async with started(FAULTS) as (backend, _):
        with pytest.raises(WorkerCrashed, match="exit code 3"):
            await backend.run(batch("exit"), LONG)
        await backend.start()
        with pytest.raises(BatchTimeout):
            await backend.run(batch("hang"), 0.1)
        await backend.start()
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


HOST = """if True:
    import asyncio, sys
    from headway.backends.process.group_guard import GroupGuard
    from headway.backends.process.backend import ProcessBackend
    from headway.config.target import ModuleTarget
    from tests.backends.entries import batch
    from tests.backends.recorder import Recorder

    async def main(name, word):
        target, guard = ModuleTarget(*name.split(":")), GroupGuard()
        backend = ProcessBackend(
            target, worker="gpu-0", device="0", start_timeout=60, log=Recorder(), guard=guard
        )
        await backend.start()
        running = asyncio.ensure_future(backend.run(batch(word), 60))
        await asyncio.sleep(0)
        output = 0 if word == "hang" else (await running)[0].output
        print(backend.pid, output, guard.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main(*sys.argv[1:]))
"""


def killed_host(name: str, word: str, also: Callable[[int], None] = lambda guard: None) -> None:
    """Kill a host of a worker, and see that the worker, what it has started and who guards them end."""
    with subprocess.Popen([sys.executable, "-c", HOST, name, word], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            pids = [int(pid) for pid in host.stdout.readline().split()]
            pidfds = [os.pidfd_open(pid) for pid in pids if pid]
            also(pids[2])
        finally:
            host.kill()
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], LONG)
        os.close(pidfd)
        assert readable


def test_neither_a_child_that_hangs_nor_what_it_has_started_outlives_its_parent() -> None:
    killed_host("tests.targets.faults:answer", "hang")
    killed_host("tests.targets.kinds:with_child", "a")


def test_who_guards_is_not_ended_by_signals_to_all() -> None:
    def signal_all(guard: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard, number)

    killed_host("tests.targets.kinds:with_child", "a", signal_all)
