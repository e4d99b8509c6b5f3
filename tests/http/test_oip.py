"""Inference with the Open Inference Protocol over REST."""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headway.gateway.fan_out import MOST_INPUTS
from headway.model import Failure, Octets, TokenCount
from headway.oip.tensors import pack, unpack
from tests.http.stand import LENGTH, Answer, Stand, on_stand, post

PATH = "/v2/models/default/infer"


def tensor(data: Any, shape: Any = None, **members: Any) -> dict[str, Any]:
    count = len(data) if isinstance(data, list) else 1
    return {"name": "INPUT", "datatype": "BYTES", "shape": shape or [count], "data": data} | members


def request_of(
    *inputs: Any, fields: Sequence[str] = (), binary: bytes | None = None, length: int | None = None, path: str = PATH,
    **members: Any,
) -> bytes:  # fmt: skip
    """Build a request with these inputs, and binary data after the JSON object."""
    head = json.dumps({"inputs": inputs, **members}).encode()
    lengths = [] if binary is None else [f"{LENGTH}: {len(head) if length is None else length}"]
    return post(head + (binary or b""), path, *lengths, *fields)


def infer(data: Any, *fields: str, shape: Any = None, **more: Any) -> bytes:
    return request_of(tensor(data, shape), fields=fields, **more)


def binary(octets: bytes, *fields: str, shape: Any = None, size: int | None = None, **more: Any) -> bytes:
    size = len(octets) if size is None else size
    given = {"name": "IN", "datatype": "BYTES", "shape": shape or [1], "parameters": {"binary_data_size": size}}
    return request_of(given, fields=fields, binary=octets, **more)


def outputs(answer: Answer) -> list[bytes]:
    told, data = answer.parts
    [output] = told["outputs"]
    assert output["parameters"]["binary_data_size"] == len(data)
    assert "data" not in output
    return unpack("OUTPUT", data, output["shape"][0])


@pytest.mark.parametrize(("data", "shape"), [(["a é"], [1]), (["a é"], [1, 1]), ([["x"], [""]], [2, 1])])
async def test_texts_in_json_are_answered_in_json_and_in_their_shape(stand: Stand, data: Any, shape: list[int]) -> None:
    answer = await stand.ask(infer(data, shape=shape))
    texts = [one[0] if isinstance(one, list) else one for one in data]
    assert answer.status == 200
    assert answer.header["content-type"] == "application/json"
    assert answer.json == {
        "model_name": "default",
        "model_version": "1",
        "outputs": [{"name": "OUTPUT", "datatype": "BYTES", "shape": shape, "data": [text.upper() for text in texts]}],
    }


async def test_an_id_is_echoed_and_members_that_are_null_are_none(stand: Stand) -> None:
    for id in ("", "42", "é"):
        assert (await stand.ask(infer(["a"], id=id))).json["id"] == id
        answer = await stand.ask(binary(pack([b"a"]), id=id, parameters={"binary_data_output": True}))
        assert answer.parts[0]["id"] == id
    answer = await stand.ask(infer(["a"], id=None, outputs=None, parameters=None))
    assert (answer.json["outputs"][0]["data"], "id" in answer.json) == (["A"], False)


async def test_binary_data_go_in_and_out(stand: Stand) -> None:
    client, elements = await stand.connect(), [f"text {number}".encode() for number in range(70)]
    for count in (1, 70):
        sent, upper = pack(elements[:count]), [one.upper() for one in elements[:count]]
        for way in ({"parameters": {"binary_data_output": True}}, {"outputs": [wanted(True)]}):
            assert outputs(await client.ask(binary(sent, shape=[count], **way))) == upper
        answer = await client.ask(binary(sent, shape=[count, 1]))
        assert answer.json["outputs"][0]["data"] == [one.decode() for one in upper]
    assert outputs(await client.ask(post("{no JSON", PATH, f"{LENGTH}: 0"))) == [b"{NO JSON"], "one element and no JSON"


def wanted(binary: bool | None = None, name: str = "OUTPUT", **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters if binary is None else {"binary_data": binary}}


async def test_what_is_said_of_the_output_goes_before_what_is_said_of_all(stand: Stand) -> None:
    both: dict[str, Any] = {"parameters": {"binary_data_output": True}, "outputs": [wanted(False)]}
    assert (await stand.ask(infer(["a"], **both))).json["outputs"][0]["data"] == ["A"]
    assert outputs(await stand.ask(infer(["a"], parameters={"binary_data_output": True}, outputs=[]))) == [b"A"]
    assert outputs(await stand.ask(infer(["a"], parameters={"binary_data_output": True}, outputs=[wanted()])))


async def test_octets_and_json_texts_are_elements_for_models_that_take_them(stand: Stand) -> None:
    stand.gateway.output = Octets(b"\xff\x00")
    stand.learn("bytes")
    asked = binary(pack([b"\xff\x00"]), parameters={"binary_data_output": True})
    assert outputs(await stand.ask(asked)) == [b"\xff\x00"]
    assert [one.input for one in stand.gateway.asked] == [Octets(b"\xff\x00")]
    answer = await stand.ask(binary(pack([b"a"])))
    assert (answer.status, "JSON cannot represent it; request `binary_data`" in answer.json["error"]) == (400, True)
    stand.gateway.output = None
    stand.learn("json")
    answer = await stand.ask(infer(['{"a": [1]}', '"text"', "null"]))
    assert answer.json["outputs"][0]["data"] == ['{"a": [1]}', '"TEXT"', "null"]
    assert (await stand.ask(infer(["no json"]))).json["error"].startswith("element 0 of the input is not JSON text")


@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("x-GZIP", gzip.compress), ("deflate", zlib.compress), ("identity", bytes), ("", bytes)],
)
async def test_a_compressed_body_is_unpacked(stand: Stand, coding: str, compress: Callable[[bytes], bytes]) -> None:
    _, _, plain = infer(["hello"]).partition(b"\r\n\r\n")
    client, encoding = await stand.connect(), f"Content-Encoding: {coding}"
    for _ in range(2):
        assert (await client.ask(post(compress(plain), PATH, encoding))).json["outputs"][0]["data"] == ["HELLO"]
    head, _, body = binary(pack([b"a"])).partition(b"\r\n\r\n")
    length = next(line for line in head.decode().split("\r\n") if line.startswith(LENGTH))
    assert (await client.ask(post(compress(body), PATH, encoding, length))).json["outputs"][0]["data"] == ["A"]


@pytest.mark.parametrize(
    ("body", "coding", "status", "says"),
    [
        (gzip.compress(bytes(5_000_000)), "gzip", 413, "larger than 1048576 bytes (max_body_bytes)"),
        (gzip.compress(b"{}")[:-1], "gzip", 400, "the gzip body is cut off after"),
        (gzip.compress(b"{}") + b"x", "gzip", 400, "1 bytes follow the end of the gzip body"),
        (b"{}", "gzip", 400, "Content-Encoding says gzip, but the body is not gzip"),
        (gzip.compress(b"{}"), "deflate", 400, "is not deflate"),
        (b"{}", "br", 400, "Content-Encoding 'br' is not accepted; expected gzip, deflate or none"),
    ],
    ids=["gzip bomb", "cut off", "too long", "not gzip", "not deflate", "br"],
)
async def test_a_wrong_compressed_body_is_named(stand: Stand, body: bytes, coding: str, status: int, says: str) -> None:
    answer = await stand.ask(post(body, PATH, f"Content-Encoding: {coding}"))
    assert answer.status == status
    assert says in answer.json["error"]


def request(**members: Any) -> str:
    changed = tensor(["a"]) | members
    return json.dumps({"inputs": [{name: value for name, value in changed.items() if value is not None}]})


WRONG = [
    ("", "the body is empty"),
    ('{"inputs": [', "not JSON"),
    ("{}", "missing required field `inputs`"),
    (json.dumps({"inputs": [tensor(["a"]), tensor(["b"])]}), "more than one input; expected one of datatype BYTES"),
    (json.dumps({"inputs": [tensor(["a"])] * 10_000}), "more than one input"),
    (request(name=None), "missing required field `name` - at `$.inputs[0]`"),
    (request(shape=[1.5]), "Expected `int`, got `float` - at `$.inputs[0].shape[0]`"),
    (request(shape="1"), "Expected `array`, got `str` - at `$.inputs[0].shape`"),
    (request(shape=[1] * 1000), "the `shape` field is"),
    (request(shape=[2]), "the input's data have 1 elements, but its shape says 2"),
    (request(data=["a"] * 100_000, shape=[1]), "the input's data have over 1024 elements, but its shape says 1"),
    (request(data=[["a"]] * 100_000, shape=[1]), "the input's data have over 1024 elements, but its shape says 1"),
    (request(data=[1]), "Expected `str`, got `int` - at `$.inputs[0].data[0]`"),
    (request(data=[[["a"]]]), "Expected `str`, got `array` - at `$.inputs[0].data[0][0]`"),
    (request(data=[["a"], "b"], shape=[2]), "Expected `array`, got `str` - at `$.inputs[0].data[1]`"),
    (request(data=None), "the input has no data; send `data`, or `binary_data_size`"),
    (request(parameters={"binary_data_size": 5}), "both `data` and `binary_data_size`"),
    (request(data=None, parameters={"binary_data_size": 5}), f"the header field {LENGTH} is missing"),
    (request(data=None, parameters={"shared_memory_region": "x"}), "shared memory is not supported"),
    (json.dumps({"inputs": [tensor(["a"])], "id": 7}), "Expected `str | null`, got `int` - at `$.id`"),
    (
        json.dumps({"inputs": [tensor(["a"])], "outputs": [wanted(classification=3)]}),
        "`classification` is not supported",
    ),
    (json.dumps({"inputs": [tensor(["a"])], "outputs": [wanted(shared_memory_region="x")]}), "shared memory is not"),
    (json.dumps({"inputs": [tensor(["a"])], "parameters": [1]}), "Expected `object | null` - at `$.parameters`"),
    (json.dumps({"inputs": [tensor(["a"])], "parameters": {f"p{n}": 1 for n in range(65)}}), "has 65 members"),
    ('{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}', "surrogate"),
]


@pytest.mark.parametrize(("body", "says"), WRONG, ids=[says for _, says in WRONG])
async def test_a_wrong_body_is_told_what_is_wrong_with_it(stand: Stand, body: str, says: str) -> None:
    answer = await stand.ask(post(body, PATH))
    assert (answer.status, list(answer.json)) == (400, ["error"])
    assert says in answer.json["error"]
    assert len(answer.body) < 500
    assert answer.header["content-type"] == "application/json"
    assert not stand.gateway.asked


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (binary(pack([b"a"]), size=4), "`binary_data_size` is 4, but 5 bytes follow the JSON object"),
        (binary(pack([b"a"]), size=-1), "`int` >= 0 - at `$.inputs[0].parameters.binary_data_size`"),
        (binary(pack([b"a"]), length=100_000), f"{LENGTH} is 100000, but the body has"),
        (post(request() + "abc", PATH, f"{LENGTH}: {len(request())}"), "3 bytes follow the JSON object, but the input"),
        (post(request(), PATH, f"{LENGTH}: -1"), f"{LENGTH} is '-1'; expected the length"),
        (post(request(), PATH, f"{LENGTH}: {'9' * 30}"), "expected the length"),
    ],
)
async def test_wrong_binary_data_are_told_what_is_wrong_with_them(stand: Stand, asked: bytes, says: str) -> None:
    answer = await stand.ask(asked)
    assert (answer.status, list(answer.json)) == (400, ["error"])
    assert says in answer.json["error"]


async def test_too_many_elements_are_refused_before_they_are_made(stand: Stand) -> None:
    for asked in (infer(["a"] * (MOST_INPUTS + 1)), binary(b"", shape=[2**40])):
        answer = await stand.ask(asked)
        assert answer.status == 413
        assert f"at most {MOST_INPUTS} are allowed in one request" in answer.json["error"]
    assert (await stand.ask(infer(["a"] * MOST_INPUTS))).status == 200


async def test_a_priority_lowers_the_tier_and_a_timeout_shortens_the_deadline(stand: Stand) -> None:
    client, fields = await stand.connect(), ("X-Request-Tier: free", "X-Request-Timeout-Ms: 1")
    for parameters in ({}, {"priority": 1, "timeout": 10**12}, {"priority": 3, "timeout": 1500, "heat": 0.5}):
        assert (await client.ask(infer(["a"], parameters=parameters))).status == 200
    assert (await client.ask(infer(["a"], *fields, parameters={"priority": 2, "x": "é"}))).status == 200
    usual, same, lower, last = stand.gateway.asked
    assert usual.options == same.options
    assert [(one.options.tier, one.options.timeout) for one in (lower, last)] == [(2, 0.0015), (2, 0.001)]
    assert (usual.parameters, same.parameters, lower.parameters) == (b"", b"", b'{"heat":0.5}')
    assert json.loads(last.parameters) == {"x": "é"}


async def test_an_error_has_the_header_fields_that_any_has(stand: Stand) -> None:
    stand.gateway.failure = Failure("SERVICE_OVERLOADED", "full \ud800", 2.5, "overloaded")
    answer = await stand.ask(infer(["a"]))
    assert answer.status == 503
    assert answer.json == {"error": "full \\ud800"}
    assert (answer.header["retry-after"], answer.header["retry-after-ms"]) == ("3", "2500")
    assert answer.header["x-headway-dropped-reason"] == "overloaded"


async def test_an_output_with_a_lone_surrogate_is_an_error(stand: Stand) -> None:
    stand.gateway.output = "\ud800"
    for asked in (infer(["a"]), infer(["a"], parameters={"binary_data_output": True}), infer(["a", "b"])):
        answer = await stand.ask(asked)
        assert (answer.status, "lone surrogate" in answer.json["error"]) == (502, True)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v2/models/default/versions/1/infer", 200, ""),
        ("/v2/models/default/versions/2/infer", 404, "'default' has no version '2' that takes requests; available: 1"),
        ("/v2/models/other/infer", 404, "no model named 'other'"),
        ("/v2/models/a/b%2Fc/infer", 404, "no model named 'a/b/c'"),
        ("/v2/models/a/b/versions/1/infer", 404, "no model named 'a/b'"),
        ("/v2/models/a%20b/infer", 404, "no model named 'a b'"),
        ("/v2/models/%C3%A9/infer", 404, "no model named 'é'"),
        ("/v2/models//infer", 404, "nothing is served"),
        ("/v2/models/default/infer?version=1", 400, "the query names `version`"),
        ("/v2/infer", 200, ""),
    ],
)
@on_stand(whole=True)
async def test_a_path_names_the_model_and_its_version(stand: Stand, path: str, status: int, says: str) -> None:
    answer = await stand.ask(infer(["a"], path=path))
    assert (answer.status, says in answer.json.get("error", "")) == (status, True)
    if "no model" in says:
        assert says in (await stand.ask(post("[", path))).json["error"], "before a fault of the body"
    assert answer.header.get("x-headway-error") == {200: None, 400: "BAD_REQUEST", 404: "NOT_FOUND"}[status]


async def test_the_tokens_of_all_elements_are_told_in_a_parameter(stand: Stand) -> None:
    for tokens, told in ((None, []), (TokenCount(7, 3), [{"tokens_used": 7}, {"tokens_used": 14}])):
        stand.gateway.tokens = tokens
        for binary in (False, True):
            asked = [infer(list(texts), parameters={"binary_data_output": binary}) for texts in ("a", "ab")]
            answers = [(await stand.ask(one)).parts[0] for one in asked]
            assert [answer["parameters"] for answer in answers if "parameters" in answer] == told
