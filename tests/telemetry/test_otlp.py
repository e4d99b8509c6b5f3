"""Spans as bytes of OpenTelemetry's protocol, read by the protocol's own classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from headway.model import TraceContext
from headway.runtime.spans import Attributes, Span, SpanForm, SpanKind, SpanLink
from headway.telemetry.tracing.otlp import MOST_TEXT, encode_span, export_request, origin_of, read_partial_success
from tests.servers.collector import Link, read_spans

ORIGIN = origin_of((("service.name", "s" * 300), ("process.pid", 7)), "headway", "1")
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


@given(st.lists(spans, max_size=3))
def test_what_is_written_is_what_the_protocols_classes_read(given: list[Span]) -> None:
    found = read_spans(export_request(ORIGIN, [encode_span(span, 100) for span in given]))
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
        assert one.flags == context.flags | (0x300 if span.remote else 0x100)
        assert one.process == {"service.name": "s" * 300, "process.pid": 7}


def span_with(name: str = "n", of_form: Attributes = (), **changes: object) -> Span:
    plain = {"form": SpanForm(name, SpanKind.CLIENT, of_form), "context": TraceContext(bytes(16), bytes(8)), "parent": b"", "begun": 1, "ended": 2}  # fmt: skip
    return Span(**{**plain, **changes})  # type: ignore[arg-type]


def test_links_beyond_the_most_are_left_out_and_counted() -> None:
    links = [SpanLink(TraceContext(bytes([n]) * 16, bytes(8)), f"m{n}") for n in range(200)]
    [found] = read_spans(export_request(ORIGIN, [encode_span(span_with(links=links), 64)]))
    assert (len(found.links), found.dropped_links) == (64, 136)


def test_long_texts_are_cut_and_what_is_no_unicode_is_replaced() -> None:
    span = span_with(name="\ud800", attributes=(("a", "x" * 10_000), ("b", "\udfff")), error="e" * 10_000)
    [found] = read_spans(export_request(ORIGIN, [encode_span(span, 64)]))
    assert (found.name, found.attributes) == ("?", {"a": "x" * MOST_TEXT, "b": "?"})
    assert found.error == "e" * MOST_TEXT


@given(st.integers(0, 2**63 - 1), words)
def test_what_a_collector_rejects_is_read(rejected: int, message: str) -> None:
    told = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    answer = ExportTraceServiceResponse(partial_success=told).SerializeToString()
    assert read_partial_success(answer) == (rejected, message)


def test_an_empty_answer_rejects_nothing() -> None:
    assert read_partial_success(b"") == (0, "")


@given(st.binary(max_size=60))
def test_no_answer_does_more_than_raise_a_value_error(body: bytes) -> None:
    try:
        rejected, message = read_partial_success(body)
    except ValueError:
        return
    assert rejected >= 0 and len(message) <= len(body)


@pytest.mark.parametrize("body", [b"<html>", b"\x0a\x05\x08", b"\x0a\xff", b"\xff" * 12])
def test_what_is_no_answer_raises_one(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_partial_success(body)
