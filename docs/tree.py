"""The page of what each file is for, made from the first lines of the files.

python docs/tree.py        # writes it anew
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("tree.md")
HEAD = """# Where each file is

The first line of every file of the package, folder by folder; floors and the way of a request are in [architecture](architecture.md).
`python docs/tree.py` makes this page.
"""


def page() -> str:
    """Text of the page."""
    return "\n".join(_lines()).rstrip("\n") + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    for folder in sorted({path.parent for path in (ROOT / "headway").rglob("*.py")}):
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        yield f"## {folder.relative_to(ROOT)}/\n"
        yield f"{_first_line(folder / '__init__.py')}\n"
        yield from (f"- `{path.name}`: {_first_line(path)}" for path in files)
        if files:
            yield ""


def _first_line(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(said.partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
