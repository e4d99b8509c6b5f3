"""Tensors at the native doors: rows in JSON, objects by name, lists, octets, tasks; and embeddings."""

import base64
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from headway.core.tensors import Tensor, TensorHead, join_elements, pack, unpack
from headway.http.server.connection_context import LARGE
from headway.model import Tensors, TensorSpec, Value, WorkerInfo, WorkerStatus
from tests.http.stand import Stand, get, on_stand, post
from tests.http.test_values import RAW

DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "int64": "INT64", "int8": "INT8", "bool": "BOOL"}
FOUR = TensorSpec("x", "FP32", (4,))
NAMED = (TensorSpec("query", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)))
PREDICT, EMBEDDINGS = "/v1/predict", "/v1/embeddings"


def takes(*inputs: TensorSpec, gives: str = "tensors") -> list[WorkerInfo]:
    worker = WorkerInfo(worker_id="gpu-0", model="default", status=WorkerStatus.HEALTHY, takes="tensors", gives=gives)
    return [WorkerInfo(**{**{name: getattr(worker, name) for name in worker.__struct_fields__}, "inputs": inputs})]


def gives(takes: str = "text") -> list[WorkerInfo]:
    return [WorkerInfo(worker_id="gpu-0", model="default", status=WorkerStatus.HEALTHY, takes=takes, gives="tensors")]


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
    stand.gateway.served.learn(takes(FOUR))
    for value, rows in (([1, 2.5, -3, 4e2], 1), ([[1, 2, 3, 4]], 1), ([[1, 2, 3, 4], [5, 6, 7, 8]], 2)):
        answer = await stand.ask(asked(value, path))
        assert (answer.status, answer.json["output"]) == (200, value)
        assert arrays(stand.gateway.asked[-1].input) == {"x": ("FP32", (rows, 4), np.array(value, "f4").tobytes())}


async def test_several_inputs_are_an_object_by_name(stand: Stand) -> None:
    stand.gateway.served.learn(takes(*NAMED))
    one, two = {"query": [1, 2], "ids": [7]}, {"ids": [[1, 2, 3], [4, 5, 6]], "query": [[0, 1], [2, 3]]}
    for value in (one, two):
        answer = await stand.ask(asked(value))
        assert (answer.status, answer.json["output"]) == (200, value)
    assert arrays(stand.gateway.asked[0].input)["ids"] == ("INT64", (1, 1), np.array([7]).tobytes())


@pytest.mark.parametrize(
    ("specs", "value", "says"),
    [
        ((FOUR,), "abc", "the data of the input `x` are `str`; expected one row, FP32 of shape [4], or an array of rows"),
        ((FOUR,), [1, 2], "the input `x` is FP32 of shape [1, 2]; the model takes `x`, FP32 of shape [-1, 4]"),
        ((FOUR,), [[[1, 2, 3, 4]]], "the data of the input `x` have 3 axes"),
        ((FOUR,), [], "the input `x` is FP32 of shape [1, 0]; the model takes `x`, FP32 of shape [-1, 4]"),
        ((FOUR,), [1, 2, 3, "4"], "the data of the input `x` are not FP32: Expected `float`, got `str`, at element 3"),
        ((FOUR,), [1, 2, 3, 1e39], "element 3 of the input `x` is 1e39, which is out of the range of FP32"),
        ((FOUR,), {"y": [1, 2, 3, 4]}, "the input `x` is missing"),
        (NAMED, [1, 2], "expected an object with an array by name; the model takes `query`, FP32 of shape [-1, 2]; `ids`"),
        (NAMED, {"query": [1, 2], "ids": [1], "more": 1}, "there is no input `more`"),
        (NAMED, {"query": [1, 2], "ids": [[1]]}, "`ids` has an axis of rows, other than those before it"),
        (NAMED, {"query": [[1, 2], [3, 4]], "ids": [[1]]}, "`query` has 2 rows and `ids` has 1; expected as many"),
        ((TensorSpec("n", "UINT8"),), 256, "element 0 of the input `n` is 256, which is out of the range of UINT8"),
        ((TensorSpec("n", "BOOL"),), [True, 1], "not BOOL: Expected `bool`, got `int`, at element 1"),
    ],
)  # fmt: skip
@on_stand(whole=True)
async def test_a_wrong_input_says_what_came(stand: Stand, specs: Sequence[TensorSpec], value: Any, says: str) -> None:
    stand.real.served.learn(takes(*specs))
    answer = await stand.ask(asked(value))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert says in answer.json["message"]
    answer = await stand.ask(post(json.dumps({"inputs": [value]})))
    assert says in answer.json["message"] and "$.inputs[0]" in answer.json["message"]
    assert stand.runs == []


@on_stand(whole=True)
async def test_a_list_is_an_entry_for_each_element_with_rows_of_its_own(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    inputs = [[1, 2, 3, 4], [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 0, 0, 0]]]
    answer = await stand.ask(post(json.dumps({"inputs": inputs})))
    assert (answer.status, answer.json["outputs"]) == (200, inputs)
    assert [run[-6:] for run in stand.runs] == ["[1, 4]", "[2, 4]", "[1, 4]"]


@on_stand(whole=True)
async def test_more_rows_than_a_batch_holds_are_refused(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    most = stand.settings.max_batch_size
    rows = [[0, 0, 0, 0]] * (most + 1)
    answer = await stand.ask(asked(rows))
    assert (answer.status, answer.error) == (413, "PAYLOAD_TOO_LARGE")
    assert f"{most + 1} rows; at most {most}" in answer.json["message"]
    answer = await stand.ask(post(json.dumps({"inputs": [rows[1:], rows]})))
    assert (answer.status, answer.error) == (413, "PAYLOAD_TOO_LARGE")
    assert "$.inputs[1]" in answer.json["message"]
    assert stand.runs == []
    assert (await stand.ask(asked(rows[1:]))).status == 200


@on_stand(max_body_bytes=1 << 24)
async def test_large_bodies_and_answers_are_whole(stand: Stand) -> None:
    stand.gateway.served.learn(takes(TensorSpec("x", "FP64", (-1,))))
    rows = np.arange(3 * LARGE, dtype="f8").reshape(3, -1) / 7
    for value in (rows.tolist(), rows.T[:32].tolist(), rows.ravel().tolist()):
        answer = await stand.ask(asked(value))
        assert answer.status == 200
        assert answer.json["output"] == value


@pytest.mark.parametrize(
    "output",
    [
        tensors(scores=np.array([[0.5, 1.5]], "f4"), best=np.array([[1]], "i8")),
        tensors(True, scores=np.array([[0.5, 1.5]], "f4"), best=np.array([1], "i8")),
        tensors(y=np.zeros((1, 3, 0), "f4")),
        tensors(True, y=np.array([True])),
        pack([Tensor(TensorHead("words", "BYTES", (1, 2)), join_elements([b"a", "é".encode()]))], single=True),
    ],
)
async def test_outputs_are_nested_arrays_and_objects_by_name(stand: Stand, output: Tensors) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = output
    expected: Any = {
        ("scores", "best"): {"scores": [[0.5, 1.5]], "best": [[1]]},
        ("y",): [[[], [], []]],
        ("words",): ["a", "é"],
    }[tuple(arrays(output))]
    if output == tensors(True, scores=np.array([[0.5, 1.5]], "f4"), best=np.array([1], "i8")):
        expected = {"scores": [0.5, 1.5], "best": 1}
    if output == tensors(True, y=np.array([True])):
        expected = True
    answer = await stand.ask(asked("text"))
    assert (answer.status, answer.json["output"]) == (200, expected)
    answer = await stand.ask(post('{"inputs": ["a", "b"]}'))
    assert answer.json["outputs"] == [expected, expected]


@pytest.mark.parametrize("count", [1, LARGE])
async def test_what_json_has_not_is_an_error_that_tells_where_it_is_had(stand: Stand, count: int) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = tensors(y=np.full((1, count), np.nan, "f4"))
    for body in (asked("text"), asked("text", PREDICT), post('{"inputs": ["a", "b"]}')):
        answer = await stand.ask(body)
        assert (answer.status, answer.error) == (502, "BACKEND_ERROR")
        assert "`y` holds NaN or an infinity, which JSON has not" in answer.json["message"]
        assert "Open Inference Protocol" in answer.json["message"]
    assert answer.json["message"].startswith("input 0 of 2, counted from 0: the output")


@on_stand(whole=True)
async def test_batches_and_inferences_are_counted_by_rows(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    for value in ([[1, 2, 3, 4]] * 3, [1, 2, 3, 4]):
        assert (await stand.ask(asked(value))).status == 200
    [found] = (await stand.ask(get("/v2/models/default/stats"))).json["model_stats"]
    sizes = {one["batch_size"]: one["compute_infer"]["count"] for one in found["batch_stats"]}
    assert (found["inference_count"], found["inference_stats"]["success"]["count"], sizes) == (4, 2, {3: 1})


@on_stand(whole=True)
async def test_tasks_have_arrays_for_outputs(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    for value in ([1, 2, 3, 4], [[1, 2, 3, 4]]):
        task = await stand.ask(asked(value, "/v1/inference", "Prefer: respond-async"))
        assert task.status == 202
        path = f"{task.header['location']}?wait=25"
        answer = await stand.ask(get(path))
        assert (answer.json["status"], answer.json["output"]) == ("SUCCESS", value)
        answer = await stand.ask(get(path, "Accept: application/octet-stream"))
        assert answer.body == np.array(value, "f4").tobytes()


@on_stand(whole=True)
async def test_a_task_with_what_json_has_not_is_fetched_as_octets(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    content = np.array([np.nan, 1, np.inf, 2], "f4").tobytes()
    task = await stand.ask(post(content, f"{PREDICT}?model_id=default", RAW, "Prefer: respond-async"))
    path = f"{task.header['location']}?wait=25"
    answer = await stand.ask(get(path))
    assert (answer.status, answer.json["status"], answer.json["error"]["error"]) == (200, "FAILED", "BACKEND_ERROR")
    assert "NaN" in answer.json["error"]["message"]
    assert (await stand.ask(get(path, "Accept: application/octet-stream"))).body == content


async def test_octets_are_the_rows_of_one_input_in_a_fixed_shape(stand: Stand) -> None:
    stand.gateway.served.learn(takes(FOUR))
    content = np.arange(8, dtype="f4").tobytes()
    for rows in (1, 2):
        answer = await stand.ask(post(content[: rows * 16], f"{PREDICT}?model_id=default", RAW))
        assert (answer.status, answer.header["content-type"]) == (200, "application/octet-stream")
        assert answer.body == content[: rows * 16]
        assert arrays(stand.gateway.asked[-1].input) == {"x": ("FP32", (rows, 4), content[: rows * 16])}
        answer = await stand.ask(
            post(content[: rows * 16], f"{PREDICT}?model_id=default", RAW, "Accept: application/json")
        )
        assert answer.json["output"] == ([0, 1, 2, 3] if rows == 1 else [[0, 1, 2, 3], [4, 5, 6, 7]])
    for wrong in (b"", content[:15]):
        answer = await stand.ask(post(wrong, f"{PREDICT}?model_id=default", RAW))
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert f"the body is {len(wrong)} bytes of data alone" in answer.json["message"]
        assert "`x`, FP32 of shape [-1, 4], of which a row takes 16 bytes" in answer.json["message"]
    answer = await stand.ask(post(content * 1000, f"{PREDICT}?model_id=default", RAW))
    assert (answer.status, answer.error) == (413, "PAYLOAD_TOO_LARGE")
    stand.gateway.served.learn(takes(*NAMED))
    answer = await stand.ask(post(content, f"{PREDICT}?model_id=default", RAW))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert "which is for models with one input" in answer.json["message"]


async def test_octets_are_one_row_where_its_length_is_free_and_one_text(stand: Stand) -> None:
    content = np.arange(8, dtype="f4").tobytes()
    for spec, shape, data in (
        (TensorSpec("x", "FP32", (-1,)), (1, 8), content),
        (TensorSpec("x", "BYTES", (1,)), (1, 1), len(content).to_bytes(4, "little") + content),
    ):
        stand.gateway.served.learn(takes(spec))
        await stand.ask(post(content, f"{PREDICT}?model_id=default", RAW))
        assert arrays(stand.gateway.asked[-1].input) == {"x": (spec.datatype, shape, data)}


@pytest.mark.parametrize("datatype", ["UINT8", "BYTES"])
@on_stand(max_body_bytes=LARGE)
async def test_large_octets_are_taken_as_small_ones_are(stand: Stand, datatype: str) -> None:
    content = bytes(random.Random(1).choices(range(65, 91), k=LARGE))
    stand.gateway.served.learn(takes(TensorSpec("x", datatype, (-1,))))
    assert (await stand.ask(post(content, f"{PREDICT}?model_id=default", RAW))).status == 200
    [(_, _, data)] = arrays(stand.gateway.asked[-1].input).values()
    assert data.endswith(content)


async def test_octets_are_answered_with_one_tensor_of_numbers_alone(stand: Stand) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = tensors(a=np.zeros((1, 1), "f4"), b=np.zeros((1, 1), "f4"))
    answer = await stand.ask(asked("text", PREDICT, "Accept: application/octet-stream"))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert "only one tensor of numbers is sent as octets" in answer.json["message"]
    answer = await stand.ask(post(b"text", f"{PREDICT}?model_id=default", RAW))
    assert answer.json["output"] == {"a": [[0.0]], "b": [[0.0]]}
    large = np.arange(3 * LARGE, dtype="f8")[None]
    stand.gateway.output = tensors(a=large)
    answer = await stand.ask(asked("text", PREDICT, "Accept: application/octet-stream"))
    assert answer.body == large.tobytes()


@on_stand(whole=True, cache=True)
async def test_kept_answers_are_those_of_the_same_rows(stand: Stand) -> None:
    stand.real.served.learn(takes(FOUR))
    one, alone, other = [1, 2, 3, 4], [[1, 2, 3, 4]], [1, 2, 3, 5]
    for value, mark in (
        (one, None),
        (alone, None),
        (other, None),
        (one, "hit"),
        (alone, "hit"),
        ([1.0, 2, 3, 4], "hit"),
    ):
        answer = await stand.ask(asked(value))
        assert (answer.json["output"], answer.header.get("x-headway-cache")) == (value, mark)
    for value, status in ((one, 200), (one, 200), (alone, 422), (other, 422)):
        answer = await stand.ask(asked(value, "/v1/inference", "Idempotency-Key: k"))
        assert answer.status == status
    for _ in range(2):
        answer = await stand.ask(post(json.dumps({"inputs": [one, alone, one]}), "/v1/inference", "Idempotency-Key: l"))
        assert answer.json["outputs"] == [one, alone, one]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8"])
async def test_embeddings_are_read_from_tensors(stand: Stand, dtype: str) -> None:
    stand.gateway.served.learn(gives())
    numbers = np.array([[1, -2, 3]], dtype)
    for single in (True, False):
        stand.gateway.output = tensors(single, e=numbers)
        answer = await stand.ask(post('{"input": ["a", "b"]}', EMBEDDINGS))
        assert [one["embedding"] for one in answer.json["data"]] == [[1, -2, 3]] * 2
        answer = await stand.ask(post('{"input": "a", "encoding_format": "base64"}', EMBEDDINGS))
        assert base64.b64decode(answer.json["data"][0]["embedding"]) == numbers.astype("<f4").tobytes()
    answer = await stand.ask(post('{"input": "a", "dimensions": 3}', EMBEDDINGS))
    assert answer.status == 200
    answer = await stand.ask(post('{"input": "a", "dimensions": 2}', EMBEDDINGS))
    assert answer.json["error"]["message"].startswith("the model gives 3 numbers, and not 2")


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (tensors(True, e=np.zeros((1, 2, 3), "f4")), "FP32 of shape [2, 3], and an embedding has one axis of numbers"),
        (tensors(e=np.zeros((2, 3), "f4")), "FP32 of shape [2, 3], and an embedding has one axis"),
        (tensors(e=np.zeros((1, 0), "f4")), "FP32 of shape [0]"),
        (
            tensors(a=np.zeros((1, 1), "f4"), b=np.zeros((1, 1), "f4")),
            "2 tensors; an embedding must be a single tensor",
        ),
    ],
)
async def test_tensors_that_are_no_embedding_fail_and_say_so(stand: Stand, output: Tensors, says: str) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = output
    answer = await stand.ask(post('{"input": "a"}', EMBEDDINGS))
    assert answer.status == 502
    assert says in answer.json["error"]["message"]


async def test_an_embedding_with_nan_comes_in_base64_alone(stand: Stand) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = tensors(True, e=np.array([[np.nan]], "f4"))
    answer = await stand.ask(post('{"input": "a"}', EMBEDDINGS))
    assert (answer.status, answer.json["error"]["code"]) == (502, "backend_error")
    assert "with encoding_format base64" in answer.json["error"]["message"]
    answer = await stand.ask(post('{"input": ["a", "b"]}', EMBEDDINGS))
    assert answer.json["error"]["message"].startswith("input 0 of 2, counted from 0: the output `e` holds NaN")
    answer = await stand.ask(post('{"input": "a", "encoding_format": "base64"}', EMBEDDINGS))
    assert base64.b64decode(answer.json["data"][0]["embedding"]) == np.array([np.nan], "f4").tobytes()


async def test_a_completion_of_tensors_is_their_json(stand: Stand) -> None:
    stand.gateway.served.learn(gives())
    stand.gateway.output = tensors(True, e=np.array([[1.5, 2]], "f4"))
    answer = await stand.ask(post('{"prompt": "a"}', "/v1/completions"))
    assert answer.json["choices"][0]["text"] == "[1.5,2.0]"


@on_stand(whole=True)
async def test_the_contract_tells_the_arrays_by_datatype_and_shape(stand: Stand) -> None:
    async def told() -> Any:
        return (await stand.ask(get("/openapi.json"))).json

    stand.real.served.learn(takes(TensorSpec("x", "INT8", (2, -1))))
    contract = await told()
    schemas = contract["components"]["schemas"]
    assert schemas["InferenceRequest"]["properties"]["input"] == {"$ref": "#/components/schemas/TensorInput"}
    assert schemas["PredictAnswer"]["properties"]["output"] == {"$ref": "#/components/schemas/TensorOutput"}
    most = stand.settings.max_batch_size
    good: list[Any] = [[[1, 2], [-128]], [[], []], [[[1], [2]]], [[[1], [2]]] * most]
    for value in good:
        jsonschema_rs.validate(schemas["TensorInput"], value)
    bad: list[Any] = ["text", 1, [1, 2], [[1]], [[0.5], [1]], [[128], [0]], [], [[[1], [2]]] * (most + 1)]
    for value in bad:
        assert not jsonschema_rs.is_valid(schemas["TensorInput"], value), value
    asked = contract["paths"]["/v1/inference"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert asked == {"input": [[0], [0]]}
    asked = contract["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    assert asked == {"inputs": [{"name": "x", "datatype": "INT8", "shape": [1, 2, 1], "data": [[[0], [0]]]}]}

    stand.real.served.learn(takes(*NAMED))
    taken = (await told())["components"]["schemas"]["TensorInput"]
    for value in ({"query": [1, 2], "ids": []}, {"query": [[1, 2.5]], "ids": [[7]]}):
        jsonschema_rs.validate(taken, value)
    bad = [{"query": [1, 2]}, {"query": [1, 2], "ids": [0.5]}, [1, 2], {"query": [[1, 2]], "ids": [7]}]
    for value in bad:
        assert not jsonschema_rs.is_valid(taken, value), value

    stand.real.served.learn(takes())
    taken = (await told())["components"]["schemas"]["TensorInput"]
    jsonschema_rs.validate(taken, [[1.5]])


@on_stand({"key": {}}, whole=True)
async def test_strangers_read_of_no_shape(stand: Stand) -> None:
    stand.real.served.learn(takes(*NAMED))
    assert (
        b"query"
        not in json.dumps((await stand.ask(get("/openapi.json"))).json["components"]["schemas"]["TensorInput"]).encode()
    )
