"""Processes of a fleet end and are replaced under load, and no client notices."""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import monotonic

from headway.http.server.connection_context import GRACE
from tests.e2e.client import Answer, Asked, Connection, wait_until
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.server import Server, run_cli
from tests.servers.redis import RedisServer

RATE = 80.0
"""Requests a second."""
CALLERS = 16
"""Clients, each with one connection at a time: more than are busy at once."""
SILENT = GRACE / 2
"""Seconds without an answer from which on a gateway that ends may close a connection as the next request comes: a client
has to send that again. What it loses in less time is lost."""


class Load:
    """Clients that send at fixed instants, whatever becomes of the requests before, over connections that they keep."""

    def __init__(self, gateways: list[Server]) -> None:
        self._gateways = gateways
        self._connecting = threading.Lock()
        self.asked: list[Asked] = []
        self.faults: list[BaseException] = []
        self._begun = monotonic()
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call, name=f"caller-{n}") for n in range(CALLERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def replace(self, old: Server, new: Server) -> None:
        """Have new connections made to another gateway, as a balancer does. The old one knows of all that were made to
        it; they go on until they are ended."""
        with self._connecting:
            self._gateways = [*(one for one in self._gateways if one is not old), new]
        assert old.get("/livez").status == 200

    def answered(self, more: int) -> None:
        """Wait until so many more have been answered."""
        before = len(self.asked)
        wait_until(lambda: self.faults or sum(bool(asked.outcome) for asked in self.asked[before:]) >= more)

    def _call(self) -> None:
        line: _Line | None = None
        try:
            while True:
                number = next(self._numbers)
                if self._over.wait(max(0.0, self._begun + number / RATE - monotonic())):
                    return
                if line is None or _ended(line.connection):
                    line = self._connect(number)
                asked = Asked(f"request {number}", line.gateway.answer_to(f"request {number}"), line.connection)
                self.asked.append(asked)
                try:
                    answer = line.ask(asked)
                except ConnectionError:
                    if asked.connection.held or line.silent_for() < SILENT:
                        raise
                    line = self._connect(number)
                    asked.connection = line.connection
                    answer = line.ask(asked)
                line.gateway.asked.append(asked)
                if answer.header["connection"] == "close":
                    line = None
        except BaseException as fault:
            self.faults.append(fault)

    def _connect(self, number: int) -> _Line:
        with self._connecting:
            gateway = self._gateways[number % len(self._gateways)]
            return _Line(gateway, gateway.connect())


class _Line:
    """A caller's connection to a gateway."""

    def __init__(self, gateway: Server, connection: Connection) -> None:
        self.gateway = gateway
        self.connection = connection
        self._answered_at = inf

    def silent_for(self) -> float:
        """Seconds since its last answer; without one it was never idle."""
        return monotonic() - self._answered_at

    def ask(self, asked: Asked) -> Answer:
        """Send a request, and wait for its answer."""
        asked.send()
        answer = asked.answer()
        self._answered_at = monotonic()
        return answer


@contextmanager
def load(gateways: list[Server]) -> Iterator[Load]:
    """Load while the block runs; every request must be answered rightly."""
    made = Load(gateways)
    made.start()
    try:
        yield made
    finally:
        made.stop()
    assert made.faults == []
    assert {asked.outcome for asked in made.asked} == {"ok"}


def _ended(connection: Connection) -> bool:
    """Whether the server has ended a connection on which nothing is under way."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def busy(it: Fleet, worker: Server) -> None:
    """Wait until a worker runs a batch."""
    pids = worker.processes()
    wait_until(lambda: any(run.pid in pids and run.ended is None for run in it.journal()[-CALLERS:]))


def drained_and_undrained(it: Fleet, clients: Load, worker: Server) -> None:
    """A host gets nothing while it is drained, and the last one may not be."""
    busy(it, worker)
    name, other = it.slot(worker).partition("/")[0], it.other(worker)
    shown = run_cli(it.gateways[0], it.folder, "drain", name)
    assert shown.returncode == 0, shown.stderr
    assert f"{it.slot(worker)} is drained: by an operator\n" in shown.stdout
    pids, before = worker.processes(), len(it.journal())
    clients.answered(20)
    assert not [run for run in it.journal()[before:] if run.pid in pids]
    wait_until(lambda: 'status="drained"} 1.0' in str(it.controllers[0].admin("/metrics").body))
    refused = run_cli(it.gateways[1], it.folder, "drain", it.slot(other))
    assert refused.returncode == 1
    assert "would have no healthy worker left" in refused.stderr
    assert run_cli(other, it.folder, "undrain", name).returncode == 0
    busy(it, worker)


def test_a_drain_and_a_rolling_restart_of_every_role_fail_no_request(tmp_path: Path) -> None:
    target = "tests.targets.journal:Slow"
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateways=2, controllers=1, target=target) as it,
    ):
        with load(list(it.gateways)) as clients:
            clients.answered(10)
            drained_and_undrained(it, clients, it.workers[0])
            for old, new in [(old, it.launch(old.role)) for old in it.everybody()]:
                it.up(new)
                if old.role == "gateway":
                    clients.replace(old, new)
                clients.answered(10)
                if old.role == "worker":
                    busy(it, old)
                it.end(old)
                clients.answered(10)
        runs = it.journal()
        assert all(run.ended for run in runs)
        ran = [text for run in runs for text in run.inputs]
        assert sorted(asked.text for asked in clients.asked) == sorted(
            text for text in ran if text.startswith("request")
        )
