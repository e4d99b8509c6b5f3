"""Traces over HTTP and gRPC: `traceparent`, `tracestate`, and spans for requests that are refused early."""

import json

import pytest

from headway import protos
from headway.core.trace_context import traceparent
from headway.errors import BadRequest
from headway.gateway.request_traces import BURST, RATE, RefusalTraces
from headway.model import TraceContext
from headway.runtime.counters import Counters
from tests.grpc.stand import INFER, PREDICT, Port, on_port, predict
from tests.http.stand import Stand, chunked, get, on_stand, post
from tests.services.tracing import CLIENT_SPAN, Recorded

CONTEXT = TraceContext(CLIENT_SPAN.trace_id, CLIENT_SPAN.span_id, 1)
PARENT = f"traceparent: {traceparent(CONTEXT)}"
STATE = "tracestate: vendor=1"
UNSAMPLED = f"traceparent: {traceparent(TraceContext(CLIENT_SPAN.trace_id, CLIENT_SPAN.span_id, 0))}"
GOOD = '{"input": "a"}'
KEYS = {"hw_a": {"rate": 0.001, "burst": 1}, "hw_b": {}}
STREAM = f"/{protos.OPEN_INFERENCE}/ModelStreamInfer"
WAY = "POST /v1/inference"


def asked(body: str = GOOD, *fields: str, key: str = "hw_b") -> bytes:
    return post(body, "/v1/inference", PARENT, f"Authorization: Bearer {key}", *fields)


@pytest.mark.parametrize(
    ("request_", "status", "error", "before"),
    [
        (asked("no JSON", STATE), 400, "BAD_REQUEST", []),
        (asked("no JSON"), 400, "BAD_REQUEST", [asked()] * 2),
        (asked(GOOD, "X-Request-Timeout-Ms: soon"), 400, "BAD_REQUEST", []),
        (asked("a" * 2000), 413, "PAYLOAD_TOO_LARGE", []),
        (chunked(b"a" * 4096, fields=[PARENT, "Authorization: Bearer hw_b"]), 413, "PAYLOAD_TOO_LARGE", []),
        (asked('{"model": "no", "input": "a"}'), 404, "NOT_FOUND", []),
        (asked(key="hw_x"), 401, "UNAUTHENTICATED", []),
        (asked(key="hw_a"), 429, "RATE_LIMITED", [asked(key="hw_a")]),
        (asked("no JSON", key="hw_a"), 429, "RATE_LIMITED", [asked(key="hw_a")]),
    ],
    ids=["body", "known", "field", "large", "chunks", "model", "key", "rate", "rate of wrong ones"],
)
@on_stand(KEYS, trace=True, whole=True, max_body_bytes=1024)
async def test_a_refused_request_leaves_one_span(
    stand: Stand, request_: bytes, status: int, error: str, before: list[bytes]
) -> None:
    client = await stand.connect()
    for earlier in before:
        assert (await client.ask(earlier)).status == 200
    stand.recorded.spans()
    assert (await client.ask(request_)).status == status
    [span] = stand.recorded.spans()
    assert (span.name, span.trace, span.parent) == (WAY, CLIENT_SPAN.trace_id.hex(), CLIENT_SPAN.span_id.hex())
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (status, error)
    assert span.attributes["headway.request_id"].startswith("req_")
    assert span.error is None
    assert span.begun <= span.ended


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere/at/all", 404), ("PUT", "/livez", 405)])
@on_stand(trace=True, whole=True)
async def test_an_error_of_a_route_leaves_a_span_with_its_path(
    stand: Stand, method: str, path: str, status: int
) -> None:
    for fields in ((PARENT,), (UNSAMPLED,), ("traceparent: 00-nonsense",), (UNSAMPLED, PARENT), ()):
        assert (await stand.ask(get(path, *fields, method=method))).status == status
    [span] = stand.recorded.spans()
    assert (span.name, span.attributes["url.path"], span.parent) == (method, path, CLIENT_SPAN.span_id.hex())
    assert span.attributes["http.response.status_code"] == status


def test_a_flood_leaves_no_more_than_its_share_and_the_rest_is_counted() -> None:
    now, counters = 100.0, Counters()
    recorded = Recorded(lambda: now)
    traces = RefusalTraces(recorded.recorder, counters.spans_dropped)
    fields = {b"traceparent": traceparent(CLIENT_SPAN).encode(), b"tracestate": b"a=1"}

    def flood(count: int) -> int:
        for _ in range(count):
            traces.refused(WAY, fields, "req_x", BadRequest("no"), now)
        return len(recorded.spans())

    assert (flood(1000), counters.spans_dropped["refused"]) == (BURST, 1000 - BURST)
    now += 2.0
    assert flood(1000) == round(2 * RATE)
    now += 3600.0
    assert flood(1000) == BURST


def test_a_long_path_is_cut() -> None:
    recorded = Recorded(lambda: 0.0)
    traces = RefusalTraces(recorded.recorder, Counters().spans_dropped)
    fields = {b"traceparent": traceparent(CLIENT_SPAN).encode()}
    traces.answered("BREW", "/x" * 10_000, fields, "req_x", 405, 0.0)
    [span] = recorded.spans()
    assert (span.name, span.attributes["http.request.method"]) == ("_OTHER", "_OTHER")
    assert len(span.attributes["url.path"]) == 256


ASKED = protos.message("inference.ModelInferRequest")(
    model_name="default",
    inputs=[{"name": "input", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"a"]}}],
)
OWN = "traceparent", traceparent(CLIENT_SPAN)
LONG = "tracestate", ",".join(f"k{n}=" + "v" * 250 for n in range(40))


@pytest.mark.parametrize(
    ("method", "body", "more", "error"),
    [
        (PREDICT, b"\xff\xff", (), "BAD_REQUEST"), (INFER, b"\xff\xff", (LONG,), "BAD_REQUEST"),
        (PREDICT, predict("a"), (("x-request-timeout-ms", "soon"),), "BAD_REQUEST"),
        (PREDICT, predict("a"), (("x-request-id", "a"), ("x-request-id", "b")), "BAD_REQUEST"),
        (PREDICT, predict("a"), (("authorization", "Bearer hw_x"),), "UNAUTHENTICATED"),
    ],
)  # fmt: skip
@on_port(keys={"hw_b": {}}, trace=True, whole=True)
async def test_a_refused_call_of_grpc_leaves_a_span(
    port: Port, method: str, body: bytes, more: tuple[tuple[str, str], ...], error: str
) -> None:
    key = () if any(name == "authorization" for name, _ in more) else (("authorization", "Bearer hw_b"),)
    client = port.client()
    await client.fail(method, body, (*key, OWN, *more))
    [span] = port.stand.recorded.spans()
    assert (span.name, span.parent) == (method[1:], CLIENT_SPAN.span_id.hex())
    assert (span.attributes["rpc.system"], span.attributes["error.type"]) == ("grpc", error)
    await client.fail(method, body, (*key, ("traceparent", traceparent(CLIENT_SPAN)[:-1] + "0"), *more))
    assert port.stand.recorded.spans() == []


@on_port(trace=True, whole=True)
async def test_nonsense_in_the_metadata_of_a_call_does_not_make_it_fail(port: Port) -> None:
    nonsense = [
        (("traceparent", "x" * 6_000),), (("traceparent", ""),), (OWN, LONG), (OWN, ("tracestate", "=,=,")),
        (("traceparent-bin", b"\x00\xff" * 20), ("tracestate-bin", b"\xff")), (("tracestate", "a=1"),),
        (("traceparent", traceparent(CLIENT_SPAN).replace("00-", "ff-", 1)),),
    ]  # fmt: skip
    client, sense = port.client(), (OWN, ("tracestate", "a=1"), ("tracestate", "b=2"))
    for metadata in (*nonsense, sense):
        await client.ask(PREDICT, predict("a"), metadata)  # type: ignore[arg-type]
        [span] = [span for span in port.stand.recorded.spans() if span.name == PREDICT[1:]]
        assert span.parent == (CLIENT_SPAN.span_id.hex() if metadata[0] == OWN else ""), metadata
        assert span.state == ("a=1,b=2" if metadata is sense else "")


@on_port(trace=True, whole=True)
async def test_each_request_of_a_stream_has_a_trace_below_the_clients_span(port: Port) -> None:
    stream = port.client().stream(STREAM, (OWN, ("tracestate", "vendor=1")))
    for request in (ASKED, protos.message("inference.ModelInferRequest")(model_name="default"), ASKED):
        await stream.write(request.SerializeToString())
        await stream.read()
    await stream.done_writing()
    spans = port.stand.recorded.spans()
    servers = [span for span in spans if span.name == STREAM[1:]]
    assert [(span.parent, span.state) for span in servers] == [(CLIENT_SPAN.span_id.hex(), "vendor=1")] * 3
    assert [span.attributes.get("error.type") for span in servers] == [None, "BAD_REQUEST", None]
    sent = [span.parent for span in spans if span.name == "send default"]
    assert sent == [servers[0].span, servers[2].span]


TENSOR = {"name": "input", "shape": [1], "datatype": "BYTES", "data": ["a"]}

BODIES = {
    "/v1/inference": {"input": "a"},
    "/api/inference": {"input": "a"},
    "/v1/predict": {"model_id": "default", "input_data": "a"},
    "/v1/completions": {"model": "default", "prompt": "a"},
    "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"model": "default", "input": "a"},
    "/v2/models/{model}/infer": {"inputs": [TENSOR]},
}


@on_stand(trace=True)
async def test_each_route_takes_the_span_that_the_client_names(stand: Stand) -> None:
    for route, body in BODIES.items():
        path = route.replace("{model}", "default")
        await stand.ask(post(json.dumps(body), path, PARENT, "tracestate: a=1", "tracestate: b=2"))
        asked = stand.gateway.asked.pop()
        assert asked.options.trace == TraceContext(CONTEXT.trace_id, CONTEXT.span_id, 1, "a=1,b=2")
        assert asked.options.way == f"POST {route}"


@on_stand(trace=True)
async def test_each_request_on_a_connection_has_its_own_and_a_malformed_one_counts_for_none(stand: Stand) -> None:
    client = await stand.connect()
    other = TraceContext(bytes(range(1, 17)), bytes(range(8)), 0)
    given: list[tuple[tuple[str, ...], TraceContext | None]] = [
        ((PARENT,), CONTEXT),
        ((PARENT,), CONTEXT),
        ((f"TraceParent: {traceparent(other)}",), other),
        ((), None),
        (("traceparent: 00-nonsense",), None),
        ((PARENT, PARENT), None),
        (("tracestate: a=1",), None),
    ]
    for fields, _ in given:
        assert (await client.ask(post('{"input": "a"}', "/v1/inference", *fields))).status == 200
    assert [asked.options.trace for asked in stand.gateway.asked] == [trace for _, trace in given]


async def test_it_is_not_looked_at_while_no_traces_are_recorded(stand: Stand) -> None:
    await stand.ask(post('{"input": "a"}', "/v1/inference", PARENT))
    assert stand.gateway.asked[0].options.trace is None
