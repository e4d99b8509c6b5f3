"""The Open Inference Protocol over REST: models with tensors, and round trips of random tensors."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.tensors import Tensor, TensorHead, join_elements, pack, rows_of, unpack
from headway.doors.exchange import Outcome
from headway.gateway.served_model import ServedModel
from headway.model import Tensors, TensorSpec, TokenCount, Value, ValueKind
from headway.oip.rest.answers import Answerer
from headway.oip.rest.bodies import TensorsRequest
from headway.oip.rest.requests import request_reader
from tests.http.stand import LENGTH, Stand, on_stand, post
from tests.http.test_oip import PATH
from tests.http.test_oip import request_of as infer
from tests.oip.arrays import DTYPES, Drawn, body_of, several

X, IDS, NAMES = TensorSpec("x", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)), TensorSpec("names", "BYTES", ())


def learn(
    stand: Stand, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec] = (), takes: str = "tensors"
) -> None:
    """Make the model return tensors, and also take them unless `takes` says otherwise."""
    stand.learn(takes, "tensors", inputs=tuple(inputs), outputs=tuple(outputs or inputs))


def tensor(spec: TensorSpec, shape: Sequence[int], data: Any = None, **more: Any) -> dict[str, Any]:
    given = {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": data} | more
    return {name: value for name, value in given.items() if value is not None}


def behind(spec: TensorSpec, shape: Sequence[int], size: int) -> dict[str, Any]:
    return tensor(spec, shape, parameters={"binary_data_size": size})


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def integers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


@pytest.mark.parametrize("data", [[1, 2.5, -3, 0], [[1, 2.5], [-3, 0]]])
async def test_numbers_in_json_are_one_entry_and_are_answered_flat(stand: Stand, data: Any) -> None:
    learn(stand, [X])
    named = tensor(X, [2, 2], data, name="the only one has any name")
    answer, _ = (await stand.ask(infer(named, id="7", parameters={"heat": 1}))).parts
    output = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.5, -3.0, 0.0]}
    assert answer == {"model_name": "default", "model_version": "1", "outputs": [output], "id": "7"}
    [asked] = stand.gateway.asked
    assert isinstance(asked.input, Tensors)
    assert (rows_of(asked.input), asked.parameters) == (2, b'{"heat": 1}')


async def test_inputs_of_several_datatypes_come_in_json_and_behind_it(stand: Stand) -> None:
    learn(stand, [X, IDS, NAMES])
    elements, numbers = join_elements([b"\xff", b""]), integers(1, 2, 3, 4, 5, 6)
    asked = infer(
        behind(NAMES, [2], len(elements)),
        tensor(X, [2, 2], [[1, 2], [3, 4]]),
        behind(IDS, [2, 3], len(numbers)),
        binary=elements + numbers,
        outputs=[{"name": "names", "parameters": {"binary_data": True}}, {"name": "ids"}],
    )
    answer, data = (await stand.ask(asked)).parts
    assert answer["outputs"] == [
        {"name": "names", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(elements)}},
        {"name": "ids", "datatype": "INT64", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]},
    ]
    assert data == elements
    [entry] = stand.gateway.asked
    assert isinstance(entry.input, Tensors)
    assert [bytes(one.data) for one in unpack(entry.input)] == [elements, floats(1, 2, 3, 4), numbers]
    learn(stand, [X, IDS])
    asked = infer(tensor(X, [1, 2], [1, 2]), tensor(IDS, [1, 1], [3]), parameters={"binary_data_output": True})
    answer, data = (await stand.ask(asked)).parts
    assert [one["parameters"] for one in answer["outputs"]] == [{"binary_data_size": 8}] * 2
    assert data == floats(1, 2) + integers(3)


async def test_a_narrower_datatype_travels_as_it_is(stand: Stand) -> None:
    learn(stand, [X])
    data = struct.pack("<2h", -3, 300)
    sent = TensorSpec("x", "INT16")
    for body in (infer(tensor(sent, [1, 2], [-3, 300])), infer(behind(sent, [1, 2], 4), binary=data)):
        assert (await stand.ask(body)).status == 200
        input = stand.gateway.asked[-1].input
        assert isinstance(input, Tensors)
        [found] = unpack(input)
        assert (found.head, bytes(found.data)) == (TensorHead("x", "INT16", (1, 2)), data)


async def test_a_body_of_data_alone_is_the_only_input(stand: Stand) -> None:
    learn(stand, [X])
    answer, data = (await stand.ask(post(floats(1, 2, 3, 4), PATH, f"{LENGTH}: 0"))).parts
    assert (answer["outputs"][0]["shape"], data) == ([2, 2], floats(1, 2, 3, 4))
    wrong = await stand.ask(post(b"abc", PATH, f"{LENGTH}: 0"))
    assert (wrong.status, "the body consists only of data; its size, 3 bytes" in wrong.json["error"]) == (400, True)


async def test_a_model_that_is_not_known_yet_gets_tensors_of_any_kind(stand: Stand) -> None:
    served = stand.gateway.served["default"]
    served.takes = served.gives = None
    for asked in (infer(tensor(X, [1, 2], [1, 2])), infer(tensor(X, [1, 2], [1, 2]), tensor(IDS, [1, 1], [7]))):
        assert (await stand.ask(asked)).parts[0]["outputs"][0]["data"] == [1.0, 2.0]
    assert (await stand.ask(infer(tensor(NAMES, [1], ["a"])))).parts[0]["outputs"][0]["data"] == ["A"]
    assert [type(one.input) for one in stand.gateway.asked] == [Tensors, Tensors, str]
    for count in (1, 2):
        texts = tensor(NAMES, [count], ["a"] * count)
        _, data = (
            await stand.ask(infer(texts, outputs=[{"name": "OUTPUT", "parameters": {"binary_data": True}}]))
        ).parts
        assert data == join_elements([b"A"] * count)
        wrong = await stand.ask(infer(texts, outputs=[{"name": "y"}]))
        assert (wrong.status, "no output `y`; the only one is `OUTPUT`" in wrong.json["error"]) == (400, True)
    assert (await stand.ask(post(b"a text", PATH, f"{LENGTH}: 0"))).parts[1][4:] == b"A TEXT"


@pytest.mark.parametrize("count", [1, 3])
async def test_outputs_of_texts_are_joined_to_tensors(stand: Stand, count: int) -> None:
    learn(stand, (), [TensorSpec("embedding", "FP32", (2,))], takes="text")
    stand.gateway.tokens = TokenCount(5)
    stand.gateway.output = pack(
        [Tensor(TensorHead("embedding", "FP32", (1, 2)), floats(0.5, 1)), Tensor(TensorHead("n", "INT8", (1,)), b"\7")],
        single=True,
    )
    texts = tensor(NAMES, [count, 1], [[str(number)] for number in range(count)])
    answer, _ = (await stand.ask(infer(texts))).parts
    assert answer["outputs"] == [
        {"name": "embedding", "datatype": "FP32", "shape": [count, 2], "data": [0.5, 1] * count},
        {"name": "n", "datatype": "INT8", "shape": [count], "data": [7] * count},
    ]
    assert answer["parameters"] == {"tokens_used": 5 * count}
    assert len(stand.gateway.asked) == count
    wanted = [{"name": "embedding", "parameters": {"binary_data": True}}]
    answer, data = (await stand.ask(infer(texts, outputs=wanted))).parts
    assert ([one["name"] for one in answer["outputs"]], data) == (["embedding"], floats(0.5, 1) * count)
    wrong = await stand.ask(infer(texts, outputs=[{"name": "OUTPUT"}]))
    assert "no output `OUTPUT`; the model returns `embedding`" in wrong.json["error"]


async def test_tensors_are_written_as_such_whatever_is_known_of_the_model(stand: Stand) -> None:
    stand.gateway.output = pack([Tensor(TensorHead("y", "FP32", (1, 1)), floats(1))])
    for binary in (False, True):
        asked = infer(tensor(NAMES, [1], ["a"]), parameters={"binary_data_output": binary})
        answer, data = (await stand.ask(asked)).parts
        assert answer["outputs"][0]["name"] == "y"
        assert (answer["outputs"][0].get("data"), data) == ((None, floats(1)) if binary else ([1.0], b""))


async def test_requests_that_differ_in_data_and_wanted_outputs_alone_are_each_read_and_answered(stand: Stand) -> None:
    """The parsed JSON object and the start of the answer are cached."""
    learn(stand, [X, IDS])
    inputs = behind(X, [2, 2], 16), behind(IDS, [2, 1], 16)
    all_: dict[str, Any] = {"parameters": {"binary_data_output": True}}
    for number, names in enumerate([(), (), ("ids",), ("ids", "x"), ("ids",), ("x",), ()]):
        data = {"x": floats(number, 1, 2, 3), "ids": integers(number, 5)}
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        asked = infer(*inputs, binary=b"".join(data.values()), **({"outputs": outputs} if outputs else all_))
        answer, told = (await stand.ask(asked)).parts
        assert told == b"".join(data[name] for name in names or data)
        shapes = {"x": [2, 2], "ids": [2, 1]}
        assert [(one["name"], one["shape"]) for one in answer["outputs"]] == [
            (name, shapes[name]) for name in names or data
        ]
    short = await stand.ask(infer(*inputs, binary=bytes(31), **all_))
    assert (short.status, "15 bytes are left" in short.body.decode()) == (400, True)
    learn(stand, [X])
    assert (await stand.ask(infer(*inputs, binary=bytes(32), **all_))).status == 400
    assert len(stand.gateway.asked) == 7


@pytest.mark.parametrize("count", [1 << 18, (1 << 18) + 1, (1 << 18) + 4])
async def test_a_large_tensor_is_packed_as_any_other(stand: Stand, count: int) -> None:
    """One that needs no padding stays in the receive buffer."""
    spec = TensorSpec("x", "UINT8", (-1,))
    learn(stand, [spec])
    for first in (b"\1", b"\2"):
        data = first.ljust(count, b"\3")
        assert (await stand.ask(infer(behind(spec, [1, count], count), binary=data))).status == 200
        assert stand.gateway.asked[-1].input == pack([Tensor(TensorHead("x", "UINT8", (1, count)), data)])


@on_stand(max_body_bytes=4_000_000)
async def test_large_tensors_go_in_and_out(stand: Stand) -> None:
    spec, count = TensorSpec("image", "FP32", (-1, 3)), 150_000
    learn(stand, [spec])
    numbers = [number / 8 for number in range(count)]
    given, data = behind(spec, [1, count // 3, 3], 4 * count), floats(*numbers)
    assert (await stand.ask(infer(given, binary=data, parameters={"binary_data_output": True}))).parts[1] == data
    assert (await stand.ask(infer(given, binary=data))).parts[0]["outputs"][0]["data"] == numbers


GOOD = tensor(X, [1, 2], [1, 2])
NUMBERS = tensor(IDS, [1, 3], [1, 2, 3])
WRONG: list[tuple[Any, str]] = [
    ([GOOD] * 10_000, "expected 1 to 64"),
    ([GOOD, NUMBERS | {"datatype": "UINT64"}], "the model takes `ids`, INT64 of shape [-1, -1]. Send INT64: in numpy use `.astype('int64')`"),
    ([GOOD, NUMBERS | {"shape": [1, 4]}], "the data of the input `ids` are of shape [3]; expected shape [1, 4]"),
    ([GOOD, NUMBERS | {"shape": [1, 2**63]}], "at `$.inputs[1].shape[1]`"),
    ([GOOD, NUMBERS | {"data": [1, 2, 3.5]}], "the data of the input `ids` are not INT64: Expected `int`, got `float`, at element 2"),
    ([GOOD, behind(IDS, [1, 3], 24)], f"the input `ids` has `binary_data_size`, but the header field {LENGTH} is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "says"), WRONG, ids=[says for _, says in WRONG])
async def test_a_wrong_input_is_told_which_and_what_was_expected(stand: Stand, inputs: Any, says: str) -> None:
    learn(stand, [X, IDS])
    answer = await stand.ask(infer(*inputs))
    assert (answer.status, list(answer.json)) == (400, ["error"])
    assert says in answer.json["error"]
    assert len(answer.body) < 600
    assert not stand.gateway.asked


@pytest.mark.parametrize(
    ("sizes", "data", "says"),
    [
        ((8, 24), bytes(31), "the `binary_data_size` of the input `ids` is 24, but 23 bytes are left after the JSON object"),
        ((8, 24), bytes(33), "33 bytes follow the JSON object, but the inputs have a total `binary_data_size` of 32"),
        ((None, 24), bytes(32), "32 bytes follow the JSON object, but the inputs have a total `binary_data_size` of 24"),
        ((-1, 24), bytes(32), "`int` >= 0 - at `$.inputs[0].parameters.binary_data_size`"),
    ],
)  # fmt: skip
async def test_binary_data_that_do_not_fit_are_told(stand: Stand, sizes: Any, data: bytes, says: str) -> None:
    learn(stand, [X, IDS])
    x = GOOD if sizes[0] is None else behind(X, [1, 2], sizes[0])
    ids = NUMBERS if sizes[1] is None else behind(IDS, [1, 3], sizes[1])
    answer = await stand.ask(infer(x, ids, binary=data))
    assert (answer.status, says in answer.json["error"]) == (400, True), answer.json
    assert not stand.gateway.asked


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([{"name": "y"}], "there is no output `y`; the model returns `x`, `ids`"),
        ([{"name": "x"}] * 70, "lists more than 64 outputs"),
        ([{"name": "x"}, {"name": 5}], "Expected `str`, got `int` - at `$.outputs[1].name`"),
    ],
)
async def test_wrong_outputs_are_told_before_anything_is_queued(stand: Stand, outputs: Any, says: str) -> None:
    learn(stand, [X, IDS])
    answer = await stand.ask(infer(GOOD, NUMBERS, outputs=outputs))
    assert (answer.status, says in answer.json["error"]) == (400, True), answer.json
    assert not stand.gateway.asked


SETTINGS = Settings()
READ = request_reader(SETTINGS)
WAYS = ("nested", "flat", "binary")


def model(drawn: list[Drawn], takes: ValueKind | None = ValueKind.TENSORS, *, free: bool = False) -> ServedModel:
    """Return a model that takes and returns tensors like these or, if `free`, with any axis sizes."""
    served = ServedModel(SETTINGS, lambda: 0.5, alone=True)
    served.takes = served.gives = takes
    if takes is ValueKind.TENSORS:
        heads = [one.tensor.head for one in drawn]
        served.inputs = served.outputs = tuple(
            TensorSpec(one.name, one.datatype, tuple(-1 if free else size for size in one.shape[1:])) for one in heads
        )
    return served


def written(asked: TensorsRequest, outputs: list[Value]) -> tuple[int | None, bytes]:
    """Return the answer, and the length of its JSON object if binary data follows it."""
    answerer = Answerer("m", asked.shape, asked.wishes.binary, ValueKind.TENSORS, asked.id, asked.wanted)
    fields, body = answerer.write(Outcome("req_1", outputs, 1.0, "1", [None] * len(outputs)))
    length = next((int(line.split()[1]) for line in fields.split(b"\r\n") if line.startswith(b"inference-")), None)
    return length, body if isinstance(body, bytes) else b"".join(body)


def read_back(length: int | None, body: bytes) -> dict[str, bytes]:
    at, found = length, {}
    for output in json.loads(body[:length])["outputs"]:
        if size := output.get("parameters", {}).get("binary_data_size"):
            assert at is not None
            found[output["name"]] = body[at : at + size]
            at += size
        elif "data" not in output:
            found[output["name"]] = b""
        else:
            found[output["name"]] = packed(output["data"], output["datatype"])
    assert at is None or at == len(body)
    return found


def packed(data: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return join_elements(one.encode() for one in data)
    if datatype == "BF16":
        return (np.array(data, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array(data, DTYPES[datatype]).tobytes()


@given(several(), st.data())
def test_any_tensors_go_in_and_out_byte_for_byte(drawn: list[Drawn], data: st.DataObject) -> None:
    ways = [data.draw(st.sampled_from(WAYS)) for _ in drawn]
    takes = data.draw(st.sampled_from([ValueKind.TENSORS, None]))
    order = data.draw(st.permutations(drawn))
    wanted = order[: data.draw(st.integers(1, len(order)))] if data.draw(st.booleans()) else []
    members: dict[str, Any] = {"parameters": {"binary_data_output": data.draw(st.booleans())}} if wanted else {}
    if wanted:
        flags = st.sampled_from([{}, {"binary_data": True}, {"binary_data": False}])
        members["outputs"] = [{"name": one.tensor.head.name, "parameters": data.draw(flags)} for one in wanted]
    body, length = body_of(drawn, ways, **members)
    asked = READ(body, length, model(drawn, takes, free=data.draw(st.booleans())))
    if not isinstance(asked, TensorsRequest):
        assert takes is None and len(drawn) == 1 and drawn[0].tensor.head.datatype == "BYTES"
        return
    assert [(one.head, bytes(one.data)) for one in unpack(asked.value)] == [one.tensor for one in drawn]
    copies = data.draw(st.integers(1, 3))
    length, answer = written(asked, [asked.value] * copies)
    told = [(one["name"], tuple(one["shape"])) for one in json.loads(answer[:length])["outputs"]]
    heads = [one.tensor.head for one in wanted or drawn]
    assert told == [(head.name, (copies * head.shape[0], *head.shape[1:])) for head in heads]
    assert read_back(length, answer) == {
        one.tensor.head.name: bytes(one.tensor.data) * copies for one in wanted or drawn
    }
