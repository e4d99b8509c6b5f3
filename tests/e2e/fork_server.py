"""Starts Headway processes as forks of a process that has already imported it, which saves most of the startup time.

    process = the_fork_server().start(["serve", TARGET], folder, environ, stdout, stderr)

A fork runs `headway/__main__.py` as `python -m headway` does, with its own arguments, working directory, environment
and outputs. Only `/proc` still shows the fork server's command line and environment.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
IMPORTED = (
    "headway.cli.roles",
    "headway.app.bulk",
    "headway.app.runner",
    "headway.app.scaling",
    "headway.app.stores",
    "headway.app.wiring",
    "headway.app.workers",
    "headway.backends.process.backend",
    "headway.brokers.memory.broker",
    "headway.brokers.memory.fleet",
    "headway.controller.autoscaler",
    "headway.controller.controller",
    "headway.gateway.fleet_watchers",
    "headway.http.inference.context",
    "headway.http.public",
    "headway.storage.sqlite",
)
"""Modules that most service processes import. None of them starts a thread."""
_MOST = 1 << 17


class Forked:
    """A process started by the fork server, with the part of `subprocess.Popen` used here. Its id is reserved until its
    exit code has been read."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (minus the signal number if a signal ended the process), or None while it runs."""
        if self._code is None:
            self._code = self._server.tell({"poll": self.pid})
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code once it has ended. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            end = os.pidfd_open(self.pid)
            try:
                select.select([end], [], [], timeout)
            finally:
                os.close(end)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The fork server, as used by the test process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env={**environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        stdout: int,
        stderr: int,
        constants: Mapping[str, float] | None = None,
    ) -> Forked:
        """Run `headway ARGUMENTS` in a folder. `constants` maps `module.NAME` to the value of a module constant."""
        how = {
            "arguments": arguments, "folder": str(folder), "environ": dict(environ), "constants": dict(constants or {})
        }  # fmt: skip
        return Forked(self, self.tell(how, [stdout, stderr]))

    def tell(self, what: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(what).encode()], descriptors)
            return json.loads(self._socket.recv(_MOST))

    def close(self) -> None:
        """Stop the fork server. Processes that it started continue."""
        self._socket.close()
        self._process.wait()


@functools.cache
def the_fork_server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork, and report exit codes, until the other end closes. In a fork, return the order that it must carry out."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _MOST, 2)
        if not text:
            return None
        order: dict[str, Any] = json.loads(text)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(json.dumps(answer).encode())


def become(order: Mapping[str, Any]) -> None:
    """Run Headway in this process as `python -m headway` would."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.path[0] = order["folder"]
    sys.argv = ["headway", *order["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, value in order["constants"].items():
        name, _, constant = path.rpartition(".")
        module = importlib.import_module(name)
        setattr(module, constant, type(getattr(module, constant))(value))
    gc.enable()
    runpy.run_module("headway", run_name="__main__", alter_sys=True)


def main() -> None:
    """Import Headway, and fork on demand. Ignores Ctrl-C in the terminal."""
    gc.disable()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        orders.set_inheritable(False)
        for name in IMPORTED:
            importlib.import_module(name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()
        order = serve(orders)
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
