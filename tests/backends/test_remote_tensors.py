"""Tensors to and from remote APIs, byte for byte, over HTTP and gRPC."""

import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.grpc import GrpcBackend
from headway.backends.http import HttpBackend
from headway.backends.remote.backend import rows_of_each
from headway.config.target import RemoteTarget
from headway.core.tensors import BYTES, JSON, SIZES, Tensor, TensorHead, count_of, join_elements, pack, unpack
from headway.core.values import as_json
from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs
from headway.dialects.table import reach
from headway.model import ItemResult, Tensors, TensorSpec, Value, ValueKind
from tests.backends.entries import batch
from tests.backends.grpc_remote import ANSWER, ASKED, Specs, metadata, served_grpc
from tests.backends.remote import served

LONG = 30.0
DATATYPES = tuple(one for one in SIZES if one != JSON)


def json_metadata(inputs: Specs, outputs: Specs) -> bytes:
    named = {"inputs": inputs, "outputs": outputs}
    return json.dumps(
        {key: [{"name": n, "datatype": d, "shape": list(s)} for n, d, s in specs] for key, specs in named.items()}
    ).encode()


def known(way: str, inputs: Specs, outputs: Specs) -> Any:
    if way == "http":
        return reach("http://h/v2/models/m/infer").dialect.learn(json_metadata(inputs, outputs))
    return reach("grpc://h:1/m").dialect.learn(metadata(inputs, outputs))


def http_echo(body: bytes, length: int) -> tuple[bytes, int]:
    """Return an answer that echoes each input as an output, with `in` in its name replaced by `out`."""
    asked = json.loads(body[:length])
    outputs = [{**one, "name": one["name"].replace("in", "out")} for one in asked["inputs"]]
    head = json.dumps({"model_name": "m", "outputs": outputs}).encode()
    return head + body[length:], len(head)


def grpc_echo(body: bytes) -> bytes:
    asked = ASKED.FromString(body)
    said = ANSWER(model_name="m", raw_output_contents=asked.raw_input_contents)
    for one in asked.inputs:
        said.outputs.add(name=one.name.replace("in", "out"), datatype=one.datatype, shape=one.shape)
    return bytes(said.SerializeToString())


def echoed(dialect: Dialect, inputs: Sequence[Value]) -> list[ItemResult]:
    """Return the items for inputs that are echoed."""
    call, rows = dialect.encode(inputs, [b""] * len(inputs)), rows_of_each(inputs)
    if not call.headers:
        return dialect.decode(grpc_echo(call.body), len(inputs), -1, rows)
    body, length = http_echo(call.body, int(call.headers["Inference-Header-Content-Length"]))
    return dialect.decode(body, len(inputs), length, rows)


def tensor(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    return Tensor(TensorHead(name, datatype, tuple(shape)), data)


def floats(*rows: Sequence[float], name: str = "in", single: bool = False) -> Tensors:
    import numpy as np

    array = np.array(rows, "<f4")
    return pack([tensor(name, "FP32", array.shape, array.tobytes())], single=single)


def contents(value: Value | None) -> list[tuple[TensorHead, bytes]]:
    assert isinstance(value, Tensors)
    return [(one.head, bytes(one.data)) for one in unpack(value)]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Specs, list[Tensors]]:
    """Draw tensor specs, and values whose rows all have the same shape."""
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    shapes = []
    for place in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        free = [draw(st.sampled_from([size, -1])) for size in shape]
        specs.append((f"in{place}", draw(st.sampled_from(DATATYPES)), (-1, *free)))
        shapes.append(shape)
    if len(specs) == 1 and specs[0][1] == BYTES and len(shapes[0]) < 2:  # Such a model takes strings.
        specs, shapes = [("in0", BYTES, (-1, 2))], [[2]]
    values = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 3))
        tensors = []
        for (name, datatype, _), shape in zip(specs, shapes, strict=True):
            count = count_of((rows, *shape))
            size = SIZES[datatype] * count
            data = (
                draw(st.binary(min_size=size, max_size=size))
                if datatype != BYTES
                else join_elements(draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count)))
            )
            tensors.append(tensor(name, datatype, (rows, *shape), data))
        values.append(pack(tensors, single=rows == 1 and draw(st.booleans())))
    return specs, values


@pytest.mark.parametrize("way", ["http", "grpc"])
@given(request=requests())
def test_tensors_come_back_byte_for_byte_whatever_they_are(way: str, request: tuple[Specs, list[Tensors]]) -> None:
    specs, values = request
    outputs = [(name.replace("in", "out"), datatype, shape) for name, datatype, shape in specs]
    dialect = known(way, specs, outputs)
    assert dialect.signature.takes is dialect.signature.gives is ValueKind.TENSORS
    for value, item in zip(values, echoed(dialect, values), strict=True):
        expected = [
            (TensorHead(head.name.replace("in", "out"), head.datatype, head.shape), data)
            for head, data in contents(value)
        ]
        assert contents(item.output) == expected
        assert rows_of_each([value]) == rows_of_each([item.output or ""])


FP32 = ("FP32", (-1, 2))


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_narrower_numbers_become_those_that_the_remote_model_takes(way: str) -> None:
    dialect = known(way, [("in0", "FP64", (-1, 2))], [("out0", "FP64", (-1, 2))])
    values = [floats([0.5, -1]), pack([tensor("in", "INT16", (1, 2), struct.pack("<2h", 7, -300))])]
    items = [contents(one.output)[0] for one in echoed(dialect, values)]
    assert items == [(TensorHead("out0", "FP64", (1, 2)), struct.pack("<2d", *row)) for row in ((0.5, -1), (7, -300))]


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_the_signature_is_that_of_the_metadata(way: str) -> None:
    inputs = [("x", "FP32", (-1, 4)), ("ids", "INT64", (-1, -1))]
    outputs = [("y", "FP16", (-1, 2)), ("words", BYTES, (-1, 1))]
    found = known(way, inputs, outputs).signature
    assert found.inputs == (TensorSpec("x", "FP32", (4,)), TensorSpec("ids", "INT64", (-1,)))
    assert found.outputs == (TensorSpec("y", "FP16", (2,)), TensorSpec("words", BYTES, (1,)))
    assert found.warm_up_input is None, "of what length a free axis may be is not known"
    [warm_up] = contents(known(way, [("x", *FP32)], [("y", *FP32)]).signature.warm_up_input)
    assert warm_up == (TensorHead("x", "FP32", (1, 2)), bytes(8))


@pytest.mark.parametrize(
    ("inputs", "outputs", "takes", "gives"),
    [
        ([("t", BYTES, (-1,))], [("e", "FP32", (-1, 384))], "text", "tensors"),
        ([("t", BYTES, (-1, 1))], [("e", "FP32", (-1,)), ("OUTPUT", BYTES, (-1, 1))], "text", "text"),
        ([("t", BYTES, (-1, 1))], [("e", "FP32", (-1,)), ("f", BYTES, (-1, 1))], "text", "tensors"),
        ([("t", BYTES, (-1, 1))], [("e", "STRANGE", (-1,)), ("f", BYTES, (-1, 1))], "text", "text"),
        ([("t", BYTES, (-1, 1))], [], "text", "text"),
        ([("t", BYTES, (-1, 3))], [("f", BYTES, (-1, 1))], "tensors", "tensors"),
        ([("x", "BF16", (-1,))], [], "tensors", "tensors"),
        ([], [("f", BYTES, (-1, 2))], "text", "tensors"),
        ([], [], "text", "text"),
    ],
)
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_metadata_say_a_models_kinds(way: str, inputs: Specs, outputs: Specs, takes: str, gives: str) -> None:
    found = known(way, inputs, outputs).signature
    assert (found.takes.value, found.gives.value) == (takes, gives)


@pytest.mark.parametrize(
    ("inputs", "outputs", "what"),
    [
        (
            [("x", "FP32", (1, 4))],
            [],
            r"`x` .* has the shape \[1, 4\], which has no axis for the batch. .*-1 as its first axis",
        ),
        ([("x", "FP32", ())], [], r"has the shape \[\], which has no axis"),
        (
            [("x", "STRING", (-1,))],
            [],
            "has the datatype `STRING`, which cannot be sent. Serve it there with one of BOOL",
        ),
        ([], [("y", "STRING", (-1,))], r"returns 1 outputs \(`y`\), none of which can be read"),
        ([(f"x{n}", "FP32", (-1,)) for n in range(65)], [], "takes 65 inputs; at most 64"),
    ],
)
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_model_that_cannot_be_asked_is_refused(way: str, inputs: Specs, outputs: Specs, what: str) -> None:
    with pytest.raises(BadMetadata, match=what):
        known(way, inputs, outputs)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"datatype": "FP64"}, "a datatype other than FP32"),
    ({"shape": [2, 3]}, r"an output of shape \[2, 3\]; the metadata says \[-1, 2\]"),
    ({"shape": [2]}, r"an output of shape \[2\]; the metadata says \[-1, 2\]"),
    ({"shape": [3, 2]}, "3 outputs for 2 inputs"),
    ({"shape": [-2, 2]}, "an impossible shape"),
    ({"shape": []}, "an impossible shape"),
    ({"name": "z"}, "whose name is not in the model's metadata"),
]


@pytest.mark.parametrize("way", ["http", "grpc"])
@pytest.mark.parametrize(("other", "what"), WRONG)
def test_an_answer_of_other_tensors_is_refused_whole(way: str, other: dict[str, Any], what: str) -> None:
    dialect = known(way, [("in", *FP32)], [("out", *FP32)])
    said = {"name": "out", "datatype": "FP32", "shape": [2, 2], **other}
    with pytest.raises(NoOutputs, match=what):
        if way == "http":
            head = json.dumps({"outputs": [{**said, "parameters": {"binary_data_size": 16}}]}).encode()
            dialect.decode(head + bytes(16), 2, len(head))
        else:
            answer = ANSWER(raw_output_contents=[bytes(16)])
            answer.outputs.add(**said)
            dialect.decode(answer.SerializeToString(), 2)


@pytest.mark.parametrize(
    ("sizes", "data", "what"),
    [
        ([8, 8], 15, "15 bytes of binary data, but announces 16"),
        ([8, None], 16, "16 bytes of binary data, but does not say how many belong to an output"),
        ([-8, 24], 16, "16 bytes of binary data, but announces 16"),
        ([4, 12], 16, "4 bytes of data, but its shape requires 8"),
        ([8], 8, "no output `b`, which the model's metadata has|whose name is not"),
        ([8, 8, 8], 24, "the same output twice"),
    ],
)
def test_an_answer_of_other_binary_data_is_refused_whole(sizes: list[int | None], data: int, what: str) -> None:
    dialect = known("http", [("in", *FP32)], [("a", *FP32), ("b", *FP32)])
    outputs = [
        {
            "name": name,
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {} if size is None else {"binary_data_size": size},
        }
        for name, size in zip("aba", sizes, strict=False)
    ]
    head = json.dumps({"outputs": outputs}).encode()
    with pytest.raises(NoOutputs, match=what):
        dialect.decode(head + bytes(data), 1, len(head))


def test_typed_contents_are_the_numbers_that_they_say() -> None:
    rows = [("b", "BOOL", (-1,)), ("d", "UINT8", (-1,)), ("e", "FP64", (-1,))]
    outputs: Specs = [*rows, ("a", "INT16", (-1, 2)), ("c", BYTES, (-1, 1))]
    dialect = known("grpc", [("in", *FP32)], outputs)
    answer = ANSWER()
    answer.outputs.add(name="a", datatype="INT16", shape=[2, 2]).contents.int_contents.extend([1, -2, 3, -4])
    answer.outputs.add(name="c", datatype=BYTES, shape=[2, 1]).contents.bytes_contents.extend([b"x", b"\xff"])
    answer.outputs.add(name="b", datatype="BOOL", shape=[2]).contents.bool_contents.extend([True, False])
    answer.outputs.add(name="e", datatype="FP64", shape=[2]).contents.fp64_contents.extend([-2.5, 1e30])
    last = answer.outputs.add(name="d", datatype="UINT8", shape=[2])
    last.contents.uint_contents.extend([255, 0])
    first, second = dialect.decode(answer.SerializeToString(), 2)
    assert as_json(first.output) == b'{"b":true,"d":255,"e":-2.5,"a":[1,-2],"c":["x"]}'
    assert contents(second.output)[4] == (TensorHead("c", BYTES, (1, 1)), join_elements([b"\xff"]))
    last.contents.uint_contents[0] = 256
    with pytest.raises(NoOutputs, match="out of the range of UINT8"):
        dialect.decode(answer.SerializeToString(), 2)


class Calls:
    """A model over HTTP or gRPC that echoes its rows and records the shapes it was sent."""

    def __init__(self, inputs: Specs, outputs: Specs) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.shapes: list[list[list[int]]] = []

    async def http(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(body=json_metadata(self.inputs, self.outputs))
        body, length = await request.read(), int(request.headers["Inference-Header-Content-Length"])
        self.shapes.append([one["shape"] for one in json.loads(body[:length])["inputs"]])
        answer, length = http_echo(body, length)
        return web.Response(body=answer, headers={"Inference-Header-Content-Length": str(length)})

    async def grpc(self, asked: Any, context: Any) -> bytes:
        self.shapes.append([list(one.shape) for one in asked.inputs])
        return grpc_echo(asked.SerializeToString())

    @asynccontextmanager
    async def against(self, way: str, **settings: Any) -> AsyncIterator[HttpBackend | GrpcBackend]:
        given: dict[str, Any] = {"start_timeout": LONG, "rng": lambda: 0.0, **settings}
        served_at = (
            served(self.http, "/v2/models/m{infer:(/infer)?}")
            if way == "http"
            else served_grpc(self.grpc, metadata(self.inputs, self.outputs))
        )
        async with served_at as url:
            kind = HttpBackend if way == "http" else GrpcBackend
            backend = kind(RemoteTarget(url.replace("{infer:(/infer)?}", "/infer")), **given)
            try:
                await backend.start()
                self.shapes.clear()
                yield backend
            finally:
                await backend.stop()


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_rows_go_in_one_call_each_entry_gets_its_own_and_values_that_do_not_fit_fail_alone(way: str) -> None:
    calls = Calls([("in", *FP32)], [("out", *FP32)])
    values: list[Value] = [floats([1, 2], [3, 4]), floats([5, 6], single=True), floats([7, 8], name="x"), b"[[5, 6]]"]
    async with calls.against(way) as backend:
        *items, text, wide = await backend.run(batch(*values, "text", floats([1, 2, 3])), LONG)
    assert [as_json(item.output or "") for item in items] == [
        b"[[1.0,2.0],[3.0,4.0]]",
        b"[5.0,6.0]",
        b"[[7.0,8.0]]",
        b"[[5.0,6.0]]",
    ]
    assert text.output is wide.output is None
    assert "of shape [1, 3]; the model takes `in`, FP32 of shape [-1, 2]" in (wide.error or "")
    assert not wide.fault
    assert calls.shapes == [[[5, 2]]]


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_rows_of_another_shape_and_more_rows_than_a_batch_go_in_calls_of_their_own(way: str) -> None:
    calls = Calls([("in", "FP32", (-1, -1))], [("out", "FP32", (-1, -1))])
    async with calls.against(way, max_rows=3) as backend:
        values = [floats([1, 2], [3, 4]), floats([5]), floats([6, 7], [8, 9]), floats([0, 0]), floats(*[[1.0]] * 5)]
        items = await backend.run(batch(*values), LONG)
        for value, item in zip(values, items, strict=True):
            assert [data for _, data in contents(item.output)] == [data for _, data in contents(value)]
    assert sorted(calls.shapes) == [[[1, 1]], [[2, 2]], [[3, 2]], [[5, 1]]]


@pytest.mark.processes
async def test_a_large_output_is_read_whole_and_one_that_is_too_large_fails_alone() -> None:
    calls = Calls([("in", "UINT8", (-1, -1))], [("out", "UINT8", (-1, -1))])
    async with calls.against("http") as backend:
        large, larger = 5 << 20, 17 << 20
        values = [pack([tensor("in", "UINT8", (1, size), bytes(size))]) for size in (large, larger)]
        one, other = await backend.run(batch(*values), LONG)
        assert contents(one.output) == [(TensorHead("out", "UINT8", (1, large)), bytes(large))]
        assert "the limit is 16777216" in (other.error or "")
        assert other.fault
