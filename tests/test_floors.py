"""Enforces the architecture: imports only point down the floors, and each floor follows its own rules.

Imports inside functions and under TYPE_CHECKING count, too.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent

FLOORS: dict[str, int] = {
    "": 0,  # headway/__init__.py
    "errors": 0,
    "version": 0,
    "model": 0,
    "client": 0,
    "v1": 0,
    "core": 1,
    "config": 2,
    "dialects": 2,
    "oip": 2,
    "ports": 2,
    "protos": 2,
    "runtime": 2,
    "brokers": 3,
    "backends": 3,
    "identity": 3,
    "input_policy": 3,
    "storage": 3,
    "bulk": 4,
    "gateway": 4,
    "worker": 4,
    "controller": 4,
    "fleet": 4,
    "doors": 5,
    "load": 5,
    "simulator": 5,
    "telemetry": 5,
    "grpc": 6,
    "http": 6,
    "oip.grpc": 6,
    "oip.rest": 6,
    "admin": 7,
    "app": 8,
    "testing": 9,
    "cli": 9,
    "__main__": 9,
}
"""The rank of each module or package directly under headway/. A module imports only from its own floor or below."""

PURE = frozenset((
    "ast", "__future__", "abc", "array", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions",
    "functools", "hashlib", "heapq", "itertools", "math", "operator", "re", "statistics", "string", "struct", "types", "typing", "unicodedata", "msgspec", "headway",
))  # fmt: skip
"""Packages that core may import."""

IMPURE_CALLS = frozenset(["__import__", "eval", "exec", "input", "open", "print"])
CLOCK_CALLS = frozenset(["monotonic", "now", "perf_counter", "sleep", "time", "today", "utcnow"])

ADAPTERS = ("headway.brokers", "headway.backends", "headway.input_policy", "headway.storage")
"""Packages whose modules only `app` may import (and each package itself)."""

USER_CODE = "headway.backends.process.usercode"
"""The only module that imports by name: it loads user code, inside the child process."""

_PROCESS = "headway.backends.process"
CHILD_ONLY: dict[str, tuple[str, ...]] = {
    USER_CODE: (f"{_PROCESS}.child", f"{_PROCESS}.run_batch", f"{_PROCESS}.observed"),
    f"{_PROCESS}.run_batch": (f"{_PROCESS}.child",),
    f"{_PROCESS}.child": (f"{_PROCESS}.observed",),
    f"{_PROCESS}.observed": ("headway.app.backends",),
}
"""Modules that run inside the child process, or in a thread for a test, and the only importers of each: user code never
reaches a server.
"""

ROLE_MODULES = ("headway.model.fleet", "headway.app.roles", "headway.app.serving")
"""Modules that may name roles, besides the commands that start one: `headway.app.serving` is one for programs."""

COMMANDS = "headway.cli.commands"
"""This module imports each command on demand."""
LOADERS = ("importlib.import_module", "importlib.machinery", "importlib.util", "runpy")
LONGEST = 60
"""Maximum lines of a function, not counting its signature and docstring (for a command, its options and help)."""

MEANINGLESS = frozenset(["common", "helper", "helpers", "misc", "shared", "util", "utils"])


def name_of(path: Path) -> str:
    parts = ("headway", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def floor(name: str) -> int:
    """Return the floor of a dotted name within headway."""
    parts = [*name.split("."), "", ""]
    return FLOORS.get(f"{parts[1]}.{parts[2]}", FLOORS[parts[1]])


@lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and full dotted name of everything that a module imports; `from a import b` is a.b."""
    package = name.split(".") if name in MODULES and MODULES[name].stem == "__init__" else name.split(".")[:-1]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                target = f"{module}.{alias.name}"
                attribute = module == "headway" and alias.name not in FLOORS and target not in MODULES
                yield node.lineno, module if attribute else target


FACADE = "headway"
"""This module names what programs use, and imports it on demand."""

VERSION = "headway.version"
"""A module that the facade and the clients may import, besides `headway.errors`."""


def check_facade(name: str, tree: ast.Module) -> Iterator[str]:
    if name == FACADE:
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") not in ("typing", VERSION):
                yield f"line {node.lineno}: `import headway` has to cost nothing; import inside a function"


def check_clients(name: str, tree: ast.Module) -> Iterator[str]:
    if below(name, "headway.client"):
        for line, target in imports(name, tree):
            known = below(target, "headway.client") or below(target, VERSION)
            if below(target, "headway") and not known and not below(target, "headway.errors"):
                yield f"line {line}: imports {target}; a client needs nothing of a service"


def check_direction(name: str, tree: ast.Module) -> Iterator[str]:
    if name == FACADE:
        return
    try:
        own = floor(name)
    except KeyError:
        yield "stands on no floor; give it one in FLOORS"
        return
    for line, target in imports(name, tree):
        if not below(target, "headway"):
            continue
        try:
            if floor(target) > own:
                yield f"line {line}: imports {target}, which is on floor {floor(target)}, above its own, {own}"
        except KeyError:
            yield f"line {line}: imports {target}, which stands on no floor"


def check_purity(name: str, tree: ast.Module) -> Iterator[str]:
    if not below(name, "headway.core"):
        return
    for line, target in imports(name, tree):
        if target.split(".")[0] not in PURE:
            yield f"line {line}: core imports {target}"
    for node in nodes(tree):
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield f"line {node.lineno}: core is synchronous"
            case ast.Call(func=ast.Name(id=called)) if called in IMPURE_CALLS:
                yield f"line {node.lineno}: core calls {called}"
            case ast.Call(func=ast.Attribute(attr=called)) if called in CLOCK_CALLS:
                yield f"line {node.lineno}: core reads a clock with {called}()"


def check_adapters(name: str, tree: ast.Module) -> Iterator[str]:
    if below(name, "headway.app"):
        return
    for line, target in imports(name, tree):
        for package in ADAPTERS:
            if below(target, package) and not below(name, package):
                yield f"line {line}: imports the adapter {target}; only headway.app chooses adapters"


def check_user_code(name: str, tree: ast.Module) -> Iterator[str]:
    for line, target in imports(name, tree):
        for module, importers in CHILD_ONLY.items():
            if below(target, module) and name not in (module, *importers):
                yield f"line {line}: imports {target}, which belongs into the child process"
        loader = target in ("importlib", "importlib.*") or any(below(target, known) for known in LOADERS)
        if loader and name not in (USER_CODE, COMMANDS):
            yield f"line {line}: imports {target}; only {USER_CODE} and {COMMANDS} import by name"
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__import__":
            yield f"line {node.lineno}: calls __import__; importlib says what is meant"


def check_roles(name: str, tree: ast.Module) -> Iterator[str]:
    if name in ROLE_MODULES or below(name, "headway.cli"):
        return
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Role":
            yield f"line {node.lineno}: asks for Role.{node.attr}; headway.app.roles says what a role has"


def check_names(name: str, tree: ast.Module) -> Iterator[str]:
    for part in MEANINGLESS.intersection(name.strip("_").split(".")):
        yield f"is named {part!r}, which says nothing of its role"


def check_lengths(name: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1 if ast.get_docstring(node, clean=False) is not None else 0 :]
        length = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
        if length > LONGEST:
            yield f"line {node.lineno}: {node.name} has {length} lines, more than {LONGEST}; give its parts names"


def problems(name: str, tree: ast.Module) -> list[str]:
    checks = (
        check_facade, check_direction, check_clients, check_purity, check_adapters, check_user_code, check_roles, check_names,
        check_lengths,
    )  # fmt: skip
    return [found for check in checks for found in check(name, tree)]


def test_every_module_keeps_the_rules_of_the_house_and_none_import_each_other_in_a_circle() -> None:
    """Type-only imports count, too: to read one module of a cycle you have to read all of them."""
    found, needs = {}, {}
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = problems(name, tree)
        needs[name] = {of for _, target in imports(name, tree) if (of := module_of(target)) != name}
    assert {name: broken for name, broken in found.items() if broken} == {}
    while free := [name for name, of in needs.items() if not of & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs, f"in a circle, or above one: {sorted(needs)}"


@pytest.mark.parametrize(
    ("name", "source", "part"),
    [
        ("headway.model", "from headway.core import queue", "above its own, 0"),
        ("headway.core.retry", "from headway import ports", "above its own, 1"),
        ("headway.core.policies", "from ...ports import Broker", "above its own, 1"),
        ("headway.worker.batcher", "def f():\n    from headway.http import lane", "line 2: imports headway.http.lane"),
        ("headway.http.lane", "from headway.app.wiring import build", "above its own, 6"),
        ("headway.newcomer", "", "stands on no floor"),
        ("headway.cli.roles", "from headway.newcomer.part import x", "stands on no floor"),
        ("headway.core.retry", "import asyncio", "core imports asyncio"),
        ("headway.core.retry", "datetime.now()", "reads a clock"),
        ("headway.core.retry", "open('x')", "core calls open"),
        ("headway.core.retry", "async def f(): ...", "core is synchronous"),
        ("headway.worker.batcher", "from headway.brokers.memory.broker import MemoryBroker", "only headway.app"),
        ("headway.gateway.gateway", "from headway import brokers", "only headway.app"),
        ("headway.app.wiring", "import importlib", "import by name"),
        ("headway.backends.process.backend", "from importlib import import_module", "import by name"),
        ("headway.cli.check", "__import__('x')", "calls __import__"),
        ("headway.backends.process.backend", "from headway.backends.process import child", "into the child process"),
        ("headway.doors.readiness", "if role is Role.WORKER: pass", "says what a role has"),
        ("headway", "from headway.client import Client", "has to cost nothing"),
        ("headway.client.service", "from headway.model import Entry", "needs nothing of a service"),
        ("headway.http.utils", "", "says nothing"),
        ("headway.http.lane", "def f():\n" + LONGEST * "    a = 1\n" + "    return a", "f has 61 lines, more than 60"),
    ],
)
def test_a_broken_rule_of_the_house_is_found(name: str, source: str, part: str) -> None:
    found = problems(name, ast.parse(source))
    assert any(part in problem for problem in found), found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("headway", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headway.client import Client"),
        ("headway.client.service", "from headway.version import __version__\nfrom headway.errors import SettingError"),
        ("headway.errors", "from headway.model import Cause"),
        ("headway.core.fair_queue", "import heapq\nfrom headway.model import Entry\nfrom . import retry"),
        ("headway.core.policies", "from .paced import Paced"),
        ("headway.brokers.memory.broker", "import asyncio\nfrom headway.brokers.memory import broker"),
        (
            "headway.app.wiring",
            "from headway.brokers.memory.broker import MemoryBroker\nimport headway.backends.process",
        ),
        ("headway.backends.process.usercode", "import importlib.util"),
        ("headway.backends.process.child", "from headway.backends.process.usercode import load"),
        ("headway.cli.roles", "run(settings, Role.WORKER)"),
        (
            "headway.http.lane",
            'def f(\n    a: int,\n) -> None:\n    """\n' + LONGEST * "x\n" + '    """\n' + LONGEST * "    a = 1\n",
        ),
        ("headway.cli.version", "from importlib.metadata import version\nfrom headway import __version__, app"),
    ],
)
def test_what_the_rules_of_the_house_allow_passes(name: str, source: str) -> None:
    assert problems(name, ast.parse(source)) == []


def module_of(target: str) -> str:
    return target if target in MODULES else target.rpartition(".")[0]
