"""Tensors on the native routes (JSON rows, named objects, lists, bytes, tasks), and embeddings."""

import base64
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from headway.core.tensors import Tensor, TensorHead, join_elements, pack, unpack
from headway.http.server.connection_context import LARGE
from headway.model import Tensors, TensorSpec, Value
from tests.http.stand import Stand, get, on_stand, post
from tests.http.test_values import ASYNC, RAW

DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "int64": "INT64", "int8": "INT8", "bool": "BOOL"}
FOUR = TensorSpec("x", "FP32", (4,))
NAMED = (TensorSpec("query", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)))
PREDICT, EMBEDDINGS = "/v1/predict", "/v1/embeddings"


def tensors(single: bool = False, **arrays: Any) -> Tensors:
    found = [Tensor(TensorHead(name, DATATYPES[x.dtype.name], x.shape), x.tobytes()) for name, x in arrays.items()]
    return pack(found, single=single)


def asked(value: Any, path: str = "/v1/inference", *fields: str) -> bytes:
    body = {"model_id": "default", "input_data": value} if path == PREDICT else {"input": value}
    return post(json.dumps(body), path, *fields)


def arrays(value: Value) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    assert isinstance(value, Tensors)
    return {one.head.name: (one.head.datatype, one.head.shape, bytes(one.data)) for one in unpack(value)}


@pytest.mark.parametrize("path", ["/v1/inference", "/api/inference", PREDICT])
async def test_one_row_and_several_are_numbers_and_return_as_sent(stand: Stand, path: str) -> None:
    stand.learn("tensors", inputs=(FOUR,))
    for value, rows in (([1, 2.5, -3, 4e2], 1), ([[1, 2, 3, 4]], 1), ([[1, 2, 3, 4], [5, 6, 7, 8]], 2)):
        answer = await stand.ask(asked(value, path))
        assert (answer.status, answer.json["output"]) == (200, value)
        assert arrays(stand.gateway.asked[-1].input) == {"x": ("FP32", (rows, 4), np.array(value, "f4").tobytes())}


@pytest.mark.parametrize(
    ("specs", "value", "says"),
    [
        ((FOUR,), "abc", "the data of the input `x` are `str`; expected one row, FP32 of shape [4], or an array of rows"),
        (NAMED, [1, 2], "expected an object with arrays by name; the model takes `query`, FP32 of shape [-1, 2]; `ids`"),
        (NAMED, {"query": [1, 2], "ids": [[1]]}, "`ids` has an axis of rows, unlike those before it"),
        (NAMED, {"query": [[1, 2], [3, 4]], "ids": [[1]]}, "`query` has 2 rows and `ids` has 1; expected the same number"),
    ],
)  # fmt: skip
@on_stand(whole=True)
async def test_a_wrong_input_says_what_came(stand: Stand, specs: Sequence[TensorSpec], value: Any, says: str) -> None:
    stand.learn("tensors", inputs=specs)
    answer = await stand.ask(asked(value))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert says in answer.json["message"]
    answer = await stand.ask(post(json.dumps({"inputs": [value]})))
    assert says in answer.json["message"] and "$.inputs[0]" in answer.json["message"]
    assert stand.runs == []


@on_stand(whole=True)
async def test_a_list_is_an_entry_for_each_element_with_rows_of_its_own(stand: Stand) -> None:
    stand.learn("tensors", inputs=(FOUR,))
    inputs = [[1, 2, 3, 4], [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 0, 0, 0]]]
    answer = await stand.ask(post(json.dumps({"inputs": inputs})))
    assert (answer.status, answer.json["outputs"]) == (200, inputs)
    assert [run[-6:] for run in stand.runs] == ["[1, 4]", "[2, 4]", "[1, 4]"]


@on_stand(whole=True)
async def test_more_rows_than_a_batch_holds_are_refused(stand: Stand) -> None:
    stand.learn("tensors", inputs=(FOUR,))
    most = stand.settings.max_batch_size
    rows = [[0, 0, 0, 0]] * (most + 1)
    for request, says in (
        (asked(rows), f"{most + 1} rows; at most {most}"),
        (post(json.dumps({"inputs": [rows[1:], rows]})), "$.inputs[1]"),
    ):
        answer = await stand.ask(request)
        assert (answer.status, answer.error, says in answer.json["message"]) == (413, "PAYLOAD_TOO_LARGE", True)
    assert stand.runs == []
    assert (await stand.ask(asked(rows[1:]))).status == 200


@on_stand(max_body_bytes=1 << 24)
async def test_large_bodies_and_answers_are_whole(stand: Stand) -> None:
    stand.learn("tensors", inputs=(TensorSpec("x", "FP64", (-1,)),))
    rows = np.arange(3 * LARGE // 4, dtype="f8").reshape(3, -1) / 7
    for value in (rows.tolist(), rows.T[:32].tolist(), rows.ravel().tolist()):
        answer = await stand.ask(asked(value))
        assert answer.status == 200
        assert answer.json["output"] == value


SCORES, BEST = np.array([[0.5, 1.5]], "f4"), np.array([[1]], "i8")
WORDS = join_elements([b"a", "é".encode()])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (tensors(scores=SCORES, best=BEST), {"scores": [[0.5, 1.5]], "best": [[1]]}),
        (tensors(True, scores=SCORES, best=BEST[0]), {"scores": [0.5, 1.5], "best": 1}),
        (tensors(y=np.zeros((1, 3, 0), "f4")), [[[], [], []]]),
        (tensors(True, y=np.array([True])), True),
        (pack([Tensor(TensorHead("words", "BYTES", (1, 2)), WORDS)], single=True), ["a", "é"]),
    ],
)
async def test_outputs_are_nested_arrays_and_objects_by_name(stand: Stand, output: Tensors, expected: Any) -> None:
    stand.learn("text", "tensors")
    stand.gateway.output = output
    answer = await stand.ask(asked("text"))
    assert (answer.status, answer.json["output"]) == (200, expected)
    answer = await stand.ask(post('{"inputs": ["a", "b"]}'))
    assert answer.json["outputs"] == [expected, expected]


@pytest.mark.parametrize("count", [1, LARGE])
async def test_what_json_has_not_is_an_error_that_tells_where_it_is_had(stand: Stand, count: int) -> None:
    stand.learn("text", "tensors")
    stand.gateway.output = tensors(y=np.full((1, count), np.nan, "f4"))
    for body, place in ((asked("text"), ""), (post('{"inputs": ["a", "b"]}'), "input 0 of 2, counted from 0: ")):
        answer = await stand.ask(body)
        assert (answer.status, answer.error) == (502, "BACKEND_ERROR")
        assert answer.json["message"].startswith(f"{place}the output")
        assert "`y` contains NaN or an infinity, which JSON cannot represent" in answer.json["message"]
        assert "Open Inference Protocol" in answer.json["message"]


@on_stand(whole=True)
async def test_tasks_have_arrays_for_outputs_and_what_json_has_not_is_fetched_as_octets(stand: Stand) -> None:
    stand.learn("tensors", inputs=(FOUR,))
    for value, status in (
        ([1, 2, 3, 4], "SUCCESS"),
        ([[1, 2, 3, 4]], "SUCCESS"),
        ([math.nan, 1, math.inf, 2], "FAILED"),
    ):
        content = np.array(value, "f4").tobytes()
        request = asked(value, "/v1/inference", ASYNC)
        if status == "FAILED":
            request = post(content, f"{PREDICT}?model_id=default", RAW, ASYNC)
        path = f"{(await stand.ask(request)).header['location']}?wait=25"
        answer = await stand.ask(get(path))
        assert (answer.status, answer.json["status"]) == (200, status)
        if status == "SUCCESS":
            assert answer.json["output"] == value
        else:
            assert answer.json["error"]["error"] == "BACKEND_ERROR"
            assert "NaN" in answer.json["error"]["message"]
        assert (await stand.ask(get(path, "Accept: application/octet-stream"))).body == content


async def test_octets_are_the_rows_of_one_input_in_a_fixed_shape(stand: Stand) -> None:
    stand.learn("tensors", inputs=(FOUR,))
    content, path = np.arange(8, dtype="f4").tobytes(), f"{PREDICT}?model_id=default"
    for rows, shown in ((1, [0, 1, 2, 3]), (2, [[0, 1, 2, 3], [4, 5, 6, 7]])):
        sent = content[: rows * 16]
        answer = await stand.ask(post(sent, path, RAW))
        assert (answer.status, answer.header["content-type"]) == (200, "application/octet-stream")
        assert answer.body == sent
        assert arrays(stand.gateway.asked[-1].input) == {"x": ("FP32", (rows, 4), sent)}
        assert (await stand.ask(post(sent, path, RAW, "Accept: application/json"))).json["output"] == shown
    answer = await stand.ask(post(content[:15], path, RAW))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert "the body consists only of data; its size, 15 bytes, does not determine the shape" in answer.json["message"]
    assert "`x`, FP32 of shape [-1, 4], where a row takes 16 bytes" in answer.json["message"]
    answer = await stand.ask(post(content * 1000, path, RAW))
    assert (answer.status, answer.error) == (413, "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize("datatype", ["UINT8", "BYTES"])
@on_stand(max_body_bytes=LARGE)
async def test_large_octets_are_taken_as_small_ones_are(stand: Stand, datatype: str) -> None:
    content = bytes(random.Random(1).choices(range(65, 91), k=LARGE))
    stand.learn("tensors", inputs=(TensorSpec("x", datatype, (-1,)),))
    assert (await stand.ask(post(content, f"{PREDICT}?model_id=default", RAW))).status == 200
    [(_, _, data)] = arrays(stand.gateway.asked[-1].input).values()
    assert data.endswith(content)


async def test_octets_are_answered_with_one_tensor_of_numbers_alone(stand: Stand) -> None:
    stand.learn("text", "tensors")
    stand.gateway.output = tensors(a=np.zeros((1, 1), "f4"), b=np.zeros((1, 1), "f4"))
    answer = await stand.ask(asked("text", PREDICT, "Accept: application/octet-stream"))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert "only a single tensor of numbers can be sent as octets" in answer.json["message"]
    answer = await stand.ask(post(b"text", f"{PREDICT}?model_id=default", RAW))
    assert answer.json["output"] == {"a": [[0.0]], "b": [[0.0]]}
    large = np.arange(3 * LARGE, dtype="f8")[None]
    stand.gateway.output = tensors(a=large)
    answer = await stand.ask(asked("text", PREDICT, "Accept: application/octet-stream"))
    assert answer.body == large.tobytes()


@pytest.mark.parametrize("dtype", ["f2", "i8"])
async def test_embeddings_are_read_from_tensors(stand: Stand, dtype: str) -> None:
    stand.learn("text", "tensors")
    numbers = np.array([[1, -2, 3]], dtype)
    for single in (True, False):
        stand.gateway.output = tensors(single, e=numbers)
        answer = await stand.ask(post('{"input": ["a", "b"], "dimensions": 3}', EMBEDDINGS))
        assert [one["embedding"] for one in answer.json["data"]] == [[1, -2, 3]] * 2
        answer = await stand.ask(post('{"input": "a", "encoding_format": "base64"}', EMBEDDINGS))
        assert base64.b64decode(answer.json["data"][0]["embedding"]) == numbers.astype("<f4").tobytes()
    answer = await stand.ask(post('{"input": "a", "dimensions": 2}', EMBEDDINGS))
    assert answer.json["error"]["message"].startswith("the model returns 3 numbers, not 2; leave this out")
    stand.gateway.output = tensors(True, e=np.array([[1.5, 2]], "f4"))
    answer = await stand.ask(post('{"prompt": "a"}', "/v1/completions"))
    assert answer.json["choices"][0]["text"] == "[1.5,2.0]", "a completion of tensors is their JSON"


async def test_tensors_that_are_no_embedding_fail_and_say_so(stand: Stand) -> None:
    stand.learn("text", "tensors")
    one = np.zeros((1, 1), "f4")
    for output, says in (
        (tensors(True, e=np.zeros((1, 2, 3), "f4")), "FP32 of shape [2, 3]; an embedding has one axis of numbers"),
        (tensors(e=np.zeros((1, 0), "f4")), "FP32 of shape [0]"),
        (tensors(a=one, b=one), "2 tensors; an embedding must be a single tensor"),
    ):
        stand.gateway.output = output
        answer = await stand.ask(post('{"input": "a"}', EMBEDDINGS))
        assert (answer.status, says in answer.json["error"]["message"]) == (502, True), answer.json


async def test_an_embedding_with_nan_comes_in_base64_alone(stand: Stand) -> None:
    stand.learn("text", "tensors")
    stand.gateway.output = tensors(True, e=np.array([[np.nan]], "f4"))
    answer = await stand.ask(post('{"input": "a"}', EMBEDDINGS))
    assert (answer.status, answer.json["error"]["code"]) == (502, "backend_error")
    assert "with encoding_format base64" in answer.json["error"]["message"]
    answer = await stand.ask(post('{"input": ["a", "b"]}', EMBEDDINGS))
    assert answer.json["error"]["message"].startswith("input 0 of 2, counted from 0: the output `e` contains NaN")
    answer = await stand.ask(post('{"input": "a", "encoding_format": "base64"}', EMBEDDINGS))
    assert base64.b64decode(answer.json["data"][0]["embedding"]) == np.array([np.nan], "f4").tobytes()


@on_stand({"key": {}}, whole=True)
async def test_strangers_read_of_no_shape(stand: Stand) -> None:
    stand.learn("tensors", inputs=NAMED)
    assert "query" not in json.dumps(
        (await stand.ask(get("/openapi.json"))).json["components"]["schemas"]["TensorInput"]
    )


@on_stand(whole=True)
async def test_the_contract_tells_the_arrays_by_datatype_and_shape(stand: Stand) -> None:
    async def contract(*inputs: TensorSpec) -> Any:
        stand.learn("tensors", inputs=inputs)
        return (await stand.ask(get("/openapi.json"))).json

    told = await contract(TensorSpec("x", "INT8", (2, -1)))
    schemas, most = told["components"]["schemas"], stand.settings.max_batch_size
    assert schemas["InferenceRequest"]["properties"]["input"] == {"$ref": "#/components/schemas/TensorInput"}
    assert schemas["PredictAnswer"]["properties"]["output"] == {"$ref": "#/components/schemas/TensorOutput"}
    examples = [
        told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        for path in ("/v1/inference", "/v2/models/{model}/infer")
    ]
    tensor = {"name": "x", "datatype": "INT8", "shape": [1, 2, 1], "data": [[[0], [0]]]}
    assert examples == [{"input": [[0], [0]]}, {"inputs": [tensor]}]
    named = (await contract(*NAMED))["components"]["schemas"]["TensorInput"]
    unknown = (await contract())["components"]["schemas"]["TensorInput"]
    good: list[tuple[Any, list[Any]]] = [
        (schemas["TensorInput"], [[[1, 2], [-128]], [[], []], [[[1], [2]]], [[[1], [2]]] * most]),
        (named, [{"query": [1, 2], "ids": []}, {"query": [[1, 2.5]], "ids": [[7]]}]),
        (unknown, [[[1.5]]]),
    ]
    bad: list[tuple[Any, list[Any]]] = [
        (schemas["TensorInput"], ["text", 1, [1, 2], [[1]], [[0.5], [1]], [[128], [0]], [], [[[1], [2]]] * (most + 1)]),
        (named, [{"query": [1, 2]}, {"query": [1, 2], "ids": [0.5]}, [1, 2], {"query": [[1, 2]], "ids": [7]}]),
    ]
    for table, valid in ((good, True), (bad, False)):
        for schema, values in table:
            assert [value for value in values if jsonschema_rs.is_valid(schema, value) is not valid] == []
