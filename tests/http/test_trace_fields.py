"""The header fields `traceparent` and `tracestate`, at every door."""

from __future__ import annotations

import json

import pytest

from headway.core.trace_context import traceparent
from headway.grpc import messages
from headway.model import TraceContext
from tests.grpc.stand import INFER, PREDICT, Port, on_port, predict
from tests.http.stand import Stand, on_stand, post

CONTEXT = TraceContext(bytes(range(16)), bytes(range(8)), 1)
PARENT = f"traceparent: {traceparent(CONTEXT)}"
ASKED = messages.message("inference.ModelInferRequest")(
    model_name="default",
    inputs=[{"name": "input", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"a"]}}],
)
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


@pytest.mark.parametrize("route", BODIES)
@on_stand(trace=True)
async def test_each_route_takes_the_span_that_the_client_names(stand: Stand, route: str) -> None:
    body, path = json.dumps(BODIES[route]), route.replace("{model}", "default")
    await stand.ask(post(body, path, PARENT, "tracestate: a=1", "tracestate: b=2"))
    [asked] = stand.gateway.asked
    assert asked.options.trace == TraceContext(CONTEXT.trace_id, CONTEXT.span_id, 1, "a=1,b=2")
    assert asked.options.way == f"POST {route}"


@on_stand(trace=True)
async def test_it_is_that_of_each_request_on_a_connection(stand: Stand) -> None:
    client = await stand.connect()
    other = TraceContext(bytes(range(1, 17)), bytes(range(8)), 0)
    fields = (PARENT,), (PARENT,), (f"TraceParent: {traceparent(other)}",), ()
    for field in fields:
        await client.send(post('{"input": "a"}', "/v1/inference", *field))
        assert (await client.answer()).status == 200
    assert [asked.options.trace for asked in stand.gateway.asked] == [CONTEXT, CONTEXT, other, None]


@pytest.mark.parametrize("fields", [("traceparent: 00-nonsense",), (PARENT, PARENT), ("tracestate: a=1",)])
@on_stand(trace=True)
async def test_a_malformed_one_does_not_make_a_request_fail(stand: Stand, fields: tuple[str, ...]) -> None:
    assert (await stand.ask(post('{"input": "a"}', "/v1/inference", *fields))).status == 200
    assert stand.gateway.asked[0].options.trace is None


@on_stand()
async def test_it_is_not_looked_at_while_no_traces_are_recorded(stand: Stand) -> None:
    await stand.ask(post('{"input": "a"}', "/v1/inference", PARENT))
    assert stand.gateway.asked[0].options.trace is None


@pytest.mark.parametrize(
    ("method", "body", "name"),
    [
        (PREDICT, predict("a"), "headway.v1.Inference/Predict"),
        (INFER, ASKED.SerializeToString(), "inference.GRPCInferenceService/ModelInfer"),
    ],
)
@on_port(trace=True)
async def test_each_call_of_grpc_takes_it_from_its_metadata(port: Port, method: str, body: bytes, name: str) -> None:
    own = "traceparent", traceparent(CONTEXT)
    await port.client().ask(method, body, (own, ("tracestate", "a=1"), ("tracestate", "b=2")))
    await port.client().ask(method, body, (("traceparent", "00-nonsense"),))
    first, second = (asked.options for asked in port.gateway.asked)
    assert first.trace == TraceContext(CONTEXT.trace_id, CONTEXT.span_id, 1, "a=1,b=2")
    assert (first.way, second.trace) == (f"grpc {name}", None)
