"""A fleet: gateways, workers and controllers as processes of their own over a real server, and the laws of its history.

    with RedisServer("valkey", tmp_path / "redis") as redis, fleet(tmp_path, redis, gateways=2) as it:
        asked = it.gateways[0].ask("hello")
        it.kill(it.gateways[1])
        asked.output()

Its workers write a journal of what they run. When the block ends, every request must have had its one outcome, answers
must be those to their own inputs and have been run for, no input may have run more often than the retry budget allows,
the server may hold no entry, no lease and no dead letter, no process may have lost track of its connections, the gateways
must tell of the same outcomes as their clients, and every process that was not killed must leave the fleet and end as
`tests.e2e.server` says.
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
"""Seconds after which a patient gateway's requests are too late; as many as there may be."""
PATIENT = ("--queue-timeout-ms", f"{DEADLINE * 1000:g}", "--request-timeout-ms", f"{DEADLINE * 1000:g}")
"""Flags of a gateway for which nothing is too late."""
HARDY = ("--gpu-timeout-ms", "30000")
"""Flags of a worker whose batches may wait at a gate."""
LEASE = 5.0
"""Seconds after which what a silent worker runs is given to another, where that is what matters. A machine that stands
still for some seconds takes no lease away from a worker that lives."""
FORGETFUL = ("--gpu-timeout-ms", "30000", "--broker-timeout-ms", f"{LEASE * 1000 - 2000:g}")
"""Flags of a worker that may be killed, or cut off, while a batch runs."""
LATE = 10.0
"""Seconds that a busy machine may take for what is due."""
CUT_OFF = {"the broker is out of reach"}
"""Log events of a process that cannot reach the server for a while."""
AWAY = CUT_OFF | {"requests are refused until the broker is back"}
"""Log events of a gateway when that takes longer."""
SPARE = 16
"""Descriptors that a process may hold beyond those at its start: connections to the server are kept for the next call."""

_ENTRIES = ("e", "p", "x", "y", "s", "d", "l1", "l2", "l3", "a1", "a2", "a3", "o", "u", "ua")
"""Keys of a queue that hold entries, leases, suspects or dead letters; see the adapter's `1_state.lua`."""
_SIZES = {b"hash": "HLEN", b"zset": "ZCARD", b"list": "LLEN", b"none": "EXISTS"}


class Run(NamedTuple):
    """One batch that a worker process ran: when it began and ended (monotonic seconds), and what was in it."""

    pid: int
    begun: float
    inputs: list[str]
    ended: float | None


class Fleet:
    """Made by `fleet`. `redis` is the server that is looked into: the primary, where there are several.

    `gateways`, `workers` and `controllers` are those that were started and not killed or ended.
    """

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

    # Who is there.

    def launch(self, role: str, *flags: str, url: str = "") -> Server:
        """Start one more process; it need not be up."""
        name = ("--name", f"{role}-{len(self._all)}", "--broker", url or self.url, *self._common)
        flags = (*name, *self._flags[role], *flags)
        server = Server(self.folder, self._target, flags, role=role, constants=self._constants)
        server.expected = self.expected
        self._all.append(server)
        self._of(server).append(server)
        return server

    def start(self, role: str, *flags: str, url: str = "") -> Server:
        """Start one more process, and wait until it is up."""
        server = self.launch(role, *flags, url=url)
        self.up(server)
        return server

    def up(self, *servers: Server) -> None:
        """Wait until these are up."""
        for server in servers:
            server.ready()
            self._ids[server] = str(server.health()["id"])
            self._descriptors[server] = server.descriptors()

    def kill(self, server: Server) -> None:
        """End a process and its children at once; its clients see that."""
        processes = server.processes()
        server.signal(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
        # What it held open is closed only at its very end, after its environment is gone.
        wait_until(lambda: not server.processes() and all(process_state(pid) in "ZX" for pid in processes))
        self._of(server).remove(server)
        self._gone.append(self._ids[server])
        for asked in server.asked:
            if not asked.outcome:  # Its client sees a reset, and no answer.
                with pytest.raises(ConnectionError):
                    asked.answer()
                asked.outcome = "reset"

    def end(self, *servers: Server) -> None:
        """Tell processes to end; they do so in good order."""
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

    # What was run.

    def journal(self) -> list[Run]:
        """Every batch that any worker has begun, in order."""
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
        """The batches that the input of a request was in."""
        return [run for run in self.journal() if asked.text in run.inputs]

    def begun(self, asked: Asked, count: int = 1) -> Run:
        """Wait until the input of a request runs for the `count`th time."""
        return wait_until(lambda: runs[count - 1] if len(runs := self.runs(asked)) >= count else None)

    def host(self, run: Run) -> Server:
        """The worker that runs a batch."""
        return next(worker for worker in self.workers if run.pid in worker.processes())

    def other(self, worker: Server) -> Server:
        """The worker that this one is not."""
        [found] = (one for one in self.workers if one is not worker)
        return found

    def slot(self, worker: Server) -> str:
        """Name of a worker's only slot."""
        return f"{self._ids[worker]}/cpu-0"

    # What is left.

    def kept(self) -> dict[str, int]:
        """Number of leftovers in the server when nobody waits, by kind of key. The last state of a vanished gateway
        stays for a while.
        """
        kept: Counter[str] = Counter()
        gone = {_process(id) for id in (*self._gone, *self._left)}
        for key in self.redis.command("KEYS", "headway:{default*:*}*:*"):
            _, _, kind = key.decode().partition("}")[2].partition(":")  # Between them, `@` and the version of a queue.
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
        """Every request has come to its one right end, and nothing of any is left."""
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
        """The server holds nothing of any request that has ended, but keys of these kinds."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.kept().keys() - set(besides))
        assert not self.kept().keys() - set(besides), self.kept()

    def check_end(self) -> None:
        """All leave the fleet and end in good order."""
        self.end(*self.everybody())
        members = {id.decode() for id in self.redis.command("HKEYS", "headway:{fleet}:k")}
        assert members <= set(self._gone)

    def kill_all(self) -> None:
        """Leave nothing behind."""
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
    """A fleet that is up; see above for what is checked at the end. Whatever happens, none of it outlives the block.

    A worker has one slot. `redis` is where the server is looked into, and `url` how it is reached, if that differs.
    `patience`: seconds that a call to the server may take. `lawful` compares outcomes: every request must be sent by
    `ask`, and no dead letter is left.
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
    """Name of the process of a gateway or of its feeder of bulk jobs, of which each has an id of its own."""
    return "-".join(id.split("-")[:2])


def pause(*servers: Server) -> None:
    """Have processes stand still (SIGSTOP); their children go on. Returns when they do."""
    for server in servers:
        server.signal(signal.SIGSTOP)
    wait_until(lambda: all(map(stands_still, servers)))


def stands_still(server: Server) -> bool:
    """Whether a process is paused."""
    return process_state(server.process.pid) == "T"


def resume(*servers: Server) -> None:
    """Have paused processes go on."""
    for server in servers:
        server.signal(signal.SIGCONT)


def gate_of(it: Fleet, gateway: Server) -> tuple[Gate, Asked]:
    """A request whose batch waits at a gate of its own, which it has reached."""
    gate = Gate(it.folder)
    asked = gateway.ask(gate.text())
    gate.reached()
    return gate, asked
