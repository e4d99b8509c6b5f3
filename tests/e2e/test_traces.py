"""Traces of real processes, at a real collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Gate
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import serving
from tests.servers.collector import Collector, http_collector
from tests.servers.redis import RedisServer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with http_collector() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        yield made


def test_a_request_whose_worker_was_killed_has_one_trace_over_all_processes(
    tmp_path: Path, collector: Collector
) -> None:
    flags = (*PATIENT, "--trace"), (*FORGETFUL, "--trace")
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateway_flags=flags[0], worker_flags=flags[1]) as it,
    ):
        [gateway] = it.gateways
        gate = Gate(tmp_path)
        asked = gateway.ask(gate.text(), PARENT, "tracestate: vendor=1")
        gate.reached()
        victim = it.host(it.begun(asked))
        collector.named("poll default")
        it.kill(victim)
        gate.reached()
        gate.open()
        asked.output()
        gateway.ask("not sampled").output()
        [server] = collector.named("POST /v1/inference")
        spans = collector.until(lambda spans: sum(one.name == "process default" for one in spans) == 2)
    polls = [one for one in spans if one.name == "poll default"]
    own = [one for one in spans if one.trace == TRACE]
    [sent] = (one for one in own if one.name == "send default")
    [process] = (one for one in own if one.name == "process default")
    assert (server.parent, sent.parent, process.parent) == (SPAN, server.span, sent.span)
    assert len(own) == 3 and {one.state for one in own} == {"vendor=1"}
    assert [poll.attributes["headway.attempt"] for poll in polls] == [1, 2]
    assert [[(link.trace, link.span) for link in poll.links] for poll in polls] == [[(TRACE, sent.span)]] * 2
    assert [(link.trace, link.span) for link in process.links] == [(polls[1].trace, polls[1].span)]
    assert (process.attributes["headway.attempt"], process.attributes["headway.queue_seconds"] > 4) == (2, True)
    [ran] = (one for one in spans if one.name == "run default")
    assert ran.trace == polls[1].trace
    assert len({one.process["process.pid"] for one in (server, *polls)}) == 3
    assert process.process == polls[1].process
    assert [one.process["headway.role"] for one in (server, *polls)] == ["gateway", "worker", "worker"]
    assert {one.name for one in spans if one.name.startswith("POST")} == {server.name}
    assert len([one for one in spans if one.name.startswith("POST")]) == 1


def test_a_batch_of_64_has_64_links(tmp_path: Path, collector: Collector) -> None:
    collector.keeps = False  # No connection is left open, as the laws of a service have it.
    with serving(tmp_path, "--trace", "--max-batch-size", "64", "--access-log", "1") as server:
        with server.held_back():
            asked = [server.ask(f"input {number}", PARENT) for number in range(64)]
        for one in asked:
            one.output()
        polls = collector.until(lambda spans: sum(len(one.links) for one in spans if one.name == "poll default") == 64)
        [full] = (one for one in polls if one.name == "poll default")
        assert (len(full.links), full.attributes["messaging.batch.message_count"]) == (64, 64)
        assert len({link.attributes["messaging.message.id"] for link in full.links}) == 64
        spans = collector.until(lambda spans: sum(one.name == "POST /v1/inference" for one in spans) == 64)
        assert {link.span for link in full.links} == {one.span for one in spans if one.name == "send default"}
        lines = [line for line in server.log("request") if line.get("trace_id")]
        assert {line["trace_id"] for line in lines} == {TRACE}
        assert len(lines) == 64
