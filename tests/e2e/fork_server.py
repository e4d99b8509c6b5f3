"""Starts processes of Headway as forks of one that has imported it, as the import is most of a start.

    process = the_fork_server().start(["serve", TARGET], folder, environ, stdout, stderr)

A fork runs `headway/__main__.py` as `python -m headway` does, with arguments, working directory, environment and outputs of its
own. Only `/proc` still shows the command line and the environment of the fork server.
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
"""Modules that most processes of the service import. None of them starts a thread."""
_MOST = 1 << 17


class Forked:
    """A process that the fork server has started, with what is used of `subprocess.Popen`. Its id stays until its exit
    code was asked for.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code, minus the number of the signal that has ended it; None while it runs."""
        if self._code is None:
            self._code = self._server.tell({"poll": self.pid})
        return self._code

    def wait(self, timeout: float) -> int:
        """Exit code, once it has ended. A `subprocess.TimeoutExpired` if it runs on after so many seconds."""
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
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The fork server, seen from a process of tests."""

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
        """Start `headway ARGUMENTS` in a folder; `constants` are values of module constants, by `module.NAME`."""
        how = {
            "arguments": arguments, "folder": str(folder), "environ": dict(environ), "constants": dict(constants or {})
        }  # fmt: skip
        return Forked(self, self.tell(how, [stdout, stderr]))

    def tell(self, what: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """The fork server's answer."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(what).encode()], descriptors)
            return json.loads(self._socket.recv(_MOST))

    def close(self) -> None:
        """End the fork server; what it has started goes on."""
        self._socket.close()
        self._process.wait()


@functools.cache
def the_fork_server() -> ForkServer:
    """The one of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork and tell exit codes until the other end closes. In a fork, return what that was started with."""
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
    """Run Headway in this process, as it would be run by `python -m headway`."""
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
    """Import Headway, and fork on demand. The terminal's Ctrl-C is not meant for the fork server."""
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
