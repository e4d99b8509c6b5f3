"""Octets on the wire as they are: bodies that are the input, and answers that are the output."""

from __future__ import annotations

import base64
import json
import os

import pytest

from headway.http.inference.octets import Form, read_accept
from headway.http.server.connection_context import LARGE
from headway.model import Octets
from tests.http.stand import Stand, get, on_stand, post
from tests.http.test_values import workers

RAW = "Content-Type: application/octet-stream"
ALL = bytes(range(256))


def octets(body: bytes, *fields: str) -> bytes:
    return post(body, "/v1/predict?model_id=default", RAW, *fields)


@on_stand()
async def test_octets_go_to_the_model_and_come_back_as_they_are(stand: Stand) -> None:
    stand.gateway.served.learn(workers("bytes"))
    client = await stand.connect()
    for body in (ALL, b"", os.urandom(LARGE + 1)):
        await client.send(octets(body))
        answer = await client.answer()
        assert (answer.status, answer.header["content-type"]) == (200, "application/octet-stream")
        assert answer.body == body
        assert answer.header["x-request-id"].startswith("req_")
    assert [one.input for one in stand.gateway.asked][:2] == [Octets(ALL), Octets(b"")]


@pytest.mark.parametrize(
    ("accept", "raw"),
    [
        ("", True),
        ("Accept: */*", True),
        ("Accept: application/octet-stream", True),
        ("Accept: application/json", False),
        ("Accept: application/json;q=0.5, application/octet-stream;q=0.4", False),
    ],
)
@on_stand()
async def test_accept_says_in_which_form_octets_are_answered(stand: Stand, accept: str, raw: bool) -> None:
    stand.gateway.served.learn(workers("bytes"))
    answer = await stand.ask(octets(ALL, *filter(None, [accept])))
    if raw:
        assert answer.body == ALL
    else:
        assert base64.b64decode(answer.json["output"]) == ALL


@on_stand()
async def test_a_text_is_answered_in_json_unless_octets_are_asked_for(stand: Stand) -> None:
    stand.gateway.served.learn(workers("text"))
    assert (await stand.ask(octets(b"hello"))).json["output"] == "HELLO"
    assert (await stand.ask(octets("é".encode(), "Accept: application/octet-stream"))).body == "É".encode()
    body = json.dumps({"model_id": "default", "input_data": "hello"})
    asked = post(body, "/v1/predict", "Accept: application/octet-stream")
    assert (await stand.ask(asked)).body == b"HELLO"
    stand.gateway.served.learn(workers("json"))
    value = post(body.replace('"hello"', '{"a": 1}'), "/v1/predict", "Accept: application/octet-stream")
    assert (await stand.ask(value)).body == b'{"a": 1}'
    wrong = await stand.ask(value.replace(b'{"a": 1}', b'{"a":  }'))
    assert (wrong.status, wrong.error) == (400, "BAD_REQUEST")


@on_stand(whole=True, cache=True)
async def test_octets_pass_every_kind_of_answer_that_is_kept(stand: Stand) -> None:
    stand.real.served.learn(workers("bytes"))
    shown = base64.b64encode(ALL).decode()
    task = await stand.ask(octets(ALL, "Prefer: respond-async"))
    result = await stand.ask(get(f"{task.header['location']}?wait=25"))
    assert (result.json["status"], result.json["output"]) == ("SUCCESS", shown)
    raw = await stand.ask(get(task.header["location"], "Accept: application/octet-stream"))
    assert (raw.status, raw.body, raw.header["content-type"]) == (200, ALL, "application/octet-stream")
    for replayed in (False, True):
        kept = await stand.ask(octets(ALL, "Idempotency-Key: k", "Cache-Control: no-cache"))
        assert kept.body == ALL
        assert ("idempotency-replayed" in kept.header) == replayed
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
