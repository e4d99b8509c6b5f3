"""Processes of a fleet are killed, cut off or paused: no accepted request is lost, and none is answered twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import CUT_OFF, FORGETFUL, LATE, LEASE, fleet, gate_of
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

LARGE = " x" * 50_000
"""An input stored apart from its entry, whose output is stored apart from its reply."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


def apart(redis: RedisServer) -> dict[str, int]:
    """Return the time to live of each separately stored value in seconds, by key. -1 means forever."""
    return {key: left for key, left in redis.ends().items() if re.search(r"\}(@[^:]*)?:(P|R|zp):", key)}


def test_a_killed_gateway_takes_only_its_own_clients_with_it_and_its_large_values_have_an_end(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, gateways=2, workers=1) as it:
        killed, other = it.gateways
        gate, key = Gate(tmp_path), "Idempotency-Key: k"
        running = killed.ask(gate.text(), key)
        gate.reached()
        lost = [killed.ask(f"lost {number}{LARGE}") for number in range(3)]
        kept = [other.ask(f"kept {number}{LARGE}") for number in range(3)]
        other.queued(6)
        assert len(apart(redis)) == 6
        it.kill(killed)
        assert {asked.outcome for asked in (running, *lost)} == {"reset"}
        again = other.ask(gate.text(), key)
        wait_until(lambda: other.health()["pending"] == 4)
        gate.open()
        assert again.answer().header["idempotency-replayed"] == "true"
        for asked in kept:
            asked.output()
        for asked in (running, *lost):
            assert len(it.runs(asked)) <= 1
        wait_until(lambda: not any("}:P:" in key for key in apart(redis)))  # Inputs are deleted with their entries.
        wait_until(lambda: len(apart(redis)) <= len(lost))  # Outputs are deleted once read.
        assert all(0 < left <= 300 for left in apart(redis).values())
        it.start("gateway").ask("in its place").output()


def test_a_worker_that_hears_nothing_any_more_is_given_up_and_comes_back(tmp_path: Path, redis: RedisServer) -> None:
    with ChaosProxy(redis.port) as network, fleet(tmp_path, redis, workers=1, worker_flags=FORGETFUL) as it:
        it.expected |= CUT_OFF
        [gateway], [other] = it.gateways, it.workers
        busy, elsewhere = gate_of(it, gateway)
        lost = it.start("worker", "--broker-timeout-ms", "3000", url=f"redis://127.0.0.1:{network.port}/0")
        gate, asked = gate_of(it, gateway)
        first = it.begun(asked)
        assert it.host(first) is lost
        network.black_hole()
        cut_at = monotonic()
        busy.open()
        elsewhere.output()
        second = it.begun(asked, 2)
        assert it.host(second) is other
        assert second.begun - cut_at < LEASE + LATE
        gate.dissolve()
        asked.output()
        network.normal()
        wait_until(lambda: lost.metrics().value("batches_total") == 1)
        busy, elsewhere = gate_of(it, gateway)
        gateway.ask("afterwards").output()
        busy.open()
        elsewhere.output()
        assert len(it.runs(asked)) == 2
