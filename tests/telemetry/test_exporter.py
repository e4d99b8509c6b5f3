"""Spans on their way to a collector: a good one, and dead, slow and lying ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from structlog.testing import capture_logs

from headway.app.tracing import Tracing, make_tracing
from headway.config import Settings
from headway.errors import SettingError
from headway.model import Role, TraceContext
from headway.runtime.counters import Counters
from headway.runtime.spans import Span, SpanForm, SpanKind
from headway.telemetry.tracing import exporter
from headway.telemetry.tracing.exporter import Complaints
from tests.servers.collector import Collector, grpc_collector, http_collector

PROTOBUF = "application/x-protobuf"


def span(name: str = "one") -> Span:
    return Span(SpanForm(name, SpanKind.SERVER), TraceContext(bytes(15) + b"\1", bytes(7) + b"\1"), b"", 1, 2)


@contextmanager
def made(counters: Counters, url: str, protocol: str = "http/protobuf", **variables: str) -> Iterator[Tracing]:
    """Parts that record and send, in an environment that says so."""
    own = {"EXPORTER_OTLP_ENDPOINT": url, "EXPORTER_OTLP_PROTOCOL": protocol, "BSP_SCHEDULE_DELAY": "10"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, **variables}.items():
            patch.setenv(f"OTEL_{name}", value)
        found = make_tracing(Settings(trace=True, name="here"), Role.WORKER, counters.spans_dropped, time.monotonic)
        assert found is not None
        yield found


def sent(making: AbstractContextManager[Tracing], then: Callable[[], object], count: int = 1) -> None:
    """Send so many spans, and close after `then`."""

    async def main(tracing: Tracing) -> None:
        await tracing.exporter.open()
        for number in range(count):
            tracing.recorder.add(span(f"span {number}"))
        await asyncio.to_thread(then)
        await tracing.exporter.close()

    with making as tracing:
        asyncio.run(main(tracing))


@pytest.mark.parametrize(("protocol", "serve"), [("http/protobuf", http_collector), ("grpc", grpc_collector)])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_arrive_with_what_the_environment_says(
    protocol: str, serve: Callable[[], AbstractContextManager[Collector]], compression: str
) -> None:
    counters = Counters()
    with serve() as collector:
        how = {"EXPORTER_OTLP_HEADERS": "x-key=s%20e", "EXPORTER_OTLP_COMPRESSION": compression, "SERVICE_NAME": "mine"}
        how |= {"RESOURCE_ATTRIBUTES": "deployment.environment=prod", "BSP_MAX_EXPORT_BATCH_SIZE": "100"}
        sent(
            made(counters, collector.url, protocol, **how),
            lambda: collector.until(lambda spans: len(spans) == 250),
            250,
        )
        assert [one.name for one in collector.spans] == [f"span {number}" for number in range(250)]
        assert len(collector.messages) >= 3
        assert all(fields["x-key"] == "s e" for fields in collector.messages)
        process = collector.spans[0].process
        assert (process["service.name"], process["service.instance.id"]) == ("mine", "here")
        assert (process["headway.role"], process["deployment.environment"]) == ("worker", "prod")
        assert process["telemetry.sdk.name"] == "headway"
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
    with made(counters, "http://127.0.0.1:9", BSP_MAX_QUEUE_SIZE="10") as tracing:
        buffer = tracing.exporter.buffer
        for _ in range(25):
            buffer.add(span())
    assert (len(buffer), counters.spans_dropped["queue"]) == (10, 15)


def test_a_dead_collector_is_told_of_once_and_what_is_lost_is_counted() -> None:
    counters = Counters()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with capture_logs() as lines:
        tracing = made(counters, f"http://127.0.0.1:{port}", EXPORTER_OTLP_TIMEOUT="20", BSP_MAX_EXPORT_BATCH_SIZE="1")

        def dropped() -> None:
            while counters.spans_dropped["export"] < 3:
                threading.Event().wait(0.01)

        sent(tracing, dropped, 3)
    [line] = (line for line in lines if line["log_level"] == "warning")
    assert line["event"] == "the trace collector takes no spans"
    assert "max retries" in str(line["error"])


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
    assert counters.spans_dropped["export"] == 50, "with those of the message that was on its way"


def test_a_process_that_ends_waits_for_no_other_try() -> None:
    counters = Counters()
    with http_collector() as collector:
        collector.answer = lambda: (503, "text/plain", b"busy")
        collector.rest = "60"
        making = made(counters, collector.url, EXPORTER_OTLP_TIMEOUT="100000", BSP_MAX_EXPORT_BATCH_SIZE="1")

        def refused() -> None:
            while not collector.messages:
                threading.Event().wait(0.01)

        sent(making, refused, 3)
        assert len(collector.messages) == 1
    assert counters.spans_dropped["export"] == 3, (
        "with the one that is being sent, whether it knows of the answer yet or not"
    )


def test_it_is_tried_again_when_the_collector_asks_for_that() -> None:
    counters = Counters()
    with http_collector() as collector, capture_logs() as lines:
        answers = iter([(503, "text/plain", b"busy")])
        collector.answer = lambda: next(answers, (200, PROTOBUF, b""))
        collector.rest = "0"
        sent(made(counters, collector.url), lambda: collector.until(lambda spans: len(spans) == 1))
        assert len(collector.messages) == 2
    assert set(counters.spans_dropped.values()) == {0}
    assert [line["event"] for line in lines] == ["traces are recorded"]


def test_what_the_sdk_cannot_do_is_told_of_and_the_process_goes_on() -> None:
    counters = Counters()
    with capture_logs() as lines:
        how = {"PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER": "nobody", "BSP_SCHEDULE_DELAY": "60000"}
        sent(made(counters, "http://127.0.0.1:9", **how), lambda: None, 3)
    [line] = (line for line in lines if line["log_level"] == "error")
    assert line["event"] == "no traces are sent" and "nobody" in line["error"]
    assert counters.spans_dropped["export"] == 3


def test_headers_that_cannot_be_read_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with http_collector() as collector:
        how = {"EXPORTER_OTLP_HEADERS": "s3cret,x-key=a"}
        sent(made(Counters(), collector.url, **how), lambda: collector.until(lambda spans: len(spans) == 1))
        assert collector.messages[0]["x-key"] == "a"
    assert "not shown" in caplog.text and "s3cret" not in caplog.text


def test_what_others_send_by_the_sdk_is_logged_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(threading.Thread())
    complaints.listen()
    try:
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("theirs")
    finally:
        complaints.stop()
    assert ("theirs" in caplog.text, complaints.said) == (True, [])


def test_without_its_packages_the_process_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingError, match=r"pip install .*opentelemetry-sdk"), made(Counters(), "http://127.0.0.1:9"):
        pass
