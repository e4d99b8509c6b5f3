"""Clients hold every descriptor they can get: operators and workers still have theirs."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.server import Server, serving

FEW = 128


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


def flood(server: Server) -> None:
    """Open connections, one after the other, until two in a row are of no use."""
    useless = 0
    while useless < 2:
        asked = server.ask("one of many")
        try:
            useless = 0 if asked.connection.answer().status == 200 else useless + 1
        except ConnectionError:
            useless += 1


def test_a_worker_is_replaced_and_operators_are_answered_while_clients_hold_all_they_can(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", before=limit, lawful=False) as server:
        server.expected = {"worker process ended"}
        inside = server.ask("before")
        inside.output()
        flood(server)
        assert server.metrics().value("refusals_total", reason="service_overloaded") >= 2
        victim = server.workers()[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        server.logged("worker process ended", pid=victim)
        server.all_healthy()
        server.ask("during", on=inside.connection).output()
        wait_until(lambda: victim not in {worker["pid"] for worker in server.workers()})
