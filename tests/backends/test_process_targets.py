"""What a worker's process serves, and what user code sees of the world in it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headway.config.target import FileTarget, ModuleTarget
from headway.errors import TargetError
from headway.model import ALL_PARAMETERS, ItemResult, PerCall, Value
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import LONG, build, kind, started

pytestmark = pytest.mark.processes


async def outputs(target: ModuleTarget | FileTarget, *inputs: Value, **settings: Any) -> list[Value | None]:
    parameters = settings.pop("parameters", ())
    async with started(target, **settings) as (backend, _):
        return [item.output for item in await backend.run(batch(*inputs, parameters=parameters), LONG)]


@pytest.mark.parametrize("name", ["plain", "as_tuple", "subclass"])
async def test_a_function_is_served(name: str) -> None:
    assert await outputs(kind(name), "A", "B") == ["A", "B"]


@pytest.mark.parametrize(
    ("name", "answers"), [("with_parameters", ["a [('k', 1)]", "b []"]), ("with_named_parameters", ["a 1", "b 0"])]
)
async def test_a_function_that_takes_parameters_gets_an_object_for_each_input(name: str, answers: list[str]) -> None:
    assert await outputs(kind(name), "a", "b", parameters=[b'{"k":1}', b""]) == answers


@pytest.mark.parametrize(("name", "sees"), [("plain", ()), ("with_parameters", ALL_PARAMETERS)])
async def test_a_target_tells_which_parameters_it_gets(name: str, sees: PerCall) -> None:
    async with started(kind(name)) as (backend, _):
        assert backend.signature.sees == sees


async def test_an_async_function_is_served_on_one_event_loop() -> None:
    async with started(kind("coroutine")) as (backend, _):
        first, second = [await backend.run(batch("a"), LONG) for _ in range(2)]
        assert first == second


async def test_a_class_is_built_once_and_set_up_for_the_only_gpu_it_sees() -> None:
    async with started(kind("Model"), device="3") as (backend, _):
        for _ in range(2):
            [item] = await backend.run(batch("a"), LONG)
            assert item.output in ("a 1 cpu 3", "a 1 cuda:0 3")
    assert await outputs(kind("Model"), "a", device="cpu") == ["a 1 cpu "]


async def test_a_class_is_built_with_its_arguments_which_are_in_no_command_line() -> None:
    assert await outputs(kind("NeedsArguments", "'m', size=3"), "a") == ["a m 3"]
    async with started(kind("NeedsArguments", "'canary'")) as (backend, _):
        assert "canary" not in await asyncio.to_thread(Path(f"/proc/{backend.pid}/cmdline").read_text)


async def test_a_relative_import_of_a_file_is_refused_with_the_name_of_its_module(tmp_path: Path) -> None:
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "a.py").write_text("from . import b\ndef f(inputs):\n    return inputs\n")
    backend = build(FileTarget(package / "a.py", "f"), Recorder())
    with pytest.raises(TargetError, match="relative import") as caught:
        await backend.start()
    assert f"outer.inner.a:f, with {tmp_path} as the working directory" in str(caught.value)


async def test_an_async_class_has_one_event_loop_on_which_its_tasks_go_on_between_batches() -> None:
    assert await outputs(kind("AsyncModel"), "a", "b", parameters=[b'{"k":1}', b""]) == ["a 1", "b None"]
    async with started(kind("AsyncModel")) as (backend, log):
        await backend.run(batch("later"), LONG)
        await log.until(lambda: log.lines("stdout") == ["done later"])
        assert await backend.run(batch("a"), LONG) == [ItemResult("a None")]


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


async def test_the_file_behind_a_target_is_known() -> None:
    async with started(kind("plain")) as (backend, _):
        assert Path(backend.source).name == "kinds.py"
