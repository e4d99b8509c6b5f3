"""Starting a worker process: what it serves, what user code sees, and starts that hang, fail or are aborted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.backends.process import frames, run_batch
from headway.backends.process.usercode import Refusal, SourceLoader, Target, UserLoop, import_from_source, load
from headway.config.target import FileTarget, ModuleTarget
from headway.errors import StartKilled, TargetError
from headway.model import ALL_PARAMETERS, ItemResult, PerCall, Value
from tests.backends.entries import batch
from tests.backends.worker_process import LONG, Recorder, alive, build, kind, started
from tests.targets import kinds

pytestmark = pytest.mark.processes


REFUSED = [
    ("tests.targets.nowhere:f", "", "there is no module 'tests.targets.nowhere'"),
    ("nowhere.at.all:f", "", "there is no module 'nowhere'"),
    ("tests.targets.lacks:f", "", "importing it raised ModuleNotFoundError: No module named 'no_such"),
    ("tests.targets.lacks:f", "", f"Headway runs on {sys.executable}; install what it imports there"),
    ("tests.targets.kinds:plian", "", "Did you mean 'plain'?"),
    ("tests.targets.kinds:plain.deeper", "", "has no 'deeper'"),
    ("tests.targets.kinds:NOT_CALLABLE", "", "it is of type int"),
    ("tests.targets.kinds:NoCall", "", "the class has no __call__"),
    ("tests.targets.kinds:NeedsArguments", "", "be built without arguments: missing a required argument: 'path'"),
    ("tests.targets.kinds:NeedsArguments", "paht='canary'", "be built with (paht=…): missing a required argument"),
    ("tests.targets.kinds:NeedsArguments", "path=None", "with (path=…) raised TypeError: path must be a str"),
    ("tests.targets.kinds:plain", "n=1", "it is not a class, but only a class takes arguments"),
    ("tests.targets.kinds:BadSetup", "", "raised RuntimeError: no GPU here"),
    ("tests.targets.kinds:needs_two", "", "its signature is (inputs: 'list[str]', other: 'str')"),
    ("tests.targets.kinds:takes_none", "", "its signature is ()"),
    ("tests.targets.kinds:one_text", "", "its parameter text is annotated str, but a target gets a list of inputs."),
    ("tests.targets.kinds:one_text", "", "Write text: list[str],"),
    ("tests.targets.kinds:one_object", "", "Write value: list[dict[str, typing.Any]]"),
    ("tests.targets.kinds:OneText", "", "Write text: list[str], and return a list"),
]


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the import state afterwards, as these tests import targets into this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setattr(sys, "path_importer_cache", {})


@pytest.mark.usefixtures("importing")
@pytest.mark.parametrize(("target", "arguments", "says"), REFUSED)
def test_a_target_that_cannot_be_loaded_is_refused_with_the_reason(target: str, arguments: str, says: str) -> None:
    module, _, name = target.partition(":")
    with pytest.raises(Refusal) as caught:
        load("module", module, name, UserLoop(), arguments)
    assert says in str(caught.value)
    assert target in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.usefixtures("importing")
def test_a_relative_import_of_a_file_is_refused_with_the_name_of_its_module(tmp_path: Path) -> None:
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "a.py").write_text("from . import b\ndef f(inputs):\n    return inputs\n")
    with pytest.raises(Refusal, match="relative import") as caught:
        load("file", str(package / "a.py"), "f", UserLoop())
    assert f"outer.inner.a:f, with {tmp_path} as the working directory" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (ModuleTarget("tests.targets.raises", "f"), "importing it raised RuntimeError: no such luck"),
        (kind("DyingSetup"), "ended with exit code 7"),
        (kind("unannotated"), "'upper'. A target gets a list of inputs and returns a list of outputs. If it does"),
        (kind("refuses_all"), "the warm-up batch ['warm-up'] failed: ValueError: not my kind of text"),
        (kind("wants_a_parameter"), "'temperature'. A warm-up batch has no parameters, and a request may have none"),
        (
            kind("TakesListForMapping"),
            "no attribute 'get'. Its arguments are lists, and parameters has one object for each input; to get one mapping for the call, write parameters: Mapping[",
        ),
        (kind("gives_numbers"), "returned int for this input"),
        (kind("gives_none"), "returned NoneType, expected a list of 1 outputs"),
    ],
    ids=str,
)
async def test_a_start_that_fails_tells_the_reason_and_leaves_no_process(target: ModuleTarget, says: str) -> None:
    log = Recorder()
    backend = build(target, log)
    with pytest.raises(TargetError) as caught:
        await backend.start()
    assert says in str(caught.value)
    assert f"{target.module}:{target.attribute}" in str(caught.value)
    assert not isinstance(caught.value, StartKilled)
    if target.attribute in ("f", "refuses_all"):
        assert f"{target.module.rpartition('.')[2]}.py" in caught.value.trace
        assert log.lines("stderr") == [], "the traceback is not told twice"
    assert not alive(backend.pid)
    await backend.stop()


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


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("late", TargetError, r"not ready within 0\.1 s.*raise start_timeout_ms"),
        ("killed", StartKilled, "died of SIGKILL"),
        ("cancelled", asyncio.CancelledError, None),
    ],
)
async def test_a_hanging_start_says_how_it_ended_and_is_gone(
    how: str, error: type[BaseException], says: str | None
) -> None:
    backend = build(kind("HangingSetup"), Recorder(), start_timeout=0.1 if how == "late" else LONG)
    starting = asyncio.ensure_future(backend.start())
    await asyncio.sleep(0)
    assert alive(backend.pid)
    if how == "killed":
        os.kill(backend.pid, signal.SIGKILL)
    elif how == "cancelled":
        starting.cancel()
    with pytest.raises(error, match=says) as caught:
        await starting
    assert isinstance(caught.value, StartKilled) == (how == "killed")
    assert not alive(backend.pid)


async def test_a_target_that_turns_down_the_warm_up_text_is_served() -> None:
    async with started(kind("refuses_each")) as (backend, _):
        assert await backend.run(batch("a"), LONG) == [ItemResult(None, "ValueError: not my kind of text")]


async def outputs(target: ModuleTarget | FileTarget, *inputs: Value, **settings: Any) -> list[Value | None]:
    async with started(target, **settings) as (backend, _):
        return [item.output for item in await backend.run(batch(*inputs), LONG)]


@pytest.mark.parametrize(
    ("target", "answers", "sees"),
    [
        (kinds.plain, ["A", "B"], ()),
        (kinds.as_tuple, ["a", "b"], ()),
        (kinds.subclass, ["a", "b"], ()),
        (kinds.decorated, ["A", "B"], ()),
        (kinds.with_parameters, ["a [('k', 1)]", "b []"], ALL_PARAMETERS),
        (kinds.with_named_parameters, ["a 1", "b 0"], ALL_PARAMETERS),
    ],
)
def test_a_function_is_served(target: Callable[..., Any], answers: list[str], sees: PerCall) -> None:
    loaded = Target(target, "t", "", UserLoop())
    word: Any = run_batch.run(loaded, frames.Run(1, ["a", "b"], [b'{"k":1}', b""]))
    assert word.outputs == answers
    assert {type(output) for output in word.outputs} == {str}
    assert loaded.signature.sees == sees


async def test_a_class_is_built_once_and_set_up_for_the_only_gpu_it_sees() -> None:
    async with started(kind("Model"), device="3") as (backend, _):
        for _ in range(2):
            [item] = await backend.run(batch("a"), LONG)
            assert item.output in ("a 1 cpu 3", "a 1 cuda:0 3")
        assert Path(backend.source).name == "kinds.py"
    assert await outputs(kind("Model"), "a", device="cpu") == ["a 1 cpu "]


async def test_a_class_is_built_with_its_arguments_which_are_in_no_command_line() -> None:
    async with started(kind("NeedsArguments", "'canary', size=3")) as (backend, _):
        assert await backend.run(batch("a"), LONG) == [ItemResult("a canary 3")]
        assert "canary" not in await asyncio.to_thread(Path(f"/proc/{backend.pid}/cmdline").read_text)


async def test_an_async_class_has_one_event_loop_on_which_its_tasks_go_on_between_batches() -> None:
    async with started(kind("AsyncModel")) as (backend, log):
        await backend.run(batch("later"), LONG)
        await log.until(lambda: log.lines("stdout") == ["done later"])
        items = await backend.run(batch("a", "b", parameters=[b'{"k":1}', b""]), LONG)
        assert items == [ItemResult("a 1"), ItemResult("b None")]


async def test_a_file_is_served_from_anywhere(tmp_path: Path) -> None:
    source = (
        "import sibling, struct\ndef f(inputs):\n    return [sibling.WORD + struct.Struct.__name__ for _ in inputs]\n"
    )
    (tmp_path / "struct.py").write_text(source)
    (tmp_path / "sibling.py").write_text("WORD = 'found'\n")
    assert await outputs(FileTarget(tmp_path / "struct.py", "f"), "a") == ["foundStruct"]


async def test_the_standard_library_is_not_shadowed_by_our_own_files() -> None:
    assert await outputs(kind("standard_library"), "a") == ["http.client"]


async def test_what_the_target_starts_does_not_inherit_the_pipe() -> None:
    [listed] = await outputs(kind("inherited"), "a")
    assert listed
    assert "socket:" not in str(listed)


async def test_files_in_the_working_directory_shadow_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("struct", "signal", "msgspec", "headway", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "app.py").write_text("def f(inputs):\n    return inputs\n")
    monkeypatch.chdir(tmp_path)
    assert await outputs(ModuleTarget("app", "f"), "a") == ["a"]


async def test_the_target_sees_the_environment_but_no_setting_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("HEADWAY_BROKER", "HEADWAY_LEDGER", "HEADWAY_ADMIN_TOKEN", "HEADWAY_LATER", "headway_broker")
    for name in ours:
        monkeypatch.setenv(name, "redis://user:canary@host")
    monkeypatch.setenv("MODEL_DIR", "/models")
    assert await outputs(kind("environment"), *ours, "MODEL_DIR") == [*["(unset)"] * len(ours), "/models"]


@pytest.mark.usefixtures("importing")
def test_a_folder_is_read_from_its_sources_and_other_code_from_its_bytecode(tmp_path: Path) -> None:
    package, installed = tmp_path / "mine" / "package", tmp_path / "mine" / ".venv" / "lib" / "site-packages"
    for folder in (package, installed):
        folder.mkdir(parents=True)
    (package / "part.py").write_text("x = 1")
    import_from_source(str(tmp_path / "mine"))
    found = sys.path_hooks[0](str(package)).find_spec("part")
    assert found is not None and isinstance(found.loader, SourceLoader)
    for other in (tmp_path, installed):
        with pytest.raises(ImportError):
            sys.path_hooks[0](str(other))
    import_from_source("/")
    with pytest.raises(ImportError):
        sys.path_hooks[0](str(Path(os.__file__).parent))
