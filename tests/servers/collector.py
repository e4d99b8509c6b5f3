"""A trace collector: an OpenTelemetry receiver over HTTP or gRPC that uses the protocol's own classes."""

import gzip
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for spans."""
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

SERVER, CLIENT, PRODUCER, CONSUMER, INTERNAL = 2, 3, 4, 5, 1


@dataclass(frozen=True)
class Link:
    trace: str
    span: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Received:
    """A received span. Its ids are hexadecimal."""

    name: str
    kind: int
    trace: str
    span: str
    parent: str
    state: str
    begun: int
    ended: int
    attributes: Mapping[str, Any]
    links: Sequence[Link]
    error: str | None
    process: Mapping[str, Any]
    dropped_links: int = 0
    flags: int = 0


class Collector:
    """Received spans and messages. `answer` is the HTTP answer to each message: status, type, body."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Received] = []
        self.messages: list[Mapping[str, str]] = []
        """Header fields, or metadata, of each message."""
        self.answer: Callable[[], tuple[int, str, bytes]] = lambda: (200, "application/x-protobuf", b"")
        self.rest = ""
        """Seconds after which clients should retry (`Retry-After`), over HTTP."""
        self.keeps = True
        """Whether it keeps connections open, over HTTP."""
        self._came = threading.Condition()

    def take(self, body: bytes, fields: Mapping[str, str]) -> None:
        with self._came:
            self.messages.append(fields)
            self.spans += read_spans(body)
            self._came.notify_all()

    def until(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        with self._came:
            assert self._came.wait_for(lambda: enough(self.spans), PATIENCE), [one.name for one in self.spans]
            return [*self.spans]

    def named(self, name: str, count: int = 1) -> list[Received]:
        found = self.until(lambda spans: sum(one.name == name for one in spans) >= count)
        return [one for one in found if one.name == name]


def read_spans(body: bytes) -> list[Received]:
    found = []
    for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
        process = _attributes(of_process.resource.attributes)
        for scoped in of_process.scope_spans:
            assert scoped.scope.name == "headway"
            for one in scoped.spans:
                found.append(
                    Received(
                        one.name, one.kind, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(), one.trace_state,
                        one.start_time_unix_nano, one.end_time_unix_nano, _attributes(one.attributes),
                        [Link(li.trace_id.hex(), li.span_id.hex(), _attributes(li.attributes)) for li in one.links],
                        one.status.message if one.status.code == 2 else None, process, one.dropped_links_count, one.flags,
                    )
                )  # fmt: skip
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            fields = {name.lower(): value for name, value in self.headers.items()} | {"path": self.path}
            status, kind, answer = collector.answer()
            if status == 200:
                assert fields["content-type"] == "application/x-protobuf"
                collector.take(gzip.decompress(body) if fields.get("content-encoding") == "gzip" else body, fields)
            else:
                collector.messages.append(fields)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(answer)))
            if collector.rest:
                self.send_header("retry-after", collector.rest)
            if not collector.keeps:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    def export(body: bytes, context: Any) -> bytes:
        collector.take(body, dict(context.invocation_metadata()))
        return collector.answer()[2]

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(export) if details.method == _METHOD else None

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    collector.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
