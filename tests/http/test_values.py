"""Inputs and outputs other than text: JSON values, and bytes, raw or in base64."""

import base64
import json
import os
from typing import Any

import pytest

from headway.config import Settings
from headway.http import openapi
from headway.http.inference.codecs import Form, read_accept
from headway.http.openapi import Kinds
from headway.http.server.connection_context import LARGE
from headway.model import Octets, ValueKind
from tests.http.stand import Stand, get, on_stand, post

RAW, ASYNC = "Content-Type: application/octet-stream", "Prefer: respond-async"
BODIES = {
    "/v1/inference": '{{"input": {}}}',
    "/api/inference": '{{"input": {}}}',
    "/v1/predict": '{{"model_id": "default", "input_data": {}}}',
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("known", [True, False])
async def test_a_model_of_json_takes_any_value_and_answers_with_one(stand: Stand, path: str, known: bool) -> None:
    if known:
        stand.learn("json")
    else:
        stand.gateway.served["default"].takes = stand.gateway.served["default"].gives = None
    client = await stand.connect()
    for value in ({"a": [1, None, "é\n"]}, [0.5, 2], 3, True, None, [], "text"):
        answer = await client.ask(post(BODIES[path].format(json.dumps(value)), path))
        assert answer.status == 200, answer.body
        assert answer.json["output"] == ("TEXT" if value == "text" else value)


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_of_texts_says_what_it_expected(stand: Stand, path: str) -> None:
    stand.learn("text")
    for value, got in (("{}", "object"), ("[1]", "array"), ("1", "int"), ("null", "null")):
        answer = await stand.ask(post(BODIES[path].format(value), path))
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert answer.json["message"].startswith(f"Expected `str`, got `{got}` - at `$.input")
    assert stand.gateway.asked == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"input": ["\\u0000"]}', "the input contains U+0000"),
        ('{"input": ' + "[" * 50_000, "nested too deeply"),
        ('{"input": [], "parameters": []}', "$.parameters"),
    ],
)
async def test_a_wrong_body_is_told_what_is_wrong_with_it(stand: Stand, body: str | bytes, says: str) -> None:
    stand.learn("json")
    answer = await stand.ask(post(body))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert says in answer.json["message"]


@on_stand(whole=True)
async def test_octets_that_are_no_base64_are_refused_and_counted(stand: Stand) -> None:
    stand.learn("bytes")
    for body in ('{"input": "no base64"}', '{"input": [1]}'):
        answer = await stand.ask(post(body))
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert "base64" in answer.json["message"]
    assert stand.runs == []
    good = await stand.ask(post('{"input": "QUJD"}'))
    assert (good.status, good.json["output"]) == (200, "QUJD")


@on_stand(whole=True)
async def test_a_json_value_is_the_outcome_of_a_task(stand: Stand) -> None:
    stand.learn("json")
    task = await stand.ask(post('{"input": {"a": [1, "é"]}}', "/v1/inference", ASYNC))
    answer = await stand.ask(get(f"{task.header['location']}?wait=25"))
    assert (answer.json["status"], answer.json["output"]) == ("SUCCESS", {"a": [1, "é"]})


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def test_the_contract_of_several_models_has_the_union_of_their_kinds() -> None:
    """Each kind has one name, and text also counts as a JSON value."""

    def kinds(*models: Kinds) -> list[Any]:
        schemas = openapi.document(Settings(), *models)["components"]["schemas"]
        asked, answer = schemas["PredictRequest"]["properties"], schemas["PredictAnswer"]["properties"]
        return [asked["input_data"], answer["output"]]

    text, octets, json = ValueKind.TEXT, ValueKind.BYTES, ValueKind.JSON
    both = [{"anyOf": [ref("Octets"), ref(name)]} for name in ("TextInput", "TextOutput")]
    assert kinds(Kinds(text, octets), Kinds(octets, text), Kinds(text, octets)) == both
    assert kinds(Kinds(text, text), Kinds(json, text)) == [ref("JsonValue"), ref("TextOutput")]
    contract = openapi.document(Settings(), Kinds(octets, json))
    assert contract["components"]["schemas"]["Octets"]["contentEncoding"] == "base64"
    content = contract["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert content["application/octet-stream"]["schema"]["format"] == "binary"


@on_stand(whole=True, cache=True, collapse=True)
async def test_a_number_out_of_range_is_a_bad_request_everywhere(stand: Stand) -> None:
    stand.learn("json")
    for number in ("1e999", f"[{'9' * 400}.0]", "9" * 4301):
        bodies = [(path, body.format(number)) for path, body in BODIES.items()]
        bodies.append(("/v1/inference", f'{{"inputs": [1, {number}]}}'))
        bodies.append(("/v1/inference", f'{{"model": "none", "input": {number}}}'))
        for path, body in bodies:
            for field in ("Idempotency-Key: k", "Prefer: respond-async", "X-Request-Id: 1"):
                answer = await stand.ask(post(body, path, field))
                assert (answer.status, answer.error) == (400, "BAD_REQUEST")
                assert f"holds a number out of range: {number.strip('[')[:24]}" in answer.json["message"]
    assert stand.runs == []


@on_stand(whole=True, cache=True)
async def test_a_number_that_was_let_in_unseen_is_still_no_fault_of_the_server(stand: Stand) -> None:
    unseen = "[" + "1e308," * 1000 + "1e309]"
    stand.learn("json")
    answer = await stand.ask(post(f'{{"input": {unseen}}}', "/v1/inference", "Idempotency-Key: k"))
    assert answer.status == 200
    assert len(stand.runs) == 1


ALL = bytes(range(256))


def octets(body: bytes, *fields: str) -> bytes:
    return post(body, "/v1/predict?model_id=default", RAW, *fields)


async def test_octets_go_to_the_model_and_come_back_as_they_are_or_in_the_form_that_is_accepted(stand: Stand) -> None:
    stand.learn("bytes")
    client = await stand.connect()
    for body in (ALL, b"", os.urandom(LARGE + 1)):
        answer = await client.ask(octets(body))
        assert (answer.status, answer.header["content-type"]) == (200, "application/octet-stream")
        assert answer.body == body
    assert [one.input for one in stand.gateway.asked][:2] == [Octets(ALL), Octets(b"")]
    assert (await client.ask(octets(ALL, "Accept: */*"))).body == ALL
    answer = await client.ask(octets(ALL, "Accept: application/json"))
    assert base64.b64decode(answer.json["output"]) == ALL


async def test_a_text_is_answered_in_json_unless_octets_are_asked_for(stand: Stand) -> None:
    stand.learn("text")
    assert (await stand.ask(octets(b"hello"))).json["output"] == "HELLO"
    assert (await stand.ask(octets("é".encode(), "Accept: application/octet-stream"))).body == "É".encode()
    body = json.dumps({"model_id": "default", "input_data": "hello"})
    asked = post(body, "/v1/predict", "Accept: application/octet-stream")
    assert (await stand.ask(asked)).body == b"HELLO"
    stand.learn("json")
    value = post(body.replace('"hello"', '{"a": 1}'), "/v1/predict", "Accept: application/octet-stream")
    assert (await stand.ask(value)).body == b'{"a": 1}'
    wrong = await stand.ask(value.replace(b'{"a": 1}', b'{"a":  }'))
    assert (wrong.status, wrong.error) == (400, "BAD_REQUEST")


@on_stand(whole=True, cache=True)
async def test_octets_pass_every_kind_of_answer_that_is_kept(stand: Stand) -> None:
    stand.learn("bytes")
    shown = base64.b64encode(ALL).decode()
    location = (await stand.ask(octets(ALL, ASYNC))).header["location"]
    result = await stand.ask(get(f"{location}?wait=25"))
    assert (result.json["status"], result.json["output"]) == ("SUCCESS", shown)
    raw = await stand.ask(get(location, "Accept: application/octet-stream"))
    assert (raw.status, raw.body, raw.header["content-type"]) == (200, ALL, "application/octet-stream")
    for replayed in (False, True):
        kept = await stand.ask(octets(ALL, "Idempotency-Key: k", "Cache-Control: no-cache"))
        assert (kept.body, "idempotency-replayed" in kept.header) == (ALL, replayed)
    same = await stand.ask(post(json.dumps({"input": shown})))
    assert (same.header["x-headway-cache"], same.json["output"]) == ("hit", shown)
    other = await stand.ask(octets(ALL[1:], "Idempotency-Key: k"))
    assert (other.status, other.error) == (422, "IDEMPOTENCY_CONFLICT")


@pytest.mark.parametrize(
    ("accept", "otherwise", "form"),
    [
        ([], Form.AS_OUTPUT, Form.AS_OUTPUT),
        ([b"*/*"], Form.AS_OUTPUT, Form.AS_OUTPUT),
        ([b"text/html, application/*"], Form.JSON, Form.JSON),
        ([b"application/octet-stream"], Form.JSON, Form.OCTETS),
        ([b"Application/Octet-Stream ; q=0.1"], Form.JSON, Form.OCTETS),
        ([b"application/json"], Form.AS_OUTPUT, Form.JSON),
        ([b"application/json, application/octet-stream"], Form.AS_OUTPUT, Form.AS_OUTPUT),
        ([b"application/json", b"application/octet-stream;q=0.9"], Form.AS_OUTPUT, Form.JSON),
        ([b"application/octet-stream, */*;q=0.1"], Form.AS_OUTPUT, Form.OCTETS),
        ([b"application/octet-stream;q=0, */*"], Form.AS_OUTPUT, Form.JSON),
        ([b"application/octet-stream;q=x;y, ,;"], Form.JSON, Form.OCTETS),
    ],
)
def test_accept_is_read_as_http_has_it(accept: list[bytes], otherwise: Form, form: Form) -> None:
    assert read_accept([(b"host", b"h"), *((b"accept", one) for one in accept)], otherwise) is form
