"""Starts the servers under test on their own core, and ends them.

A server and its child processes share the first core that this process may use. Load generators get the last. If there is only one core, or no
taskset, nothing is pinned, and the results say so. Everything listens on 127.0.0.1, on ports that the system chooses.
"""

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
"""Part of the command line of the process that ends its parent's child processes."""

checkout = ROOT
"""Working directory of the servers, from which Python takes their code."""

START_SECONDS = 60.0
STOP_SECONDS = 40.0
"""A server may take 30 s to end (`Settings.drain_s`). After this time it is killed."""

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_PINS = len(_CORES) > 1 and shutil.which("taskset") is not None
PINNING = f"servers on core {_CORES[0]}, load on core {_CORES[-1]}" if _PINS else "nothing is pinned"

_PUBLIC = re.compile(r"^ *public +(https?://[^/\s]+)", re.MULTILINE)
_ADMIN = re.compile(r"^ *admin +(https?://[^/\s]+)", re.MULTILINE)


class Broken(Exception):
    """Raised if a server doesn't do what a benchmark needs. The text has the end of its output."""


def on_server_core(command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", str(_CORES[0]), *command] if _PINS else list(command)


def on_load_core(command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", str(_CORES[-1]), *command] if _PINS else list(command)


def pin_to_load_core() -> None:
    if _PINS:
        os.sched_setaffinity(0, {_CORES[-1]})


def move_to_load_core(pid: int) -> None:
    if _PINS:
        os.sched_setaffinity(pid, {_CORES[-1]})


def end_in_order() -> None:
    """Make SIGTERM unwind this program as Ctrl-C does, so that its servers end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@cache
def _claim_logs() -> IO[bytes]:
    """Lock the logs against other benchmarks: their servers have the same names, and a server's port is read from its log."""
    OUT.mkdir(parents=True, exist_ok=True)
    claim = (OUT / ".claim").open("wb")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"Another program of bench/ runs with its logs in {OUT}. Wait for its end, or use another checkout.")
    return claim


class Server:
    """A server under test, used as a context manager or ended by `stop`.

    `role` returns the role of each of its processes. `environment` adds variables to those of this process.

    Attributes:
        url, admin: URLs of its ports, empty until they are known.
        grpc_port, version, models: of the model that it serves, if its starter sets them.
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
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns True. Raises Broken if the process ends first, or takes too long."""
        patience = time.monotonic() + START_SECONDS
        while not ready():
            code = self._process.poll()
            if code is not None or time.monotonic() > patience:
                what = f"is not up after {START_SECONDS:g} s" if code is None else f"ended with exit code {code}"
                self.stop()
                raise Broken(f"{self.name} {what}. It said:\n{self.output[-2000:]}")
            time.sleep(0.02)

    def wait_for_banner(self, last: str) -> None:
        """Wait for `last`, the end of Headway's banner, and read the URLs from the banner."""
        self.wait_for(lambda: last in self.output)
        public, admin = _PUBLIC.search(self.output), _ADMIN.search(self.output)
        if admin is None:
            raise Broken(f"{self.name} does not say where it listens:\n{self.output[-2000:]}")
        self.url, self.admin = public[1] if public else "", admin[1]

    def role_of(self, process: Process) -> str:
        return self._role(process)

    def usage(self) -> dict[str, float]:
        """Return CPU seconds so far, by role."""
        return processes.usage(self.pid, self._role)

    def rss(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for process in processes.family(self.pid):
            role = self._role(process)
            sizes[role] = sizes.get(role, 0) + process.rss
        return sizes

    def descriptors(self) -> int:
        return processes.descriptors(self.pid)

    def ask(self, path: str, within: float = 10.0) -> Any:
        """GET a path of the admin port, and return the decoded answer."""
        return msgspec.json.decode(self._get(path, within))

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return all metrics: (name, labels sorted by name) to value."""
        families = text_string_to_metric_families(self._get("/metrics").decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in families
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels."""
        wanted = set(labels.items())
        return sum(value for (metric, own), value in self.metrics().items() if metric == name and wanted <= set(own))

    def outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (name, labels), value in self.metrics().items():
            if name == "headway_requests_total":
                outcome = dict(labels)["outcome"]
                counts[outcome] = counts.get(outcome, 0) + int(value)
        return counts

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.ask("/internal/workers")["workers"] if worker["pid"]]

    @property
    def is_running(self) -> bool:
        return self.exit_code is None and self._process.poll() is None

    def kill(self) -> None:
        """Kill only its first process."""
        self._process.kill()
        self.exit_code = self._process.wait()

    def stop(self) -> int:
        """End it and its child processes with SIGTERM, or finally SIGKILL. Returns its exit code."""
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
    command = [sys.executable, "-m", "headway", "serve", target, "--port", "0", "--admin-port", "0", *flags]
    with Server(name, command, _headway_role, environment) as server:
        server.wait_for_banner("Try it:")
        yield server


def emulated(batch_ms: float, max_batch: int, workers: int, *flags: str, name: str) -> Any:
    """Run `headway serve` with emulated GPUs."""
    return headway(
        EMULATED_GPU,
        *("--workers", str(workers), "--devices", "cpu", "--max-batch-size", str(max_batch), "--log-level", "warning"),
        *flags,
        name=name,
        environment={"EMULATED_MS": str(batch_ms), "EMULATED_MAX": str(max_batch)},
    )


def write_key(path: Path) -> str:
    """Write a keys file with one key, whose limit is counted but never reached. Returns the key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry("bench", "bench", "bench", "enterprise", "rate = 1e9\nburst = 1e9\n"), encoding="utf-8")
    return key_of("bench")


def free_port() -> int:
    """Return a currently free port, for servers that can't choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _headway_role(process: Process) -> str:
    return "worker" if any(part in process.command for part in (GPU_CHILD, GUARD)) else "front"
