"""Ends child processes when this process has ended, even if it was killed. A separate process waits for the end of a
pipe that only we hold open. Then it kills all that it watches, and all with our mark in their environment."""

import atexit
import functools
import os
import subprocess
import sys
import uuid

MARK = "STARTED_BY_TESTS"
_LOOP = """
import contextlib, os, pathlib, signal, sys
pids, mark = set(), sys.argv[1].encode()
for line in sys.stdin:
    (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
for environ in pathlib.Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):
        if mark in environ.read_bytes().split(b"\\0"):
            pids.add(int(environ.parent.name))
for pid in pids - {os.getpid()}:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
"""


class Reaper:
    """Kills the watched processes and all started since, once `close` is called or this process has ended."""

    def __init__(self) -> None:
        # In its own session, as the terminal's Ctrl-C isn't meant for it.
        os.environ[MARK] = uuid.uuid4().hex
        command = [sys.executable, "-I", "-S", "-c", _LOOP, f"{MARK}={os.environ[MARK]}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """`pid` has ended, and its number may be reused soon."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        print(line, file=self._process.stdin, flush=True)


@functools.cache
def the_reaper() -> Reaper:
    reaper = Reaper()
    atexit.register(reaper.close)
    return reaper
