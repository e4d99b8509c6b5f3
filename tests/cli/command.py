"""Runs the command line, in this process or in a new one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import headway
from headway.cli import main

ROOT = Path(headway.__file__).parent.parent


def run(arguments: Sequence[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `headway ARGUMENTS` in a new process, without our settings in its environment."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.run(
        [sys.executable, "-m", "headway", *arguments],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def code_of(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
