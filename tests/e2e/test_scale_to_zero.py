"""A model that nobody asks for has no process, and whoever asks for it next is answered all the same, by whatever door."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.e2e.client import PATIENCE, request, wait_until
from tests.e2e.fleet import HARDY, PATIENT, fleet
from tests.e2e.server import Server, serving
from tests.e2e.test_bulk import job, submit
from tests.grpc.stand import PREDICT, predict, predicted
from tests.servers.ports import Port
from tests.servers.redis import RedisServer

ZERO = "--min-workers", "0", "--scale-to-zero-after-s", "1"
LOCAL = "--autoscale", "local", "--max-workers", "2"


def at_zero(gateway: Server, model: str = "default") -> dict[str, Any]:
    """Wait until the model has no worker, and both its controller and this gateway know; what that controller says."""

    def found() -> Any:
        told = gateway.admin("/internal/scaling").json["models"].get(model, {})
        gone = all(one["status"] == "offline" for one in gateway.workers())
        return told if gone and told.get("desired") == told.get("current") == 0 else None

    shown: dict[str, Any] = wait_until(found)
    assert gateway.get("/readyz").status == 200, "so that somebody can ask it"
    return shown


def by_http(server: Server) -> str:
    return server.ask("by http").output()


def by_list(server: Server) -> str:
    connection = server.connect()
    connection.send(request(json.dumps({"model": "default", "prompt": ["by", "list"]}).encode(), "/v1/completions"))
    return " ".join(one["text"] for one in connection.answer().json["choices"])


def by_task(server: Server) -> str:
    connection = server.connect()
    connection.send(request(b'{"input": "by task"}', "/v1/inference", "Prefer: respond-async"))
    return str(server.get(f"{connection.answer().header['location']}?wait=30").json["output"])


def by_grpc(server: Server) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        answer = channel.unary_unary(PREDICT)(predict("by grpc"), timeout=PATIENCE)
    return str(predicted(answer).output.decode())


def test_a_model_that_nobody_asks_for_has_no_process_and_answers_by_every_door_all_the_same(tmp_path: Path) -> None:
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path, *ZERO, *LOCAL, "--grpc-port", str(port.number), lawful=False) as server,
    ):
        shown = at_zero(server)
        assert (shown["desired"], shown["current"], shown["min_workers"]) == (0, 0, 0)
        assert server.processes() == [server.process.pid]
        assert server.metrics().value("desired_workers") == 0
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda ask: ask(server), (by_http, by_list, by_task, by_grpc)))
        assert answers == ["BY HTTP", "BY LIST", "BY TASK", "BY GRPC"]
        told = server.logged("workers are scaled", direction="down")
        assert told["reason"] == "nobody asked for it for 1 s"


def test_hosts_of_a_fleet_give_their_workers_back_and_requests_and_bulk_jobs_bring_them_again(tmp_path: Path) -> None:
    named = "--model", "m"
    bulk = "--bulk-dir", str(tmp_path / "bulk"), "--ledger", f"sqlite:///{tmp_path}/jobs.db"
    hosts = (*HARDY, *named, "--workers", "1", *LOCAL)
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateway_flags=(*PATIENT, *named, *bulk), worker_flags=hosts, lawful=False) as it,
    ):
        [gateway] = it.gateways
        controller = it.start("controller", *named, *ZERO, *LOCAL)
        gateway.ask("first").output()
        at_zero(gateway, "m")
        assert all(one.admin("/readyz").status == 200 for one in it.workers)
        assert gateway.ask("second").output() == "SECOND"
        told = controller.logged("workers are scaled", direction="up")
        assert (told["before"], told["workers"], told["reason"]) == (0, 2, "somebody asks for it")
        at_zero(gateway, "m")
        woken = sum(one["direction"] == "up" for one in controller.log("workers are scaled"))
        id = submit(gateway, [f"line {number}" for number in range(50)], model="m")
        wait_until(lambda: job(gateway, id)["status"] == "completed")
        assert job(gateway, id)["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
        found = controller.logged("workers are scaled", woken + 1, direction="up")
        assert found["reason"] == "lines of bulk jobs wait for it"
