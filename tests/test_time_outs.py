"""A hanging test is reported with its stacks, even if no signal helps. The others continue, and its processes end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.client import PATIENCE, process_state, wait_until
from tests.test_floors import ROOT

pytestmark = pytest.mark.processes

HANGING = """
import asyncio, ctypes, pathlib, subprocess, threading
import pytest

pytestmark = pytest.mark.processes

async def test_in_a_loop():
    await asyncio.Event().wait()

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_in_a_fixture(stuck):
    pass

def test_in_a_call_of_c():
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path("child").write_text(str(child.pid))
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

@pytest.mark.parametrize("number", range(3))
def test_fine(number):
    pass
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the mutex is Linux's, as is the list of processes")
def test_tests_that_hang_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    config = ["-c", str(ROOT.parent / "pyproject.toml"), f"--rootdir={tmp_path}"]
    how = [*config, "-p", "tests.conftest", "-p", "no:cacheprovider"]
    times = ["-o", "timeout=1", "-o", "faulthandler_timeout=3"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", *how, *times, "test_hanging.py"],
        cwd=tmp_path, env={**environ, "PYTHONPATH": str(ROOT.parent)}, timeout=3 * PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    told = done.stdout
    for name in ("test_in_a_loop", "test_in_a_fixture"):
        assert re.search(rf"(FAILED|ERROR) \S*::{name} - Failed: Timeout \(>1", told), told
    assert re.search(r"worker 'gw\d+' crashed while running '\S*::test_in_a_call_of_c'", told), told
    assert re.search(r"\n=+ 2 failed, 4 passed, 1 error in ", told), told
    assert told.count("Timeout (0:00:03)!") == 1, told
    assert re.search(r'File "\S*test_hanging.py", line \d+ in test_in_a_call_of_c', told), "stacks are shown"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: process_state(child) in "ZX")
