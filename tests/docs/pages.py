"""Code blocks of a page, and the commands in them with the output that the page shows."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import headway

ROOT = Path(headway.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "benchmarks" / "README.md"]
SHELL = frozenset(("sh", "bash", "console", "shell"))

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"^(?P<host>[\w-]*)\$ (?P<text>.*)$")
_COMMENT = re.compile(r"\s+#\s.*$")
_TOOL = re.compile(r"^(make|headway|pip|python|curl)\b|^[\w-]*\$ ")
_FILE = re.compile(r"^(?:#|//) (\S+\.\w+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block, the path of its page from the root, and the line number of its fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        """True if it contains commands. A block without a language does if it begins with one."""
        return self.language in SHELL or (not self.language and bool(_TOOL.match(self.text)))

    @property
    def file(self) -> str | None:
        """The name of the file that it shows, given as a comment in its first line."""
        named = _FILE.match(self.text.partition("\n")[0])
        return named[1] if named and not self.is_shell else None


@dataclass(frozen=True)
class Command:
    """A command of a page: the host before its prompt, if any, the command, and the output shown below it."""

    page: str
    line: int
    host: str
    text: str
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(str(page.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1, found[1], dedent(found[2]))


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block. With prompts, all other lines are output; without, each line is a command.

    A command continues after a backslash at the end of a line, and a function or a loop continues up to its end.
    """
    lines = block.text.splitlines()
    if not any(_PROMPT.match(line) for line in lines):
        return [
            Command(block.page, block.line + 1 + at, "", text) for at, text in _joined(lines) if text and text[0] != "#"
        ]
    found: list[tuple[int, str, str, list[str]]] = []
    for at, line in enumerate(lines):
        if prompt := _PROMPT.match(line):
            found.append((block.line + 1 + at, prompt["host"], _COMMENT.sub("", prompt["text"]), []))
        elif found:
            found[-1][3].append(line)
    return [Command(block.page, line, host, text, tuple(shown)) for line, host, text, shown in found]


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    begun, whole = 0, ""
    for at, line in enumerate(lines):
        bare = _COMMENT.sub("", line).rstrip()
        begun = begun if whole else at
        whole = f"{whole[:-1]}{bare.lstrip()}" if whole.endswith("\\") else f"{whole}\n{bare}".lstrip("\n")
        if not whole.endswith("\\") and len(re.findall(r"\bdo\b", whole)) == len(re.findall(r"\bdone\b", whole)):
            yield begun, whole
            whole = ""
