"""A model that a credential may not use looks like one that isn't served, whatever the body is."""

import dataclasses
import itertools
import json
from collections.abc import Callable

import grpc
import pytest

from headway import protos
from headway.config import Settings
from headway.config.target import ModelSettings
from headway.doors.exchange import CodecContext, Exchange
from headway.errors import RequestError
from headway.gateway.served_models import ServedModels
from headway.grpc.methods import PREDICT_READER
from headway.http.inference.inference_head import read_inference_head
from headway.http.inference.routes import codecs
from headway.http.openapi import document
from headway.http.server.head import Head, RequestTarget
from headway.model import RequestOptions, ValueKind, WorkerInfo, WorkerStatus
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.rest.requests import infer
from headway.runtime.counters import GatewayCounts
from tests.grpc.stand import PREDICT, Port, on_port, predict
from tests.http.stand import Stand, on_stand, post

SETTINGS = Settings()
OPTIONS = RequestOptions(4.0)
KEY = "Authorization: Bearer ada"
ONLY = frozenset({"mine"})
KINDS = ServedModels(["mine", "other"])
BODIES = [
    b"{",
    b"{}",
    b'{"inputs":[{"name":"INPUT","shape":[1],"datatype":"FP32","data":[1.5]}]}',
    b'{"inputs":[{"name":"INPUT","shape":[1],"datatype":"BYTES","data":["a"]}]}',
    b'{"inputs":[{"name":"INPUT","shape":[2],"datatype":"BYTES","data":["a"]}]}',
    b'{"inputs":[{"name":"INPUT","shape":[1],"datatype":"BYTES","data":["not base64!"]}],"outputs":[{"name":"no"}]}',
]
TENSORS = [json.loads(body)["inputs"][0] for body in BODIES[2:5]]


def http_oip(model: str, body: bytes, version: str | None) -> Exchange:
    head = Head(b"POST", b"/v2/models/m/infer", "1.1", [])
    head.length = len(body)
    target = RequestTarget({"model": model} | ({"version": version} if version else {}), b"")
    asked = read_inference_head(
        infer(SETTINGS), head, target, CodecContext(SETTINGS, KINDS, GatewayCounts()), None, ONLY
    )
    return asked.read(body, asked.options, KINDS.seen_by(ONLY))


def native(model: str, body: bytes, version: str | None) -> Exchange:
    """Read a native request. Its input is the body's tensors, or a number if the body isn't JSON."""
    try:
        input: object = json.loads(body).get("inputs")
    except ValueError:
        input = 1.5
    asked = {"model": model, "input": input} | ({"model_version": version} if version else {})
    return codecs(SETTINGS)["/v1/inference"].read_json(json.dumps(asked).encode(), OPTIONS, KINDS.seen_by(ONLY))


def grpc_infer(model: str, body: bytes, version: str | None) -> Exchange:
    asked = protos.message("inference.ModelInferRequest")(model_name=model, model_version=version or "")
    place = BODIES.index(body)
    for tensor in TENSORS[place - 2 : place - 1] if place > 1 else ():
        made = asked.inputs.add(name="INPUT", datatype=tensor["datatype"], shape=tensor["shape"])
        data = [str(one).encode() for one in tensor["data"]]
        made.contents.bytes_contents.extend(data if tensor["datatype"] == "BYTES" else [])
    return infer_reader(SETTINGS).at_once(asked.SerializeToString(), OPTIONS, KINDS.seen_by(ONLY))


def grpc_predict(model: str, body: bytes, version: str | None) -> Exchange:
    asked = protos.message("headway.v1.PredictRequest")(model_id=model, input_data=body + b"\xff")
    return PREDICT_READER.at_once(asked.SerializeToString(), OPTIONS, KINDS.seen_by(ONLY))


def told(read: Callable[[str, bytes, str | None], Exchange], model: str, body: bytes, version: str | None) -> object:
    """Return the request or error, without the model's name."""
    try:
        found = read(model, body, version)
    except RequestError as exc:
        return exc.code, exc.message.replace(model, "…"), exc.retry_after
    return (found.model or "").replace(model, "…"), found.input, found.options


@pytest.mark.parametrize("read", [http_oip, native, grpc_infer, grpc_predict])
@pytest.mark.parametrize("takes", ValueKind)
def test_a_hidden_model_reads_as_unknown(read: Callable[[str, bytes, str | None], Exchange], takes: ValueKind) -> None:
    KINDS.learn([
        WorkerInfo(worker_id="w", model=model, status=WorkerStatus.HEALTHY, takes=takes.value, gives=takes.value)
        for model in KINDS.models
    ])  # fmt: skip
    for version, body in itertools.product((None, "1", "no"), BODIES):
        assert told(read, "other", body, version) == told(read, "nowhere", body, version), (version, body)


def test_a_model_that_may_be_asked_is_known_as_it_is_now() -> None:
    kinds = ServedModels(["mine", "other"])
    seen = kinds.seen_by(ONLY)
    assert ("mine" in seen, "other" in seen, seen["mine"].takes) == (True, False, None)
    kinds.learn([WorkerInfo(worker_id="w", model="mine", status=WorkerStatus.HEALTHY, takes="bytes", gives="json")])
    assert (seen["mine"].takes, seen["mine"].gives) == (ValueKind.BYTES, ValueKind.JSON)
    assert seen.check("mine", "no base64!") is not None
    assert kinds.seen_by(()) is kinds


@pytest.mark.parametrize(
    "asked",
    [
        post('{"input": "a"}', "/v1/inference", KEY),
        post('{"inputs": ["a", "b"]}', "/v1/inference", KEY),
        post('{"input": "a"}', "/v1/inference", KEY, "Prefer: respond-async"),
        post('{"prompt": "a"}', "/v1/completions", KEY),
        post('{"input": "a"}', "/v1/embeddings", KEY),
    ],
)
@on_stand(keys={"ada": {"models": ["mine"]}}, whole=True, model="hidden")
async def test_a_default_that_a_credential_may_not_ask_is_none(stand: Stand, asked: bytes) -> None:
    answer = await stand.ask(asked)
    assert answer.status == 403
    assert b"the request names no model" in answer.body
    assert b"only for: mine" in answer.body
    assert b"hidden" not in answer.body


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (predict("a"), grpc.StatusCode.PERMISSION_DENIED),
        (predict("a") * 2, grpc.StatusCode.PERMISSION_DENIED),
        (predict(b"\xff"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
@on_port(keys={"ada": {"models": ["mine"]}}, whole=True, model="hidden")
async def test_a_default_beyond_the_credential_is_none(port: Port, body: bytes, status: grpc.StatusCode) -> None:
    found = await port.client().fail(PREDICT, body, (("authorization", "Bearer ada"),))
    assert found.status is status
    assert "hidden" not in found.details


def test_the_contract_names_no_model_where_some_may_be_hidden() -> None:
    several = Settings(models=(ModelSettings("hidden"), ModelSettings("mine")), default_model="hidden")
    assert "hidden" in json.dumps(document(several))
    assert "hidden" not in json.dumps(document(dataclasses.replace(several, keys="keys.toml")))
