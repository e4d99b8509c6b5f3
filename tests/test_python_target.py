"""Targets given as Python objects: the name under which workers import them, and which ones are refused."""

import functools
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.app.serving import target_of
from headway.config.target import FileTarget, ModuleTarget, RemoteTarget
from headway.errors import TargetError

ROOT = str(Path(__file__).parent.parent)


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Model:
    def __init__(self, end: str = "") -> None:
        self.end = end

    def __call__(self, inputs: list[str]) -> list[str]:
        return [text + self.end for text in inputs]

    class Inner:
        def __call__(self, inputs: list[str]) -> list[str]:
            return inputs


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(inputs: list[str]) -> Any:
        return function(inputs)

    return inner


@wrapped
def decorated(inputs: list[str]) -> list[str]:
    return inputs


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("tests.targets.kinds:f", ModuleTarget("tests.targets.kinds", "f")),
        ("http://127.0.0.1:1/batch", RemoteTarget("http://127.0.0.1:1/batch")),
        (upper, ModuleTarget(__name__, "upper", folder=ROOT)),
        (decorated, ModuleTarget(__name__, "decorated", folder=ROOT)),
        (Model, ModuleTarget(__name__, "Model", folder=ROOT)),
        (Model.Inner, ModuleTarget(__name__, "Model.Inner", folder=ROOT)),
        (functools.partial(Model, end="!"), ModuleTarget(__name__, "Model", "end='!'", folder=ROOT)),
        (textwrap.dedent, ModuleTarget("textwrap", "dedent")),
    ],
)
def test_what_can_be_imported_has_a_name(given: Any, target: Any) -> None:
    assert target_of(given) == target


def made() -> Callable[..., Any]:
    def inner(inputs: list[str]) -> list[str]:
        return inputs

    return inner


HIDDEN = wrapped(upper)
"""A function that claims to be `upper`, but is another."""


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (lambda inputs: inputs, "Write a function: def f"),
        (made(), "is defined inside made, where workers cannot import it. Move it"),
        (Model(), "target Model is neither a function nor a class. Pass the class itself"),
        (Model().__call__, "target method is neither"),
        (len, "is neither"),
        (None, "target NoneType is neither"),
        (functools.partial(upper, ["a"]), "target partial is neither"),
        (functools.partial(Model, "!"), "positional arguments. Pass them by name"),
        (functools.partial(dict, end=object()), "cannot get these arguments"),
        (HIDDEN, f"target upper is not the object that {__name__}:upper names"),
        ("nonsense", "TARGET 'nonsense'"),
    ],
)
def test_what_workers_could_not_import_is_refused_with_its_mend(given: Any, part: str) -> None:
    with pytest.raises(TargetError) as raised:
        target_of(given)
    assert part in str(raised.value)


def program(monkeypatch: pytest.MonkeyPatch, source: str, **facts: Any) -> types.ModuleType:
    """Replace the running program with one that has this source."""
    main = types.ModuleType("__main__")
    vars(main).update({"__spec__": None, **facts})
    exec(compile(source, facts.get("__file__", "<stdin>"), "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


SOURCE = "def f(inputs):\n    return inputs\n"


def test_a_script_is_served_by_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(SOURCE)
    assert target_of(program(monkeypatch, SOURCE, __file__=str(file)).f) == FileTarget(file, "f")


def test_a_module_run_as_a_program_is_served_as_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "app.py"
    file.write_text(SOURCE)
    spec = types.SimpleNamespace(name="package.app")
    main = program(monkeypatch, SOURCE, __file__=str(file), __spec__=spec)
    assert target_of(main.f) == ModuleTarget("package.app", "f", folder=str(tmp_path))


@pytest.mark.parametrize("file", [None, "/nowhere/kernel.py", __file__])
def test_a_notebook_is_told_to_write_a_file(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    main = program(monkeypatch, SOURCE)
    if file is not None:
        vars(main)["__file__"] = file
    with pytest.raises(TargetError, match=r"notebook or an interactive session.*%%writefile"):
        target_of(main.f)


def test_a_function_of_a_script_must_still_have_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(SOURCE)
    main = program(monkeypatch, SOURCE, __file__=str(file))
    first = main.f
    vars(main)["f"] = None
    with pytest.raises(TargetError, match=r"is not the object that .*app\.py:f names"):
        target_of(first)
