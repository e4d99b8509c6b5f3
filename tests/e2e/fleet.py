"""A fleet: gateways, workers and controllers in separate processes with a real server, and the rules for each run.

    with RedisServer("valkey", tmp_path / "redis") as redis, fleet(tmp_path, redis, gateways=2) as it:
        asked = it.gateways[0].ask("hello")
        it.kill(it.gateways[1])
        asked.output()

The workers write a journal of what they run. When the block ends, these checks must pass:
- Every request has exactly one outcome. Its answer belongs to its own input, which a worker ran.
- No input ran more often than the retry budget allows.
- The server holds no entry, no lease and no dead letter.
- The gateways count the same outcomes as their clients, and no process leaks connections.
- Every process that was not killed leaves the fleet and ends as described in `tests.e2e.server`.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from headway.core.retry import MAX_ATTEMPTS
from tests.e2e.client import Asked, Gate, process_state, wait_until
from tests.e2e.server import Server
from tests.servers.redis import RunningServer
from tests.targets.journal import JOURNAL

TARGET = "tests.targets.journal:Journaled"
DEADLINE = 30.0
"""Timeout of a patient gateway's requests in seconds; the longest allowed."""
PATIENT = ("--queue-timeout-ms", f"{DEADLINE * 1000:g}", "--request-timeout-ms", f"{DEADLINE * 1000:g}")
"""Flags of a gateway on which no request times out."""
HARDY = ("--gpu-timeout-ms", "30000")
"""Flags of a worker whose batches may wait at a gate."""
LEASE = 5.0
"""Seconds until a silent worker's batch is given to another, in tests that depend on it. Long enough that a live worker
keeps its lease if the machine stalls for a few seconds."""
FORGETFUL = ("--gpu-timeout-ms", "30000", "--broker-timeout-ms", f"{LEASE * 1000 - 2000:g}")
"""Flags of a worker that may be killed or cut off during a batch."""
LATE = 10.0
"""Maximum delay on a busy machine in seconds."""
CUT_OFF = {"the broker is out of reach"}
"""Log events of a process that cannot reach the server for a while."""
AWAY = CUT_OFF | {"requests are refused until the broker is back"}
"""Log events of a gateway if that takes longer."""
SPARE = 16
"""Descriptors allowed beyond those open at the start. Connections to the server stay open for the next call."""

_ENTRIES = ("e", "p", "x", "y", "s", "d", "l1", "l2", "l3", "a1", "a2", "a3", "o", "u", "ua")
"""Keys of a queue that hold entries, leases, suspects or dead letters; see the adapter's `1_state.lua`."""
_SIZES = {b"hash": "HLEN", b"zset": "ZCARD", b"list": "LLEN", b"none": "EXISTS"}


class Run(NamedTuple):
    """A batch that a worker process ran: when it began and ended (monotonic seconds), and its inputs."""

    pid: int
    begun: float
    inputs: list[str]
    ended: float | None


class Fleet:
    """Made by `fleet`. `redis` is the server to inspect: the primary if there are several. `gateways`, `workers` and
    `controllers` are the processes still running."""

    def __init__(
        self,
        folder: Path,
        redis: RunningServer,
        url: str,
        target: str,
        flags: dict[str, Sequence[str]],
        common: Sequence[str],
        constants: Mapping[str, float] | None,
    ) -> None:
        self.folder = folder
        self.redis = redis
        self.url = url
        self.gateways: list[Server] = []
        self.workers: list[Server] = []
        self.controllers: list[Server] = []
        self.expected: set[str] = set()
        self._target = target
        self._flags = flags
        self._common = common
        self._constants = constants
        self._all: list[Server] = []
        self._gone: list[str] = []
        self._left: list[str] = []
        self._ids: dict[Server, str] = {}
        self._descriptors: dict[Server, int] = {}

    def launch(self, role: str, *flags: str, url: str = "") -> Server:
        """Start another process without waiting until it is up."""
        name = ("--name", f"{role}-{len(self._all)}", "--broker", url or self.url, *self._common)
        flags = (*name, *self._flags[role], *flags)
        server = Server(self.folder, self._target, flags, role=role, constants=self._constants)
        server.expected = self.expected
        self._all.append(server)
        self._of(server).append(server)
        return server

    def start(self, role: str, *flags: str, url: str = "") -> Server:
        """Start another process, and wait until it is up."""
        server = self.launch(role, *flags, url=url)
        self.up(server)
        return server

    def up(self, *servers: Server) -> None:
        for server in servers:
            server.ready()
            self._ids[server] = str(server.health()["id"])
            self._descriptors[server] = server.descriptors()

    def kill(self, server: Server) -> None:
        """Kill a process and its children. Its clients notice."""
        processes = server.processes()
        server.signal(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
        # The kernel closes its files last, after its environment is gone.
        wait_until(lambda: not server.processes() and all(process_state(pid) in "ZX" for pid in processes))
        self._of(server).remove(server)
        self._gone.append(self._ids[server])
        for asked in server.asked:
            if not asked.outcome:  # The client sees a reset and gets no answer.
                with pytest.raises(ConnectionError):
                    asked.answer()
                asked.outcome = "reset"

    def end(self, *servers: Server) -> None:
        """Tell processes to end, and check that they exit cleanly."""
        for server in servers:
            server.signal()
        for server in servers:
            server.check_end()
            self._of(server).remove(server)
            self._left.append(self._ids.get(server, ""))

    def everybody(self) -> list[Server]:
        return [*self.gateways, *self.workers, *self.controllers]

    def _of(self, server: Server) -> list[Server]:
        return {"gateway": self.gateways, "worker": self.workers, "controller": self.controllers}[server.role]

    def journal(self) -> list[Run]:
        """Return every batch that any worker has started, in order."""
        runs: dict[tuple[int, int], Run] = {}
        path = self.folder / JOURNAL
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                pid, number, at, inputs = json.loads(line)
                if inputs is not None:
                    runs[pid, number] = Run(pid, at, inputs, None)
                else:
                    runs[pid, number] = runs[pid, number]._replace(ended=at)
        return list(runs.values())

    def runs(self, asked: Asked) -> list[Run]:
        return [run for run in self.journal() if asked.text in run.inputs]

    def begun(self, asked: Asked, count: int = 1) -> Run:
        """Wait until the request's input runs for the `count`th time."""
        return wait_until(lambda: runs[count - 1] if len(runs := self.runs(asked)) >= count else None)

    def host(self, run: Run) -> Server:
        return next(worker for worker in self.workers if run.pid in worker.processes())

    def other(self, worker: Server) -> Server:
        [found] = (one for one in self.workers if one is not worker)
        return found

    def slot(self, worker: Server) -> str:
        return f"{self._ids[worker]}/cpu-0"

    def kept(self) -> dict[str, int]:
        """Count the server's leftovers by kind of key when nothing is queued. A vanished gateway's state stays."""
        kept: Counter[str] = Counter()
        gone = {_process(id) for id in (*self._gone, *self._left)}
        for key in self.redis.command("KEYS", "headway:{default*:*}*:*"):
            _, _, kind = key.decode().partition("}")[2].partition(":")  # In between are `@` and the queue's version.
            if kind == "e":
                kept[kind] += sum(
                    mark[:1] != b"!" or _process(mark[9:].decode()) not in gone
                    for mark in self.redis.command("HVALS", key)
                )
            elif kind in _ENTRIES:
                kept[kind] += self.redis.command(_SIZES[self.redis.command("TYPE", key)], key)
            elif kind.startswith("r:") and _process(kind[2:]) not in gone:
                kept["replies"] += self.redis.command("XLEN", key)
        return {kind: count for kind, count in kept.items() if count}

    def check_history(self) -> None:
        """Check that every request had exactly one correct outcome and left nothing behind."""
        for gateway in self.gateways:
            gateway.check_rest()
        for server in self._all:
            server.check_wire()
        self.check_left()
        for server in self.everybody():
            most = self._descriptors[server] + SPARE
            wait_until(lambda server=server, most=most: server.descriptors() <= most)  # type: ignore[misc]
        journal = self.journal()
        for asked in (asked for server in self._all for asked in server.asked):
            assert asked.outcome, f"{asked.text} has no outcome"
            runs = [run for run in journal if asked.text in run.inputs]
            assert len(runs) <= MAX_ATTEMPTS, f"{asked.text} ran {len(runs)} times"
            assert asked.outcome != "ok" or any(run.ended for run in runs), f"{asked.text} was answered and did not run"

    def check_left(self, *besides: str) -> None:
        """Check that the server holds nothing from finished requests, except keys of these kinds."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.kept().keys() - set(besides))
        assert not self.kept().keys() - set(besides), self.kept()

    def check_end(self) -> None:
        self.end(*self.everybody())
        members = {id.decode() for id in self.redis.command("HKEYS", "headway:{fleet}:k")}
        assert members <= set(self._gone)

    def kill_all(self) -> None:
        for server in self._all:
            server.kill()


@contextmanager
def fleet(
    folder: Path,
    redis: RunningServer,
    *,
    gateways: int = 1,
    workers: int = 2,
    controllers: int = 0,
    gateway_flags: Sequence[str] = PATIENT,
    worker_flags: Sequence[str] = HARDY,
    url: str = "",
    target: str = TARGET,
    patience: float = 20.0,
    lawful: bool = True,
    constants: Mapping[str, float] | None = None,
) -> Iterator[Fleet]:
    """Run a fleet. See the module for what is checked at the end. No process outlives the block.

    A worker has one slot. `redis` is the server to inspect; `url` is how to reach it, if different. `patience` is the
    maximum time of a call to the server, in seconds. If `lawful`, outcomes are compared: send every request with `ask`,
    and leave no dead letters.
    """
    flags = {"gateway": gateway_flags, "worker": worker_flags, "controller": ()}
    made = Fleet(
        folder, redis, url or redis.url, target, flags, ("--broker-timeout-ms", f"{patience * 1000:g}"), constants
    )
    try:
        for role, count in (("worker", workers), ("gateway", gateways), ("controller", controllers)):
            for _ in range(count):
                made.launch(role)
        made.up(*made.everybody())
        if made.gateways:
            wait_until(lambda: made.gateways[0].health().get("workers", {}).get("healthy") == workers)
        yield made
        if lawful:
            made.check_history()
        else:
            made.check_left("o")
        made.check_end()
    finally:
        made.kill_all()


def _process(id: str) -> str:
    """Return the process name of a gateway or of its bulk job feeder, which has a different id."""
    return "-".join(id.split("-")[:2])


def pause(*servers: Server) -> None:
    """Pause processes (SIGSTOP) but not their children. Returns once they have stopped."""
    for server in servers:
        server.signal(signal.SIGSTOP)
    wait_until(lambda: all(map(stands_still, servers)))


def stands_still(server: Server) -> bool:
    return process_state(server.process.pid) == "T"


def resume(*servers: Server) -> None:
    for server in servers:
        server.signal(signal.SIGCONT)


def gate_of(it: Fleet, gateway: Server) -> tuple[Gate, Asked]:
    """Send a request whose batch waits at its own gate, and wait until it gets there."""
    gate = Gate(it.folder)
    asked = gateway.ask(gate.text())
    gate.reached()
    return gate, asked
