"""Environments of clients, under `.venv/clients/`: one folder for each list of packages here.

    python -m tests.clients.environments [NAME …]

makes those that are missing, or whose list has changed. Tests make none, as that takes the network: they are skipped where one
is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv" / "clients"
REQUIRED = "HEADWAY_TEST_REQUIRE_CLIENTS"
"""Names of the environments without which a test fails, as in CI, in place of being skipped."""
PATIENCE = 120.0
"""Seconds for one program of a client."""


def names() -> list[str]:
    """Names of all environments."""
    return sorted(path.stem for path in HERE.glob("*.txt"))


def make(name: str) -> None:
    """Make an environment, unless it is there with these packages. Raises CalledProcessError when it cannot be made."""
    if _fits(name):
        return
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"
    subprocess.run([*pip, "install", "--quiet", "-r", str(_list(name))], check=True)
    shutil.copy(_list(name), _made_of(name))


def run_client(name: str, program: str, *arguments: str) -> Any:
    """What a program prints as JSON, run in an environment. Skips the test where there is none."""
    if not _fits(name):
        reason = f"the environment of {name} is not there, or is older than its list: run `make clients`"
        if name in os.environ.get(REQUIRED, "").split():
            pytest.fail(f"{reason}; {REQUIRED} names it")
        pytest.skip(reason)
    command = [str(FOLDER / name / "bin" / "python"), "-I", str(HERE / program), *arguments]
    environ = {
        key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("HEADWAY_")
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    return json.loads(done.stdout)


def _fits(name: str) -> bool:
    made_of = _made_of(name)
    return made_of.exists() and made_of.read_bytes() == _list(name).read_bytes()


def _list(name: str) -> Path:
    return HERE / f"{name}.txt"


def _made_of(name: str) -> Path:
    return FOLDER / name / "packages.txt"


if __name__ == "__main__":
    for one in sys.argv[1:] or names():
        make(one)
