"""A model without requests has no process. The next request for it is still answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.fleet import HARDY, PATIENT, fleet
from tests.e2e.server import Server
from tests.e2e.test_bulk import job, submit
from tests.servers.redis import RedisServer

ZERO = "--min-workers", "0", "--scale-to-zero-after-s", "1"
LOCAL = "--autoscale", "local", "--max-workers", "2"
SOON = {"headway.controller.autoscaler.SETTLES_AFTER": 1.0}
"""Shortens the time in which a new leader waits for all hosts to report."""


def at_zero(gateway: Server) -> None:
    """Wait until the model has no worker, and both its controller and this gateway know it."""

    def is_known() -> bool:
        told: dict[str, Any] = gateway.admin("/internal/scaling").json["models"].get("m", {})
        gone = all(one["status"] == "offline" for one in gateway.workers())
        return gone and told.get("desired") == told.get("current") == 0

    wait_until(is_known)
    assert gateway.get("/readyz").status == 200, "so that somebody can ask it"


def test_hosts_of_a_fleet_give_their_workers_back_and_requests_and_bulk_jobs_bring_them_again(tmp_path: Path) -> None:
    named = "--model", "m"
    bulk = "--bulk-dir", str(tmp_path / "bulk"), "--ledger", f"sqlite:///{tmp_path}/jobs.db"
    hosts = (*HARDY, *named, "--workers", "1", *LOCAL)
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(
            tmp_path, redis, gateway_flags=(*PATIENT, *named, *bulk), worker_flags=hosts, lawful=False, constants=SOON
        ) as it,
    ):  # fmt: skip
        [gateway] = it.gateways
        controller = it.start("controller", *named, *ZERO, *LOCAL)
        at_zero(gateway)
        assert all(one.admin("/readyz").status == 200 for one in it.workers)
        assert [one.processes() for one in it.workers] == [[one.process.pid] for one in it.workers]
        gateway.ask("first").output()
        assert controller.logged("workers are scaled", direction="down")["reason"] == "no requests for 1 s"
        told = controller.logged("workers are scaled", direction="up")
        assert (told["before"], told["workers"], told["reason"]) == (0, 2, "it has requests")
        at_zero(gateway)
        woken = sum(one["direction"] == "up" for one in controller.log("workers are scaled"))
        id = submit(gateway, [f"line {number}" for number in range(50)], model="m")
        wait_until(lambda: job(gateway, id)["status"] == "completed")
        assert job(gateway, id)["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
        assert controller.logged("workers are scaled", woken + 1, direction="up")["workers"] == 2
