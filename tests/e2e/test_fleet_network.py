"""The network between a fleet and its server is slow, or takes everything and brings nothing: deadlines hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import AWAY, CUT_OFF, FORGETFUL, LATE, LEASE, fleet, gate_of
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

TIMEOUT = 9.0
"""Seconds that a hasty gateway's requests have in all."""
HASTY = (
    *("--queue-timeout-ms", f"{TIMEOUT * 1000:g}", "--request-timeout-ms", f"{TIMEOUT * 1000:g}"),
    *("--broker-timeout-ms", "4000"),
)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


@pytest.fixture
def network(redis: RedisServer) -> Iterator[ChaosProxy]:
    with ChaosProxy(redis.port) as proxy:
        yield proxy


def test_over_a_slow_network_all_is_answered(tmp_path: Path, redis: RedisServer, network: ChaosProxy) -> None:
    with fleet(tmp_path, redis, url=f"redis://127.0.0.1:{network.port}/0") as it:
        [gateway] = it.gateways
        network.delay(0.1)
        for one in [gateway.ask(f"from afar {number}") for number in range(20)]:
            one.output()
            assert len(it.runs(one)) == 1


def test_a_gateway_that_hears_nothing_any_more_answers_by_the_deadline(
    tmp_path: Path, redis: RedisServer, network: ChaosProxy
) -> None:
    """Answers come when the network is back, and find no request any more."""
    with fleet(tmp_path, redis, workers=1) as it:
        it.expected |= AWAY
        other = it.gateways[0]
        gateway = it.start("gateway", *HASTY, url=f"redis://127.0.0.1:{network.port}/0")
        gate, running = gate_of(it, gateway)
        queued = gateway.ask("queued")
        other.queued(1)
        network.black_hole()
        asked_at = monotonic()
        gate.open()
        offered = gateway.ask("offered in vain")
        for late in (running, queued, offered):
            assert late.refusal() == "DEADLINE_EXCEEDED"
            assert monotonic() - asked_at < TIMEOUT + LATE
        gateway.logged("requests are refused until the broker is back")
        answer = gateway.ask("refused").answer()
        assert (answer.status, answer.error) == (503, "SERVICE_OVERLOADED")
        other.ask("meanwhile").output()
        network.normal()
        gateway.logged("the broker is back", who="gateway")
        gateway.ask("afterwards").output()


def test_a_worker_that_hears_nothing_any_more_is_given_up_and_comes_back(
    tmp_path: Path, redis: RedisServer, network: ChaosProxy
) -> None:
    with fleet(tmp_path, redis, workers=1, worker_flags=FORGETFUL) as it:
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
