"""Imports of user code from its source."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any

import pytest

from headway.backends.process.usercode import SourceLoader, import_from_source


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[Path], Any]]:
    """Finder of a path once imports of a folder come from its source; None where they do not."""
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setattr(sys, "path_importer_cache", {})

    def begin(folder: str) -> Callable[[Path], Any]:
        import_from_source(folder)
        made = sys.path_hooks[0]

        def find(path: Path) -> Any:
            try:
                return made(str(path))
            except ImportError:
                return None

        return find

    return begin


def test_a_folder_is_read_from_its_sources(tmp_path: Path, hook: Callable[[str], Callable[[Path], Any]]) -> None:
    package = tmp_path / "mine" / "package"
    package.mkdir(parents=True)
    (package / "part.py").write_text("x = 1")
    finder = hook(str(tmp_path / "mine"))(package)
    assert isinstance(finder, FileFinder)
    found = finder.find_spec("part")
    assert found is not None and isinstance(found.loader, SourceLoader)


def test_other_code_keeps_its_bytecode(tmp_path: Path, hook: Callable[[str], Callable[[Path], Any]]) -> None:
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    find = hook(str(tmp_path))
    assert find(tmp_path.parent) is None
    assert find(installed) is None
    assert hook("/")(Path(os.__file__).parent) is None
