"""Spans on their way to a collector: a good one, and dead, slow and lying ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from structlog.testing import capture_logs

from headway.app.tracing import Tracing, make_tracing
from headway.config import Settings
from headway.model import Role, TraceContext
from headway.runtime.counters import Counters
from headway.runtime.spans import Span, SpanForm, SpanKind
from headway.telemetry.tracing import exporter
from tests.servers.collector import Collector, grpc_collector, http_collector

PROTOBUF = "application/x-protobuf"


def span(name: str = "one") -> Span:
    return Span(SpanForm(name, SpanKind.SERVER), TraceContext(bytes(15) + b"\1", bytes(7) + b"\1"), b"", 1, 2)


def made(counters: Counters, url: str, protocol: str = "http/protobuf", **variables: str) -> Tracing:
    own = {"EXPORTER_OTLP_ENDPOINT": url, "EXPORTER_OTLP_PROTOCOL": protocol, "BSP_SCHEDULE_DELAY": "10"}
    found = make_tracing(
        Settings(trace=True, name="here"), Role.WORKER, counters, time.monotonic,
        {f"OTEL_{name}": value for name, value in {**own, **variables}.items()},
    )  # fmt: skip
    assert found is not None
    return found


def sent(tracing: Tracing, then: Callable[[], object], count: int = 1) -> None:
    """Send so many spans, and close after `then`."""

    async def main() -> None:
        await tracing.exporter.open()
        for number in range(count):
            tracing.recorder.add(span(f"span {number}"))
        await asyncio.to_thread(then)
        await tracing.exporter.close()

    asyncio.run(main())


@pytest.mark.parametrize(("protocol", "serve"), [("http/protobuf", http_collector), ("grpc", grpc_collector)])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_arrive_with_what_the_environment_says(
    protocol: str, serve: Callable[[], AbstractContextManager[Collector]], compression: str
) -> None:
    counters = Counters()
    with serve() as collector:
        how = {"EXPORTER_OTLP_HEADERS": "x-key=s%20e", "EXPORTER_OTLP_COMPRESSION": compression, "SERVICE_NAME": "mine"}
        tracing = made(counters, collector.url, protocol, **how, BSP_MAX_EXPORT_BATCH_SIZE="100")
        sent(tracing, lambda: collector.until(lambda spans: len(spans) == 250), 250)
        assert [one.name for one in collector.spans] == [f"span {number}" for number in range(250)]
        assert len(collector.messages) >= 3
        assert all(fields["x-key"] == "s e" for fields in collector.messages)
        process = collector.spans[0].process
        assert (process["service.name"], process["service.instance.id"]) == ("mine", "here")
        assert process["headway.role"] == "worker"
    assert set(counters.spans_dropped.values()) == {0}


def test_the_last_spans_are_sent_when_the_process_ends() -> None:
    with http_collector() as collector:
        sent(made(Counters(), collector.url, BSP_SCHEDULE_DELAY="60000"), lambda: None, 3)
        assert len(collector.spans) == 3


def test_only_whole_messages_are_sent_before_the_delay_is_over() -> None:
    with http_collector() as collector:
        tracing = made(Counters(), collector.url, BSP_SCHEDULE_DELAY="60000", BSP_MAX_EXPORT_BATCH_SIZE="100")
        sent(tracing, lambda: collector.until(lambda spans: len(spans) == 200), 250)
        assert (len(collector.messages), len(collector.spans)) == (3, 250)  # The last one as the process ends.


def test_spans_beyond_those_that_may_wait_are_dropped_and_counted() -> None:
    counters = Counters()
    buffer = made(counters, "http://127.0.0.1:9", BSP_MAX_QUEUE_SIZE="10").exporter.buffer
    for _ in range(25):
        buffer.add(span())
    assert (len(buffer), counters.spans_dropped["queue"]) == (10, 15)


def test_a_dead_collector_is_told_of_once_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "FIRST_PAUSE", 0.001)
    counters = Counters()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with capture_logs() as lines:
        tracing = made(counters, f"http://127.0.0.1:{port}", EXPORTER_OTLP_TIMEOUT="20", BSP_MAX_EXPORT_BATCH_SIZE="1")

        def dropped() -> None:
            while counters.spans_dropped["export"] < 3:
                threading.Event().wait(0.01)

        sent(tracing, dropped, 3)
    told = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in told] == ["the trace collector takes no spans"]


@contextmanager
def silent() -> Iterator[str]:
    """A collector that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_silent_collector_does_not_hold_up_the_end(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CLOSE_WITHIN", 0.2)
    counters = Counters()
    with silent() as url:
        tracing = made(counters, url, protocol, BSP_MAX_EXPORT_BATCH_SIZE="2")
        sent(tracing, lambda: None, 50)  # It returns: joined with a bound.
    assert counters.spans_dropped["export"] >= 40


def test_it_is_tried_again_when_the_collector_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "FIRST_PAUSE", 0.001)
    counters = Counters()
    with http_collector() as collector:
        answers = iter([(503, "text/plain", b"busy"), (429, "text/plain", b"")])
        collector.answer = lambda: next(answers, (200, PROTOBUF, b""))
        sent(made(counters, collector.url), lambda: collector.until(lambda spans: len(spans) == 1))
        assert len(collector.messages) == 3
    assert set(counters.spans_dropped.values()) == {0}


@pytest.mark.parametrize(
    ("status", "kind", "body", "reason"),
    [
        (400, "text/plain", b"no", "export"), (404, "text/html", b"<html>", "export"), (200, "text/html", b"<html>", "export"),
        (302, "text/plain", b"", "export"), (200, PROTOBUF, b"x" * 100_000, "export"),
    ],
)  # fmt: skip
def test_a_collector_that_is_none_gets_each_message_once(status: int, kind: str, body: bytes, reason: str) -> None:
    counters = Counters()
    with http_collector() as collector:
        collector.answer = lambda: (status, kind, body)

        def dropped() -> None:
            while not counters.spans_dropped[reason]:
                threading.Event().wait(0.01)

        with capture_logs() as lines:
            sent(made(counters, collector.url), dropped)
        assert len(collector.messages) == 1
    assert "the trace collector takes no spans" in [line["event"] for line in lines]


@pytest.mark.parametrize(("protocol", "serve"), [("http/protobuf", http_collector), ("grpc", grpc_collector)])
def test_spans_that_a_collector_rejects_are_counted(
    protocol: str, serve: Callable[[], AbstractContextManager[Collector]]
) -> None:
    counters = Counters()
    told = ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    answer = ExportTraceServiceResponse(partial_success=told).SerializeToString()
    with serve() as collector, capture_logs() as lines:
        collector.answer = lambda: (200, PROTOBUF, answer)
        sent(made(counters, collector.url, protocol), lambda: collector.until(lambda spans: len(spans) == 5), 5)
    assert counters.spans_dropped["rejected"] >= 2
    [line] = (line for line in lines if line["event"] == "the trace collector complains")
    assert (line["rejected"], line["message"]) == (2, "too old")


def test_nonsense_in_an_answer_is_told_of_and_costs_nothing() -> None:
    counters = Counters()
    with http_collector() as collector, capture_logs() as lines:
        collector.answer = lambda: (200, PROTOBUF, b"\xff\xff\xff")
        sent(made(counters, collector.url), lambda: collector.until(lambda spans: len(spans) == 1))
    assert set(counters.spans_dropped.values()) == {0}
    assert "the trace collector complains" in [line["event"] for line in lines]
