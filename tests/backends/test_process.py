"""A GPU worker's child process, and every way in which user code can go wrong in it."""

from __future__ import annotations

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
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headway.backends.process import child_process
from headway.backends.process.backend import ProcessBackend
from headway.backends.process.child_process import Lifetime
from headway.config.target import FileTarget, ModuleTarget
from headway.errors import (
    BackendError,
    BatchRaised,
    BatchTimeout,
    StartKilled,
    TargetError,
    WorkerAbsent,
    WorkerCrashed,
)
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.recorder import Recorder

pytestmark = pytest.mark.processes

LONG = 30.0
FAULTS = ModuleTarget("tests.targets.faults", "answer")
Act = Callable[[ProcessBackend, Recorder], Awaitable[None]]


def kind(name: str) -> ModuleTarget:
    return ModuleTarget("tests.targets.kinds", name)


def build(target: ModuleTarget | FileTarget, log: Recorder, **settings: Any) -> ProcessBackend:
    arguments = {"worker": "gpu-0", "device": "0", "start_timeout": LONG, **settings}
    return ProcessBackend(target, log=log, **arguments)


def started(target: ModuleTarget | FileTarget, act: Act, **settings: Any) -> None:
    """Run `act` on a started backend, and see that nothing is left of it."""

    async def main() -> None:
        log = Recorder()
        backend = build(target, log, **settings)
        await backend.start()
        pid = backend.pid
        assert alive(pid)
        try:
            await act(backend, log)
        finally:
            last = backend.pid
            await backend.stop()
        assert not alive(pid)
        assert not last or not alive(last)

    asyncio.run(main())


def alive(pid: int) -> bool:
    """Whether the process is there, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def outputs(target: ModuleTarget | FileTarget, *inputs: str, **settings: Any) -> list[str | None]:
    """Outputs of a started target for one batch."""
    found: list[str | None] = []
    parameters = settings.pop("parameters", ())

    async def act(backend: ProcessBackend, log: Recorder) -> None:
        found.extend(item.output for item in await backend.run(batch(*inputs, parameters=parameters), LONG))

    started(target, act, **settings)
    return found


@pytest.mark.parametrize("name", ["plain", "as_tuple", "subclass"])
def test_a_function_is_served(name: str) -> None:
    assert outputs(kind(name), "A", "B") == ["A", "B"]


@pytest.mark.parametrize(
    ("name", "answers"), [("with_parameters", ["a [('k', 1)]", "b []"]), ("with_named_parameters", ["a 1", "b 0"])]
)
def test_a_function_that_takes_parameters_gets_an_object_for_each_input(name: str, answers: list[str]) -> None:
    assert outputs(kind(name), "a", "b", parameters=[b'{"k":1}', b""]) == answers


def test_an_async_function_is_served_on_one_event_loop() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        first, second = [await backend.run(batch("a"), LONG) for _ in range(2)]
        assert first == second

    started(kind("coroutine"), act)


def test_a_class_is_built_once_and_set_up_for_the_only_gpu_it_sees() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        for _ in range(2):
            [item] = await backend.run(batch("a"), LONG)
            assert item.output in ("a 1 cpu 3", "a 1 cuda:0 3")

    started(kind("Model"), act, device="3")
    assert outputs(kind("Model"), "a", device="cpu") == ["a 1 cpu "]


def test_an_async_class_shares_one_event_loop() -> None:
    assert outputs(kind("AsyncModel"), "a", "b", parameters=[b'{"k":1}', b""]) == ["a 1", "b None"]


def test_tasks_of_an_async_target_go_on_between_batches() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        await backend.run(batch("later"), LONG)
        await log.until(lambda: log.lines("stdout") == ["done later"])
        assert await backend.run(batch("a"), LONG) == [ItemResult("a None")]

    started(kind("AsyncModel"), act)


def test_a_file_is_served_from_anywhere(tmp_path: Path) -> None:
    source = (
        "import sibling, struct\ndef f(inputs):\n    return [sibling.WORD + struct.Struct.__name__ for _ in inputs]\n"
    )
    (tmp_path / "struct.py").write_text(source)
    (tmp_path / "sibling.py").write_text("WORD = 'found'\n")
    assert outputs(FileTarget(tmp_path / "struct.py", "f"), "a") == ["foundStruct"]


def test_the_standard_library_is_not_shadowed_by_our_own_files() -> None:
    assert outputs(kind("standard_library"), "a") == ["http.client"]


def test_what_the_target_starts_does_not_inherit_the_pipe() -> None:
    [listed] = outputs(kind("inherited"), "a")
    assert listed
    assert "socket:" not in listed


def test_files_in_the_working_directory_do_not_shadow_what_the_child_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("struct", "signal", "msgspec", "headway", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "app.py").write_text("def f(inputs):\n    return inputs\n")
    monkeypatch.chdir(tmp_path)
    assert outputs(ModuleTarget("app", "f"), "a") == ["a"]


def test_the_target_sees_the_environment_but_no_setting_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("HEADWAY_BROKER", "HEADWAY_LEDGER", "HEADWAY_ADMIN_TOKEN", "HEADWAY_LATER", "headway_broker")
    for name in ours:
        monkeypatch.setenv(name, "redis://user:canary@host")
    monkeypatch.setenv("MODEL_DIR", "/models")
    assert outputs(kind("environment"), *ours, "MODEL_DIR") == [*["(unset)"] * len(ours), "/models"]


def test_the_file_behind_a_target_is_known() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        assert Path(backend.source).name == "kinds.py"

    started(kind("plain"), act)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (ModuleTarget("tests.targets.nowhere", "f"), "there is no module 'tests.targets.nowhere'"),
        (ModuleTarget("nowhere.at.all", "f"), "there is no module 'nowhere'"),
        (ModuleTarget("tests.targets.raises", "f"), "importing it raised RuntimeError: no such luck"),
        (ModuleTarget("tests.targets.lacks", "f"), "importing it raised ModuleNotFoundError: No module named 'no_such"),
        (kind("plian"), "Did you mean 'plain'?"),
        (kind("plain.deeper"), "has no 'deeper'"),
        (kind("NOT_CALLABLE"), "it is of type int"),
        (kind("NoCall"), "the class has no __call__"),
        (kind("NeedsArguments"), "building it without arguments raised TypeError"),
        (kind("BadSetup"), r"raised RuntimeError: no GPU here"),
        (kind("DyingSetup"), "ended with exit code 7"),
        (kind("needs_two"), "its signature is (inputs: 'list[str]', other: 'str')"),
        (kind("takes_none"), "its signature is ()"),
        (kind("refuses_all"), "the warm-up batch ['warm-up'] failed: ValueError: not my kind of text"),
        (kind("gives_numbers"), "returned int for this input"),
        (kind("gives_none"), "returned NoneType, expected a list of 1 outputs"),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_served_is_refused_with_the_reason(target: ModuleTarget, says: str) -> None:
    async def main() -> None:
        log = Recorder()
        backend = build(target, log)
        with pytest.raises(TargetError) as caught:
            await backend.start()
        assert says in str(caught.value)
        assert str(target) in str(caught.value)
        assert not alive(backend.pid)
        await backend.stop()

    asyncio.run(main())


def test_the_traceback_of_a_failed_import_is_in_the_log() -> None:
    async def main() -> None:
        log = Recorder()
        backend = build(ModuleTarget("tests.targets.raises", "f"), log)
        with pytest.raises(TargetError):
            await backend.start()
        assert any("raises.py" in line for line in log.lines("stderr"))
        assert log.of("worker output")[0]["worker"] == "gpu-0"

    asyncio.run(main())


def test_a_target_that_is_not_ready_in_time_is_refused_and_killed() -> None:
    async def main() -> None:
        backend = build(kind("HangingSetup"), Recorder(), start_timeout=0.1)
        with pytest.raises(TargetError, match=r"not ready within 0\.1 s.*raise start_timeout_ms"):
            await backend.start()
        assert not alive(backend.pid)

    asyncio.run(main())


def test_a_kill_from_outside_while_it_starts_is_told_from_a_target_that_does_not_load() -> None:
    async def main() -> None:
        backend = build(kind("HangingSetup"), Recorder())
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(StartKilled, match="died of SIGKILL"):
            await starting
        with pytest.raises(TargetError, match="exit code 7") as caught:
            await build(kind("DyingSetup"), Recorder()).start()
        assert not isinstance(caught.value, StartKilled)

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> None:
        log = Recorder()
        backend = build(kind("HangingSetup"), log)
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        assert alive(backend.pid)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not alive(backend.pid)

    asyncio.run(main())


def test_a_target_that_turns_down_the_warm_up_text_is_served() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        assert await backend.run(batch("a"), LONG) == [ItemResult(None, "ValueError: not my kind of text")]

    started(kind("refuses_each"), act)


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
def test_user_code_that_raises_fails_its_batch_and_the_process_goes_on(word: str, says: str) -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        pid = backend.pid
        with pytest.raises(BatchRaised) as caught:
            await backend.run(batch("a", word), LONG)
        assert str(caught.value) == says
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert backend.pid == pid
        assert any("faults.py" in line for line in log.lines("stderr"))

    started(FAULTS, act)


def test_the_error_of_one_input_is_its_own() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
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

    started(FAULTS, act)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("exit", "ended with exit code 3"),
        ("segfault", "died of SIGSEGV"),
        ("scribble", "wrote something on its pipe to Headway that is no answer"),
        ("forge", "answered something else than it was asked"),
        ("close", "closed its pipe to Headway"),
        ("last-words", r"exit code 9; its last words: out of\x1b[31m luck"),
    ],
)
def test_a_process_that_dies_in_a_batch_fails_it_and_can_be_started_again(
    word: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.backends.process.child_process._PIPELESS", 0.05)

    async def act(backend: ProcessBackend, log: Recorder) -> None:
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

    started(FAULTS, act)


@pytest.mark.parametrize("word", ["raise", "exit", "hang", "scribble", "forge"])
def test_a_process_that_died_leaves_nothing_for_the_garbage_collector(word: str) -> None:
    async def main() -> None:
        backend = build(FAULTS, Recorder())
        await backend.start()
        assert backend._child is not None
        left: list[weakref.ref[Any]] = [weakref.ref(backend._child), *map(weakref.ref, backend._child._outputs)]
        with contextlib.suppress(BackendError):
            await backend.run(batch("a", word), 0.1 if word == "hang" else LONG)
        await backend.stop()
        await asyncio.sleep(0)  # What was called back last lets go.
        assert [one for one in left if one() is not None] == []

    without_collector(main)


@pytest.mark.parametrize("name", ["DyingSetup", "refuses_all"])
def test_a_start_that_failed_leaves_nothing_for_the_garbage_collector(name: str) -> None:
    async def main() -> None:
        backend = build(kind(name), Recorder())
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        child: Lifetime | None = backend._child
        assert child is not None
        left = weakref.ref(child)
        with contextlib.suppress(TargetError):
            await starting
        del starting, child
        await backend.stop()
        await asyncio.sleep(0)
        assert left() is None

    without_collector(main)


def without_collector(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` while nothing looks for reference cycles."""
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("word", ["hang", "sleep"])
def test_a_process_that_hangs_is_killed_at_the_timeout(word: str) -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        pid = backend.pid
        with pytest.raises(BatchTimeout, match=r"gpu-0 had no answer within 0\.1 s"):
            await backend.run(batch("a", word), 0.1)
        await backend.gone()
        await backend.start()
        assert not alive(pid)
        assert "had run for 0.1 s" in log.of("worker process ended")[0]["how"]
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]

    started(FAULTS, act)


def test_a_process_that_is_killed_while_idle_is_gone() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        os.kill(backend.pid, signal.SIGKILL)
        await backend.gone()
        with pytest.raises(WorkerCrashed):
            await backend.run(batch("a"), LONG)
        await log.until(lambda: log.of("worker process ended"))
        assert log.of("worker process ended")[0]["how"] == "died of SIGKILL"

    started(FAULTS, act)


def test_a_process_that_is_killed_in_a_batch_fails_it() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
        await asyncio.sleep(0)
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="died of SIGKILL"):
            await running

    started(FAULTS, act)


def test_a_process_whose_run_is_cancelled_is_killed_at_once() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
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

    started(FAULTS, act)


def test_a_process_that_speaks_without_being_asked_is_killed() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        with contextlib.suppress(WorkerCrashed):
            await backend.run(batch("a", "forge-later"), LONG)
        async with asyncio.timeout(LONG):
            await backend.gone()

    started(FAULTS, act)


def await_bytes(backend: ProcessBackend, count: int) -> None:
    """Hold up everything here until the child has sent so many that are not read yet."""
    assert backend._child is not None
    waiting = b""
    while int.from_bytes(waiting, sys.byteorder) < count:
        waiting = fcntl.ioctl(backend._child._socket, termios.FIONREAD, bytes(4))


def test_an_answer_given_just_before_the_end_counts() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        running = asyncio.ensure_future(backend.run(batch("X" * 100_000), LONG))
        await asyncio.sleep(0)
        await_bytes(backend, 100_000)
        pidfd = os.pidfd_open(backend.pid)
        os.kill(backend.pid, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)
        assert await running == [ItemResult("X" * 100_000)]
        await backend.gone()

    started(FAULTS, act)


def test_an_answer_after_what_is_none_does_not_count() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        running = asyncio.ensure_future(backend.run(batch("babble"), LONG))
        await asyncio.sleep(0)
        await_bytes(backend, child_process._READ + 1)
        with pytest.raises(WorkerCrashed, match="that is no answer"):
            await running

    started(FAULTS, act)


def test_a_child_leaves_signals_to_its_parent() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(backend.pid, number)
        assert await backend.run(batch("a"), LONG) == [ItemResult("-15")]

    started(kind("with_fork"), act)


def test_what_a_child_has_started_ends_with_it() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        [item] = await backend.run(batch("a"), LONG)
        left = int(item.output or 0)
        pidfd = os.pidfd_open(left)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await backend.stop()
        async with asyncio.timeout(LONG):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    started(kind("with_child"), act)


def test_a_stopped_process_fails_the_batch_it_runs() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        running = asyncio.ensure_future(backend.run(batch("sleep"), LONG))
        await asyncio.sleep(0)
        await backend.stop()
        with pytest.raises(WorkerCrashed, match="was stopped"):
            await running

    started(FAULTS, act)


def test_a_second_batch_at_once_is_a_mistake_of_the_caller() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        running = asyncio.ensure_future(backend.run(batch("a"), LONG))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="given a batch while it runs one"):
            await backend.run(batch("b"), LONG)
        assert await running == [ItemResult("A")]

    started(FAULTS, act)


def test_a_flood_of_output_neither_blocks_nor_fills_the_log() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        assert await backend.run(batch("flood"), LONG) == [ItemResult("FLOOD")]
        await backend.stop()
        shown, dropped = log.lines("stdout"), log.of("worker output dropped")
        assert len(shown) < 10_000
        assert len(shown) + sum(fields["lines"] for fields in dropped) >= 200_000

    started(FAULTS, act)


def test_output_of_any_encoding_reaches_the_log_escaped() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        await backend.run(batch("noise"), LONG)
        await backend.stop()
        assert log.lines("stdout") == [r"\ud800 😀", r"caf\xe9 \x1b[2J ok", "half a line"]

    started(FAULTS, act)


def test_too_much_memory_is_a_wish_to_go_between_batches() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        await backend.gone()
        assert log.of("worker wants to be replaced")[0]["rss_bytes"] > 1_000_000
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]

    started(FAULTS, act, recycle_rss_bytes=1_000_000)


def test_age_is_a_wish_to_go_even_without_a_pause_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.process.backend._CHECK_EVERY", 0.01)

    async def act(backend: ProcessBackend, log: Recorder) -> None:
        gone = asyncio.ensure_future(backend.gone())
        while not gone.done():
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert log.of("worker wants to be replaced")

    started(FAULTS, act, recycle_after=0.02)


def test_within_its_limits_a_process_stays() -> None:
    async def act(backend: ProcessBackend, log: Recorder) -> None:
        gone = asyncio.ensure_future(backend.gone())
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        assert not gone.done()
        gone.cancel()

    started(FAULTS, act, recycle_after=3600.0, recycle_rss_bytes=1 << 40)


def descriptors() -> int:
    gc.collect()  # What others have left behind is not to go in between.
    return len(list(Path("/proc/self/fd").iterdir()))


def test_fifty_restarts_leak_no_descriptor() -> None:
    async def main() -> None:
        backend = build(FAULTS, Recorder())
        await backend.start()
        before = descriptors()
        for round_ in range(50):
            if round_ % 2:
                os.kill(backend.pid, signal.SIGKILL)
            await backend.start()
        assert descriptors() == before
        await backend.stop()

    asyncio.run(main())


def test_without_pidfd_a_thread_tells_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    async def act(backend: ProcessBackend, log: Recorder) -> None:
        with pytest.raises(WorkerCrashed, match="exit code 3"):
            await backend.run(batch("exit"), LONG)
        await backend.start()
        with pytest.raises(BatchTimeout):
            await backend.run(batch("hang"), 0.1)
        await backend.start()
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]

    started(FAULTS, act)


def test_it_works_on_uvloop() -> None:
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
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids if pid]
        also(pids[2])
        host.kill()
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], LONG)
        os.close(pidfd)
        assert readable


def test_a_child_does_not_outlive_its_parent_even_when_it_hangs() -> None:
    killed_host("tests.targets.faults:answer", "hang")


def test_what_a_child_has_started_does_not_outlive_the_parent_of_both() -> None:
    killed_host("tests.targets.kinds:with_child", "a")


def test_who_guards_is_not_ended_by_signals_to_all() -> None:
    def signal_all(guard: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard, number)

    killed_host("tests.targets.kinds:with_child", "a", signal_all)
