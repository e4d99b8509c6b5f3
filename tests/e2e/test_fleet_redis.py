"""The server that a fleet shares stalls, dies, forgets, fills up and moves: clients wait in bounds, and none twice."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.fleet import AWAY, CUT_OFF, DEADLINE, PATIENT, TARGET, fleet, gate_of, pause, resume
from tests.e2e.server import Server
from tests.servers.redis import RedisServer
from tests.servers.sentinel import SentinelSetup

REFUSED = "requests are refused until the broker is back"
BRIEF = 4.0
"""Seconds that a call to the server may take, and that it may be away before clients are told, where that is waited for.
What is asked right after it went comes in within that."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis", durable=True) as server:
        yield server


def refused(gateway: Server, text: str) -> None:
    """A request that is refused at the door, for want of the server, and not at its deadline."""
    before = monotonic()
    answer = gateway.ask(text).answer()
    assert (answer.status, answer.error) == (503, "SERVICE_OVERLOADED")
    assert answer.header["x-headway-dropped-reason"] == "broker"
    assert monotonic() - before < DEADLINE / 2


def shed(gateway: Server, text: str) -> None:
    """A request that is refused for want of memory in the server."""
    answer = gateway.ask(text).answer()
    assert (answer.status, answer.error) == (429, "SHED")
    assert answer.header["x-headway-dropped-reason"] == "memory"


class Monitor:
    """Hears of every command that the server takes, from when it is made."""

    def __init__(self, redis: RedisServer) -> None:
        self._sock = socket.create_connection(("127.0.0.1", redis.port), timeout=PATIENCE)
        self._sock.sendall(b"MONITOR\r\n")
        self._heard = self._sock.recv(5)
        assert self._heard == b"+OK\r\n"

    def heard(self, *words: str) -> bool:
        """Whether there was a command with all of these words in it."""
        while select.select([self._sock], [], [], 0)[0]:
            self._heard += self._sock.recv(1 << 16)
        return any(all(word.encode() in line for word in words) for line in self._heard.split(b"\r\n"))

    def close(self) -> None:
        self._sock.close()


def test_a_server_that_stalls_makes_clients_wait_in_bounds_and_nothing_runs_twice(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, workers=1, patience=BRIEF) as it:
        it.expected |= AWAY
        [gateway] = it.gateways
        gate, running = gate_of(it, gateway)
        asked = [running, *(gateway.ask(f"queued {number}") for number in range(5))]
        gateway.queued(5)
        with closing(Monitor(redis)) as monitor:
            redis.pause()
            asked += [gateway.ask(f"offered meanwhile {number}") for number in range(5)]
            gateway.logged(REFUSED)
            refused(gateway, "too late")
            assert (gateway.get("/readyz").status, gateway.get("/livez").status) == (503, 200)
            redis.resume()
            for one in asked:
                wait_until(partial(monitor.heard, "enqueue", one.id))
        gate.open()
        for one in asked:
            one.output()
            assert len(it.runs(one)) == 1
        gateway.ask("afterwards").output()


def test_a_server_that_comes_back_empty_is_told_again_by_the_gateways(tmp_path: Path, redis: RedisServer) -> None:
    """The gateways hold what is not answered. A worker that stood still through it all hands in answers under a lease of
    before, which must not pass for the first lease of after."""
    with fleet(tmp_path, redis, gateways=2) as it:
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
    tmp_path: Path, durable: RedisServer
) -> None:
    """Queued requests are taken back: when the server returns they have been answered, and do not run again."""
    fallback = ("--fallback", TARGET, "--fallback-concurrency", "1", *PATIENT)
    with fleet(tmp_path, durable, workers=1, gateway_flags=fallback, patience=BRIEF) as it:
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


def test_a_server_without_memory_takes_nothing_in_and_all_that_it_has_is_answered(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, workers=1) as it:
        it.expected |= {"the broker's memory is nearly full"}
        [gateway] = it.gateways
        gate, running = gate_of(it, gateway)
        queued = [gateway.ask(f"queued {number}") for number in range(5)]
        gateway.queued(5)
        redis.command("CONFIG", "SET", "maxmemory", 1)
        for number in range(5):
            shed(gateway, f"no room {number}")
        gate.open()
        for one in (running, *queued):
            one.output()
        turns = itertools.count()

        def shed_for_little_room() -> bool:
            used = redis.command("INFO", "memory")["used_memory"]  # It shrinks when buffers are given back.
            redis.command("CONFIG", "SET", "maxmemory", used * 10 // 9)
            return gateway.ask(f"little room {next(turns)}").answer().status == 429

        wait_until(shed_for_little_room)
        redis.command("CONFIG", "SET", "maxmemory", 0)
        wait_until(lambda: gateway.ask(f"room again {next(turns)}").answer().status == 200)


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
