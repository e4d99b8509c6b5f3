"""Sending spans to a collector in the SDK's format. The collector may work, be dead or slow, or lie."""

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from structlog.testing import capture_logs

from headway.app.tracing import Tracing, make_tracing
from headway.config import Settings
from headway.errors import SettingError
from headway.model import Role, TraceContext
from headway.runtime.counters import Counters
from headway.runtime.spans import Attributes, Span, SpanForm, SpanKind, SpanLink
from headway.telemetry import trace_exporter
from headway.telemetry.trace_exporter import MOST_TEXT, Complaints, ReadableSpans
from tests.servers.collector import Collector, Link, Received, grpc_collector, http_collector, read_spans

PROTOBUF = "application/x-protobuf"


def span(name: str = "one") -> Span:
    return Span(SpanForm(name, SpanKind.SERVER), TraceContext(bytes(15) + b"\1", bytes(7) + b"\1"), b"", 1, 2)


@contextmanager
def made(counters: Counters, url: str, protocol: str = "http/protobuf", **variables: str) -> Iterator[Tracing]:
    """Create the parts that record and send spans, as the environment says."""
    own = {"EXPORTER_OTLP_ENDPOINT": url, "EXPORTER_OTLP_PROTOCOL": protocol, "BSP_SCHEDULE_DELAY": "10"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, **variables}.items():
            patch.setenv(f"OTEL_{name}", value)
        found = make_tracing(Settings(trace=True, name="here"), Role.WORKER, counters.spans_dropped, time.monotonic)
        assert found is not None
        yield found


def sent(making: AbstractContextManager[Tracing], then: Callable[[], object], count: int = 1) -> None:
    """Send `count` spans, call `then`, and close."""

    async def main(tracing: Tracing) -> None:
        await tracing.exporter.open()
        for number in range(count):
            tracing.recorder.add(span(f"span {number}"))
        await asyncio.to_thread(then)
        await tracing.exporter.close()

    with making as tracing:
        asyncio.run(main(tracing))


@pytest.mark.parametrize(
    ("protocol", "serve", "compression"),
    [
        ("http/protobuf", http_collector, "none"),
        ("http/protobuf", http_collector, "gzip"),
        ("grpc", grpc_collector, "gzip"),
    ],
)
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


def test_spans_are_sent_in_whole_messages_and_the_last_when_the_process_ends() -> None:
    with http_collector() as collector:
        sent(made(Counters(), collector.url, BSP_SCHEDULE_DELAY="60000"), lambda: None, 3)
        assert len(collector.spans) == 3
    with http_collector() as collector:
        tracing = made(Counters(), collector.url, BSP_SCHEDULE_DELAY="60000", BSP_MAX_EXPORT_BATCH_SIZE="100")
        sent(tracing, lambda: collector.until(lambda spans: len(spans) == 200), 250)
        assert (len(collector.messages), len(collector.spans)) == (3, 250)  # The last one is sent as the process ends.


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
    assert line["event"] == "the trace collector accepts no spans"
    assert "max retries" in str(line["error"])


@contextmanager
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_silent_collector_does_not_hold_up_the_end(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "CLOSE_WITHIN", 0.2)
    counters = Counters()
    with silent() as url:
        tracing = made(counters, url, protocol, BSP_MAX_EXPORT_BATCH_SIZE="2")
        sent(tracing, lambda: None, 50)  # This returns, because the join has a timeout.
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
    assert counters.spans_dropped["export"] == 3, "with the one that is being sent"


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
    assert line["event"] == "traces cannot be sent" and "nobody" in line["error"]
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


PROCESS: dict[str, str | int] = {"service.name": "s" * 300, "process.pid": 7}
words = st.text(max_size=40)
contexts = st.builds(
    TraceContext,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 3),
    st.sampled_from(["", "a=1"]),
)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words
attributes = st.dictionaries(words.filter(bool), numbers, max_size=4).map(lambda found: tuple(found.items()))
forms = st.builds(SpanForm, words, st.sampled_from(SpanKind), attributes)
spans = st.builds(
    Span,
    forms,
    contexts,
    st.sampled_from([b"", b"parent-8"]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    attributes,
    st.lists(st.builds(SpanLink, contexts, words), max_size=4),
    st.none() | words,
    st.booleans(),
)


def received(given: Sequence[Span], most_links: int = 100) -> list[Received]:
    return read_spans(encode_spans(ReadableSpans(given, Resource(PROCESS), most_links)).SerializeToString())


@given(st.lists(spans, max_size=3))
def test_what_is_written_is_what_the_protocols_classes_read(given: list[Span]) -> None:
    found = received(given)
    assert len(found) == len(given)
    for span, one in zip(given, found, strict=True):
        context = span.context
        assert (one.trace, one.span, one.state) == (context.trace_id.hex(), context.span_id.hex(), context.state)
        assert (one.name, one.kind, one.parent) == (span.form.name, span.form.kind, span.parent.hex())
        assert (one.begun, one.ended, one.attributes) == (
            span.begun,
            span.ended,
            dict(span.form.attributes) | dict(span.attributes),
        )
        assert one.links == [
            Link(li.context.trace_id.hex(), li.context.span_id.hex(), {"messaging.message.id": li.message} if li.message else {})
            for li in span.links
        ]  # fmt: skip
        assert one.error == span.error
        assert one.flags == (0x300 if span.remote and span.parent else 0x100)
        assert one.process == PROCESS


def span_with(name: str = "n", of_form: Attributes = (), **changes: object) -> Span:
    plain = {"form": SpanForm(name, SpanKind.CLIENT, of_form), "context": TraceContext(bytes(16), bytes(8)), "parent": b"", "begun": 1, "ended": 2}  # fmt: skip
    return Span(**{**plain, **changes})  # type: ignore[arg-type]


def test_links_beyond_the_most_are_left_out_and_counted() -> None:
    links = [SpanLink(TraceContext(bytes([n]) * 16, bytes(8)), f"m{n}") for n in range(200)]
    [found] = received([span_with(links=links)], 64)
    assert (len(found.links), found.dropped_links) == (64, 136)


def test_long_texts_are_cut_and_what_is_no_unicode_is_replaced() -> None:
    span = span_with(name="\ud800", attributes=(("a", "x" * 10_000), ("b", "\udfff")), error="e" * 10_000)
    [found] = received([span])
    assert (found.name, found.attributes) == ("?", {"a": "x" * MOST_TEXT, "b": "?"})
    assert found.error == "e" * MOST_TEXT
