"""A fleet's server goes down, moves or starts late: gateways lose no requests, and none is answered twice."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.fleet import AWAY, CUT_OFF, PATIENT, TARGET, fleet, gate_of
from tests.e2e.server import launched
from tests.servers.redis import RedisServer
from tests.servers.sentinel import SentinelSetup

BRIEF = 4.0
"""Timeout of calls to the server, and how long it may be down before clients notice, in seconds. Requests sent right
after it went down must arrive in this time."""


def test_without_the_server_a_gateway_asks_its_fallback_so_many_batches_at_once_and_no_more(tmp_path: Path) -> None:
    """Queued requests go to the fallback, too. They don't run again when the server returns."""
    fallback = ("--fallback", TARGET, *PATIENT)
    with (
        RedisServer("valkey", tmp_path / "redis", durable=True) as durable,
        fleet(tmp_path, durable, workers=1, gateway_flags=fallback, patience=BRIEF) as it,
    ):
        it.expected |= CUT_OFF | {"direct mode until the broker is back"}
        [gateway] = it.gateways
        gate, running = gate_of(it, gateway)
        moved = [gateway.ask(f"queued {number}") for number in range(5)]
        gateway.queued(5)
        durable.stop()
        moved += [gateway.ask(f"offered in vain {number}") for number in range(5)]
        gateway.logged("direct mode until the broker is back")
        wait_until(lambda: gateway.get("/readyz").status == 200)
        fallback_pid = it.begun(running, 2).pid
        direct = [gateway.ask(f"asked directly {number}") for number in range(5)]
        wait_until(lambda: gateway.health()["pending"] == 1 + len(moved) + len(direct))
        durable.start()
        gateway.logged("the broker is back", who="gateway")
        wait_until(lambda: it.kept().keys() <= {"x", "y"})
        assert not any(it.runs(one) for one in direct)
        gate.dissolve()
        for one in (running, *moved, *direct):
            one.output()
        assert {run.pid for one in (*moved, *direct) for run in it.runs(one)} == {fallback_pid}
        assert all(len(it.runs(one)) == 1 for one in (*moved, *direct))
        assert gateway.metrics().value("direct_total") == 1 + len(moved) + len(direct)
        gateway.ask("afterwards").output()


def test_a_failover_loses_nothing_that_a_gateway_holds(tmp_path: Path) -> None:
    with (
        SentinelSetup("valkey", tmp_path / "sentinel") as setup,
        fleet(tmp_path, setup.primary, gateways=2, workers=1, url=setup.url) as it,
    ):
        it.expected |= AWAY
        gate, running = gate_of(it, it.gateways[0])
        asked = [running, *(one.ask(f"queued {one.port} {number}") for one in it.gateways for number in range(5))]
        it.gateways[0].queued(10)
        setup.primary.kill()
        asked += [one.ask(f"offered meanwhile {one.port} {number}") for one in it.gateways for number in range(5)]
        it.redis = setup.primary
        gate.dissolve()
        for one in asked:
            one.output()
        it.gateways[1].ask("afterwards").output()


DIRECT = "the broker does not answer; starting in direct mode"
UNFIT = "the broker cannot be used; direct mode continues"
EXPECTED = {DIRECT, UNFIT, "the broker is out of reach", "direct mode until the broker is back"}


def test_a_start_without_the_broker_is_one_in_direct_mode(tmp_path: Path) -> None:
    redis = RedisServer("valkey", tmp_path / "redis", "maxmemory-policy allkeys-lru")
    try:
        flags = "--broker", redis.url, "--fallback", "tests.targets.gates:Gated"
        with launched(tmp_path, *flags, "--name", "late") as server:
            server.expected |= EXPECTED
            server.ready()
            server.logged(DIRECT)
            wait_until(lambda: server.get("/readyz").status == 200)
            assert server.get("/readyz").json["status"] == "degraded"
            server.ask("answered by the fallback").output()
            assert server.metrics().value("direct_total") == 1
            redis.start()
            assert "allkeys-lru" in str(server.logged(UNFIT)["error"])
            server.ask("answered by the fallback, too").output()
            assert server.metrics().value("direct_total") == 2
            assert redis.command("HKEYS", "headway:{fleet}:k") == []
            redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.logged("the broker answers; direct mode ends")
            wait_until(lambda: server.get("/readyz?verbose").json["checks"]["workers"] == "healthy")
            server.logged("the broker is back", who="gateway")
            server.ask("answered by its own worker").output()
            assert server.metrics().value("direct_total") == 2
            assert redis.command("HLEN", "headway:{fleet}:k") == 1
            server.signal()
            server.check_end()
            assert redis.command("HLEN", "headway:{fleet}:k") == 0
    finally:
        redis.close()
