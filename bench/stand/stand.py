"""The test stand: starts the servers that are measured, on a core of their own, and ends them.

The server and all it starts (its workers too) share the first core this process may use; load generators get the
last. A GPU made of sleep costs next to nothing there. With one core, or without taskset, nothing is pinned, and the
results say so. Everything listens on 127.0.0.1 only, on ports the system chooses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.stand import processes
from bench.stand.findings import OUT
from bench.stand.processes import Process
from tests.identity.writing import entry, key_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TARGETS = HERE / "targets.py"
EMULATED_GPU = f"{ROOT / 'examples' / 'emulated_gpu.py'}:EmulatedGPU"
GPU_CHILD = "headway/backends/process/child.py"
"""Part of the command line of processes that run functions."""
GUARD = "headway-guard"
"""Part of the command line of who ends what they have started."""

module = "headway"
"""Module that is run; `holding` in its place writes down what holds the event loops."""
checkout = ROOT
"""Whose code servers run: a module is looked for first in the folder in which it is started."""

START_SECONDS = 60.0
"""Longest wait for a server to come up."""
STOP_SECONDS = 40.0
"""Longest wait for one to end by itself, which it may take 30 s for (`Settings.drain_s`); then it is killed."""

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_PINS = len(_CORES) > 1 and shutil.which("taskset") is not None
PINNING = f"servers on core {_CORES[0]}, load on core {_CORES[-1]}" if _PINS else "nothing is pinned"

_PUBLIC = re.compile(r"^ *public +(https?://[^/\s]+)", re.MULTILINE)
_ADMIN = re.compile(r"^ *admin +(https?://[^/\s]+)", re.MULTILINE)


class Broken(Exception):
    """A server did not do what a benchmark needs; the text says which and what it said last."""


def on_server_core(command: Sequence[str]) -> list[str]:
    """`command`, pinned to the core of servers."""
    return ["taskset", "-c", str(_CORES[0]), *command] if _PINS else list(command)


def on_load_core(command: Sequence[str]) -> list[str]:
    """`command`, pinned to the core of load generators."""
    return ["taskset", "-c", str(_CORES[-1]), *command] if _PINS else list(command)


def pin_to_load_core() -> None:
    """Pin this very process to the core of load generators."""
    if _PINS:
        os.sched_setaffinity(0, {_CORES[-1]})


def move_to_load_core(pid: int) -> None:
    """Pin a running process to the core of load generators."""
    if _PINS:
        os.sched_setaffinity(pid, {_CORES[-1]})


def end_in_order() -> None:
    """Have SIGTERM unwind this program as Ctrl-C does, so that what it has started is ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@cache
def _claim_logs() -> IO[bytes]:
    """Keep other programs of bench/ out of the folder of logs while this one runs: servers of both would have the same names,
    and the port of a server is read in its log."""
    OUT.mkdir(parents=True, exist_ok=True)
    claim = (OUT / ".claim").open("wb")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"Another program of bench/ runs with its logs in {OUT}. Wait for its end, or use another checkout.")
    return claim


class Server:
    """A server process under test. Use it as a context manager, or call `stop`.

    Arguments:
        name: for messages and the file its output goes to.
        command: how it is started.
        role: names the role of each of its processes.
        environment: variables it gets besides this process's own.

    Attributes:
        url: of its public port.
        admin: URL of its admin port, empty when it has none.
        grpc_port: its port for gRPC, as whoever started it says; 0 for none.
        version: version of the model that it runs, as whoever started it says; empty where nobody did.
        models: names of other models that it runs on the same GPUs, likewise.
        exit_code: once it is stopped.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        role: Callable[[Process], str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        _claim_logs()
        self.name = name
        self.url = self.admin = ""
        self.grpc_port, self.version = 0, ""
        self.models: tuple[str, ...] = ()
        self.exit_code: int | None = None
        self._role = role
        self._log = OUT / f"{name}.log"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HEADWAY_")}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                on_server_core(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=checkout,
                env=inherited | dict(environment or {}),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """All it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Return as soon as `ready` says so.

        Raises:
            Broken: the process ended, or it takes too long.
        """
        patience = time.monotonic() + START_SECONDS
        while not ready():
            code = self._process.poll()
            if code is not None or time.monotonic() > patience:
                what = f"is not up after {START_SECONDS:g} s" if code is None else f"ended with exit code {code}"
                self.stop()
                raise Broken(f"{self.name} {what}. It said:\n{self.output[-2000:]}")
            time.sleep(0.02)

    def wait_for_banner(self, last: str) -> None:
        """Wait until `last`, the end of what Headway prints at its start, is there; then it says where it listens.

        Raises:
            Broken: the process ended, or it takes too long.
        """
        self.wait_for(lambda: last in self.output)
        public, admin = _PUBLIC.search(self.output), _ADMIN.search(self.output)
        if admin is None:
            raise Broken(f"{self.name} does not say where it listens:\n{self.output[-2000:]}")
        self.url, self.admin = public[1] if public else "", admin[1]

    def role_of(self, process: Process) -> str:
        """Role of one of its processes."""
        return self._role(process)

    def usage(self) -> dict[str, float]:
        """CPU seconds so far by role."""
        return processes.usage(self.pid, self._role)

    def rss(self) -> dict[str, int]:
        """Bytes in memory by role."""
        found: dict[str, int] = {}
        for process in processes.family(self.pid):
            role = self._role(process)
            found[role] = found.get(role, 0) + process.rss
        return found

    def descriptors(self) -> int:
        """Open file descriptors of the first process."""
        return processes.descriptors(self.pid)

    def ask(self, path: str, within: float = 10.0) -> Any:
        """What the admin port answers to a GET within so many seconds, decoded."""
        return msgspec.json.decode(self._get(path, within))

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All metrics: (name, labels in order of their names) to value."""
        families = text_string_to_metric_families(self._get("/metrics").decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in families
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric over all its series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, own), value in self.metrics().items() if found == name and wanted <= set(own))

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome so far, as the server counts them."""
        counts: dict[str, int] = {}
        for (name, labels), value in self.metrics().items():
            if name == "headway_requests_total":
                outcome = dict(labels)["outcome"]
                counts[outcome] = counts.get(outcome, 0) + int(value)
        return counts

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [worker["pid"] for worker in self.ask("/internal/workers")["workers"] if worker["pid"]]

    @property
    def is_running(self) -> bool:
        """Whether its first process has not ended."""
        return self.exit_code is None and self._process.poll() is None

    def kill(self) -> None:
        """Kill its first process, and no other, with SIGKILL."""
        self._process.kill()
        self.exit_code = self._process.wait()

    def stop(self) -> int:
        """End it: SIGTERM, patience, then SIGKILL for it and what it had started. Returns its exit code."""
        if self.exit_code is not None:
            return self.exit_code
        household = processes.family(self.pid)
        self._process.terminate()
        try:
            self.exit_code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()
        for process in household:
            if processes.is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return self.exit_code

    def _get(self, path: str, within: float = 10.0) -> bytes:
        with urllib.request.urlopen(f"{self.admin}{path}", timeout=within) as answer:
            content: bytes = answer.read()
            return content


@contextlib.contextmanager
def headway(
    target: str, *flags: str, name: str = "headway", environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`headway serve TARGET FLAGS`, up and ready, until the context ends.

    Raises:
        Broken: it does not come up.
    """
    command = [sys.executable, "-m", module, "serve", target, "--port", "0", "--admin-port", "0", *flags]
    with Server(name, command, _headway_role, environment) as server:
        server.wait_for_banner("Try it:")
        yield server


def emulated(batch_ms: float, max_batch: int, workers: int, *flags: str, name: str) -> Any:
    """`headway` serving GPUs made of sleep.

    Arguments:
        batch_ms: run time of a batch.
        max_batch: most inputs in one.
        workers: how many GPUs.
        flags: further flags of `headway serve`.
        name: of the server.
    """
    return headway(
        EMULATED_GPU,
        *("--workers", str(workers), "--devices", "cpu", "--max-batch-size", str(max_batch), "--log-level", "warning"),
        *flags,
        name=name,
        environment={"EMULATED_MS": str(batch_ms), "EMULATED_MAX": str(max_batch)},
    )


def write_key(path: Path) -> str:
    """Write a keys file with one key, whose rate limit is counted but too high to be met; returns the key."""
    return write_keys(path, ["bench"])["bench"]


def write_keys(
    path: Path, names: Sequence[str], tier: str = "enterprise", rate: float = 1e9, burst: float = 1e9
) -> dict[str, str]:
    """Write a keys file with a key for each tenant, of letters and digits; returns the keys."""
    limit = f"rate = {rate}\nburst = {burst}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(entry(name, name, name, tier, limit) for name in names), encoding="utf-8")
    return {name: key_of(name) for name in names}


def free_port() -> int:
    """A port nobody listens on now, for servers that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _headway_role(process: Process) -> str:
    return "worker" if any(part in process.command for part in (GPU_CHILD, GUARD)) else "front"
