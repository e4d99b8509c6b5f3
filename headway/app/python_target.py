"""Targets given as Python objects, and the names under which worker processes import them.

A worker is a separate process that imports its target, so the object needs a name to find it by. Objects defined in the
running script are found by the script's file, all others by their module.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config.target import FileTarget, ModuleTarget, Target, parse_target
from headway.core import arguments
from headway.errors import TargetError

TargetLike = str | Callable[..., Any]
"""Function, class, `functools.partial` of a class, or text that names one."""

_RUN_AS = ("__main__", "__mp_main__")
"""Names of the program's own module. It has the second in a process spawned by `multiprocessing`."""
_INSTALLED = ("site-packages", "dist-packages")


def target_of(given: TargetLike) -> Target:
    """Return the target that `given` is or names. Raises TargetError if worker processes couldn't import it."""
    if isinstance(given, str):
        return parse_target(given)
    if isinstance(given, functools.partial) and isinstance(given.func, type):
        return _with_arguments(given)
    if not (isinstance(given, type) or inspect.isfunction(given)):
        kind = type(given).__name__
        raise _unfit(kind, "is neither a function nor a class", "Pass the class itself; each worker builds its own.")
    name, qualified = given.__module__, given.__qualname__
    if "<lambda>" in qualified:
        raise _unfit(qualified, "has no name by which workers could import it", "Write a function: def f(inputs): …")
    if "<locals>" in qualified:
        outer = qualified.partition(".<locals>")[0]
        hint = "Move it to the top level of its module."
        raise _unfit(qualified, f"is defined inside {outer}, where workers cannot import it", hint)
    module = sys.modules.get(name)
    if name in _RUN_AS:
        return _of_program(given, module)
    if module is None or _found(module, qualified) is not given:
        hint = "Pass what the module's name stands for, or its text: module:name."
        raise _unfit(qualified, f"is not what {name}:{qualified} names", hint)
    return ModuleTarget(name, qualified, folder=_folder(module, name))


def _with_arguments(given: functools.partial[Any]) -> Target:
    if given.args:
        raise _unfit(given.func.__qualname__, "has arguments without names", "Give them by name.")
    try:
        text = arguments.write(given.keywords)
    except arguments.NoArguments as exc:
        hint = "Give text, numbers, true or false, lists or dicts: they travel to another process."
        raise _unfit(given.func.__qualname__, f"cannot be built so: {exc}", hint) from None
    named = target_of(given.func)
    return dataclasses.replace(named, arguments=text) if isinstance(named, ModuleTarget | FileTarget) else named


def _of_program(given: Any, module: ModuleType | None) -> Target:
    """Return a target in the running program: a script, a module run by `python -m`, a notebook or an interactive session."""
    qualified = given.__qualname__
    file = getattr(module, "__file__", None)
    if module is None or file is None or not Path(file).is_file() or _source(given) != Path(file).resolve():
        hint = "Write it to a file, in a notebook with %%writefile upper.py, and pass its text: 'upper.py:upper'."
        raise _unfit(
            qualified, "is defined in a notebook or an interactive session, where workers cannot import it", hint
        )
    if _found(module, qualified) is not given:
        raise _unfit(qualified, f"is not what {file}:{qualified} names", "Call serve after its last definition.")
    spec = getattr(module, "__spec__", None)
    if spec is not None and "." in spec.name:
        return ModuleTarget(spec.name, qualified, folder=_folder(module, spec.name))
    return FileTarget(Path(file).resolve(), qualified)


def _source(given: Any) -> Path | None:
    try:
        return Path(inspect.getfile(given)).resolve()
    except (OSError, TypeError):
        return None


def _found(module: ModuleType, qualified: str) -> object:
    target: object = module
    for part in qualified.split("."):
        target = getattr(target, part, None)
    return target


def _folder(module: ModuleType, name: str) -> str:
    """Return the folder that a module was imported from, or "" if workers find the module without it."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    path = Path(file).resolve()
    path = path.parent if path.name == "__init__.py" else path
    root = path.parents[name.count(".")]
    installed = any(part in _INSTALLED for part in root.parts) or root.is_relative_to(sys.base_prefix)
    return "" if installed else str(root)


def _unfit(name: str, reason: str, hint: str) -> TargetError:
    return TargetError(f"target {name}: it {reason}. {hint}")
