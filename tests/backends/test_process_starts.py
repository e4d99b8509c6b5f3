"""Starts of a worker's process: targets that cannot be served, and starts that hang, fail or are cut short."""

import asyncio
import contextlib
import os
import signal
import sys
import weakref

import pytest

from headway.config.target import ModuleTarget
from headway.errors import StartKilled, TargetError
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import LONG, alive, build, kind, started, without_collector

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (ModuleTarget("tests.targets.nowhere", "f"), "there is no module 'tests.targets.nowhere'"),
        (ModuleTarget("nowhere.at.all", "f"), "there is no module 'nowhere'"),
        (ModuleTarget("tests.targets.raises", "f"), "importing it raised RuntimeError: no such luck"),
        (ModuleTarget("tests.targets.lacks", "f"), "importing it raised ModuleNotFoundError: No module named 'no_such"),
        (ModuleTarget("tests.targets.lacks", "f"), f"Headway runs on {sys.executable}; what it imports is to be there"),
        (kind("plian"), "Did you mean 'plain'?"),
        (kind("plain.deeper"), "has no 'deeper'"),
        (kind("NOT_CALLABLE"), "it is of type int"),
        (kind("NoCall"), "the class has no __call__"),
        (kind("NeedsArguments"), "it cannot be built without arguments: missing a required argument: 'path'"),
        (kind("NeedsArguments", "paht='canary'"), "it cannot be built with (paht=…): missing a required argument"),
        (kind("NeedsArguments", "path=None"), "building it with (path=…) raised TypeError: path must be a str"),
        (kind("plain", "n=1"), "it is not a class, and only a class takes arguments"),
        (kind("BadSetup"), r"raised RuntimeError: no GPU here"),
        (kind("DyingSetup"), "ended with exit code 7"),
        (kind("needs_two"), "its signature is (inputs: 'list[str]', other: 'str')"),
        (kind("takes_none"), "its signature is ()"),
        (
            kind("one_text"),
            "its parameter text is annotated str, and a target gets a list of inputs. Write text: list[str],",
        ),
        (kind("one_object"), "Write value: list[dict[str, typing.Any]]"),
        (kind("OneText"), "Write text: list[str], and return a list"),
        (
            kind("unannotated"),
            "no attribute 'upper'. A target gets a list of inputs and returns a list of outputs. If it does",
        ),
        (kind("refuses_all"), "the warm-up batch ['warm-up'] failed: ValueError: not my kind of text"),
        (
            kind("wants_a_parameter"),
            "KeyError: 'temperature'. A warm-up batch has no parameters, and a request may have none",
        ),
        (
            kind("TakesListForMapping"),
            "no attribute 'get'. Its arguments are lists, and parameters has one object for each input; annotate it as in parameters: Mapping[",
        ),
        (kind("gives_numbers"), "returned int for this input"),
        (kind("gives_none"), "returned NoneType, expected a list of 1 outputs"),
    ],
    ids=str,
)
async def test_a_target_that_cannot_be_served_is_refused_with_the_reason(target: ModuleTarget, says: str) -> None:
    log = Recorder()
    backend = build(target, log)
    with pytest.raises(TargetError) as caught:
        await backend.start()
    assert says in str(caught.value)
    assert f"{target.module}:{target.attribute}" in str(caught.value)
    assert "canary" not in str(caught.value)
    assert not alive(backend.pid)
    await backend.stop()


async def test_a_decorator_that_takes_lists_may_keep_the_annotations_of_what_it_wraps() -> None:
    async with started(kind("decorated")) as (backend, _):
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


async def test_a_start_measures_batches_of_one_and_of_the_largest_size() -> None:
    async with started(kind("tells_sizes"), max_batch=64) as (backend, log):
        assert log.lines("stdout") == ["a batch of 1", "a batch of 1", "a batch of 64", "a batch of 64"]
        assert [size for size, _ in backend.warm_up] == [1, 64]
        assert all(0.0 < seconds < LONG for _, seconds in backend.warm_up)


async def test_a_target_that_does_not_take_the_largest_batch_is_refused() -> None:
    for name, says in (
        ("takes_few", "a warm-up batch of 64 times 'warm-up' failed: ValueError: too many."),
        ("dies_of_many", "its process ended with exit code 9 in a warm-up batch of 64."),
    ):
        backend = build(kind(name), Recorder(), max_batch=64)
        with pytest.raises(TargetError) as caught:
            await backend.start()
        assert says in str(caught.value)
        assert "lower max_batch_size" in str(caught.value)
        await backend.stop()


async def test_the_traceback_of_a_failed_import_comes_with_the_error() -> None:
    log = Recorder()
    backend = build(ModuleTarget("tests.targets.raises", "f"), log)
    with pytest.raises(TargetError) as caught:
        await backend.start()
    assert "raises.py" in caught.value.trace
    assert log.lines("stderr") == [], "it is not told twice"
    backend = build(kind("refuses_all"), log)
    with pytest.raises(TargetError) as caught:
        await backend.start()
    assert "kinds.py" in caught.value.trace.splitlines()[1], "that of a warm-up batch, too"


async def test_a_target_that_is_not_ready_in_time_is_refused_and_killed() -> None:
    backend = build(kind("HangingSetup"), Recorder(), start_timeout=0.1)
    with pytest.raises(TargetError, match=r"not ready within 0\.1 s.*raise start_timeout_ms"):
        await backend.start()
    assert not alive(backend.pid)


async def test_a_kill_from_outside_while_it_starts_is_told_from_a_target_that_does_not_load() -> None:
    backend = build(kind("HangingSetup"), Recorder())
    starting = asyncio.ensure_future(backend.start())
    await asyncio.sleep(0)
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(StartKilled, match="died of SIGKILL"):
        await starting
    with pytest.raises(TargetError, match="exit code 7") as caught:
        await build(kind("DyingSetup"), Recorder()).start()
    assert not isinstance(caught.value, StartKilled)


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    log = Recorder()
    backend = build(kind("HangingSetup"), log)
    starting = asyncio.ensure_future(backend.start())
    await asyncio.sleep(0)
    assert alive(backend.pid)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(backend.pid)


async def test_a_target_that_turns_down_the_warm_up_text_is_served() -> None:
    async with started(kind("refuses_each")) as (backend, _):
        assert await backend.run(batch("a"), LONG) == [ItemResult(None, "ValueError: not my kind of text")]


@pytest.mark.parametrize("name", ["DyingSetup", "refuses_all"])
def test_a_start_that_failed_leaves_nothing_for_the_garbage_collector(name: str) -> None:
    async def main() -> None:
        backend = build(kind(name), Recorder())
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        child = backend._child
        assert child is not None
        left = weakref.ref(child)
        with contextlib.suppress(TargetError):
            await starting
        del starting, child
        await backend.stop()
        await asyncio.sleep(0)
        assert left() is None

    without_collector(main)
