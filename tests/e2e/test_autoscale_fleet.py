"""The autoscaler over Redis with real processes: hosts follow the number that the controller's rules bring it to."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.fleet import HARDY, fleet, gate_of
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

RULES = json.dumps([
    {"queue_above": 3, "for_s": 0.5, "add": 1},
    {"utilisation_above": 5, "for_s": 3600, "add": 1},
    {"utilisation_below": 0.4, "for_s": 2, "remove": 1},
])  # fmt: skip
LOCAL = "--autoscale", "local", "--max-workers", "2"


def healthy(server: Server) -> int:
    return sum(worker["status"] == "healthy" for worker in server.workers())


def test_a_worker_comes_while_requests_wait_and_leaves_when_nobody_asks_and_nobody_fails(tmp_path: Path) -> None:
    flags = (*HARDY, "--workers", "1", *LOCAL)
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, workers=1, worker_flags=flags) as it,
    ):
        [gateway] = it.gateways
        controller = it.start("controller", "--scale-rules", RULES, *LOCAL)
        gate, held = gate_of(it, gateway)
        for asked in [gateway.ask(f"text {number}") for number in range(8)]:
            asked.output()
        told = controller.logged("workers are scaled", direction="up")
        assert (told["before"], told["workers"], told["driver"]) == (1, 2, "local")
        assert "queue above 3 for 0.5 s" in told["reason"]
        gate.open()
        held.output()
        assert len(it.runs(held)) == 1
        controller.logged("workers are scaled", direction="down")
        wait_until(lambda: healthy(gateway) == 1)
        gateway.ask("after").output()
        shown = controller.admin("/internal/scaling").json["models"]["default"]
        assert (shown["desired"], shown["trouble"]) == (1, "")
        assert controller.metrics().value("scaling_decisions_total", direction="down") == 1
