import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any, Self

from tests.cli.command import ROOT

PATIENCE = 60.0
_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """`headway …` on a pseudo-terminal of a given size. `with` starts and ends it."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (100, 40)) -> None:
        self._command = [sys.executable, "-m", "headway", *arguments]
        self._size = size

    def until(self, *words: str) -> str:
        """Return what is shown from now on, up to the moment when all these words have appeared."""
        shown, until = "", time.monotonic() + PATIENCE
        while not all(word in shown for word in words):
            ready, _, _ = select.select([self._ours], [], [], PATIENCE)
            assert ready and time.monotonic() < until, (words, shown[-4000:])
            shown += _STEERING.sub("", os.read(self._ours, 65_536).decode(errors="replace"))
        return shown

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def code(self) -> int:
        return self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        columns, lines = self._size
        environment: dict[str, Any] = {
            **os.environ, "COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm", "PYTHONUTF8": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            self._command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
        )
        os.close(theirs)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)
