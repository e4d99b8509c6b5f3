"""Zones with real processes: requests stay where they came in, and a zone that is killed takes only its own connections with it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.client import Asked, Gate, request, wait_until
from tests.e2e.fleet import FORGETFUL, Fleet, fleet
from tests.e2e.server import Server
from tests.servers.redis import RedisServer


def task(gateway: Server, text: str) -> str:
    """Path of the outcome of a new task."""
    connection = gateway.connect()
    connection.send(request(json.dumps({"input": text}).encode(), "/v1/inference", "Prefer: respond-async"))
    return str(connection.answer().header["location"])


def zone_of(it: Fleet, zone: str) -> tuple[Server, Server]:
    """A gateway and a worker of one zone, which are starting."""
    return it.launch("gateway", "--zone", zone), it.launch("worker", "--zone", zone)


def ran_by(it: Fleet, asked: Asked) -> Server:
    asked.output()
    [run] = it.runs(asked)
    return it.host(run)


def test_requests_stay_in_their_zone_and_nothing_of_a_killed_zone_is_lost(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(
            tmp_path, redis, gateways=0, workers=0, worker_flags=FORGETFUL, target="tests.targets.journal:Long"
        ) as it,
    ):
        (near, here), (far, there) = zone_of(it, "near"), zone_of(it, "far")
        it.up(near, here, far, there)
        for gateway in (near, far):
            wait_until(lambda gateway=gateway: gateway.health()["workers"]["healthy"] == 2)  # type: ignore[misc]
        for number in range(3):
            assert ran_by(it, near.ask(f"near {number}")) is here
            assert ran_by(it, far.ask(f"far {number}")) is there
        assert {worker["zone"]: worker["worker_id"] for worker in near.workers()} == {
            "near": it.slot(here),
            "far": it.slot(there),
        }

        gate, busy = Gate(tmp_path), Gate(tmp_path)
        first = near.ask(busy.text())  # Or an idle worker would help.
        busy.reached()
        running = task(far, gate.text())
        gate.reached()
        waiting = task(far, "waits")
        torn = far.ask("torn", "Idempotency-Key: once")
        far.queued(2)
        it.kill(far)
        it.kill(there)
        assert torn.outcome == "reset"
        again = near.ask("torn", "Idempotency-Key: once")
        busy.open()
        first.output()
        gate.reached()  # Its lease has ended.
        gate.open()
        again.output()
        assert len(it.runs(again)) == 1
        for path, text in ((running, gate.text()), (waiting, "waits")):
            answer = near.get(f"{path}?wait=30").json
            assert (answer["status"], answer.get("output")) == ("SUCCESS", text.upper())
        assert ran_by(it, near.ask("after")) is here
        assert here.metrics().value("zone_help_batches_total", zone="far") >= 1
