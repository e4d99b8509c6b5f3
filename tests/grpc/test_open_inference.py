"""The Open Inference Protocol over gRPC: tensors in both forms, streams, parameters and server metadata."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from headway import __version__, errors, protos
from headway.gateway.limiter import POLLS, POLLS_AT_ONCE
from headway.grpc.inference_call import MOST_ANSWER
from headway.model import Failure, Octets, TokenCount
from headway.oip.tensors import pack, unpack
from tests.grpc.stand import INFER, PREDICT, Port, on_port, predict

Status = grpc.StatusCode
CHECK = f"/{protos.HEALTH}/Check"
SERVICE = f"/{protos.OPEN_INFERENCE}"
STREAM = f"{SERVICE}/ModelStreamInfer"
KEYS = {"secret": {}, "narrow": {"models": ["other"], "user": "bob"}}
BEARER = (("authorization", "Bearer secret"),)
NARROW = (("authorization", "Bearer narrow"),)
Request = protos.message("inference.ModelInferRequest")


def request(*texts: str | bytes, raw: bool = False, **members: Any) -> Any:
    """Return a request with one input, which is in `raw_input_contents` if `raw`."""
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    asked = Request(model_name="default", **members)
    tensor = asked.inputs.add(name="text", datatype="BYTES", shape=[len(data)])
    if raw:
        asked.raw_input_contents.append(pack(data))
    else:
        tensor.contents.bytes_contents.extend(data)
    return asked


def answered(body: bytes) -> Any:
    return protos.message("inference.ModelInferResponse").FromString(body)


def outputs(answer: Any) -> list[bytes]:
    (tensor,), (raw,) = answer.outputs, answer.raw_output_contents
    assert (tensor.name, tensor.datatype) == ("OUTPUT", "BYTES")
    return unpack("OUTPUT", raw, tensor.shape[0])


@pytest.mark.parametrize("raw", [False, True])
async def test_an_input_is_answered_with_its_output_in_raw_contents(port: Port, raw: bool) -> None:
    client = port.client()
    answer = answered(await client.ask(INFER, request("a", "bü", "", raw=raw, id="mine").SerializeToString()))
    assert outputs(answer) == [b"A", "BÜ".encode(), b""]
    assert (answer.model_name, answer.model_version, answer.id) == ("default", "1", "mine")
    one = request("x", raw=raw)
    one.inputs[0].shape[:] = [1, 1]
    answer = answered(await client.ask(INFER, one.SerializeToString()))
    assert (outputs(answer), list(answer.outputs[0].shape), answer.id) == ([b"X"], [1, 1], "")
    assert [asked.input for asked in port.gateway.asked] == ["a", "bü", "", "x"]


async def test_the_answer_tells_versions_and_the_tokens_of_all_elements(port: Port) -> None:
    async def told(*texts: str) -> tuple[str, dict[str, int]]:
        answer = answered(await client.ask(INFER, request(*texts).SerializeToString()))
        return answer.model_version, {name: each.int64_param for name, each in answer.parameters.items()}

    client = port.client()
    port.gateway.versions = {"a": "3", "b": "3", "c": "4"}
    assert [await told("a", "b"), await told("a", "b", "c")] == [("3", {}), ("3,4", {})]
    port.gateway.tokens = TokenCount(7)
    assert [await told("a"), await told("a", "b")] == [("3", {"tokens_used": 7}), ("3", {"tokens_used": 14})]
    call = client.stream(STREAM)
    asked = request("a")
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    await call.write(asked.SerializeToString())
    assert set(streamed(await call.read()).infer_response.parameters) == {"tokens_used", "triton_final_response"}
    call.cancel()


async def test_parameters_reach_the_target_but_for_those_of_the_protocol(port: Port) -> None:
    asked = request("a")
    asked.parameters["n"].int64_param = 3
    asked.parameters["deep"].bool_param = True
    asked.parameters["word"].string_param = "yes"
    asked.parameters["share"].double_param = 0.5
    asked.parameters["priority"].uint64_param = 3
    asked.parameters["timeout"].int64_param = 2_000_000
    await port.client().ask(INFER, asked.SerializeToString())
    (entry,) = port.gateway.asked
    assert (entry.tier, entry.options.timeout) == (2, 2.0)
    assert json.loads(entry.parameters) == {"n": 3, "deep": True, "word": "yes", "share": 0.5}


REGION = protos.message("inference.InferParameter")(string_param="r")
WRONG: dict[str, Any] = {
    "no input": lambda asked: asked.ClearField("inputs"),
    "two inputs": lambda asked: asked.inputs.add(name="more", datatype="BYTES", shape=[1]),
    "too few": lambda asked: asked.inputs[0].shape.__setitem__(0, 3),
    "both forms": lambda asked: asked.raw_input_contents.append(pack([b"a", b"b"])),
    "other contents": lambda asked: asked.inputs[0].contents.int_contents.append(1),
    "shared memory": lambda asked: asked.inputs[0].parameters["shared_memory_region"].CopyFrom(REGION),
    "not a number": lambda asked: setattr(asked.parameters["n"], "double_param", float("nan")),
    "no text": lambda asked: asked.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"),
    "two raw": lambda asked: (
        asked.inputs[0].ClearField("contents"),
        asked.raw_input_contents.extend([pack([b"a", b"b"])] * 2),
    ),
}


async def test_what_is_not_as_the_protocol_has_it_or_not_served_is_refused(port: Port) -> None:
    client = port.client()
    for name, change in WRONG.items():
        asked = request("a", "b")
        change(asked)
        refused = await client.fail(INFER, asked.SerializeToString())
        assert (name, refused.status, bool(refused.details)) == (name, Status.INVALID_ARGUMENT, True)
        assert refused.trailers["x-headway-error"] == "BAD_REQUEST"
    for asked, status in (
        (request("a", model_version="7"), Status.NOT_FOUND),
        (request(*["a"] * 1025), Status.RESOURCE_EXHAUSTED),
    ):
        assert (await client.fail(INFER, asked.SerializeToString())).status is status
    assert port.gateway.asked == []
    asked = request("a", model_version="1")
    assert outputs(answered(await client.ask(INFER, asked.SerializeToString()))) == [b"A"]


async def test_large_outputs_are_answered_in_turns_bounded_together_and_held_until_then(port: Port) -> None:
    held = port.gateway.quotas.bytes
    free = held.free
    client = port.client(**{"grpc.max_receive_message_length": -1})
    port.gateway.output = "é" * 1_000_000
    answer = answered(await client.ask(INFER, request(*["a"] * 5, id="mine").SerializeToString()))
    assert outputs(answer) == ["é".encode() * 1_000_000] * 5
    assert answer.id == "mine"
    refused = await client.fail(INFER, request(*["a"] * 9).SerializeToString())
    assert refused.status is Status.RESOURCE_EXHAUSTED
    assert refused.trailers["x-headway-error"] == "PAYLOAD_TOO_LARGE"
    assert f"exceed {MOST_ANSWER} bytes in total" in refused.details
    assert refused.details.endswith("(because over gRPC an answer is a single message)"), "no setting would help"
    assert held.take("another", held.free - (2 << 20))
    refused = await client.fail(INFER, request(*["a"] * 5).SerializeToString())
    assert refused.trailers["x-headway-error"] == "SERVICE_OVERLOADED"
    held.give("another", held.used("another"))
    assert held.free == free


async def test_elements_of_models_that_take_json_or_octets(port: Port) -> None:
    client = port.client()
    port.stand.learn("json")
    answer = answered(await client.ask(INFER, request('{"a": 1}', '"t"').SerializeToString()))
    assert outputs(answer) == [b'{"a": 1}', b'"T"']
    port.stand.learn("bytes")
    port.gateway.output = Octets(b"\xff\x00")
    assert outputs(answered(await client.ask(INFER, request(b"\xff").SerializeToString()))) == [b"\xff\x00"]
    assert port.gateway.asked[-1].input == Octets(b"\xff")


async def say(client: Any, method: str, metadata: Any = (), **members: Any) -> Any:
    asked, answer = protos.message_classes(protos.OPEN_INFERENCE, method)
    body = await client.ask(f"{SERVICE}/{method}", asked(**members).SerializeToString(), metadata)
    return answer.FromString(body)


async def test_the_server_and_its_models_are_described(port: Port) -> None:
    client = port.client()
    assert (await say(client, "ServerLive")).live
    assert (await say(client, "ServerReady")).ready
    server = await say(client, "ServerMetadata")
    assert (server.name, server.version) == ("headway", __version__)
    assert (await say(client, "ModelReady", name="default")).ready
    assert (await say(client, "ModelReady")).ready
    assert (await say(client, "ModelMetadata")).name == "default"
    model = await say(client, "ModelMetadata", name="default", version="1")
    assert (model.name, list(model.versions), model.platform) == ("default", ["1"], "headway")
    assert [(one.name, one.datatype, list(one.shape)) for one in model.inputs] == [("INPUT", "BYTES", [-1, 1])]
    config = (await say(client, "ModelConfig", name="default")).config
    assert (config.name, config.max_batch_size, config.HasField("dynamic_batching")) == ("default", 1024, True)
    assert [(one.name, one.data_type, list(one.dims)) for one in config.output] == [("OUTPUT", 13, [1])]
    await client.ask(INFER, request("a", "b").SerializeToString())
    for members in ({"name": "default"}, {}):
        (counted,) = (await say(client, "ModelStatistics", **members)).model_stats
        assert (counted.name, counted.version) == ("default", "1")
    (listed,) = (await say(client, "RepositoryIndex", ready=True)).models
    assert (listed.name, listed.version, listed.state) == ("default", "1", "READY")
    port.stand.leaving = True
    assert not (await say(client, "ServerReady")).ready
    assert not (await say(client, "ModelReady", name="default")).ready
    assert list((await say(client, "RepositoryIndex", ready=True)).models) == []
    assert (await client.fail(f"{SERVICE}/RepositoryModelLoad", b"")).status is Status.UNIMPLEMENTED


@on_port(whole=True, keys={"slow": {"rate": 1.0, "burst": 1.0}})
async def test_what_is_told_of_models_counts_as_polls(port: Port) -> None:
    client, key = port.client(), (("authorization", "Bearer slow"),)
    body = protos.message("inference.ModelStatisticsRequest")(name="default").SerializeToString()
    for _ in range(POLLS + POLLS_AT_ONCE):
        await client.ask(f"{SERVICE}/ModelStatistics", body, key)
    failed = await client.fail(f"{SERVICE}/ModelStatistics", body, key)
    assert failed.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    await client.ask(f"{SERVICE}/ServerLive", b"", key)


@on_port(KEYS)
async def test_what_is_said_of_a_model_is_for_those_who_may_ask_it(port: Port) -> None:
    client = port.client()
    for method in ("ServerLive", "ServerReady", "ServerMetadata"):
        await say(client, method)
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        asked, _ = protos.message_classes(protos.OPEN_INFERENCE, method)
        body = asked(name="default").SerializeToString()
        assert (await client.fail(f"{SERVICE}/{method}", body)).status is Status.UNAUTHENTICATED
        assert (await client.fail(f"{SERVICE}/{method}", body, NARROW)).status is Status.PERMISSION_DENIED
    assert list((await say(client, "RepositoryIndex", NARROW)).models) == []
    for metadata, members in (
        (BEARER, {"name": "other"}),
        (BEARER, {"name": "default", "version": "9"}),
        (NARROW, {"name": "other"}),
    ):
        assert not (await say(client, "ModelReady", metadata, **members)).ready


@on_port({"secret": {"rate": 60.0, "burst": 5.0}})
async def test_what_is_said_of_models_comes_with_an_id_and_the_callers_limits(port: Port) -> None:
    client = port.client()
    for method, members in (
        ("ModelReady", {"name": "default"}),
        ("ModelMetadata", {}),
        ("RepositoryIndex", {}),
        ("ModelConfig", {"name": "other"}),
        ("RepositoryModelLoad", {}),
    ):
        asked, _ = protos.message_classes(protos.OPEN_INFERENCE, method)
        call = client.call(f"{SERVICE}/{method}", asked(**members).SerializeToString(), BEARER)
        told = dict(await call.trailing_metadata())
        assert told["x-request-id"].startswith("req_")
        assert (told["ratelimit-policy"], told["ratelimit"]) == ('"key";q=60;w=60', '"key";r=5;t=0')


@on_port(whole=True)
async def test_a_model_of_which_it_is_not_known_whether_it_is_served_is_asked_for_again_later(port: Port) -> None:
    port.stand.real.served.in_doubt = lambda: True
    client = port.client()
    refused = await client.fail(PREDICT, predict("a", "late"))
    assert (refused.status, refused.trailers["grpc-retry-pushback-ms"]) == (Status.UNAVAILABLE, "1000")
    assert not (await say(client, "ModelReady", name="late")).ready


def streamed(body: bytes) -> Any:
    return protos.message("inference.ModelStreamInferResponse").FromString(body)


async def test_a_stream_answers_each_request_in_order_and_outlives_an_error(port: Port) -> None:
    call = port.client().stream(STREAM)
    for number in range(20):
        text = b"\xff" if number == 7 else f"text {number}".encode()
        await call.write(request(text, id=f"n{number}").SerializeToString())
    await call.write(b"\xff\xff")
    await call.done_writing()
    for number in range(20):
        answer = streamed(await call.read())
        assert answer.infer_response.id == f"n{number}"
        if number == 7:
            assert "is not UTF-8" in answer.error_message
        else:
            assert outputs(answer.infer_response) == [f"TEXT {number}".encode()]
            assert answer.error_message == ""
    assert "malformed" in streamed(await call.read()).error_message
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Status.OK


async def test_the_id_of_a_request_with_too_much_in_it_is_in_its_error(port: Port) -> None:
    call = port.client().stream(STREAM)
    asked = request("text", id="n" * 50_000)
    await call.write(asked.SerializeToString())
    for _ in range(30_000):
        asked.inputs.add(name="more")
    await call.write(asked.SerializeToString())
    await call.done_writing()
    answer = streamed(await call.read())
    assert (answer.infer_response.id, outputs(answer.infer_response)) == (asked.id, [b"TEXT"])
    answer = streamed(await call.read())
    assert "take long to decode" in answer.error_message
    assert answer.infer_response.id == asked.id


async def test_an_answer_on_a_stream_says_that_it_is_the_last_where_that_is_asked_for(port: Port) -> None:
    def asked(*texts: str, wish: bool | None = True, **members: Any) -> bytes:
        made = request(*texts, **members)
        made.parameters["n"].int64_param = 3
        if wish is not None:
            made.parameters["triton_enable_empty_final_response"].bool_param = wish
        return bytes(made.SerializeToString())

    async def said(body: bytes) -> Any:
        await call.write(body)
        answer = streamed(await call.read())
        parameters = answer.infer_response.parameters
        last = parameters["triton_final_response"].bool_param if "triton_final_response" in parameters else None
        return last, outputs(answer.infer_response) if not answer.error_message else answer.infer_response.id

    call = port.client().stream(STREAM)
    assert await said(asked("a", "b")) == (True, [b"A", b"B"])
    assert await said(asked("a", wish=False)) == await said(asked("a", wish=None)) == (None, [b"A"])
    assert await said(asked("a", id="x", model_version="9")) == (True, "x")
    assert await said(asked("a", id="y", model_version="9", wish=False)) == (None, "y")
    port.gateway.failure = Failure(errors.BACKEND_ERROR, "broken")
    assert await said(asked("a", id="z")) == (True, "z")
    assert await said(asked("a", id="z", wish=None)) == (None, "z")
    assert {one.parameters for one in port.gateway.asked} == {b'{"n":3}'}
    call.cancel()
    port.gateway.failure = None
    alone = answered(await port.client().ask(INFER, asked("a")))
    assert (outputs(alone), dict(alone.parameters)) == ([b"A"], {})


async def test_an_id_that_a_proxy_gave_to_a_stream_is_none_of_its_requests(port: Port) -> None:
    chosen = "01890a5d-ac96-774b-bcce-b302099a8057"
    call = port.client().stream(STREAM, (("x-request-id", chosen), ("x-request-tier", "free")))
    for text in ("a", "b"):
        await call.write(request(text).SerializeToString())
        assert outputs(streamed(await call.read()).infer_response) == [text.upper().encode()]
    first, second = port.gateway.asked
    assert (first.tier, second.tier) == (2, 2)
    assert len({first.id, second.id, chosen}) == 3
    assert not first.options.chosen
    call.cancel()


async def held(port: Port) -> Any:
    """Return a stream with three requests in progress."""
    port.gateway.hold = True
    call = port.client().stream(STREAM)
    for number in range(3):
        await call.write(request(str(number)).SerializeToString())
    await port.gateway.until(lambda: len(port.gateway.waiting) == 3)
    return call


async def test_a_stream_whose_client_leaves_abandons_its_requests(port: Port) -> None:
    call = await held(port)
    call.cancel()
    await port.gateway.until(lambda: len(port.gateway.abandoned) == 3)


async def test_a_drain_answers_what_a_stream_has_sent_and_then_ends_it(port: Port) -> None:
    call = await held(port)
    draining = asyncio.ensure_future(port.listener.drain())
    connections = port.listener._connections
    assert connections is not None
    (connection,) = connections.open
    while connection.leaving is None:  # noqa: ASYNC110 - the port runs in this loop and has no event to await
        await asyncio.sleep(0)
    port.gateway.release()
    answers = [outputs(streamed(await call.read()).infer_response) for _ in range(3)]
    assert answers == [[b"0"], [b"1"], [b"2"]]
    assert await call.code() is Status.UNAVAILABLE
    await draining


@on_port(KEYS)
async def test_errors_of_the_gateway_are_told_in_a_stream(port: Port) -> None:
    port.gateway.failure = Failure(errors.SERVICE_OVERLOADED, "full — ü", 1.5, "overloaded")
    call = port.client().stream(STREAM, BEARER)
    await call.write(request("a", id="x").SerializeToString())
    answer = streamed(await call.read())
    assert (answer.error_message, answer.infer_response.id) == ("full — ü", "x")
    said = {name: one.string_param for name, one in answer.infer_response.parameters.items()}
    assert said.pop("x-request-id").startswith("req_")
    assert said == {
        "x-headway-error": "SERVICE_OVERLOADED",
        "x-headway-dropped-reason": "overloaded",
        "grpc-retry-pushback-ms": "1500",
    }
    call.cancel()
    assert await port.client().stream(STREAM).code() is Status.UNAUTHENTICATED
    keyed = port.client().stream(STREAM, (*BEARER, ("idempotency-key", "k")))
    assert await keyed.code() is Status.INVALID_ARGUMENT


@on_port(max_body_bytes=1 << 17, memory_mb=8)
async def test_requests_of_a_stream_wait_while_they_hold_their_clients_share_of_bytes(port: Port) -> None:
    port.gateway.hold = True
    call = port.client().stream(STREAM)

    async def write() -> None:
        for _ in range(30):
            await call.write(request("x" * 100_000).SerializeToString())
        await call.done_writing()

    writing = asyncio.ensure_future(write())
    await port.gateway.until(lambda: len(port.gateway.waiting) == 18)
    await port.client().ask(CHECK, b"")  # By now the stream could have read more.
    assert len(port.gateway.asked) == 18, "17 within the share, and one in the room that the stream holds for reading"
    port.gateway.hold = False
    port.gateway.release()
    answers = [streamed(await call.read()) for _ in range(30)]
    assert not any(answer.error_message for answer in answers)
    await writing
    assert await call.code() is Status.OK
    assert dict(port.counters.gateway.refusals) == {}
