"""Processes of a fleet stand still and go on, as in a long collection of garbage or on a host that swaps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import CUT_OFF, FORGETFUL, fleet, gate_of, pause, resume
from tests.servers.redis import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


def test_the_late_answers_of_a_worker_that_stood_still_past_its_lease_are_dropped(
    tmp_path: Path, redis: RedisServer
) -> None:
    with fleet(tmp_path, redis, worker_flags=FORGETFUL) as it:
        it.expected |= CUT_OFF
        [gateway] = it.gateways
        gate, asked = gate_of(it, gateway)
        paused = it.host(it.begun(asked))
        pause(paused)
        assert it.host(it.begun(asked, 2)) is it.other(paused)
        gate.dissolve()
        asked.output()
        wait_until(lambda: all(run.ended for run in it.runs(asked)))
        before = gateway.metrics().value("requests_total", outcome="ok")
        resume(paused)
        wait_until(lambda: paused.metrics().value("batches_total") == 1)
        gateway.ask("afterwards").output()
        gateway.all_healthy()
        assert gateway.metrics().value("requests_total", outcome="ok") == before + 1
        assert len(it.runs(asked)) == 2


def test_a_gateway_that_stood_still_answers_504_to_whom_it_is_too_late_for(tmp_path: Path, redis: RedisServer) -> None:
    timeout = 8.0
    flags = ("--queue-timeout-ms", f"{timeout * 1000:g}", "--request-timeout-ms", f"{timeout * 1000:g}")
    with fleet(tmp_path, redis, gateways=2, workers=1) as it:
        it.expected |= CUT_OFF
        other = it.gateways[0]
        paused = it.start("gateway", *flags)
        gate, running = gate_of(it, paused)
        queued = paused.ask("still queued")
        other.queued(1)
        asked_at = monotonic()
        pause(paused)
        gate.open()
        wait_until(lambda: it.begun(running).ended)
        other.ask("meanwhile").output()
        wait_until(lambda: it.unread(paused) and monotonic() > asked_at + timeout + 0.1)
        resume(paused)
        for late in (running, queued):
            assert late.refusal() == "DEADLINE_EXCEEDED"
        paused.ask("afterwards").output()
        assert len(it.runs(running)) == 1
        assert len(it.runs(queued)) <= 1
