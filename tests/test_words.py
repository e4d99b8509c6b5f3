"""Words of the code: docstrings begin with what they are about, and a word of the glossary stands for one thing.

A docstring begins with a noun or an imperative, never with a pronoun or a question.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
INSIDE = [path for path in MODULES if path.parent != ROOT / "client"]
"""Modules but for those of the Python client, whose words are its users'."""

RIDDLES = (
    "It|Its|He|They|Their|Them|We|Our|"
    "Who|Whose|Whom|What|Where|When|Which|How|Why|"
    "This|That|These|Those|There|Such|Some|"
    "Nobody|Somebody|Everybody|Anybody|Nothing|Something|Everything|Anything|"
    "Another|As|By|For|From|Of|So|With"
)
"""Words that say only in their context what a docstring is about, or that begin a fragment."""

PHRASES = "All of them|All of it|All that|One of these|One of those|One that|The other|The same"
"""Beginnings of more words that do the same."""

FORMER = {
    "attendance", "bell", "brokerage", "desk", "dice", "door", "house", "journal", "keyring", "lookout", "patience",
    "pulse", "recall", "redo", "tally",
}  # fmt: skip
"""Words that are no longer used, as the field has another: no name has them as a part."""

HOMES = {
    "caller": ("brokers/redis/", "config/", "core/", "gateway/", "http/server/", "model/", "simulator/"),
    "epoch": ("brokers/", "gateway/", "ports.py"),
    "leads": ("admin/", "app/", "brokers/memory/", "controller/", "model/"),
    "pool": (
        "app/",
        "brokers/redis/",
        "cli/",
        "gateway/",
        "load/",
        "protos/",
        "scaling/",
        "telemetry/tracing/",
        "worker/",
    ),
    "probe": ("brokers/", "core/breaker.py", "gateway/", "ports.py", "worker/"),
    "quarantine": ("brokers/redis/", "core/"),
    "shard": ("app/", "brokers/redis/", "cli/", "config/", "core/shards.py", "simulator/"),
    "tolerance": ("brokers/redis/", "core/", "http/rate_limit_headers.py"),
}
"""Words that could be taken for more than one thing, and the files and packages whose names have them."""

NAMESAKES = {
    "Autoscaler": "of a controller, and what Kubernetes has of that kind",
    "Connection": "HTTP, of the server and of the load generator",
    "Flow": "the outcomes of a tier, of a load and of a simulation",
    "Gateway": "the gateway, and the simulated one",
    "Mailbox": "the mailbox, in memory and over Redis",
    "Model": "what `headway init` makes, of texts and of numbers",
    "Output": "what a target may return, with its tokens, and what its process prints",
    "Record": "what happened in a run, of a load and of a simulation",
    "Registry": "the worker registry: the port, and its adapter over Redis",
    "Report": "the report of a run, of a load and of a simulation",
    "Run": "one run of a batch, as the trial asks for it and as the child is told",
    "State": "the state of a breaker, and the state behind the metrics",
    "Target": "what is served, and what the load generator aims at",
    "Wakeups": "the wake-ups, in memory and over Redis",
}
"""Classes whose name stands in two files, and what both are."""

_RIDDLE = re.compile(rf"(?:{RIDDLES}|{PHRASES})(?=[\s,.:;])")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes and constants too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def riddles(source: str) -> list[str]:
    """Line and beginning of each docstring that begins with a riddle."""
    found = docstrings(ast.parse(source))
    return [f"line {line}: {text.strip()[:60]}" for line, text in found if _RIDDLE.match(text.strip())]


def test_docstrings_begin_with_what_they_are_about() -> None:
    assert {path: found for path in MODULES if (found := riddles(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What is written into the server."""',
        'def f():\n    """It has ended."""',
        'class C:\n    """The same, for tiers."""',
        'LIMIT = 3\n"""Of one tenant."""',
        'class C:\n    def __init__(self):\n        self.x = 1\n        """Where it stands."""',
        'def f():\n    """\n    Nobody waits.\n    """',
        'async def f():\n    """All that wait."""',
        '"""Who, and when."""',
    ],
)
def test_a_docstring_that_begins_with_a_riddle_is_found(source: str) -> None:
    assert len(riddles(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Wire format of the server."""',
        'def f():\n    """Whether the entry waits; what it waits for is elsewhere."""',
        'LIMIT = 3\n"""Most requests of one tenant."""',
        'TEXT = "What is it?"',
        'SUM = lambda: "Who"',
        '"""Item of a list. It may be empty."""',
        'def f():\n    """Formerly in use."""',
    ],
)
def test_a_docstring_that_begins_plainly_passes(source: str) -> None:
    assert riddles(source) == []


def described(tree: ast.Module) -> Iterator[tuple[str, list[str], dict[str, bool]]]:
    """Name, bases and methods of each class; of a method whether it has a docstring."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            names = [ast.unparse(base).rpartition(".")[2] for base in bases]
            made = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            setters = {
                one.name for one in made if any(ast.unparse(by).endswith(".setter") for by in one.decorator_list)
            }
            told = {one.name: ast.get_docstring(one, clean=False) is not None or one.name in setters for one in made}
            yield node.name, names, told


def undescribed(sources: Iterable[str]) -> list[str]:
    """Public methods that neither say what they do nor get that from a base; one from elsewhere counts as one that says it."""
    found = [one for source in sources for one in described(ast.parse(source))]
    classes = defaultdict[str, list[tuple[list[str], dict[str, bool]]]](list)
    for name, bases, told in found:
        classes[name].append((bases, told))

    def says(bases: list[str], told: dict[str, bool], method: str) -> bool:
        above = [one for base in bases for one in classes.get(base, [([], {method: True})])]
        return told.get(method, False) or any(says(*one, method) for one in above)

    public = [(*one, method) for one in found for method in one[2] if one[0][0] != "_" != method[0]]
    return [f"{name}.{method}" for name, bases, told, method in public if not says(bases, told, method)]


def test_a_method_says_what_it_does_or_the_port_that_it_is_part_of_does() -> None:
    assert undescribed(path.read_text(encoding="utf-8") for path in MODULES) == []


def test_a_method_that_nobody_describes_is_found() -> None:
    port = "class Port:\n def a(self):\n  'A.'\n def b(self): ..."
    assert undescribed([port, "class Adapter(Port):\n def a(self): ...\n def b(self): ...\n def c(self): ..."]) == [
        "Port.b", "Adapter.b", "Adapter.c",
    ]  # fmt: skip
    assert undescribed(["class Other(asyncio.Protocol):\n def data_received(self): ..."]) == []


def parts(name: str) -> list[str]:
    """Words of which a name is made, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


@cache
def named(path: Path) -> set[str]:
    """Names in a file, those of attributes, arguments and modules too."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@cache
def lowered(path: Path) -> str:
    """Text of a file in lower case."""
    return path.read_text(encoding="utf-8").lower()


def names_with(path: Path, words: set[str]) -> list[str]:
    """Names in a file that have one of `words` as a part. A file without any of them as text is not taken apart."""
    if not any(word in lowered(path) for word in words):
        return []
    return [name for name in sorted(named(path)) if words.intersection(parts(name))]


def test_no_name_has_a_word_of_former_times() -> None:
    assert {path: found for path in MODULES if (found := names_with(path, FORMER))} == {}


@pytest.mark.parametrize("word", HOMES)
def test_a_word_that_could_mean_two_things_is_used_where_it_means_one(word: str) -> None:
    files = [str(path.relative_to(ROOT)) for path in INSIDE if names_with(path, {word, f"{word}s"})]
    assert [file for file in files if not file.startswith(HOMES[word])] == []


def test_a_class_has_a_name_of_its_own() -> None:
    found = defaultdict(list)
    for path in INSIDE:
        for name in re.findall(r"^class ([^\W_]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in NAMESAKES} == {}
    assert [name for name in NAMESAKES if len(found[name]) != 2] == []


def test_the_glossary_has_each_word_once() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    glossary = text.split("## Glossary", 1)[1].split("\n## ", 1)[0]
    words = Counter(re.findall(r"^\| ([a-z][a-z ]*) \|", glossary, re.MULTILINE)) - Counter(
        {"word": glossary.count("| word |")}
    )
    assert len(words) > 50
    assert [word for word, count in words.items() if count > 1] == []


def test_a_name_with_a_word_is_found(tmp_path: Path) -> None:
    file = tmp_path / "doors.py"
    file.write_text('"""A door."""\nopen_doors = theDoor = 1\nindoors = adoration = "door"\n')
    assert names_with(file, {"door"}) == ["theDoor"]
    assert names_with(file, {"door", "doors"}) == ["open_doors", "theDoor"]
    assert names_with(file, {"lane"}) == []


def test_a_name_of_former_times_is_found() -> None:
    assert parts("_admin_doorLane2HTTPPulse") == ["admin", "door", "lane", "http", "pulse"]
