"""Limits that follow what is there: workers are killed, memory runs out, the lowest tier floods, gateways share a limit."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

from headway.identity.api_keys.credential import LIVE, NOISE, digest, generate, parse
from tests.e2e.client import Answer, wait_until
from tests.e2e.fleet import PATIENT, fleet
from tests.e2e.server import ROOT, Server, serving
from tests.servers.redis import RedisServer

GPU = f"{ROOT / 'examples' / 'emulated_gpu.py'}:EmulatedGPU"


def throttle(gateway: Server) -> float:
    return gateway.metrics().value("throttle_per_second")


def usable(gateway: Server, healthy: int) -> float:
    """Items per second that `healthy` workers should carry, once the throttle goes by that; 0 before."""
    answer = gateway.admin("/internal/fleet")
    for capacity in answer.json["capacities"] if answer.status == 200 else ():
        told = float(capacity["usable_per_second"])
        if capacity["healthy"] == healthy and throttle(gateway) == pytest.approx(told, rel=0.01):
            return told
    return 0.0


def carried(gateway: Server) -> float:
    """Items per second that the healthy workers say they do."""
    return sum(float(one["items_per_second"]) for one in gateway.workers() if one["status"] == "healthy")


def test_limits_follow_the_workers_that_are_killed_and_come_back(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, workers=4, controllers=1) as it,
    ):
        [gateway], [controller] = it.gateways, it.controllers
        gateway.ask("measured").output()
        wait_until(lambda: usable(gateway, 4))

        def told() -> float:
            return controller.metrics().value("capacity_items_per_second")

        wait_until(lambda: told() == pytest.approx(carried(gateway), rel=0.01))
        for host in list(it.workers[:2]):
            it.kill(host)
        assert wait_until(lambda: usable(gateway, 2)) == pytest.approx(carried(gateway), rel=0.01)
        for _ in range(2):
            it.start("worker")
        assert wait_until(lambda: usable(gateway, 4)) == pytest.approx(carried(gateway), rel=0.01)


def test_a_flood_of_the_lowest_tier_is_held_and_the_others_pass(tmp_path: Path) -> None:
    flags = ("--max-batch-size", "1", "--target-utilisation", "0.1", *PATIENT)
    with serving(tmp_path, *flags, target=GPU, environ={"EMULATED_MS": "50"}) as server:
        server.ask("measured").output()
        wait_until(lambda: throttle(server))
        answers: list[Answer] = []

        def flood() -> bool:
            free = [server.ask(f"free {number}", "X-Request-Tier: free") for number in range(40)]
            paid = [server.ask(f"paid {number}") for number in range(10)]
            answers.extend(asked.answer() for asked in free)
            for asked in paid:
                asked.output()
            return {200, 429} <= {answer.status for answer in answers}

        # On a machine that stands still the worker may count for nothing, or the door be open, for a moment.
        wait_until(flood)
        refused = [answer for answer in answers if answer.status != 200]
        for answer in refused:
            assert answer.error == "SHED"
            assert answer.header["x-headway-dropped-reason"] == "capacity"
            assert int(answer.header["retry-after"]) >= 1
        assert server.metrics().value("refusals_total", reason="capacity", tier="free") == len(refused)


def test_a_worker_whose_memory_runs_out_works_on_and_says_so(tmp_path: Path) -> None:
    """The worker's process reads a machine's memory that the test has made up."""
    meminfo = tmp_path / "machine" / "proc" / "meminfo"
    meminfo.parent.mkdir(parents=True)

    def available(share: int) -> None:
        fresh = meminfo.with_suffix(".new")
        fresh.write_text(f"MemTotal: 100 kB\nMemAvailable: {share} kB\n")
        fresh.replace(meminfo)

    available(50)
    (tmp_path / "sitecustomize.py").write_text(
        "from pathlib import Path\n"
        "from headway.backends.process.host_memory import HostMemory\n"
        f"HostMemory.__init__.__defaults__ = (Path({str(meminfo.parent.parent)!r}),)\n"
    )
    with serving(tmp_path, environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) as server:
        server.expected = {"memory is scarce"}
        server.ask("while there is room").output()
        available(7)
        reason = "93% of the memory is in use"
        [worker] = wait_until(lambda: [one for one in server.workers() if one["reason"] == reason])
        assert (worker["status"], worker["memory"]) == ("degraded", 0.93)
        server.ask("while there is none").output()
        wait_until(lambda: server.metrics().value("capacity_items_per_second") == 0.0)
        available(40)
        server.all_healthy()
        wait_until(lambda: server.metrics().value("capacity_items_per_second"))


def test_four_gateways_count_one_limit(tmp_path: Path) -> None:
    key = generate(LIVE, bytes(range(NOISE)))
    id, secret = parse(key.encode()) or ("", b"")
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nid = "{id}"\nsha256 = "{digest(secret).hex()}"\nuser = "u"\ntenant = "t"\ntier = "paid"\n'
        "rate = 6\nburst = 10\n"
    )
    flags = (*PATIENT, "--keys", str(tmp_path / "keys.toml"))
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateways=4, workers=1, gateway_flags=flags) as it,
    ):
        begun = monotonic()
        asked = [
            gateway.ask(f"{number}", f"Authorization: Bearer {key}") for number in range(6) for gateway in it.gateways
        ]
        statuses = [one.answer().status for one in asked]
        most = 10 + int((monotonic() - begun) * 0.1) + 1
        assert 10 <= statuses.count(200) <= most
        assert statuses.count(200) + statuses.count(429) == 24
