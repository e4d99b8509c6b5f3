"""Processes of a fleet are killed, cut off or stand still: nothing that was accepted is lost, and nothing is answered twice."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import CUT_OFF, FORGETFUL, LATE, LEASE, fleet, gate_of
from tests.e2e.server import run_cli
from tests.servers.proxy import ChaosProxy
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


def test_a_killed_gateway_takes_only_its_own_clients_with_it_and_its_large_values_have_an_end(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, gateways=2, workers=1) as it:
        killed, other = it.gateways
        gate, running = gate_of(it, killed)
        lost = [killed.ask(f"lost {number}{LARGE}") for number in range(3)]
        kept = [other.ask(f"kept {number}{LARGE}") for number in range(3)]
        other.queued(6)
        assert len(apart(redis)) == 6
        it.kill(killed)
        assert {asked.outcome for asked in (running, *lost)} == {"reset"}
        gate.open()
        for asked in kept:
            asked.output()
        for asked in (running, *lost):
            assert len(it.runs(asked)) <= 1
        wait_until(lambda: not any("}:P:" in key for key in apart(redis)))  # Inputs go with their entries.
        wait_until(lambda: len(apart(redis)) <= len(lost))  # Outputs that were read go, too.
        assert all(0 < left <= 300 for left in apart(redis).values())
        it.start("gateway").ask("in its place").output()


def test_the_status_of_a_fleet_tells_for_minutes_how_its_processes_have_ended(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, controllers=1) as it:
        [gateway], [lost, stays] = it.gateways, it.workers
        it.expected.add("worker process ended")
        os.kill(next(one["pid"] for one in stays.workers() if one["worker_id"] == it.slot(stays)), signal.SIGKILL)
        gone = it.slot(lost).partition("/")[0]
        it.kill(lost)
        another = it.start("worker")
        stopped = it.slot(another).partition("/")[0]
        it.end(another)

        def ended() -> dict[str, tuple[str, str]]:
            found = gateway.admin("/internal/snapshot").json["departed"]
            return {one["id"]: (one["ending"], one["reason"]) for one in found}

        wait_until(lambda: len(ended()) == 3)
        assert ended()[stopped] == ("stopped", "told to by SIGTERM")
        assert ended()[gone][0] == "lost"
        assert ended()[it.slot(stays)] == ("killed", "died of SIGKILL")
        shown = run_cli(gateway, tmp_path, "status").stdout
        assert re.search(rf"{stopped} +stopped +\d+ s ago +worker", shown)


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
