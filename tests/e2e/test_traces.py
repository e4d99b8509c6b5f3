"""Traces of real processes in a real collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Gate, request
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import serving
from tests.servers.collector import Collector, Received, http_collector
from tests.servers.redis import RedisServer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Run a collector. Processes started meanwhile send it the traces that their clients sample."""
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


def own(spans: list[Received]) -> tuple[list[Received], list[Received], list[Received]]:
    """Return the SERVER, `send` and `process` spans of the client's trace."""
    mine = [one for one in spans if one.trace == TRACE]
    return tuple([one for one in mine if one.name.startswith(name)] for name in ("POST", "send", "process"))  # type: ignore[return-value]


@pytest.mark.parametrize("leaves", [False, True])
def test_the_span_of_a_stream_ends_when_its_last_choice_has_gone_or_its_client_leaves(
    tmp_path: Path, collector: Collector, leaves: bool
) -> None:
    collector.keeps = False
    with serving(tmp_path, "--trace", "--max-batch-size", "1", lawful=False) as service:
        gate, connection = Gate(tmp_path), service.connect()
        body = json.dumps({"stream": True, "prompt": ["at once", gate.text()]}).encode()
        connection.send(request(body, "/v1/completions", PARENT))
        gate.reached()
        earlier = collector.until(lambda spans: len(own(spans)[2]) == 1)
        assert own(earlier)[0] == [], "nothing has gone to the client"
        if leaves:
            connection.close()
            collector.until(lambda spans: len(own(spans)[0]) == 1)
            gate.open()
        else:
            gate.open()
            answer = connection.answer()
            assert (answer.status, answer.body.count(b"data: ")) == (200, 3)
        [server], sent, processed = own(
            collector.until(lambda spans: (len(own(spans)[0]), len(own(spans)[2])) == (1, 2))
        )
    assert (server.name, server.parent, server.error) == ("POST /v1/completions", SPAN, None)
    assert server.attributes["http.response.status_code"] == (499 if leaves else 200)
    assert server.attributes["gen_ai.operation.name"] == "text_completion"
    assert [one.parent for one in sent] == [server.span] * 2
    assert {one.parent for one in processed} == {one.span for one in sent}
    assert server.begun <= min(one.begun for one in sent)
    assert leaves is (server.ended < processed[-1].ended)
