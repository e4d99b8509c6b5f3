"""Servers that are compared in turns, with wrk saturating their core, and with open loops."""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from bench.stand import generators, stand
from bench.stand.fleet import Fleet
from bench.stand.generators import Measured, Wrk
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server

MAX_BATCH, WAIT_MS = 64, 2
BODY_BYTES = 115
BODY = b'{"input": "%s"}' % (b"the quick brown fox " * 6)[: BODY_BYTES - 13]
ROUTE = "/v1/inference"
BATCHES = ("headway_batch_size_sum", "headway_batch_size_count")
MOSEC_BATCHES = ("mosec_service_batch_size_sum", "mosec_service_batch_size_count")
SAFE_PATH = "-P"
"""Stops torch from taking the folder `triton` beside a program for the package."""
WARM_UP = 2.0
"""Seconds of load before a turn, in which the server learns batch times and arrivals."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load on one server. `cpu_us` is per answered request, by role; `batch` is the mean batch size; wrk's latencies are those of its closed
    loop; `operations` counts Redis's operations, if there is a Redis.
    """

    cpu_us: Mapping[str, float]
    rate: float
    batch: float
    p95_ms: float
    p99_ms: float
    requests: int
    unanswered: int
    operations: Mapping[str, float]
    report: Wrk | Measured

    @property
    def cost(self) -> float:
        """Microseconds of CPU a request, over all processes."""
        return sum(self.cpu_us.values())


@dataclass(slots=True)
class Contender:
    """A server to measure, and its turns so far by load. `flags` are for `headway bench`, `headers` and `body` for wrk; `batches` names the metrics
    of entries and batches.
    """

    start: Callable[[], AbstractContextManager[Server | Fleet]]
    flags: tuple[str, ...] = ("--expect", "upper")
    headers: tuple[str, ...] = ()
    batches: tuple[str, str] = BATCHES
    route: str = ROUTE
    body: bytes = BODY
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def mean(self, load: str, value: Callable[[Turn], float]) -> float:
        return statistics.fmean(value(turn) for turn in self.turns[load])

    def cost(self, load: str) -> float:
        return self.mean(load, lambda turn: turn.cost)

    def wrk(self, server: Server | Fleet, seconds: float) -> Wrk:
        return generators.closed_loop(f"{server.url}{self.route}", self.body, seconds, headers=self.headers)

    def fill(self, load: str, server: Server | Fleet, seconds: float) -> None:
        """Take a turn at full load, after a warm-up. Raises Broken if a request fails."""
        self.wrk(server, WARM_UP)
        turn = self._take(load, server, lambda: self.wrk(server, seconds))
        if turn.unanswered:
            raise Broken(f"{turn.unanswered} of {turn.requests} requests at the brim failed")

    def ask(self, load: str, server: Server | Fleet, rate: float, seconds: float, *, all_answered: bool = True) -> None:
        """Take a turn at a rate, after a warm-up. Raises Broken if a request gets no right answer, unless `all_answered` is false."""
        send = partial(generators.open_loop, server, rate)
        send(WARM_UP, *self.flags, path=self.route)
        turn = self._take(load, server, lambda: send(seconds, *self.flags, path=self.route))
        if turn.unanswered and all_answered:
            raise Broken(f"{turn.unanswered} requests at {rate:g}/s got no right answer")

    def _take(self, load: str, server: Server | Fleet, send: Callable[[], Wrk | Measured]) -> Turn:
        before, asked, used = self._batches(server), _operations(server), server.usage()
        sent = send()
        spent = generators.spent(used, server.usage())
        entries, batches = (late - early for late, early in zip(self._batches(server), before, strict=True))
        operations = {what: count - asked[what] for what, count in _operations(server).items()}
        if isinstance(sent, Wrk):
            rate, p95, p99, answered, failed = sent.rate, sent.p95_ms, sent.p99_ms, sent.requests, sent.errors
        else:
            total, latency = sent.report.total, sent.report.total.latency_ms
            rate, p95, p99 = total.answered_rate, latency.p95, latency.p99
            answered, failed = total.answered, sent.failures
        cpu_us = {role: seconds / max(1, answered) * 1e6 for role, seconds in spent.items()}
        turn = Turn(cpu_us, rate, entries / max(1.0, batches), p95, p99, answered, failed, operations, sent)
        self.turns.setdefault(load, []).append(turn)
        return turn

    def _batches(self, server: Server | Fleet) -> tuple[float, float]:
        return server.total(self.batches[0]), server.total(self.batches[1])

    def row(self, name: str, load: str, roles: tuple[str, ...], peer: float) -> dict[str, object]:
        """Return a table row. `peer` is the cost that the ratio refers to."""
        cost = self.cost(load)
        by_role = {role: self.mean(load, lambda turn, role=role: turn.cpu_us.get(role, 0.0)) for role in roles}  # type: ignore[misc]
        return {
            "server": name,
            "µs CPU/request": cost,
            "ratio": cost / peer,
            **by_role,
            "other": cost - sum(by_role.values()),
            "least": min(turn.cost for turn in self.turns[load]),
            "most": max(turn.cost for turn in self.turns[load]),
            "batch": self.mean(load, lambda turn: turn.batch),
            "requests/s": self.mean(load, lambda turn: turn.rate),
            "p95 ms": self.mean(load, lambda turn: turn.p95_ms),
            "p99 ms": self.mean(load, lambda turn: turn.p99_ms),
        }


def _operations(server: Server | Fleet) -> dict[str, float]:
    return server.redis.operations() if isinstance(server, Fleet) else {}


@contextmanager
def mosec(
    fast_json: bool = False,
    max_batch: int = MAX_BATCH,
    wait_ms: int = WAIT_MS,
    batch_ms: float = 0.0,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run mosec while the context lasts. `environment` configures what it serves (see bench/stand/peer_models.py)."""
    variables = {"BENCH_BATCH_MS": str(batch_ms), "BENCH_MSGSPEC": "1" if fast_json else "", **(environment or {})}
    flags = ("--address", "127.0.0.1", "--log-level", "warning")
    with _peer("mosec", flags, _mosec_role, (max_batch, wait_ms, workers), variables) as server:
        yield server


@contextmanager
def litserve(max_batch: int, wait_ms: int, workers: int, environment: Mapping[str, str]) -> Iterator[Server]:
    with _peer("litserve", (), lambda _: "litserve", (max_batch, wait_ms, workers), environment) as server:
        yield server


@contextmanager
def _peer(
    name: str,
    flags: tuple[str, ...],
    role: Callable[[Process], str],
    shape: tuple[int, int, int],
    environment: Mapping[str, str],
) -> Iterator[Server]:
    """Run a peer with a maximum batch size, a wait for more entries in ms, and a number of workers."""
    port, program = stand.free_port(), str(stand.HERE / f"{name}_server.py")
    variables = dict(zip(("BENCH_MAX_BATCH", "BENCH_MAX_WAIT_MS", "BENCH_WORKERS"), map(str, shape), strict=True))
    command = [sys.executable, SAFE_PATH, program, "--port", str(port), *flags]
    with Server(f"peer-{name}", command, role, variables | dict(environment)) as server:
        server.url = server.admin = f"http://127.0.0.1:{port}"
        server.wait_for(lambda: _answers(server.url))
        yield server


def _answers(url: str) -> bool:
    try:
        with urlopen(Request(f"{url}{ROUTE}", BODY, {"Content-Type": "application/json"}), timeout=2) as answer:
            return bool(answer.status == 200)
    except (HTTPError, URLError, OSError):
        return False


def _mosec_role(process: Process) -> str:
    """Return a process's role. The Rust program is the front; Python processes spawned by multiprocessing are workers."""
    if process.name == "mosec":
        return "front"
    if "spawn_main" in process.command:
        return "worker"
    return "coordinator"
