"""Traces of real processes, at a real collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.client import Connection, Gate, request
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import Server, serving
from tests.servers.collector import Collector, Received, http_collector
from tests.servers.redis import RedisServer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01"


def send_spans_to(collector: Collector, patch: pytest.MonkeyPatch) -> None:
    """Have processes that are started send their spans there, and sample what their clients do."""
    patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with http_collector() as made:
        send_spans_to(made, monkeypatch)
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


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Streams(NamedTuple):
    """Service whose batches hold one input and whose chats are their first message, and what it tells of them."""

    server: Server
    collector: Collector


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    folder = tmp_path_factory.mktemp("streams")
    template = folder / "first.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    flags = "--trace", "--chat-template", str(template), "--max-batch-size", "1"
    with http_collector() as collector, pytest.MonkeyPatch.context() as patch:
        send_spans_to(collector, patch)
        collector.keeps = False
        with serving(folder, *flags, lawful=False) as server:
            yield Streams(server, collector)


@pytest.fixture
def streams(service: Streams) -> Streams:
    """The service, of which nothing is told yet."""
    service.collector.spans.clear()
    return service


def streamed(server: Server, path: str, *texts: str, **members: object) -> Connection:
    """Connection on which a sampled stream of answers to these texts is asked for; a chat has one text."""
    asked = {"messages": [{"role": "user", "content": texts[0]}]} if path == CHAT else {"prompt": texts}
    connection = server.connect()
    connection.send(request(json.dumps({"stream": True, **asked, **members}).encode(), path, PARENT))
    return connection


def own(spans: list[Received]) -> tuple[list[Received], list[Received], list[Received]]:
    """Spans of the client's trace: SERVER, `send` and `process`."""
    mine = [one for one in spans if one.trace == TRACE]
    return tuple([one for one in mine if one.name.startswith(name)] for name in ("POST", "send", "process"))  # type: ignore[return-value]


@pytest.mark.parametrize(("path", "operation"), [(CHAT, "chat"), (COMPLETIONS, "text_completion")])
def test_the_span_of_a_stream_ends_when_its_last_choice_has_gone(streams: Streams, path: str, operation: str) -> None:
    gate = Gate(streams.server.folder)
    texts = [gate.text()] if path == CHAT else ["at once", gate.text()]
    connection = streamed(streams.server, path, *texts)
    gate.reached()
    earlier = streams.collector.until(lambda spans: len(own(spans)[2]) == len(texts) - 1)
    assert own(earlier)[0] == [], "nothing has gone to the client"
    gate.open()
    answer = connection.answer()
    assert (answer.status, answer.body.count(b"data: ")) == (200, len(texts) + 1)
    [server], sent, processed = own(
        streams.collector.until(lambda spans: len(own(spans)[0]) == 1 and len(own(spans)[2]) == len(texts))
    )
    assert (server.name, server.parent, server.error) == (f"POST {path}", SPAN, None)
    assert (server.attributes["http.response.status_code"], "error.type" in server.attributes) == (200, False)
    assert server.attributes["gen_ai.operation.name"] == operation
    assert server.attributes["headway.request_id"] == answer.header["x-request-id"]
    assert [one.parent for one in sent] == [server.span] * len(texts)
    assert {one.parent for one in processed} == {one.span for one in sent}
    assert server.begun <= min(one.begun for one in sent)
    assert server.ended >= max(one.ended for one in processed)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_is_refused_before_it_is_submitted_has_a_span_alone(streams: Streams, path: str) -> None:
    wrong: dict[str, tuple[int, str]] = {"n": (400, "BAD_REQUEST"), "model": (404, "NOT_FOUND")}
    for count, (member, (status, error)) in enumerate(wrong.items(), 1):
        answer = streamed(streams.server, path, "a", **{member: 0 if member == "n" else "nobody's"}).answer()
        assert (answer.status, answer.header["content-type"]) == (status, "application/json")
        servers, sent, processed = own(streams.collector.until(lambda spans, count=count: len(own(spans)[0]) == count))  # type: ignore[misc]
        assert (servers[-1].name, servers[-1].parent, servers[-1].error) == (f"POST {path}", SPAN, None)
        assert servers[-1].attributes["http.response.status_code"] == status
        assert servers[-1].attributes["error.type"] == error
        assert (sent, processed) == ([], [])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_span_of_a_stream_whose_client_leaves_midway_ends_then(streams: Streams, path: str) -> None:
    gate = Gate(streams.server.folder)
    texts = [gate.text()] if path == CHAT else ["at once", gate.text()]
    connection = streamed(streams.server, path, *texts)
    gate.reached()
    connection.close()
    [server], _, processed = own(streams.collector.until(lambda spans: len(own(spans)[0]) == 1))
    assert len(processed) < len(texts), "its last batch still runs"
    assert (server.name, server.parent, server.error) == (f"POST {path}", SPAN, None)
    assert server.attributes["http.response.status_code"] == 499
    gate.open()
    servers, sent, processed = own(streams.collector.until(lambda spans: len(own(spans)[2]) == len(texts)))
    assert (servers, len(sent)) == ([server], len(texts))
    assert processed[-1].ended >= server.ended
