"""The contents of the wheel and the source archive; and the wheel serves without anything else."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dist import build, faults, serve


@pytest.mark.processes
def test_a_wheel_holds_all_of_the_package_and_nothing_else_and_serves(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    archive, wheel = build(tmp_path / "dist")
    assert faults(archive, wheel) == []
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as members:
        members.extractall(installed)
        [metadata] = [members.read(name).decode() for name in members.namelist() if name.endswith("METADATA")]
    assert "Description-Content-Type: text/markdown" in metadata
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "upper.py").write_text(
        "import headway\n\ndef upper(inputs: list[str]) -> list[str]:\n    return [headway.__file__ for _ in inputs]\n"
    )
    environ = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(tmp_path), "PYTHONPATH": str(installed)}
    serve(tmp_path / "empty", [sys.executable, "-m", "headway"], environ, str(installed / "headway" / "__init__.py"))
