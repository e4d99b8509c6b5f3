"""Batches in a worker process: every way user code can fail, and that nothing is left behind."""

import asyncio
import contextlib
import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import termios
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headway.backends.process import child_process, group_guard
from headway.backends.process.backend import HAND_OVER_RATE, HAND_OVER_SECONDS, ProcessBackend
from headway.backends.process.child_process import Child, ChildProcess
from headway.backends.process.frames import Computed, Outputs, Ready
from headway.backends.process.group_guard import GroupGuard
from headway.errors import BackendError, BatchRaised, BatchTimeout, TargetError, WorkerAbsent, WorkerCrashed
from headway.model import ItemResult, ValueKind
from tests.backends.entries import batch
from tests.backends.worker_process import FAULTS, LONG, Recorder, alive, build, kind, started
from tests.virtual_time import Clock, run

pytestmark = pytest.mark.processes


async def test_user_code_that_raises_fails_its_batch_and_the_process_goes_on() -> None:
    raises = {
        "raise": "ValueError: what is\nthis",
        "system-exit": "SystemExit: 4",
        "interrupt": "KeyboardInterrupt",
        "unprintable": "Unprintable: (its message cannot be shown)",
        "unreadable": "SystemExit: 5",
    }
    async with started(FAULTS) as (backend, log):
        pid = backend.pid
        for word, says in raises.items():
            with pytest.raises(BatchRaised) as caught:
                await backend.run(batch("a", word), LONG)
            assert str(caught.value) == caught.value.shown == says
            assert "faults.py" in caught.value.trace.splitlines()[1], "the traceback begins in user code"
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
            assert backend.pid == pid
        assert log.lines("stderr") == [], "it is not told twice"


async def test_outputs_that_are_too_large_together_are_left_out_alone() -> None:
    async with started(FAULTS, tiers=1) as (backend, _):
        asked, lines = batch("a", "large", "large"), batch("large", "large", "b")
        items = await backend.run([*asked, *(replace(line, tier=1) for line in lines)], LONG)
        assert [len(item.output or "") for item in items] == [1, 9 << 20, 9 << 20, 9 << 20, 0, 1]
        assert [item.crowded for item in items] == [False] * 4 + [True, False]
        mixed = [replace(entry, tenant=entry.input) for entry in batch("a", "large")]
        assert [item.left_out for item in await backend.run(mixed, LONG)] == [0, 9 << 20]


async def test_a_process_that_dies_in_a_batch_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = {
        "exit": "ended with exit code 3",
        "segfault": "died of SIGSEGV",
        "scribble": "wrote something on its pipe to Headway that is not an answer",
        "forge": "sent a wrong answer",
        "close": "closed its pipe to Headway",
        "last-words": "ended with exit code 9",
    }
    monkeypatch.setattr("headway.backends.process.child_process._PIPELESS", 0.05)
    async with started(FAULTS) as (backend, log):
        for word, how in dies.items():
            pid = backend.pid
            with pytest.raises(WorkerCrashed) as caught:
                await backend.run(batch("a", word), LONG)
            assert how in str(caught.value)
            assert "gpu-0" in str(caught.value)
            assert caught.value.shown == f"the worker's process {how}"
            await backend.gone()
            with pytest.raises(WorkerAbsent, match="must be started"):
                await backend.run(batch("a"), LONG)
            await backend.start()
            assert not alive(pid)
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert r"; its last words: out of\x1b[31m luck" in str(caught.value)
        assert any("faults.py" in line for line in log.lines("stderr")), "the trace of faulthandler"


async def test_a_process_that_hangs_is_killed_at_the_timeout() -> None:
    late = "took longer than the GPU deadline of 100 ms"
    async with started(FAULTS) as (backend, log):
        for word in ("hang", "sleep"):
            pid = backend.pid
            with pytest.raises(BatchTimeout, match=rf"gpu-0: its batch {late}.*it was killed") as caught:
                await backend.run(batch("a", word), 0.1)
            assert caught.value.shown == f"the model {late}"
            await backend.gone()
            await backend.start()
            assert not alive(pid)
            assert late in log.of("worker process ended")[-1]["how"]
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


async def test_a_process_that_is_ended_from_outside_is_gone_and_fails_its_batch() -> None:
    async with started(FAULTS) as (backend, log):
        os.kill(backend.pid, signal.SIGKILL)
        await backend.gone()
        with pytest.raises(WorkerCrashed):
            await backend.run(batch("a"), LONG)
        await log.until(lambda: log.of("worker process ended"))
        assert log.of("worker process ended")[0]["how"] == "died of SIGKILL"
        for how in ("died of SIGKILL", "was stopped", "was cancelled"):
            await backend.start()
            running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="given a batch while it was running one"):
                await backend.run(batch("b"), LONG)
            if how == "was stopped":
                await backend.stop()
            elif how == "was cancelled":
                running.cancel()
            else:
                os.kill(backend.pid, signal.SIGKILL)
            with pytest.raises(asyncio.CancelledError if how == "was cancelled" else WorkerCrashed) as caught:
                await running
            assert how in str(caught.value) or how == "was cancelled"
        with pytest.raises(WorkerCrashed, match="must be started"):
            await backend.run(batch("a"), LONG)
        await log.until(lambda: "was cancelled" in log.of("worker process ended")[-1]["how"])


async def test_a_process_that_is_killed_and_stopped_before_it_is_reaped_is_logged_as_killed() -> None:
    async with started(FAULTS) as (backend, log):
        child = backend._child
        assert isinstance(child, ChildProcess)
        os.kill(backend.pid, signal.SIGKILL)
        select.select([child._socket], [], [])
        child._readable()
        await backend.stop()
        assert [fields["how"] for fields in log.of("worker process ended")] == ["died of SIGKILL"]


async def test_a_process_that_speaks_without_being_asked_is_killed() -> None:
    async with started(FAULTS) as (backend, _):
        with contextlib.suppress(WorkerCrashed):
            await backend.run(batch("a", "forge-later"), LONG)
        async with asyncio.timeout(LONG):
            await backend.gone()


def await_bytes(backend: ProcessBackend, count: int) -> None:
    """Block until the child has sent `count` bytes that are still unread."""
    assert isinstance(backend._child, ChildProcess)
    waiting = b""
    while int.from_bytes(waiting, sys.byteorder) < count:
        waiting = fcntl.ioctl(backend._child._socket, termios.FIONREAD, bytes(4))


async def test_an_answer_given_just_before_the_end_counts() -> None:
    async with started(FAULTS) as (backend, _):
        running = asyncio.ensure_future(backend.run(batch("X" * 100_000), LONG))
        await asyncio.sleep(0)
        await_bytes(backend, 100_000)
        pidfd = os.pidfd_open(backend.pid)
        os.kill(backend.pid, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)
        assert await running == [ItemResult("X" * 100_000)]
        await backend.gone()


async def test_an_answer_after_what_is_none_does_not_count() -> None:
    async with started(FAULTS) as (backend, _):
        running = asyncio.ensure_future(backend.run(batch("babble"), LONG))
        await asyncio.sleep(0)
        await_bytes(backend, child_process._READ + 1)
        with pytest.raises(WorkerCrashed, match="that is not an answer"):
            await running


async def test_output_of_any_encoding_is_escaped_and_a_flood_of_it_neither_blocks_nor_fills_the_log() -> None:
    async with started(FAULTS) as (backend, log):
        await backend.run(batch("noise"), LONG)
        assert await backend.run(batch("flood"), LONG) == [ItemResult("FLOOD")]
        await backend.stop()
        shown, dropped = log.lines("stdout"), log.of("worker output dropped")
        assert shown[:3] == [r"\ud800 😀", r"caf\xe9 \x1b[2J ok", "half a lineflood"]
        assert len(shown) < 10_000
        assert len(shown) + sum(fields["lines"] for fields in dropped) >= 200_000


@pytest.mark.parametrize("busy", [False, True])
async def test_too_much_memory_is_a_wish_to_go_busy_or_not(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.process.backend._CHECK_EVERY", 0.01)
    async with started(FAULTS, recycle_rss_bytes=1_000_000) as (backend, log):
        gone = asyncio.ensure_future(backend.gone())
        while busy and not gone.done():
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        await gone
        assert log.of("worker uses too much memory, replacing it")[0]["rss_bytes"] > 1_000_000
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


@pytest.mark.parametrize("word", ["raise", "exit", "hang", "refuse its start"])
def test_a_process_that_died_leaves_nothing_for_the_garbage_collector(word: str) -> None:
    async def main() -> None:
        backend = build(kind("refuses_all") if word.startswith("refuse") else FAULTS, Recorder())
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        assert isinstance(backend._child, ChildProcess)
        left: list[weakref.ref[Any]] = [weakref.ref(backend._child), *map(weakref.ref, backend._child._outputs)]
        with contextlib.suppress(BackendError, TargetError):
            await starting
            await backend.run(batch("a", word), 0.1 if word == "hang" else LONG)
        del starting
        await backend.stop()
        await asyncio.sleep(0)  # Let the last callback drop its references.
        assert [one for one in left if one() is not None] == []

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


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


async def test_without_pidfd_a_thread_tells_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    async with started(FAULTS) as (backend, _):
        with pytest.raises(WorkerCrashed, match="exit code 3"):
            await backend.run(batch("exit"), LONG)
        await backend.start()
        with pytest.raises(BatchTimeout):
            await backend.run(batch("hang"), 0.1)


HOST = """if True:
    import asyncio, sys
    from headway.backends.process.group_guard import GroupGuard
    from headway.backends.process.backend import ProcessBackend
    from headway.config.target import ModuleTarget
    from tests.backends.entries import batch
    from tests.backends.worker_process import Recorder

    async def main(name, word):
        target, guard = ModuleTarget(*name.split(":")), GroupGuard()
        backend = ProcessBackend(
            target, worker="gpu-0", device="0", start_timeout=60, log=Recorder(), guard=guard, arena_bytes=8 << 20
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
    """Kill a worker's host. Check that the worker, its child processes and their guard end too."""
    with subprocess.Popen([sys.executable, "-c", HOST, name, word], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            pids = [int(pid) for pid in host.stdout.readline().split()]
            assert "headway-arena" in Path(f"/proc/{pids[0]}/maps").read_text()
            pidfds = [os.pidfd_open(pid) for pid in pids if pid]
            also(pids[2])
        finally:
            host.kill()
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], LONG)
        os.close(pidfd)
        assert readable


def signal_all(guard: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard, number)


def test_neither_a_child_that_hangs_nor_what_it_has_started_outlives_its_parent() -> None:
    killed_host("tests.targets.faults:answer", "hang")
    killed_host("tests.targets.kinds:with_child", "a", signal_all)  # These signals don't end the guard.


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_what_was_forgotten_is_left_alone(group: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        guard = GroupGuard()
        for process in (group, other):
            guard.watch(process.pid)
        guard.forget(group.pid)
        guard.close()
        assert other.wait(LONG) == -signal.SIGKILL
    assert group.poll() is None


def test_one_that_was_killed_is_replaced_and_told_of_all(group: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        guard = GroupGuard()
        guard.watch(group.pid)
        first = guard.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        guard.forget(0)  # The guard is dead and never hears of this, which does no harm.
        guard.watch(other.pid)
        assert guard.pid != first
        guard.close()
        assert {group.wait(LONG), other.wait(LONG)} == {-signal.SIGKILL}


def test_without_a_shell_nothing_is_watched(group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_guard, "_SHELL", "/nowhere/sh")
    guard = GroupGuard()
    guard.watch(group.pid)
    assert guard.pid == 0
    guard.forget(group.pid)
    guard.close()
    assert group.poll() is None


SIZE = 32 << 20


class SlowChild(Child):
    """A child that reports its outputs after `computes` seconds and hands them over `hands` seconds later."""

    computes, hands = 0.5, 0.0

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], worker: str, *_: object) -> None:
        super().__init__(worker)
        self.pid = 1
        self._number = 0

    def catch_up(self) -> None:
        pass

    def kill(self, verdict: str = "") -> None:
        self.doomed, self.cause = True, verdict
        self.ended.set()

    hang_up = kill

    def resident_bytes(self) -> int:
        return 0

    def _send(self, content: bytes) -> None:
        if self._number == 0:
            self._loop.call_soon(self._hear, Ready((), ""))
        else:
            self._loop.call_later(self.computes, self._hear, Computed(SIZE))
            told = Outputs(self._number, ValueKind.TEXT, ["x"], {})
            self._loop.call_later(self.computes + self.hands, self._hear, told)
        self._number += 1


@pytest.mark.parametrize(
    ("computes", "hands", "late"),
    [
        (0.5, 2.0, ""),
        (0.5, HAND_OVER_SECONDS + SIZE / HAND_OVER_RATE, ""),
        (0.5, 2 * HAND_OVER_SECONDS + SIZE / HAND_OVER_RATE, f"did not hand over its outputs of {SIZE} bytes"),
        (1.5, 0.0, "took longer than the GPU deadline of 1000 ms"),
    ],
)
def test_outputs_that_were_computed_in_time_are_waited_for(computes: float, hands: float, late: str) -> None:
    async def main(clock: Clock) -> None:
        backend = build(FAULTS, Recorder(), spawn=type("Slow", (SlowChild,), {"computes": computes, "hands": hands}))
        await backend.start()
        if late:
            with pytest.raises(BatchTimeout, match=late):
                await backend.run(batch("a"), 1.0)
        else:
            assert await backend.run(batch("a"), 1.0) == [ItemResult("x")]

    run(main)
