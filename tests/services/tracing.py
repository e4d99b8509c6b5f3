import random

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from headway.core.trace_context import Sampler
from headway.model import TraceContext
from headway.runtime.counters import Counters
from headway.runtime.spans import SpanBuffer, SpanRecorder
from headway.telemetry.trace_exporter import ReadableSpans
from tests.servers.collector import Received, read_spans
from tests.virtual_time import Clock

CLIENT_SPAN = TraceContext(bytes(range(1, 17)), bytes(range(1, 9)), 1, "vendor=1")
EPOCH = 1_700_000_000
"""Unix time in seconds of the virtual clock's 0."""


class Recorded:
    """A recorder that samples `ratio` of the requests without a parent. `spans` reads its spans as a collector would."""

    def __init__(self, clock: Clock, ratio: float = 1.0) -> None:
        self._buffer = SpanBuffer(100_000, 100_000, Counters().spans_dropped, lambda: None)
        bits = random.Random(1).getrandbits
        self.recorder = SpanRecorder(
            Sampler(ratio, True, bits), self._buffer, clock, lambda: round((EPOCH + clock()) * 1e9)
        )

    def spans(self) -> list[Received]:
        found = ReadableSpans(self._buffer.take(100_000), Resource({}), 1000)
        return read_spans(encode_spans(found).SerializeToString())
