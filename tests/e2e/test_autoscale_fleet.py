"""The autoscaler over Redis with real processes: hosts follow the number, and it outlives the controller that decided it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import HARDY, Fleet, fleet
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

GROWS = {"queue_above": 3, "for_s": 0.5, "add": 1}
SHRINKS = {"utilisation_below": 0.4, "for_s": 2, "remove": 1}
NEVER = {"utilisation_above": 5, "for_s": 3600, "add": 1}
"""A bound for removals, which the load of these tests never reaches."""
LOCAL = "--autoscale", "local", "--max-workers", "2"
SCALED = (*HARDY, "--workers", "1", *LOCAL)
"""Flags of a worker process that makes its own workers."""


def rules(*those: Mapping[str, float]) -> tuple[str, ...]:
    return "--scale-rules", json.dumps(those)


def leader(it: Fleet, *flags: str) -> Server:
    """A controller that leads from its start."""
    made = it.start("controller", *flags)
    made.logged("leads the fleet")
    return made


def scaling(server: Server) -> dict[str, object]:
    found: dict[str, object] = server.admin("/internal/scaling").json["models"].get("default", {})
    return found


def pids(server: Server) -> dict[str, int]:
    """Process ids of the healthy workers, by their names."""
    return {one["worker_id"]: one["pid"] for one in server.workers() if one["status"] == "healthy"}


def test_hosts_follow_the_number_and_busy_workers_outlive_the_controller(tmp_path: Path) -> None:
    # No worker is removed before the second one is busy, too, however slow the machine.
    flags = *rules(GROWS, {**SHRINKS, "for_s": 6}, NEVER), *LOCAL
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, workers=1, worker_flags=SCALED) as it,
    ):
        [gateway], [host] = it.gateways, it.workers
        first = leader(it, *flags)
        second = it.start("controller", *flags)
        gates = [Gate(tmp_path), Gate(tmp_path)]
        held = [gateway.ask(gates[0].text())]
        gates[0].reached()
        waiting = [gateway.ask(f"text {number}") for number in range(8)]
        for one in waiting:
            one.output()
        told = first.logged("workers are scaled", direction="up")
        assert (told["before"], told["workers"], told["driver"]) == (1, 2, "local")
        assert len(pids(gateway)) == 2
        held.append(gateway.ask(gates[1].text()))
        gates[1].reached()
        busy = pids(gateway)
        it.kill(first)
        second.logged("leads the fleet")
        wait_until(lambda: scaling(second).get("current") == 2)
        assert pids(gateway) == busy
        for gate, one in zip(gates, held, strict=True):
            gate.open()
            one.output()
            assert len(it.runs(one)) == 1
        second.logged("workers are scaled", direction="down")
        wait_until(lambda: len(pids(gateway)) == 1)
        gateway.ask("after").output()
        assert scaling(second)["trouble"] == ""
        assert not host.log("the workers of this process cannot be scaled")
