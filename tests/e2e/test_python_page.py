"""Every snippet in docs/python.md, and the client example, with a running service."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headway
from tests.e2e.client import PATIENCE
from tests.e2e.server import ROOT, launched

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
TARGET = "def upper(inputs: list[str]) -> list[str]:\n    return [text.upper() for text in inputs]\n"

_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A Python snippet. They run one after the other, as in one session."""
_TOLD = re.compile(r"^(?: *print\(.*\)  )?# (.+)$", re.MULTILINE)
"""Comments that give the expected output: after a print, or on their own lines."""


def test_the_snippets_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "upper.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "snippets"}
    with launched(tmp_path, target="upper.py:upper") as server:
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        snippets = _SNIPPET.findall(PAGE)
        assert len(snippets) >= 6
        for snippet in snippets:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(snippet.replace(URL, url), "python.md", "exec"), names)
            assert printed.getvalue().splitlines() == _TOLD.findall(snippet)
        names["client"].close()
        example = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "client.py"), url],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        first, many, later = example.stdout.splitlines()
        assert first.startswith("HELLO  (") and many.startswith("TEXT 0, TEXT 1") and later == "LATER"
        server.signal()
        server.check_end()


def test_nothing_is_imported_before_it_is_named() -> None:
    program = "import sys, headway; print(sorted(n for n in sys.modules if n.startswith('headway') or n in ('urllib3', 'aiohttp')))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "['headway', 'headway.version']"
    assert set(headway.__all__) <= set(dir(headway))
