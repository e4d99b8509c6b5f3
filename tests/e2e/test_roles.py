"""The roles as processes of their own over a real server: how they come up, what they show, how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import CUT_OFF, HARDY, PATIENT, fleet
from tests.e2e.server import Server, launched, run_cli
from tests.servers.redis import RedisServer

SECRET = "canary"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


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
    return any(one.name in ("headway_workers", "headway_queue_depth") for one in server.metrics().samples)


def check_view(server: Server, ids: set[str], pids: set[int], slots: Sequence[str], folder: Path) -> None:
    """A process knows all processes and slots, and tells of them wherever it is asked; a busy broker is waited for."""
    known = wait_until(lambda: known if (known := members(server)).keys() == ids else None)
    assert {member["pid"] for member in known.values()} == pids
    assert [worker["worker_id"] for worker in server.workers()] == list(slots)
    wait_until(lambda: server.metrics().value("broker_up") == 1)
    assert server.admin("/livez").status == 200
    for path in ("/readyz", "/healthz"):
        wait_until(lambda path=path: server.admin(path).status == 200)  # type: ignore[misc]

    def shows_all() -> bool:
        text = shown(server, folder, "status")
        capacity = [line for line in text.splitlines() if line.startswith("capacity")]
        return all(id in text for id in (*ids, *slots)) and " inputs/s" in "".join(capacity)

    wait_until(shows_all)


def test_every_role_shows_the_whole_fleet(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, gateways=2, workers=2, controllers=1) as it:
        for number in range(4):
            it.gateways[number % 2].ask(f"text {number}").output()
        wait_until(lambda: leader(it.gateways[0]) == "controller-4")
        wait_until(lambda: it.controllers[0].metrics().value("capacity_items_per_second", model="default"))
        assert {server.role for server in it.everybody() if exports_fleet(server)} == {"controller"}
        ids = {str(server.health()["id"]) for server in it.everybody()}
        slots = ("worker-0/cpu-0", "worker-1/cpu-0")
        pids = {server.process.pid for server in it.everybody()}
        for server in it.everybody():
            check_view(server, ids, pids, slots, tmp_path)
        assert "controller-4" in shown(it.controllers[0], tmp_path, "top")
        assert json.loads(shown(it.workers[0], tmp_path, "status", "--json"))["role"] == "worker"


def test_serve_over_a_broker_shares_its_workers(tmp_path: Path, redis: RedisServer) -> None:
    flags = ("--broker", redis.url, *PATIENT, *HARDY, "--broker-timeout-ms", "20000")
    with (
        launched(tmp_path, *flags, "--name", "one") as one,
        launched(tmp_path, *flags, "--name", "two") as two,
    ):
        for server in (one, two):
            server.ready()
        wait_until(lambda: [w["worker_id"] for w in one.workers()] == ["one/cpu-0", "two/cpu-0"])
        gates = [Gate(tmp_path) for _ in range(2)]
        asked = []
        for gate in gates:
            asked.append(one.ask(gate.text()))
            gate.reached()
        wait_until(lambda: [worker["in_flight"] for worker in two.workers()] == [1, 1])
        for gate, waiting in zip(gates, asked, strict=True):
            gate.open()
            waiting.output()
        for server in (one, two):
            server.check_rest()
            server.signal()
            server.check_end()


def test_the_brokers_password_is_shown_nowhere(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path / "redis") as redis:
        redis.command("CONFIG", "SET", "requirepass", SECRET)
        address = redis.url.removeprefix("redis://")
        environ = {"HEADWAY_BROKER": f"redis://:{SECRET}@{address}"}
        with launched(tmp_path, "--log-level", "debug", role="controller", environ=environ) as server:
            server.ready()
            told = [server.banner(), run_cli(server, tmp_path, "status").stdout]
            told += [server.admin(path).body.decode() for path in ("/internal/health", "/internal/fleet", "/metrics")]
            assert f"redis://…@{address}" in told[0]
            server.expected |= CUT_OFF
            redis.kill()
            server.logged("the broker is out of reach")
            told += [server.admin(path).body.decode() for path in ("/internal/health", "/readyz?verbose", "/metrics")]
            server.signal()
            server.check_end()
            told.append(server.log_text())
        assert SECRET not in "".join(told)
