"""Batches of a worker's process, every way in which user code can go wrong in one, and what clients read of it."""

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import sys
import termios

import pytest
from msgspec.structs import replace

from headway.backends.process import child_process
from headway.backends.process.backend import ProcessBackend
from headway.backends.process.child_process import ChildProcess
from headway.config.target import ModuleTarget
from headway.errors import BackendError, BatchRaised, BatchTimeout, WorkerAbsent, WorkerCrashed
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import FAULTS, LONG, alive, build, descriptors, started

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("raise", "ValueError: what is\nthis"),
        ("system-exit", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt"),
        ("unprintable", "Unprintable: (its text cannot be shown)"),
        ("unreadable", "SystemExit: 5"),
    ],
)
async def test_user_code_that_raises_fails_its_batch_and_the_process_goes_on(word: str, says: str) -> None:
    async with started(FAULTS) as (backend, log):
        pid = backend.pid
        with pytest.raises(BatchRaised) as caught:
            await backend.run(batch("a", word), LONG)
        assert str(caught.value) == says
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert backend.pid == pid
        assert "faults.py" in caught.value.trace.splitlines()[1], "the traceback begins in user code"
        assert log.lines("stderr") == [], "it is not told twice"


async def test_outputs_of_bulk_lines_that_are_too_large_together_are_left_out_alone() -> None:
    async with started(FAULTS, tiers=1) as (backend, _):
        asked, lines = batch("a", "large", "large"), batch("large", "large", "b")
        items = await backend.run([*asked, *(replace(line, tier=1) for line in lines)], LONG)
        assert [len(item.output or "") for item in items] == [1, 9 << 20, 9 << 20, 9 << 20, 0, 1]
        assert [item.crowded for item in items] == [False] * 4 + [True, False]
        items = await backend.run(batch("a", *["large"] * 8), LONG)
        assert [len(item.output or "") for item in items] == [1, *[9 << 20] * 7, 0]
        assert [item.left_out for item in items] == [0] * 8 + [9 << 20]
        mixed = [replace(entry, tenant=entry.input) for entry in batch("a", "large")]
        assert [item.left_out for item in await backend.run(mixed, LONG)] == [0, 9 << 20]


async def test_the_error_of_one_input_is_its_own() -> None:
    async with started(FAULTS) as (backend, _):
        items = await backend.run(batch("a", "exception", "none", "number", "bytes", "surrogate", "huge"), LONG)
        assert items[0] == ItemResult("A")
        assert items[1] == ItemResult(None, "ValueError: no good", fault=False)
        assert [item.fault for item in items[2:]] == [True] * 5
        assert [(item.error or "").split(" returned ")[1].split(" for ")[0] for item in items[2:]] == [
            "NoneType",
            "int",
            "bytes",
            "a lone surrogate",
            f"{16 * 1024 * 1024 + 1} bytes",
        ]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("exit", "ended with exit code 3"),
        ("segfault", "died of SIGSEGV"),
        ("scribble", "wrote something on its pipe to Headway that is not an answer"),
        ("forge", "answered something else than it was asked"),
        ("close", "closed its pipe to Headway"),
        ("last-words", r"exit code 9; its last words: out of\x1b[31m luck"),
    ],
)
async def test_a_process_that_dies_in_a_batch_fails_it(word: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.process.child_process._PIPELESS", 0.05)
    async with started(FAULTS) as (backend, log):
        pid = backend.pid
        with pytest.raises(WorkerCrashed) as caught:
            await backend.run(batch("a", word), LONG)
        assert says in str(caught.value)
        assert "gpu-0" in str(caught.value)
        await backend.gone()
        with pytest.raises(WorkerAbsent, match="must be started"):
            await backend.run(batch("a"), LONG)
        await backend.start()
        assert not alive(pid)
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        if word == "segfault":
            assert any("faults.py" in line for line in log.lines("stderr")), "the trace of faulthandler"


@pytest.mark.parametrize("word", ["hang", "sleep"])
async def test_a_process_that_hangs_is_killed_at_the_timeout(word: str) -> None:
    async with started(FAULTS) as (backend, log):
        pid = backend.pid
        with pytest.raises(BatchTimeout, match=r"gpu-0: its batch took longer than the GPU deadline of 100 ms"):
            await backend.run(batch("a", word), 0.1)
        await backend.gone()
        await backend.start()
        assert not alive(pid)
        assert "took longer than the GPU deadline of 100 ms" in log.of("worker process ended")[0]["how"]
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


async def test_a_process_that_is_killed_while_idle_is_gone() -> None:
    async with started(FAULTS) as (backend, log):
        os.kill(backend.pid, signal.SIGKILL)
        await backend.gone()
        with pytest.raises(WorkerCrashed):
            await backend.run(batch("a"), LONG)
        await log.until(lambda: log.of("worker process ended"))
        assert log.of("worker process ended")[0]["how"] == "died of SIGKILL"


async def test_a_process_that_is_killed_and_stopped_before_it_is_reaped_is_logged_as_killed() -> None:
    async with started(FAULTS) as (backend, log):
        child = backend._child
        assert isinstance(child, ChildProcess)
        os.kill(backend.pid, signal.SIGKILL)
        select.select([child._socket], [], [])
        child._readable()
        await backend.stop()
        assert [fields["how"] for fields in log.of("worker process ended")] == ["died of SIGKILL"]


async def test_a_process_that_is_killed_in_a_batch_fails_it() -> None:
    async with started(FAULTS) as (backend, _):
        running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
        await asyncio.sleep(0)
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="died of SIGKILL"):
            await running


async def test_a_process_whose_run_is_cancelled_is_killed_at_once() -> None:
    async with started(FAULTS) as (backend, log):
        running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(WorkerCrashed, match="must be started"):
            await backend.run(batch("a"), LONG)
        await backend.gone()
        await log.until(lambda: log.of("worker process ended"))
        assert "was cancelled" in log.of("worker process ended")[0]["how"]


async def test_a_process_that_speaks_without_being_asked_is_killed() -> None:
    async with started(FAULTS) as (backend, _):
        with contextlib.suppress(WorkerCrashed):
            await backend.run(batch("a", "forge-later"), LONG)
        async with asyncio.timeout(LONG):
            await backend.gone()


def await_bytes(backend: ProcessBackend, count: int) -> None:
    """Hold up everything here until the child has sent so many that are not read yet."""
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


async def test_a_stopped_process_fails_the_batch_it_runs() -> None:
    async with started(FAULTS) as (backend, _):
        running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
        await asyncio.sleep(0)
        await backend.stop()
        with pytest.raises(WorkerCrashed, match="was stopped"):
            await running


async def test_a_second_batch_at_once_is_a_mistake_of_the_caller() -> None:
    async with started(FAULTS) as (backend, _):
        running = asyncio.ensure_future(backend.run(batch("a"), LONG))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="given a batch while it was running one"):
            await backend.run(batch("b"), LONG)
        assert await running == [ItemResult("A")]


async def test_a_flood_of_output_neither_blocks_nor_fills_the_log() -> None:
    async with started(FAULTS) as (backend, log):
        assert await backend.run(batch("flood"), LONG) == [ItemResult("FLOOD")]
        await backend.stop()
        shown, dropped = log.lines("stdout"), log.of("worker output dropped")
        assert len(shown) < 10_000
        assert len(shown) + sum(fields["lines"] for fields in dropped) >= 200_000


async def test_output_of_any_encoding_reaches_the_log_escaped() -> None:
    async with started(FAULTS) as (backend, log):
        await backend.run(batch("noise"), LONG)
        await backend.stop()
        assert log.lines("stdout") == [r"\ud800 😀", r"caf\xe9 \x1b[2J ok", "half a line"]


async def test_too_much_memory_is_a_wish_to_go_between_batches() -> None:
    async with started(FAULTS, recycle_rss_bytes=1_000_000) as (backend, log):
        await backend.gone()
        assert log.of("worker wants to be replaced")[0]["rss_bytes"] > 1_000_000
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


async def test_memory_is_a_wish_to_go_even_without_a_pause_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.process.backend._CHECK_EVERY", 0.01)
    async with started(FAULTS, recycle_rss_bytes=1_000_000) as (backend, log):
        gone = asyncio.ensure_future(backend.gone())
        while not gone.done():
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert log.of("worker wants to be replaced")


async def test_within_its_limits_a_process_stays() -> None:
    async with started(FAULTS, recycle_rss_bytes=1 << 40) as (backend, _):
        gone = asyncio.ensure_future(backend.gone())
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert not gone.done()
        gone.cancel()


def test_a_worker_process_works_on_uvloop() -> None:
    import uvloop

    async def main() -> None:
        backend = build(FAULTS, Recorder())
        before = descriptors()
        for word in ("exit", "hang", "scribble", "flood"):
            await backend.start()
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
            try:
                assert await backend.run(batch(word), 0.2 if word == "hang" else LONG) == [ItemResult("FLOOD")]
            except (WorkerCrashed, BatchTimeout):
                await backend.gone()
        await backend.stop()
        assert descriptors() <= before + 2

    uvloop.run(main())


def fails_with(word: str, kind: type[BackendError], timeout: float) -> BackendError:
    async def main() -> BackendError:
        target = ModuleTarget("tests.targets.faults", "answer")
        backend = ProcessBackend(target, worker="host-7/gpu-0", device="cpu", start_timeout=60.0, log=Recorder())
        await backend.start()
        try:
            with pytest.raises(kind) as caught:
                await backend.run(batch(word), timeout)
        finally:
            await backend.stop()
        return caught.value

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("word", "kind", "timeout", "told", "shown"),
    [
        ("last-words", WorkerCrashed, 60.0, "out of", "the worker's process ended with exit code 9"),
        ("hang", BatchTimeout, 0.1, "it was killed", "the model took longer than the GPU deadline of 100 ms"),
        ("forge", WorkerCrashed, 60.0, "", "the worker's process answered something else than it was asked"),
        ("raise", BatchRaised, 60.0, "what is", "ValueError: what is\nthis"),
    ],
)
def test_clients_read_how_it_ended(word: str, kind: type[BackendError], timeout: float, told: str, shown: str) -> None:
    error = fails_with(word, kind, timeout)
    assert error.shown == shown
    assert told in str(error)
    assert ("host-7/gpu-0" in str(error)) == (kind is not BatchRaised)
