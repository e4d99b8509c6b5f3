"""`headway serve`, or another role, in its own process, and the rules that it must obey.

    with serving(tmp_path, "--workers", "2") as server:
        asked = server.ask("hello")
        assert asked.output() == "HELLO"

When the block ends, every request must have exactly one outcome, and the metrics must agree. Nothing may be queued or
running, and no descriptor may be open. The service must exit with code 0 on SIGTERM and leave no process behind. Its
log may hold only the warnings that the test announced.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import headway
from tests.e2e.client import PATIENCE, Answer, Asked, Connection, Gate, request, wait_until
from tests.e2e.fork_server import Forked, the_fork_server

ROOT = Path(headway.__file__).parent.parent
TARGET = "tests.targets.gates:Gated"
MARK = "TEST_RUN"
"""Environment variable that marks all processes of a run."""

RUN, TAKE = ("serve", "worker"), ("serve", "gateway")
"""Roles that run a target, and roles that accept requests."""

AT_THE_DOOR = frozenset(("BAD_REQUEST", "UNAUTHENTICATED", "PAYLOAD_TOO_LARGE", "REQUEST_TIMEOUT", "HEADERS_TOO_LARGE"))
"""Errors of requests that never reach a gateway."""

TIERS = "--tiers", "enterprise,paid,free,last"
"""Adds an unused tier at the bottom: the lowest is throttled to the measured rate, which drops in a slow moment."""
LONGEST_MS = "30000"
"""The longest timeout that a request may have."""
GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides the machine's GPUs, because the targets of these tests use none."""
HELD_UP = frozenset(
    (
        "the store of keys is out of reach",
        "cannot reread all keys; still following their changes",
        "the store does not answer yet",
        "worker process must be killed to end",
        "memory is scarce",
    )
)
"""Log events of any process on a busy machine: it or its child is stalled for seconds, or memory is low."""

_PUBLIC = re.compile(r"public +https?://127\.0\.0\.1:(\d+)")
_ADMIN = re.compile(r"admin +https?://127\.0\.0\.1:(\d+)")
_GRPC = re.compile(r"grpc +127\.0\.0\.1:(\d+)")
_LAST = re.compile(r"^(Try it:|Ready\.)$", re.MULTILINE)


class Metrics:
    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of `headway_NAME` with these labels, or 0 if there are none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"headway_{name}" and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of `headway_NAME` summed by one label, without zeros."""
        sums: Counter[str] = Counter()
        for sample in self.samples:
            if sample.name == f"headway_{name}":
                sums[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return {value: total for value, total in sums.items() if total}


class Server:
    """A running `headway serve` or another role. Made by `serving` and `launched`, and by `tests.e2e.fleet`.

    Arguments:
        target: what it serves; a gateway and a controller have none.
        flags: more of its command line. The timeouts of clients' requests are long unless set here.
        before: called in the child before it becomes Headway.
        logs_json: the log has one JSON object per line, and is checked; otherwise it is plain text, the default.
        fresh: start a new Python, which takes longer than a fork, because the test reads the process's `/proc` entry.
        constants: values of module constants for a fork, by `module.NAME`, such as shorter times than in the source.

    Attributes:
        expected: events that may be logged as warnings or errors.
        port, admin_port, grpc_port: set once it is `ready`; 0 if it has none.
        answer_to: returns the target's output for an input.
    """

    def __init__(
        self,
        folder: Path,
        target: str = TARGET,
        flags: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
        logs_json: bool = True,
        stdout: int | None = None,
        stderr: int | None = None,
        role: str = "serve",
        fresh: bool = False,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.role = role
        self.logs_json = logs_json
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.answer_to: Callable[[str], str] = str.upper
        self.asked: list[Asked] = []
        self._connections: list[Connection] = []
        self.expected: set[str] = set()
        self.port = self.admin_port = self.grpc_port = 0
        self._files = folder / f"out-{self.mark}", folder / f"log-{self.mark}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        own = {"PYTHONPATH": str(ROOT), "HEADWAY_LOG_JSON": str(logs_json), MARK: self.mark, **GPUS, **_patient(flags)}
        command = [role, *([target] if role in RUN else []), *(["--port", "0"] if role in TAKE else [])]
        command += ["--admin-port", "0", *flags]
        environ = {**inherited, **own, **(environ or {})}
        self.process: subprocess.Popen[bytes] | Forked
        with self._files[0].open("wb") as out, self._files[1].open("wb") as log:
            outputs = out.fileno() if stdout is None else stdout, log.fileno() if stderr is None else stderr
            if before is None and not fresh and environ["PYTHONPATH"] == str(ROOT):
                self.process = the_fork_server().start(command, folder, environ, *outputs, constants)
                return
            assert constants is None, "only a fork has other constants"
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headway", *command],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                preexec_fn=before,
            )

    def banner(self) -> str:
        return self._files[0].read_text()

    @property
    def log_path(self) -> Path:
        return self._files[1]

    def log_text(self) -> str:
        return self.log_path.read_text()

    def log(self, event: str = "") -> list[dict[str, Any]]:
        """Return the complete lines of its log so far; if `event` is given, only those with it."""
        lines = [json.loads(line) for line in self.log_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if event in ("", line["event"])]

    def logged(self, event: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for the `count`th line with this event and these field values, and return it."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.log(event) if fields.items() <= line.items()]
            return lines[count - 1] if len(lines) >= count else None

        return wait_until(found)

    def ready(self) -> None:
        wait_until(lambda: _LAST.search(self.banner()) or self.process.poll() is not None)
        assert self.process.poll() is None, self.log_text()
        public, admin = _PUBLIC.search(self.banner()), _ADMIN.search(self.banner())
        assert bool(public) is (self.role in TAKE)
        assert admin
        self.port, self.admin_port = int(public[1]) if public else 0, int(admin[1])
        grpc = _GRPC.search(self.banner())
        self.grpc_port = int(grpc[1]) if grpc else 0
        self._descriptors = self.descriptors()

    def connect(self) -> Connection:
        """Open a connection to the public port. It is closed at the end."""
        self._connections.append(Connection(self.port))
        return self._connections[-1]

    def ask(self, text: str, *fields: str, on: Connection | None = None, **members: Any) -> Asked:
        """Send a request, by default on a new connection. Read the answer from what is returned."""
        asked = Asked(text, self.answer_to(text), on or self.connect())
        self.asked.append(asked)
        asked.send(*fields, **members)
        return asked

    def get(self, path: str) -> Answer:
        return ask_at(self.port, "GET", path)

    def post(self, path: str, body: Any, *fields: str) -> Answer:
        """POST to the public port. Bytes are sent unchanged, anything else as JSON."""
        if not isinstance(body, bytes):
            body, fields = json.dumps(body).encode(), ("Content-Type: application/json", *fields)
        connection = self.connect()
        connection.send(request(body, path, *fields))
        answer = connection.answer()
        connection.close()
        return answer

    def admin(self, path: str, method: str = "GET") -> Answer:
        return ask_at(self.admin_port, method, path)

    def health(self) -> Any:
        return self.admin("/internal/health").json

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._shared("/internal/workers")["workers"]
        return sorted(workers, key=lambda worker: str(worker["worker_id"]))

    def letters(self) -> list[dict[str, Any]]:
        letters: list[dict[str, Any]] = self._shared("/internal/dlq")["letters"]
        return letters

    def _shared(self, path: str) -> Any:
        """Return the answer of an admin route that asks the broker. Retries, because the route times out quickly."""
        return wait_until(lambda: answer if (answer := self.admin(path)).status == 200 else None).json

    def metrics(self) -> Metrics:
        return Metrics(self.admin("/metrics").body.decode())

    def queued(self, count: int) -> None:
        """Wait until exactly `count` entries are queued."""
        wait_until(lambda: self.health().get("queue_depth") == count)

    def all_healthy(self) -> None:
        wait_until(lambda: self.health()["status"] == "ok")

    @contextmanager
    def held_back(self, workers: int = 1) -> Iterator[None]:
        """Keep all workers busy. Requests sent in the block are then claimed together, unless they are cancelled."""
        gates = [Gate(self.folder) for _ in range(workers)]
        first = []
        for gate in gates:
            first.append(self.ask(gate.text()))
            gate.reached()
        before = len(self.asked)
        yield
        self.queued(sum(not asked.outcome for asked in self.asked[before:]))
        for gate in gates:
            gate.open()
        for asked in first:
            asked.output()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait until it has ended. Returns the exit code."""
        return self.process.wait(PATIENCE)

    def check_rest(self) -> None:
        """Check that nothing is held, queued or running, and that the metrics show the same outcomes as the clients."""
        assert all(asked.outcome for asked in self.asked), "a request was neither answered nor left"
        wait_until(lambda: (health := self.health())["pending"] == health.get("queue_depth") == 0)
        seen = Counter(asked.outcome.lower() for asked in self.asked if asked.outcome not in AT_THE_DOOR)
        told = Counter(
            {outcome: int(count) for outcome, count in self.metrics().by("requests_total", "outcome").items()}
        )
        more, less = told - seen, seen - told
        # A client that left may have had an answer on the way.
        assert set(less) <= {"cancelled"} and more.total() == less.total(), (
            f"{told} in the metrics, {seen} at the clients"
        )

    def check_wire(self) -> None:
        """Check that no client gets anything after its answers, then close the connections."""
        for asked in self.asked:
            connection = asked.connection
            if asked.outcome != "cancelled" and not connection.closed:
                connection.end()
                assert connection.ended(), f"more than its answer: {connection.held!r}"
                connection.close()

    def check_end(self, code: int = 0) -> None:
        """Check that it exited cleanly, logged nothing unexpected, sent nothing more, and left no process behind."""
        assert (ended := self.ended()) == code, f"it ended with {ended}: {self.log_text()}"
        wait_until(lambda: not self.processes())
        self.check_wire()
        if self.logs_json:
            alarming = [line for line in self.log() if line["level"] not in ("debug", "info")]
            alarming = [line for line in alarming if line["event"] not in self.expected | HELD_UP]
            assert not alarming, alarming

    def check_descriptors(self) -> None:
        """Check that it has no more open descriptors than at the start, once all clients have left."""
        for connection in self._connections:
            connection.close()
        wait_until(lambda: self.descriptors() <= self._descriptors)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def processes(self) -> list[int]:
        """Return the ids of all its processes, whatever their parent is."""
        found = [self.process.pid] if isinstance(self.process, Forked) and self.process.poll() is None else []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        for pid in {self.process.pid, *self.processes()} if self.process.poll() is None else set(self.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(PATIENCE)
        for connection in self._connections:
            connection.close()


@contextmanager
def launched(folder: Path, *flags: str, **how: Any) -> Iterator[Server]:
    """Run `headway serve` without waiting until it is up. No process outlives the block."""
    server = Server(folder, flags=flags, **how)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def serving(folder: Path, *flags: str, lawful: bool = True, **how: Any) -> Iterator[Server]:
    """Run a service. See the module for what is checked at the end. `lawful=False` skips comparing outcomes, for
    tests that send requests other than by `ask`."""
    with launched(folder, *flags, **how) as server:
        server.ready()
        yield server
        if lawful:
            server.check_rest()
        server.check_wire()
        server.check_descriptors()
        server.signal()
        server.check_end()


def run_cli(server: Server, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `headway ARGUMENTS` against the server's admin port."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    environ |= {"PYTHONPATH": str(ROOT), "HEADWAY_ADMIN": f"http://127.0.0.1:{server.admin_port}", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "headway", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def _patient(flags: Sequence[str]) -> dict[str, str]:
    """Timeouts that even a machine that stalls for seconds does not reach. Flags override them."""
    given = dict(itertools.pairwise(flags))
    return {
        "HEADWAY_REQUEST_TIMEOUT_MS": LONGEST_MS,
        "HEADWAY_QUEUE_TIMEOUT_MS": given.get("--request-timeout-ms", LONGEST_MS),
        "HEADWAY_GPU_TIMEOUT_MS": LONGEST_MS,
        **dict.fromkeys(("HEADWAY_READ_TIMEOUT_MS", "HEADWAY_KEEP_ALIVE_MS"), "600000"),
    }


def ask_at(port: int, method: str, path: str, body: bytes = b"", **fields: str) -> Answer:
    """Send a request to a port. Underscores in field names become hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        header = {name.replace("_", "-"): value for name, value in fields.items() if value}
        connection.request(method, path, body or None, header)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()
