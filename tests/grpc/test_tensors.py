"""Tensors over gRPC: typed and raw contents, several inputs and outputs, streams, JSON texts, and random tensors."""

import asyncio
import itertools
import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.tensors import SIZES, join_elements, unpack
from headway.doors.exchange import Outcome
from headway.errors import UNFORESEEN
from headway.gateway.limiter import Limiter
from headway.gateway.served_models import ServedModels
from headway.grpc.message_turns import MessageTurns
from headway.model import RequestOptions, Tensors, TensorSpec, ValueKind, WorkerInfo, WorkerStatus
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.tensors import CONTENTS
from tests.grpc.stand import INFER, PREDICT, Port, failed, on_port, predict, predicted, served
from tests.grpc.test_open_inference import STREAM, Request, answered, request, say, streamed
from tests.grpc.test_open_inference import outputs as elements
from tests.http.test_tensors import arrays, tensors
from tests.oip.arrays import Drawn, several

Status = grpc.StatusCode
FOUR = TensorSpec("x", "FP32", (4,))
NAMED = (TensorSpec("query", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)), TensorSpec("texts", "BYTES"))
TYPED: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 0, 127]),
    "INT16": ("int_contents", [-(1 << 15), 0, (1 << 15) - 1]),
    "INT32": ("int_contents", [-(1 << 31), 0, (1 << 31) - 1]),
    "INT64": ("int64_contents", [-(1 << 63), 0, (1 << 63) - 1]),
    "UINT8": ("uint_contents", [0, 1, 255]),
    "UINT16": ("uint_contents", [0, 1, (1 << 16) - 1]),
    "UINT32": ("uint_contents", [0, 1, (1 << 32) - 1]),
    "UINT64": ("uint64_contents", [0, 1, (1 << 64) - 1]),
    "FP32": ("fp32_contents", [0.5, float("nan"), float("-inf")]),
    "FP64": ("fp64_contents", [0.1, float("nan"), float("inf")]),
    "BYTES": ("bytes_contents", [b"", b"\xff\0", b"three"]),
}
"""Datatypes that `contents` may have, with the member for each, and elements of it."""
CODES = {"BOOL": "b", "INT": "i", "UINT": "u", "FP": "f"}


def model(takes: str = "tensors", gives: str = "tensors", inputs: Any = (), outputs: Any = ()) -> list[WorkerInfo]:
    """Workers of the model, of which it is known that it takes and gives these."""
    return [
        WorkerInfo(
            worker_id="g", model="default", status=WorkerStatus.HEALTHY, takes=takes, gives=gives, inputs=inputs, outputs=outputs
        )
    ]  # fmt: skip


def asked(given: Mapping[str, tuple[str, Sequence[int], bytes]], **members: Any) -> Any:
    found = Request(model_name="default", **members)
    for name, (datatype, shape, data) in given.items():
        found.inputs.add(name=name, datatype=datatype, shape=shape)
        found.raw_input_contents.append(data)
    return found


def typed(datatype: str, shape: Sequence[int], **contents: Sequence[Any]) -> Any:
    """A request with one input whose data are in `contents`."""
    found = Request(model_name="default")
    found.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents)
    return found


def told(answer: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    assert len(answer.outputs) == len(answer.raw_output_contents)
    return {
        one.name: (one.datatype, tuple(one.shape), raw)
        for one, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


def data_of(datatype: str, values: Sequence[Any]) -> bytes:
    """Data of elements in the binary form, as numpy has them."""
    if datatype == "BYTES":
        return join_elements(values)
    return np.array(values, f"<{CODES[datatype.rstrip('0123456789')]}{SIZES[datatype]}").tobytes()


@pytest.mark.parametrize("datatype", TYPED)
async def test_elements_of_each_datatype_reach_the_model_in_the_binary_form(port: Port, datatype: str) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", datatype, (-1,)),)))
    member, values = TYPED[datatype]
    data = data_of(datatype, values)
    for one in (typed(datatype, [1, 3], **{member: values}), asked({"x": (datatype, [1, 3], data)})):
        answer = answered(await port.client().ask(INFER, one.SerializeToString()))
        assert arrays(port.gateway.asked[-1].input) == {"x": (datatype, (1, 3), data)}
        assert told(answer) == {"x": (datatype, (1, 3), data)}
    answer = answered(await port.client().ask(INFER, typed(datatype, [2, 0]).SerializeToString()))
    assert told(answer) == {"x": (datatype, (2, 0), b"")}


async def test_a_narrower_datatype_travels_as_it_is(port: Port) -> None:
    port.gateway.served.learn(model(inputs=(FOUR,)))
    data = data_of("INT8", [-1, 0, 1, 2])
    for one in (typed("INT8", [1, 4], int_contents=[-1, 0, 1, 2]), asked({"x": ("INT8", [1, 4], data)})):
        answered(await port.client().ask(INFER, one.SerializeToString()))
        assert arrays(port.gateway.asked[-1].input) == {"x": ("INT8", (1, 4), data)}


@pytest.mark.parametrize("count", [4, 1 << 18, (1 << 18) + 1])
async def test_messages_that_differ_in_their_data_alone_are_each_read_and_answered(port: Port, count: int) -> None:
    """All but their data is remembered. A large tensor that needs nothing behind it stays where it was received."""
    spec, client = TensorSpec("x", "UINT8", (-1,)), port.client()
    port.gateway.served.learn(model(inputs=(spec,), outputs=(spec,)))
    for first in (b"\1", b"\2", b"\3"):
        data = first.ljust(count, b"\4")
        answer = await client.ask(INFER, asked({"y": ("UINT8", [1, count], data)}).SerializeToString())
        assert told(answered(answer)) == {"x": ("UINT8", (1, count), data)}
        assert arrays(port.gateway.asked[-1].input) == {"x": ("UINT8", (1, count), data)}
    other = asked({"z": ("UINT8", [1, count], data)}).SerializeToString()  # As long as those before.
    assert told(answered(await client.ask(INFER, other))) == {"x": ("UINT8", (1, count), data)}
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "INT8", (-1,)),)))
    found = await client.fail(INFER, asked({"y": ("UINT8", [1, count], data)}).SerializeToString())
    assert found.status is Status.INVALID_ARGUMENT


async def test_what_is_remembered_of_a_message_keeps_its_id_parameters_and_outputs(port: Port) -> None:
    port.gateway.served.learn(model(inputs=(FOUR,), outputs=(FOUR, TensorSpec("other", "INT8"))))
    client = port.client()
    for number in range(3):
        data = bytes([number] * 16)
        given = asked({"x": ("FP32", [1, 4], data)}, id="7")
        given.outputs.add(name="x")
        given.parameters["heat"].int64_param = 5
        answer = answered(await client.ask(INFER, given.SerializeToString()))
        assert (answer.id, told(answer)) == ("7", {"x": ("FP32", (1, 4), data)})
        assert port.gateway.asked[-1].parameters == b'{"heat":5}'


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_halves_travel_raw(port: Port, datatype: str) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", datatype, (2,)),)))
    client = port.client()
    answer = answered(await client.ask(INFER, asked({"x": (datatype, [1, 2], b"\1\2\3\4")}).SerializeToString()))
    assert told(answer) == {"x": (datatype, (1, 2), b"\1\2\3\4")}
    found = await client.fail(INFER, typed(datatype, [1, 2], fp32_contents=[1, 2]).SerializeToString())
    assert found.status is Status.INVALID_ARGUMENT
    assert f"`x` is {datatype}, for which the protocol has no `contents`" in found.details


@pytest.mark.parametrize("rows", [1, 3])
async def test_several_inputs_are_one_entry_and_requested_outputs_come_in_their_order(port: Port, rows: int) -> None:
    port.gateway.served.learn(model(inputs=NAMED, outputs=NAMED))
    given = {
        "texts": ("BYTES", (rows,), join_elements([b"\xff"] * rows)),
        "query": ("FP32", (rows, 2), np.arange(2 * rows, dtype="<f4").tobytes()),
        "ids": ("INT64", (rows, 3), np.arange(3 * rows, dtype="<i8").tobytes()),
    }
    client = port.client()
    answer = answered(await client.ask(INFER, asked(given, id="mine", model_version="1").SerializeToString()))
    assert (told(answer), answer.id, answer.model_name, answer.model_version) == (given, "mine", "default", "1")
    (entry,) = port.gateway.asked
    assert arrays(entry.input) == given
    for names in (["ids", "query"], ["texts"]):
        wanted = asked(given, outputs=[{"name": name} for name in names])
        answer = answered(await client.ask(INFER, wanted.SerializeToString()))
        assert list(told(answer).items()) == [(name, given[name]) for name in names]
    assert len(port.gateway.asked) == 3


def raw_four(*shape: int, datatype: str = "FP32", name: str = "x", data: bytes | None = None, **members: Any) -> Any:
    return asked({name: (datatype, shape, bytes(4 * 4) if data is None else data)}, **members)


def named(without: str = "", **changes: tuple[str, tuple[int, ...], bytes]) -> Any:
    good = {"query": ("FP32", (1, 2), bytes(8)), "ids": ("INT64", (1, 1), bytes(8)), "texts": ("BYTES", (1,), bytes(4))}
    return asked({name: one for name, one in (good | changes).items() if name != without})


def both_forms() -> Any:
    found = raw_four(1, 4)
    found.inputs[0].contents.fp32_contents.extend([0] * 4)
    return found


def without_last_raw() -> Any:
    found = named()
    del found.raw_input_contents[-1]
    return found


def in_shared_memory() -> Any:
    found = named()
    found.inputs[1].parameters["shared_memory_region"].string_param = "r"
    return found


def classified() -> Any:
    found = raw_four(1, 4, outputs=[{"name": "y"}])
    found.outputs[0].parameters["classification"].int64_param = 3
    return found


WRONG: dict[str, tuple[Any, Any, str]] = {
    "datatype": ((FOUR,), raw_four(1, 4, datatype="FP64"), "the model takes `x`, FP32 of shape [-1, 4]. Send FP32: in numpy use `.astype('float32')`"),
    "many axes": ((FOUR,), raw_four(*[1] * 50_000), "are 50017 bytes; the limit is 32768"),
    "too few bytes": ((FOUR,), raw_four(1, 4, data=b"\0"), "the input `x` has 1 bytes; FP32 of shape [1, 4] takes 16"),
    "many bytes": ((FOUR,), raw_four(1, 4, data=bytes(99_999)), "the input `x` has 99999 bytes; FP32 of shape [1, 4] takes 16"),
    "no data": ((FOUR,), typed("FP32", [1, 4]), "`fp32_contents` of the input `x` has 0 elements; FP32 of shape [1, 4] takes 4"),
    "few elements": ((FOUR,), typed("FP32", [1, 4], fp32_contents=[1]), "of the input `x` has 1 elements; FP32 of shape [1, 4] takes 4"),
    "other contents": ((FOUR,), typed("FP32", [1, 4], fp64_contents=[1] * 4), "the input `x` has `fp64_contents`; expected `fp32_contents`"),
    "both forms": ((FOUR,), both_forms(), "the input `x` has `contents`, and the request has `raw_input_contents`"),
    "range": (
        (TensorSpec("x", "UINT8"),), typed("UINT8", [2], uint_contents=[255, 256]),
        "element 1 of the input `x` is 256, which is out of the range of UINT8",
    ),
    "range of a later page": (
        (TensorSpec("x", "INT8", (-1,)),), typed("INT8", [1, 3000], int_contents=[*[1] * 2500, 128, *[1] * 499]),
        "element 2500 of the input `x` is 128, which is out of the range of INT8",
    ),
    "lower range": (
        (TensorSpec("x", "INT16"),), typed("INT16", [1], int_contents=[-40_000]),
        "element 0 of the input `x` is -40000, which is out of the range of INT16",
    ),
    "missing": (NAMED, named("ids"), "the input `ids` is missing; the model takes `query`"),
    "raw missing": (NAMED, without_last_raw(), "`raw_input_contents` has 2 members, and the request has 3 inputs"),
    "shared memory": (NAMED, in_shared_memory(), "shared memory is not served here"),
    "many inputs": (NAMED, Request(inputs=[{"name": "a"}] * 30_000), "the message has more than 1024 members, which take long to decode"),
    "no output": ((FOUR,), raw_four(1, 4, outputs=[{"name": "z"}]), "there is no output `z`; the model gives `y`"),
    "many outputs": ((FOUR,), raw_four(1, 4, outputs=[{"name": "y"}] * 65), "the request asks for 65 outputs; at most 64"),
    "classification": ((FOUR,), classified(), "classification is not served here"),
}  # fmt: skip
"""Specifications of a model, a request that is wrong for it, and what its client is told."""


@pytest.mark.parametrize("name", WRONG)
@on_port(whole=True)
async def test_inputs_that_a_model_does_not_take_are_refused_before_anything_is_queued(port: Port, name: str) -> None:
    specs, wrong, says = WRONG[name]
    port.stand.real.served.learn(model(inputs=specs, outputs=(TensorSpec("y", "FP32"),)))
    found = await port.client().fail(INFER, wrong.SerializeToString())
    assert (found.status, found.trailers["x-headway-error"]) == (Status.INVALID_ARGUMENT, "BAD_REQUEST")
    assert says in found.details
    assert port.stand.runs == []


@on_port(max_body_bytes=1 << 16)
async def test_numbers_that_take_more_bytes_than_a_message_may_are_refused(port: Port) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "INT64", (-1,)),)))
    found = await port.client().fail(INFER, typed("INT64", [1, 9000], int64_contents=[1] * 9000).SerializeToString())
    assert found.status is Status.RESOURCE_EXHAUSTED
    assert "are 72000 bytes; the limit is 65536 (max_body_bytes)" in found.details
    assert port.gateway.asked == []


async def test_texts_of_a_model_that_gives_tensors_are_answered_with_one_tensor(port: Port) -> None:
    outputs = (TensorSpec("mean", "FP32", (2,)), TensorSpec("label", "BYTES"))
    port.gateway.served.learn(model("text", outputs=outputs))
    port.gateway.output = tensors(True, mean=np.array([[1, 2]], "f4"), size=np.array([[7]], "i8"))
    client = port.client()
    for count in (1, 3):
        answer = answered(await client.ask(INFER, request(*"abc"[:count]).SerializeToString()))
        assert told(answer) == {
            "mean": ("FP32", (count, 2), np.array([[1, 2]] * count, "<f4").tobytes()),
            "size": ("INT64", (count, 1), np.array([[7]] * count, "<i8").tobytes()),
        }
    assert [one.input for one in port.gateway.asked] == ["a", *"abc"]
    answer = answered(await client.ask(INFER, request("a", "b", outputs=[{"name": "mean"}]).SerializeToString()))
    assert list(told(answer)) == ["mean"]
    found = await client.fail(INFER, request("a", outputs=[{"name": "OUTPUT"}]).SerializeToString())
    assert "there is no output `OUTPUT`; the model gives `mean`, `label`" in found.details


async def test_texts_whose_tensors_differ_are_told_so(port: Port) -> None:
    port.gateway.served.learn(model("text"))
    port.gateway.hold = True
    call = port.client().call(INFER, request("a", "b").SerializeToString())
    asked = asyncio.ensure_future(failed(call))
    await port.gateway.until(lambda: len(port.gateway.waiting) == 2)
    for size, one in enumerate(port.gateway.waiting):
        port.gateway.waiting, port.gateway.output = [one], tensors(True, y=np.zeros((1, size), "f4"))
        port.gateway.release()
    found = await asked
    assert (found.status, "the outputs differ in shape or datatype" in found.details) == (Status.INVALID_ARGUMENT, True)


async def test_a_model_of_which_nothing_is_known_gets_tensors_and_texts(port: Port) -> None:
    port.gateway.served["default"].takes = port.gateway.served["default"].gives = None
    client = port.client()
    given = {"a": ("FP32", (2, 2), bytes(16)), "b": ("BYTES", (2, 1), join_elements([b"a", b"b"]))}
    answer = answered(await client.ask(INFER, asked(given).SerializeToString()))
    assert (told(answer), isinstance(port.gateway.asked[-1].input, Tensors)) == (given, True)
    assert elements(answered(await client.ask(INFER, request("a", "b").SerializeToString()))) == [b"A", b"B"]
    found = await client.fail(INFER, asked(given, outputs=[{"name": "c"}]).SerializeToString())
    assert (found.status, "there is no output `c`" in found.details) == (Status.INVALID_ARGUMENT, True)


async def test_each_message_of_a_stream_has_tensors_of_its_own(port: Port) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "FP32", (-1,)),)))
    call = port.client().stream(STREAM)
    for number in range(1, 6):
        size = 4 * number if number != 3 else 1
        await call.write(asked({"x": ("FP32", (1, number), bytes(size))}, id=f"n{number}").SerializeToString())
    await call.done_writing()
    for number in range(1, 6):
        answer = streamed(await call.read())
        assert answer.infer_response.id == f"n{number}"
        if number == 3:
            assert "the input `x` has 1 bytes; FP32 of shape [1, 3] takes 12" in answer.error_message
        else:
            assert told(answer.infer_response) == {"x": ("FP32", (1, number), bytes(4 * number))}
    assert await call.read() is grpc.aio.EOF


async def test_metadata_and_config_tell_the_tensors_as_they_are(port: Port) -> None:
    outputs = (TensorSpec("scores", "BF16", (-1, 3)), TensorSpec("more", "JSON"))
    port.gateway.served.learn(model(inputs=NAMED, outputs=outputs))
    client = port.client()
    metadata = await say(client, "ModelMetadata", name="default")
    described = [
        [(one.name, one.datatype, list(one.shape)) for one in side] for side in (metadata.inputs, metadata.outputs)
    ]
    assert described == [
        [("query", "FP32", [-1, 2]), ("ids", "INT64", [-1, -1]), ("texts", "BYTES", [-1])],
        [("scores", "BF16", [-1, -1, 3]), ("more", "BYTES", [-1])],
    ]
    config = (await say(client, "ModelConfig", name="default")).config
    kinds = (
        config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"].enum_type.values_by_number
    )
    configured = [
        [(one.name, kinds[one.data_type].name, list(one.dims)) for one in side]
        for side in (config.input, config.output)
    ]
    assert configured == [
        [("query", "TYPE_FP32", [2]), ("ids", "TYPE_INT64", [-1]), ("texts", "TYPE_STRING", [])],
        [("scores", "TYPE_BF16", [-1, 3]), ("more", "TYPE_STRING", [])],
    ]
    assert config.max_batch_size == port.gateway.served["default"].settings.max_batch_size


@on_port(max_body_bytes=1 << 23)
async def test_large_tensors_go_in_and_out_whole_and_nothing_stays_counted(port: Port) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "FP32", (-1,)),)))
    free = port.gateway.quotas.bytes.free
    client = port.client(**{"grpc.max_receive_message_length": -1})
    for size in (150_000, 1_500_000):
        data = np.random.default_rng(size).random(size, "<f4").tobytes()
        for one in (
            asked({"x": ("FP32", (1, size), data)}),
            typed("FP32", [1, size], fp32_contents=np.frombuffer(data, "<f4").tolist()),
        ):
            answer = answered(await client.ask(INFER, one.SerializeToString()))
            assert told(answer) == {"x": ("FP32", (1, size), data)}
    assert port.gateway.quotas.bytes.free == free


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        found = work()
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_raw_tensor_is_copied_once_on_its_way_in_and_once_on_its_way_out() -> None:
    known = ServedModels(["default"], Settings())
    known.learn(model(inputs=(TensorSpec("x", "FP32", (-1,)),)))
    size = 600_000
    body = asked({"x": ("FP32", (1, size // 4), bytes(size))}).SerializeToString()
    read = infer_reader(Settings()).at_once
    exchange, peak = peak_of(lambda: read(body, RequestOptions(1.0), known))
    assert size < peak < 1.1 * size
    assert isinstance(exchange.input, Tensors)
    (_, answer), peak = peak_of(lambda: exchange.write(Outcome("", [exchange.input], 0.0, "1", [None])))
    assert size < peak < 1.1 * size
    assert told(answered(answer)) == {"x": ("FP32", (1, size // 4), bytes(size))}


@pytest.mark.parametrize(
    ("inputs", "text", "shape"),
    [((FOUR,), "[1, 2.5, -3, 4e2]", (1, 4)), ((FOUR,), " [[1, 2, 3, 4], [5, 6, 7, 8]]", (2, 4)), ((TensorSpec("n", "INT8"),), "-7", (1,))],
)  # fmt: skip
async def test_predict_takes_and_gives_nested_arrays_in_json(
    port: Port, inputs: Sequence[TensorSpec], text: str, shape: tuple[int, ...]
) -> None:
    port.gateway.served.learn(model(inputs=tuple(inputs)))
    answer = predicted(await port.client().ask(PREDICT, predict(text)))
    assert json.loads(answer.output) == json.loads(text)
    (found,) = arrays(port.gateway.asked[0].input).values()
    assert found[1] == shape


async def test_predict_takes_several_inputs_as_an_object_by_name(port: Port) -> None:
    port.gateway.served.learn(model(inputs=NAMED))
    text = '{"query": [1, 2], "ids": [7], "texts": "a"}'
    answer = predicted(await port.client().ask(PREDICT, predict(text)))
    assert json.loads(answer.output) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abc", "the input is not JSON text: JSON is malformed"),
        ("", "the input is not JSON text"),
        (b"\xff", "the input is not JSON text"),
        ('"abc"', "the data of the input `x` are `str`; expected one row, FP32 of shape [4], or an array of rows"),
        ("[1, 2]", "the input `x` is FP32 of shape [1, 2]; the model takes `x`, FP32 of shape [-1, 4]"),
        ("[1, 2, 3, null]", "the data of the input `x` are not FP32: Expected `float`, got `null`, at element 3"),
        ("[" * 100_000, "the input"),
    ],
)
@on_port(whole=True)
async def test_predict_refuses_what_is_no_tensor_of_the_model(port: Port, text: str | bytes, says: str) -> None:
    port.stand.real.served.learn(model(inputs=(FOUR,)))
    found = await port.client().fail(PREDICT, predict(text))
    assert (found.status, found.trailers["x-headway-error"]) == (Status.INVALID_ARGUMENT, "BAD_REQUEST")
    assert says in found.details
    assert port.stand.runs == []


async def test_predict_says_which_numbers_json_has_not(port: Port) -> None:
    port.gateway.served.learn(model("text"))
    port.gateway.output = tensors(True, y=np.array([[1, np.nan]], "f4"))
    found = await port.client().fail(PREDICT, predict("a"))
    assert (found.status, found.trailers["x-headway-error"]) == (Status.INTERNAL, "BACKEND_ERROR")
    assert found.details == (
        "the output `y` holds NaN or an infinity, which JSON has not; ask for it in binary, by ModelInfer of the Open Inference Protocol"
    )


async def test_predict_writes_a_large_tensor_in_turns(port: Port) -> None:
    port.gateway.served.learn(model("text"))
    rows = np.arange(300_000, dtype="f4").reshape(1, -1, 3)
    port.gateway.output = tensors(True, y=rows)
    answer = predicted(await port.client().ask(PREDICT, predict("a")))
    assert json.loads(answer.output) == rows[0].tolist()


@pytest.mark.parametrize("numbers", [10, 100_000])
@on_port({"secret": {"rate": 1000.0, "burst": 10.0}}, whole=True)
async def test_a_long_message_is_charged_its_reading(port: Port, monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """A limit of a thousand messages of a megabyte would otherwise buy most of a minute of the event loop."""
    port.stand.real.served.learn(model(inputs=(TensorSpec("x", "INT64", (-1,)),)))
    charged: list[int] = []
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    bearer, client = (("authorization", "Bearer secret"),), port.client()
    await client.call(PREDICT, predict(json.dumps([1] * numbers)), bearer)
    await client.call(INFER, typed("INT64", [1, numbers], int64_contents=[1] * numbers).SerializeToString(), bearer)
    assert charged == ([] if numbers == 10 else [4, 1])


PAGES = predict(json.dumps([1] * 100_000))
"""Message that is charged as four requests."""


@pytest.mark.parametrize("as_stream", [False, True])
@on_port({"secret": {"rate": 1.0, "burst": 1.0}}, whole=True)
async def test_a_long_message_within_the_limit_is_not_refused_for_its_own_pages(port: Port, as_stream: bool) -> None:
    """The pages are charged behind their request, as over HTTP: else a key of few at once could send no long message at all."""
    port.stand.real.served.learn(model(inputs=(TensorSpec("x", "INT64", (-1,)),)))
    bearer, client = (("authorization", "Bearer secret"),), port.client()
    if as_stream:
        many = typed("INT64", [1, 130_000], int64_contents=[1] * 130_000).SerializeToString()
        call = client.stream(STREAM, bearer)
        answers = []
        for _ in range(2):
            await call.write(many)
            answers.append(streamed(await call.read()))
        first, second = answers
        assert first.error_message != second.error_message
        assert "over the limit" in second.error_message and "over the limit" not in first.error_message
    else:
        await client.ask(PREDICT, PAGES, bearer)
        assert (await client.fail(PREDICT, PAGES, bearer)).status is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("as_stream", [False, True])
@on_port({"secret": {"rate": 1000.0, "burst": 10.0}})
async def test_a_call_that_ends_while_its_message_is_read_pays_for_the_pages_that_were(
    port: Port, monkeypatch: pytest.MonkeyPatch, as_stream: bool
) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "INT64", (-1,)),)))
    charged, stopped, take, taken = list[int](), asyncio.Event(), MessageTurns.take, itertools.count()

    async def some(turns: MessageTurns, owner: str, work: Callable[[float], Any]) -> Any:
        if next(taken) == (1 if as_stream else 8):
            stopped.set()
            await asyncio.Event().wait()
        return await take(turns, owner, work)

    monkeypatch.setattr(MessageTurns, "take", some)
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    bearer, client = (("authorization", "Bearer secret"),), port.client()
    if as_stream:
        call = client.stream(STREAM, bearer)
        await call.write(typed("INT64", [1, 130_000], int64_contents=[1] * 130_000).SerializeToString())
    else:
        call = client.call(PREDICT, predict(json.dumps([1] * 300_000)), bearer)
    await stopped.wait()
    assert not charged
    call.cancel()
    while not charged:  # noqa: ASYNC110 - the port is in this loop, and has nobody to tell
        await asyncio.sleep(0)
    assert port.gateway.asked == []


async def test_a_message_whose_time_passes_unread_stays_unread(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    port.gateway.served.learn(model(inputs=(TensorSpec("x", "INT64", (-1,)),)))
    seconds = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr("headway.grpc.inference_call.monotonic", lambda: float(next(seconds)))
        found = await port.client().fail(PREDICT, PAGES, (("x-request-timeout-ms", "2000"),))
    assert found.status is Status.DEADLINE_EXCEEDED
    assert found.details == "the total deadline of 2000 ms passed while the body waited for its turn to be read"
    assert port.gateway.asked == []


READ = infer_reader(Settings()).at_once


def message(drawn: list[Drawn], raw: bool, **members: Any) -> bytes:
    """Message of a request with these inputs, whose data are raw, or typed where they can be."""
    asked = Request(model_name="default", **members)
    raw = raw or any(one.tensor.head.datatype not in CONTENTS for one in drawn)
    for one in drawn:
        head = one.tensor.head
        tensor = asked.inputs.add(name=head.name, datatype=head.datatype, shape=head.shape)
        if raw:
            asked.raw_input_contents.append(bytes(one.tensor.data))
        else:
            elements = [each.encode() for each in one.flat] if head.datatype == "BYTES" else one.flat
            getattr(tensor.contents, CONTENTS[head.datatype][0]).extend(elements)
    return bytes(asked.SerializeToString())


def known_by(drawn: list[Drawn], takes: ValueKind | None, *, free: bool) -> ServedModels:
    """Models one of which takes and gives tensors such as these, or of which nothing is known. `free`: the sizes of its axes are."""
    known, heads = ServedModels(["default"], Settings()), [one.tensor.head for one in drawn]
    if takes is not None:
        specs = tuple(TensorSpec(one.name, one.datatype, tuple(-1 if free else size for size in one.shape[1:])) for one in heads)  # fmt: skip
        known.learn(model(inputs=specs, outputs=specs))
    return known


@given(several(), st.booleans(), st.data())
def test_any_tensors_go_in_and_out_byte_for_byte(drawn: list[Drawn], raw: bool, data: st.DataObject) -> None:
    takes = data.draw(st.sampled_from([ValueKind.TENSORS, None]))
    order = data.draw(st.permutations(drawn))
    wanted = order[: data.draw(st.integers(0, len(order)))]
    body = message(drawn, raw, outputs=[{"name": one.tensor.head.name} for one in wanted])
    if data.draw(st.booleans()):  # As a large one is read; the parameter is for the target.
        pad = Request(model_name="default")
        pad.parameters["pad"].string_param = "x" * (1 << 14)
        body += pad.SerializeToString()
    exchange = READ(body, RequestOptions(1.0), known_by(drawn, takes, free=data.draw(st.booleans())))
    if not isinstance(exchange.input, Tensors):
        assert takes is None and len(drawn) == 1 and drawn[0].tensor.head.datatype == "BYTES"
        return
    assert [(one.head, bytes(one.data)) for one in unpack(exchange.input)] == [one.tensor for one in drawn]
    copies = data.draw(st.integers(1, 3))
    _, answer = exchange.write(Outcome("", [exchange.input] * copies, 0.0, "1", [None] * copies))
    assert isinstance(answer, bytes)
    heads = {one.tensor.head.name: one.tensor for one in wanted or drawn}
    assert list(told(answered(answer)).items()) == [
        (name, (head.datatype, (copies * head.shape[0], *head.shape[1:]), bytes(content) * copies))
        for name, (head, content) in heads.items()
    ]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[Drawn], bytes]:
    """Tensors, and a message with them that is damaged in some places."""
    drawn = draw(several())
    body = bytearray(message(drawn, draw(st.booleans()), outputs=[{"name": drawn[0].tensor.head.name}]))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 3))] = draw(PIECES)
    return drawn, bytes(body)


PIECES = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"FP16", b"JSON", b"BOOL", b"\xff" * 9 + b"\1", b"\x80" * 11, b"\x0b", b"\x0c", b"\x3a\0", b"\x2a\0", b"\0" * 9]),
)  # fmt: skip
"""What damages a message."""
REFUSED = {Status.OK, Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.RESOURCE_EXHAUSTED}
"""Statuses that a damaged message may have."""


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(damaged(), min_size=1, max_size=30))
def test_damaged_messages_leave_their_connection_intact(drawn: list[tuple[list[Drawn], bytes]]) -> None:
    async def main(port: Port) -> None:
        client = port.client()
        learn = port.stand.real.served.learn
        specs = tuple(
            TensorSpec(one.tensor.head.name, one.tensor.head.datatype, one.tensor.head.shape[1:]) for one in drawn[0][0]
        )
        for inputs in ((), specs):
            learn(model(inputs=inputs))
            calls = [client.call(way, body) for _, body in drawn for way in (INFER, PREDICT)]
            assert {await call.code() for call in calls} <= REFUSED
            stream = client.stream(STREAM)
            for _, body in drawn:
                await stream.write(body)
            await stream.done_writing()
            for _ in drawn:
                assert streamed(await asyncio.wait_for(stream.read(), 10)).error_message != UNFORESEEN
            assert await stream.code() is Status.OK
        learn(model("text", "text"))
        await client.ask(INFER, request("a").SerializeToString())

    served(main, whole=True)
