"""The server that a fleet shares forgets, goes and moves: gateways lose nothing that they hold, and nothing is answered twice."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.fleet import AWAY, CUT_OFF, PATIENT, TARGET, fleet, gate_of, pause, resume
from tests.servers.redis import RedisServer
from tests.servers.sentinel import SentinelSetup

BRIEF = 4.0
"""Seconds that a call to the server may take, and that it may be away before clients are told, where that is waited for.
What is asked right after it went comes in within that."""


def test_a_server_that_comes_back_empty_is_told_again_by_the_gateways(tmp_path: Path) -> None:
    """The gateways hold what is not answered. A worker that stood still through it all hands in answers under a lease of
    before, which must not pass for the first lease of after."""
    with RedisServer("valkey", tmp_path / "redis") as redis, fleet(tmp_path, redis, gateways=2) as it:
        it.expected |= AWAY
        first, second = it.gateways
        old_gate, old = gate_of(it, first)
        paused = it.host(it.begun(old))
        gate, running = gate_of(it, second)
        queued = [one.ask(f"queued {one.port} {number}") for one in it.gateways for number in range(5)]
        first.queued(10)
        pause(paused)
        old_gate.open()
        wait_until(lambda: it.begun(old).ended)
        redis.kill()
        redis.start()
        first.queued(12)
        gate.dissolve()
        old_gate.reached()
        resume(paused)
        # It may run what the other's batch had no room for before it is asked, too.
        wait_until(lambda: paused.metrics().value("batches_total") >= 1)
        old_gate.open()
        for one in (old, running, *queued):
            one.output()
        assert [len(it.runs(one)) for one in (old, running, *queued)] == [2, 2, *(1 for _ in queued)]


def test_without_the_server_a_gateway_asks_its_fallback_so_many_batches_at_once_and_no_more(
    tmp_path: Path,
) -> None:
    """Queued requests are taken back: when the server returns they have been answered, and do not run again."""
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
