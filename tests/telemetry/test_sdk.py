"""Spans as OpenTelemetry's SDK has them, read by the protocol's own classes from what the SDK writes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from headway.model import TraceContext
from headway.runtime.spans import Attributes, Span, SpanForm, SpanKind, SpanLink
from headway.telemetry.tracing.exporter import MOST_TEXT, ReadableSpans
from tests.servers.collector import Link, Received, read_spans

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
    """Spans as a collector reads them."""
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
