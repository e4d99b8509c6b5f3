"""A server as a child process on its own port. It ends with its block, and with pytest however that ends."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.e2e.client import PATIENCE, wait_until
from tests.servers.ports import Port
from tests.servers.reaper import the_reaper

NOBODY = 65_534
"""The user for servers that don't run as root."""


def give(folder: Path) -> None:
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


def as_nobody() -> dict[str, Any]:
    """Arguments for a child process that must not run as root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}


class ChildServer:
    """`with` starts and stops it. Its log is in its folder, which is removed with it if `temporary`. `argv` is its
    command line, `how` holds more arguments of Popen."""

    argv: list[str]
    ends_by = signal.SIGKILL

    def __init__(self, folder: Path, *, temporary: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.how: dict[str, Any] = {}
        self.paused = False
        self._port = Port()
        self._temporary = temporary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._port.number

    @property
    def pid(self) -> int:
        assert self._process, "it does not run"
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Start it on the same port and files as before. Returns once it answers."""
        assert not self.runs, "it runs already"
        self._process, self.paused = self.launch(*self.argv), False
        the_reaper().watch(self._process.pid)
        wait_until(self._answers)

    def launch(self, *command: object) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, **self.how
            )

    def pause(self) -> None:
        """Pause it until `resume` (SIGSTOP). Its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> None:
        assert self._process, "it does not run"
        self._process.send_signal(number)
        self.gone()

    def gone(self) -> None:
        assert self._process
        self._process.wait(PATIENCE)
        the_reaper().forget(self._process.pid)
        self._process = None

    def close(self) -> None:
        """Stop it if it runs, and remove its files."""
        if self.runs:
            self.end(self.ends_by)
        self._port.close()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _answers(self) -> bool:
        assert self._process
        if (code := self._process.poll()) is not None:
            self.gone()
            raise AssertionError(f"{Path(self.argv[0]).name} ended with code {code}:\n{self.log[-2000:]}")
        return self.answers()
