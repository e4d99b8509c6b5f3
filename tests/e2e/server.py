"""`headway serve`, or another role, as a process of its own, and the laws that hold for its whole life.

    with serving(tmp_path, "--workers", "2") as server:
        asked = server.ask("hello")
        assert asked.output() == "HELLO"

When the block ends, every request must have had its one outcome, the service must agree in its metrics, nothing
may be held or wait, no descriptor be left open, SIGTERM must end it with exit code 0, none of its processes may be
left, and its log may hold no warning that the test has not announced.
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
"""Environment variable by which all processes of one run are known."""

RUN, TAKE = ("serve", "worker"), ("serve", "gateway")
"""Roles that run a target, and those that take requests."""

AT_THE_DOOR = frozenset(("BAD_REQUEST", "UNAUTHENTICATED", "PAYLOAD_TOO_LARGE", "REQUEST_TIMEOUT", "HEADERS_TOO_LARGE"))
"""Errors of requests that no gateway has seen."""

TIERS = "--tiers", "enterprise,paid,free,last"
"""A tier below all that are used: the lowest is throttled to what was measured, which a slow moment makes little."""
LONGEST_MS = "30000"
"""The longest time-out that a request may have."""
GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""GPUs that the workers have, whatever the machine has: none, as the targets of these tests use none."""
HELD_UP = frozenset(
    (
        "the store of keys is out of reach",
        "cannot reread all keys; their changes are still being read",
        "the store does not answer yet",
        "worker process must be killed to end",
        "memory is scarce",
    )
)
"""Log events of any process on a machine that is busy: it, or its child, is not run for seconds, or others take the
memory.
"""

_PUBLIC = re.compile(r"public +https?://127\.0\.0\.1:(\d+)")
_ADMIN = re.compile(r"admin +https?://127\.0\.0\.1:(\d+)")
_GRPC = re.compile(r"grpc +127\.0\.0\.1:(\d+)")
_LAST = re.compile(r"^(Try it:|Ready\.)$", re.MULTILINE)


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples `headway_NAME` that have these labels; 0 when there is none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"headway_{name}" and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples `headway_NAME`, summed by the value of one label; zeros are left out."""
        sums: Counter[str] = Counter()
        for sample in self.samples:
            if sample.name == f"headway_{name}":
                sums[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return {value: total for value, total in sums.items() if total}


class Server:
    """A running `headway serve` or another role; made by `serving` and `launched`, and by `tests.e2e.fleet`.

    Arguments:
        target: what it serves; a gateway and a controller have none.
        flags: more of its command line; time-outs of clients' requests are long unless they are in it.
        before: called in the child before it becomes Headway.
        logs_json: the log is one JSON object a line, and checked; else text for people, as by default.
        fresh: it is a new Python, though that takes longer than a fork; a test looks at what `/proc` shows of it.
        constants: values of module constants of a fork, by `module.NAME`, as shorter times than those in the source.

    Attributes:
        expected: events that the log may hold as warnings or errors.
        port, admin_port, grpc_port: once it is `ready`; 0 where it has none.
        answer_to: what the target makes of an input.
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

    # What it prints.

    def banner(self) -> str:
        return self._files[0].read_text()

    @property
    def log_path(self) -> Path:
        return self._files[1]

    def log_text(self) -> str:
        return self.log_path.read_text()

    def log(self, event: str = "") -> list[dict[str, Any]]:
        """The whole lines of its log so far, those of one event if it is named."""
        lines = [json.loads(line) for line in self.log_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if event in ("", line["event"])]

    def logged(self, event: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for the `count`th line of an event, whose fields must have these values, and return it."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.log(event) if fields.items() <= line.items()]
            return lines[count - 1] if len(lines) >= count else None

        return wait_until(found)

    # What it is asked.

    def ready(self) -> None:
        """Wait until it serves."""
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
        """A new connection to the public port; it is closed in the end."""
        self._connections.append(Connection(self.port))
        return self._connections[-1]

    def ask(self, text: str, *fields: str, on: Connection | None = None, **members: Any) -> Asked:
        """Send one request, by default on a new connection; its answer is read by what is returned."""
        asked = Asked(text, self.answer_to(text), on or self.connect())
        self.asked.append(asked)
        asked.send(*fields, **members)
        return asked

    def get(self, path: str) -> Answer:
        """GET on the public port."""
        return ask_at(self.port, "GET", path)

    def post(self, path: str, body: Any, *fields: str) -> Answer:
        """POST on the public port: of bytes as they are, and of anything else as JSON."""
        if not isinstance(body, bytes):
            body, fields = json.dumps(body).encode(), ("Content-Type: application/json", *fields)
        connection = self.connect()
        connection.send(request(body, path, *fields))
        answer = connection.answer()
        connection.close()
        return answer

    def admin(self, path: str, method: str = "GET") -> Answer:
        """A request to the admin port."""
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
        """Answer of an admin route from what the broker knows. The route does not wait long for that, so it is asked
        again.
        """
        return wait_until(lambda: answer if (answer := self.admin(path)).status == 200 else None).json

    def metrics(self) -> Metrics:
        return Metrics(self.admin("/metrics").body.decode())

    def queued(self, count: int) -> None:
        """Wait until exactly so many entries wait."""
        wait_until(lambda: self.health().get("queue_depth") == count)

    def all_healthy(self) -> None:
        """Wait until every worker is healthy."""
        wait_until(lambda: self.health()["status"] == "ok")

    @contextmanager
    def held_back(self, workers: int = 1) -> Iterator[None]:
        """Keep all workers busy; what is asked in the block, and not left again, then leaves together."""
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

    # How it ends.

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait until it has ended; its exit code."""
        return self.process.wait(PATIENCE)

    def check_rest(self) -> None:
        """Check that nothing is held, waits or runs, and that the metrics tell of the same outcomes as the clients."""
        assert all(asked.outcome for asked in self.asked), "a request was neither answered nor left"
        wait_until(lambda: (health := self.health())["pending"] == health.get("queue_depth") == 0)
        seen = Counter(asked.outcome.lower() for asked in self.asked if asked.outcome not in AT_THE_DOOR)
        told = Counter(
            {outcome: int(count) for outcome, count in self.metrics().by("requests_total", "outcome").items()}
        )
        more, less = told - seen, seen - told
        # Who left may have had an answer on its way.
        assert set(less) <= {"cancelled"} and more.total() == less.total(), (
            f"{told} in the metrics, {seen} at the clients"
        )

    def check_wire(self) -> None:
        """No client gets anything beyond its answers; those that are still there leave."""
        for asked in self.asked:
            connection = asked.connection
            if asked.outcome != "cancelled" and not connection.closed:
                connection.end()
                assert connection.ended(), f"more than its answer: {connection.held!r}"
                connection.close()

    def check_end(self, code: int = 0) -> None:
        """Check that it has ended in order, logged nothing alarming, and left nothing behind, on the wire or running."""
        assert (ended := self.ended()) == code, f"it ended with {ended}: {self.log_text()}"
        wait_until(lambda: not self.processes())
        self.check_wire()
        if self.logs_json:
            alarming = [line for line in self.log() if line["level"] not in ("debug", "info")]
            alarming = [line for line in alarming if line["event"] not in self.expected | HELD_UP]
            assert not alarming, alarming

    def check_descriptors(self) -> None:
        """Once all clients have left it holds no descriptor that it did not hold at first."""
        for connection in self._connections:
            connection.close()
        wait_until(lambda: self.descriptors() <= self._descriptors)

    def descriptors(self) -> int:
        """File descriptors that it holds."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def processes(self) -> list[int]:
        """Process ids of all that runs of it, whoever its parent is."""
        found = [self.process.pid] if isinstance(self.process, Forked) and self.process.poll() is None else []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        """End all of it at once."""
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
    """`headway serve` from its first instant; whatever happens, nothing of it outlives the block."""
    server = Server(folder, flags=flags, **how)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def serving(folder: Path, *flags: str, lawful: bool = True, **how: Any) -> Iterator[Server]:
    """A service that is up; see above for what is checked at the end. `lawful=False` leaves out the comparison
    of outcomes, for tests that send more than `ask` knows of."""
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
    """`headway ARGUMENTS` towards the server's admin port."""
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
    """Time-outs that a slow machine does not reach, nor one that stands still for seconds. Flags go before them."""
    given = dict(itertools.pairwise(flags))
    return {
        "HEADWAY_REQUEST_TIMEOUT_MS": LONGEST_MS,
        "HEADWAY_QUEUE_TIMEOUT_MS": given.get("--request-timeout-ms", LONGEST_MS),
        "HEADWAY_GPU_TIMEOUT_MS": LONGEST_MS,
        **dict.fromkeys(("HEADWAY_READ_TIMEOUT_MS", "HEADWAY_KEEP_ALIVE_MS"), "600000"),
    }


def ask_at(port: int, method: str, path: str, body: bytes = b"", **fields: str) -> Answer:
    """Answer of a port; underscores in names of fields are hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        header = {name.replace("_", "-"): value for name, value in fields.items() if value}
        connection.request(method, path, body or None, header)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()
