"""Processes of a fleet are stopped and replaced under load without any client noticing."""

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
"""Requests per second."""
CALLERS = 16
"""Clients, each with at most one connection: more than are busy at the same time."""
SILENT = GRACE / 2
"""If a connection has been silent for this many seconds, a gateway that is ending may close it as a request arrives,
and the client has to resend. Closing it earlier loses the request."""


class Load:
    """Clients that send at fixed times on persistent connections, without waiting for earlier answers."""

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
        """Connect to another gateway from now on, as a load balancer does. The old gateway has accepted all of its
        connections, which stay open until it closes them."""
        with self._connecting:
            self._gateways = [*(one for one in self._gateways if one is not old), new]
        assert old.get("/livez").status == 200

    def answered(self, more: int) -> None:
        """Wait until `more` more requests have been answered."""
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
    def __init__(self, gateway: Server, connection: Connection) -> None:
        self.gateway = gateway
        self.connection = connection
        self._answered_at = inf

    def silent_for(self) -> float:
        """Return the seconds since its last answer; negative if there was none yet."""
        return monotonic() - self._answered_at

    def ask(self, asked: Asked) -> Answer:
        asked.send()
        answer = asked.answer()
        self._answered_at = monotonic()
        return answer


@contextmanager
def load(gateways: list[Server]) -> Iterator[Load]:
    """Keep up load while the block runs. Every request must be answered correctly."""
    made = Load(gateways)
    made.start()
    try:
        yield made
    finally:
        made.stop()
    assert made.faults == []
    assert {asked.outcome for asked in made.asked} == {"ok"}


def _ended(connection: Connection) -> bool:
    """Return True if the server has closed a connection on which no request is in progress."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def busy(it: Fleet, worker: Server) -> None:
    pids = worker.processes()
    wait_until(lambda: any(run.pid in pids and run.ended is None for run in it.journal()[-CALLERS:]))


def drained_and_undrained(it: Fleet, clients: Load, worker: Server) -> None:
    """Check that a drained host gets no work, and that the last one can't be drained."""
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
