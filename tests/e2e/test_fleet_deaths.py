"""Processes of a fleet are killed: nothing that was accepted is lost, and nothing is answered twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import CUT_OFF, FORGETFUL, LATE, LEASE, fleet, gate_of, pause, resume
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

UNHAPPY = {"batch failed", "worker process ended"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


def test_a_killed_gateway_takes_only_its_own_clients_with_it(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, gateways=2, workers=1) as it:
        killed, other = it.gateways
        gate, running = gate_of(it, killed)
        queued = [killed.ask(f"lost {number}") for number in range(5)]
        kept = [other.ask(f"kept {number}") for number in range(5)]
        other.queued(10)
        it.kill(killed)
        assert {asked.outcome for asked in (running, *queued)} == {"reset"}
        gate.open()
        for asked in kept:
            asked.output()
        for asked in (running, *queued):
            assert len(it.runs(asked)) <= 1
        it.start("gateway").ask("in its place").output()


def test_what_a_killed_worker_ran_is_given_to_another_when_its_lease_ends(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, worker_flags=FORGETFUL) as it:
        [gateway] = it.gateways
        gate = Gate(tmp_path)
        with gateway.held_back(workers=2):
            asked = [gateway.ask(gate.text()), gateway.ask("mate"), gateway.ask("another")]
        gate.reached()
        victim = it.host(it.begun(asked[0]))
        killed_at = monotonic()
        it.kill(victim)
        gate.reached()
        assert it.begun(asked[0], 2).begun - killed_at < LEASE + LATE
        gate.open()
        for one in asked:
            one.output()
            assert len(it.runs(one)) == 2
        wait_until(lambda: it.retries("lease_lost") == 3)


def test_a_batch_whose_worker_process_is_killed_runs_again_and_its_host_lives_on(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis) as it:
        it.expected |= UNHAPPY
        [gateway] = it.gateways
        gate = Gate(tmp_path)
        with gateway.held_back(workers=2):
            asked = [gateway.ask(gate.text()), gateway.ask("mate"), gateway.ask("another")]
        gate.reached()
        first = it.begun(asked[0])
        host = it.host(first)
        os.kill(first.pid, signal.SIGKILL)
        host.logged("worker process ended", pid=first.pid)
        gate.reached()
        gate.open()
        for one in asked:
            one.output()
            assert len(it.runs(one)) == 2
        wait_until(lambda: it.retries("crashed") == 3)
        assert host.metrics().value("retries_total", cause="crashed") == 3
        wait_until(lambda: host.metrics().value("worker_restarts_total") == 1)
        gateway.all_healthy()


def test_a_worker_killed_before_it_could_hand_in_its_answers_leaves_one_answer_to_each(
    tmp_path: Path, redis: RedisServer
) -> None:
    """The worker's call is held up on the way, and comes after another worker has answered: that changes nothing."""
    with ChaosProxy(redis.port) as network, fleet(tmp_path, redis, workers=1, worker_flags=FORGETFUL) as it:
        [gateway], [other] = it.gateways, it.workers
        it.expected |= CUT_OFF
        busy, elsewhere = gate_of(it, gateway)
        victim = it.start("worker", "--broker-timeout-ms", "3000", url=f"redis://127.0.0.1:{network.port}/0")
        gate, asked = gate_of(it, gateway)
        first = it.begun(asked)
        assert it.host(first) is victim
        network.black_hole()
        gate.open()
        victim.logged("the broker is out of reach", who=it.slot(victim))
        it.kill(victim)
        busy.open()
        elsewhere.output()
        gate.reached()
        assert it.host(it.begun(asked, 2)) is other
        gate.open()
        asked.output()
        network.normal()
        gateway.ask("afterwards").output()


def test_a_worker_killed_before_it_heard_that_its_answers_were_taken_leaves_nothing_to_run_again(
    tmp_path: Path, redis: RedisServer
) -> None:
    with ChaosProxy(redis.port) as network, fleet(tmp_path, redis, workers=0) as it:
        [gateway] = it.gateways
        victim = it.start("worker", url=f"redis://127.0.0.1:{network.port}/0")
        gate, asked = gate_of(it, gateway)
        network.delay(0.4)
        gate.open()
        asked.output()
        it.kill(victim)
        assert it.leases() == 0
        assert len(it.runs(asked)) == 1


def test_what_several_take_back_at_once_is_given_out_once(tmp_path: Path, redis: RedisServer) -> None:
    with fleet(tmp_path, redis, gateways=2, controllers=2, worker_flags=FORGETFUL) as it:
        it.expected |= CUT_OFF
        gateway = it.gateways[0]
        gate = Gate(tmp_path)
        with gateway.held_back(workers=2):
            asked = [gateway.ask(gate.text()), *(gateway.ask(f"mate {number}") for number in range(7))]
        gate.reached()
        it.kill(it.host(it.begun(asked[0])))
        left = it.everybody()
        pause(*left)
        wait_until(it.overdue)
        resume(*left)
        gate.reached()
        gate.open()
        for one in asked:
            one.output()
            assert len(it.runs(one)) == 2
        wait_until(lambda: it.retries("lease_lost") == len(asked))


def test_while_all_workers_are_gone_requests_are_held_up_to_their_queue_deadline(
    tmp_path: Path, redis: RedisServer
) -> None:
    """A killed worker counts for a while; who waits longer for a GPU than that hears that there is none."""
    with fleet(tmp_path, redis) as it:
        patient = it.gateways[0]
        hasty = it.start("gateway", "--queue-timeout-ms", "8000")
        for worker in tuple(it.workers):
            it.kill(worker)
        asked_at = monotonic()
        late = hasty.ask("held too long")
        held = [patient.ask(f"held {number}") for number in range(10)]
        answer = late.answer()
        assert (answer.status, answer.error) == (503, "NO_WORKERS")
        assert monotonic() - asked_at >= 7.9  # The server's clock is another one.
        assert patient.get("/readyz").status == 503
        assert patient.get("/livez").status == 200
        it.start("worker")
        for one in held:
            one.output()
        wait_until(lambda: patient.get("/readyz").status == 200)
