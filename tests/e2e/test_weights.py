"""Batches by what a function of the target counts: in one process, and in a fleet, whose gateways do not have that function."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.client import request, wait_until
from tests.e2e.server import Server, launched
from tests.servers.redis import RedisServer

TARGET = "tests.targets.weighed:together"
BOUND = 40
FLAGS = "--max-batch-weight", str(BOUND), "--weight", "words", "--max-batch-size", "64"
PATIENT = "--broker-timeout-ms", "20000"
INPUTS = [" ".join(["word" * 25] * (1 + number % 7)) for number in range(100)]
"""Texts of 1 to 7 words, of which not one would fit by its characters."""


def runs(server: Server) -> list[tuple[int, int]]:
    """Number and weight of the inputs of the run that each input was in."""
    connection = server.connect()
    connection.send(request(json.dumps({"inputs": INPUTS}).encode(), "/v1/inference"))
    return [(count, weight) for count, weight in connection.answer().json["outputs"]]


def learns_and_keeps_the_bound(server: Server) -> None:
    def full() -> bool:
        told = runs(server)
        assert max(weight for _, weight in told) <= BOUND
        return max(weight for _, weight in told) > 0.7 * BOUND

    wait_until(full)


def test_gateways_learn_what_inputs_weigh_from_the_workers(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        launched(tmp_path, "--broker", redis.url, *PATIENT, *FLAGS, target=TARGET, role="worker") as worker,
        launched(tmp_path, "--broker", redis.url, *PATIENT, *FLAGS, role="gateway") as gateway,
    ):
        worker.ready()
        gateway.ready()
        wait_until(lambda: gateway.get("/readyz").status == 200)
        learns_and_keeps_the_bound(gateway)
        for one in (gateway, worker):
            one.signal()
            one.check_end()
