"""Large values of a fleet whose processes are killed: nothing accepted is lost, and what is stored apart goes or has an end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import FORGETFUL, fleet, gate_of
from tests.servers.redis import RedisServer

LARGE = " x" * 50_000
"""Text that is stored apart from its entry, and whose output is stored apart from its reply."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


def apart(redis: RedisServer) -> dict[str, int]:
    """Seconds until the end of each value that is stored apart, by its key; -1: never."""
    return {key: left for key, left in redis.ends().items() if re.search(r"\}(@[^:]*)?:(P|R|zp):", key)}


def test_what_a_killed_worker_had_runs_elsewhere_and_leaves_nothing(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, worker_flags=FORGETFUL) as it:
        [gateway] = it.gateways
        gate = Gate(tmp_path)
        with gateway.held_back(workers=2):
            asked = [gateway.ask(gate.text() + LARGE), gateway.ask("mate" + LARGE), gateway.ask("small")]
        gate.reached()
        it.kill(it.host(it.begun(asked[0])))
        gate.reached()
        it.begun(asked[0], 2)
        gate.open()
        for one in asked:
            one.output()
        wait_until(lambda: not apart(redis))


def test_a_killed_gateway_leaves_large_values_that_have_an_end(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, gateways=2, workers=1) as it:
        killed, other = it.gateways
        gate, running = gate_of(it, killed)
        lost = [killed.ask(f"lost {number}{LARGE}") for number in range(3)]
        kept = [other.ask(f"kept {number}{LARGE}") for number in range(3)]
        other.queued(6)
        assert len(apart(redis)) == 6
        it.kill(killed)
        gate.open()
        for asked in kept:
            asked.output()
        assert {asked.outcome for asked in (running, *lost)} == {"reset"}
        wait_until(lambda: not any("}:P:" in key for key in apart(redis)))  # Inputs go with their entries.
        wait_until(lambda: len(apart(redis)) <= len(lost))  # Outputs that were read go, too.
        assert all(0 < left <= 300 for left in apart(redis).values())


def test_a_dead_letter_with_a_large_input_is_shown_and_replayed(tmp_path: Path, redis: RedisServer) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    text = f"unless {obstacle} {LARGE}"
    with fleet(tmp_path, redis, workers=1, lawful=False) as it:
        it.expected |= {"batch failed"}
        [gateway] = it.gateways
        assert gateway.ask(text).refusal() == "REJECTED_BY_MODEL"
        [letter] = gateway.letters()
        assert [key.partition("}")[2].partition(":")[2][:3] for key in apart(redis)] == ["zp:"]
        assert gateway.admin(f"/internal/dlq/{letter['id']}").json["input"] == text
        again = gateway.admin(f"/internal/dlq/{letter['id']}/replay", "POST")
        assert (again.status, again.json["error"]) == (422, "REJECTED_BY_MODEL")
        obstacle.unlink()
        again = gateway.admin(f"/internal/dlq/{letter['id']}/replay", "POST")
        assert (again.status, again.json["output"]) == (200, text.upper())
        assert gateway.letters() == []
        wait_until(lambda: not apart(redis))
