"""The roles as processes of their own over a real server: what each shows of the whole fleet, and how they have ended."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.server import Server, run_cli
from tests.servers.redis import RedisServer


def members(server: Server) -> dict[str, dict[str, Any]]:
    """The processes that this one knows, by their ids; none while the broker takes its time."""
    return {str(member["id"]): member for member in server.admin("/internal/fleet").json.get("members", ())}


def leader(server: Server) -> str:
    """Id of the controller that leads; empty when none is seen to."""
    return next((id for id, member in members(server).items() if member["leads"]), "")


def shown(server: Server, folder: Path, *arguments: str) -> str:
    """Output of a command once it finds that the process serves."""

    def output() -> str:
        ended = run_cli(server, folder, *arguments)
        return ended.stdout if ended.returncode == 0 else ""

    return wait_until(output)


def exports_fleet(server: Server) -> bool:
    """Whether a process exports figures of the whole fleet."""
    return any(sample.name in ("headway_workers", "headway_queue_depth") for sample in server.metrics().samples)


def check_view(server: Server, ids: set[str], pids: set[int], slots: Sequence[str]) -> None:
    """A process knows all processes and slots; a busy broker is waited for."""
    known = wait_until(lambda: known if (known := members(server)).keys() == ids else None)
    assert {member["pid"] for member in known.values()} == pids
    assert [worker["worker_id"] for worker in server.workers()] == list(slots)
    wait_until(lambda: server.metrics().value("broker_up") == 1)
    assert server.admin("/livez").status == 200
    for path in ("/readyz", "/healthz"):
        wait_until(lambda path=path: server.admin(path).status == 200)  # type: ignore[misc]


def test_every_role_shows_the_whole_fleet_and_how_its_processes_have_ended(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path / "redis") as redis, fleet(tmp_path, redis, gateways=2, controllers=1) as it:
        for number in range(4):
            it.gateways[number % 2].ask(f"text {number}").output()
        wait_until(lambda: leader(it.gateways[0]) == "controller-4")
        wait_until(lambda: it.controllers[0].metrics().value("capacity_items_per_second", model="default"))
        assert {server.role for server in it.everybody() if exports_fleet(server)} == {"controller"}
        ids = {str(server.health()["id"]) for server in it.everybody()}
        slots = ("worker-0/cpu-0", "worker-1/cpu-0")
        pids = {server.process.pid for server in it.everybody()}
        for server in it.everybody():
            check_view(server, ids, pids, slots)

        def shows_all() -> bool:
            text = shown(it.gateways[0], tmp_path, "status")
            capacity = [line for line in text.splitlines() if line.startswith("capacity")]
            return all(id in text for id in (*ids, *slots)) and " inputs/s" in "".join(capacity)

        wait_until(shows_all)
        assert "controller-4" in shown(it.controllers[0], tmp_path, "top")
        assert json.loads(shown(it.workers[0], tmp_path, "status", "--json"))["role"] == "worker"
        ends_are_told(it)


def ends_are_told(it: Fleet) -> None:
    """A process that was stopped, one that was lost and a worker that was killed are told apart."""
    gateway, [lost, stays] = it.gateways[0], it.workers
    it.expected.add("worker process ended")
    os.kill(next(one["pid"] for one in stays.workers() if one["worker_id"] == it.slot(stays)), signal.SIGKILL)
    gone = it.slot(lost).partition("/")[0]
    it.kill(lost)
    another = it.start("worker")
    stopped = it.slot(another).partition("/")[0]
    it.end(another)

    def ended() -> dict[str, tuple[str, str]]:
        found = gateway.admin("/internal/snapshot").json["departed"]
        return {one["id"]: (one["ending"], one["reason"]) for one in found}

    wait_until(lambda: len(ended()) == 3)
    assert ended()[stopped] == ("stopped", "got SIGTERM")
    assert ended()[gone][0] == "lost"
    assert ended()[it.slot(stays)] == ("killed", "died of SIGKILL")
    assert re.search(rf"{stopped} +stopped +\d+ s ago +worker", run_cli(gateway, it.folder, "status").stdout)
