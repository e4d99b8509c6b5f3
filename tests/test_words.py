"""Docstrings begin with what they are about: a noun or an imperative, never a pronoun or a question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

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


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES])
def test_docstrings_begin_with_what_they_are_about(path: Path) -> None:
    assert riddles(path.read_text(encoding="utf-8")) == []


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
