"""Headway with short lives, as `bench/stand/hurried.py` makes it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.processes
def test_its_lives_are_written_into_the_functions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.stand.hurried", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
