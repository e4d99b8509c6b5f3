"""Errors as clients read them: in the form of the route's codec, else as problem documents, and what they say is meant."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headway.config import Settings
from headway.doors.bodies import suggestion
from headway.errors import REJECTED_BY_MODEL, AnyError
from headway.http.inference import routes
from headway.http.inference.codecs import Codec, inference
from headway.http.problem import Encoded
from headway.http.server.connection import REQUESTS_PER_TURN
from headway.model import Failure
from tests.http.stand import Answer, Keys, Stand, get, on_stand, post, settled

OWN = "/own/inference"
NATIVE = "/v1/inference"
GOOD = '{"input": "a"}'
WRONG = '{"input": 1}'
KEY = "Authorization: Bearer key"
KEYS: Keys = {"key": {}}


def encode(error: AnyError, shown: str) -> Encoded:
    told = {"message": error.message, "type": error.code, "id": shown, "wait": error.retry_after, "why": error.reason}
    return {"content-type": "application/json", "x-own": "yes"}, json.dumps({"error": told}).encode()


def own(settings: Settings) -> Codec:
    return msgspec.structs.replace(inference(settings), encode_error=encode)


@pytest.fixture(autouse=True)
def route() -> Iterator[None]:
    """A further route, whose errors have another form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ROUTES", {**routes.ROUTES, OWN: own})
        yield


def check(answer: Answer, status: int, code: str) -> None:
    """An error in the route's own form, with the status and the id that any form has."""
    assert answer.status == status
    assert (answer.header["content-type"], answer.header["x-own"]) == ("application/json", "yes")
    assert answer.json["error"]["type"] == code
    assert answer.json["error"]["id"] == answer.header["x-request-id"]


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post(WRONG, OWN, KEY), 400, "BAD_REQUEST"),
        (post(GOOD, OWN), 401, "UNAUTHENTICATED"),
        (post(GOOD, OWN, KEY, "X-Request-Timeout-Ms: soon"), 400, "BAD_REQUEST"),
        (post("", OWN, KEY, length=9_000_000), 413, "PAYLOAD_TOO_LARGE"),
        (post(b"x\r\n", OWN, KEY).replace(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "BAD_REQUEST"),
    ],
    ids=["body", "key", "header", "length", "chunk"],
)
@on_stand(KEYS)
async def test_a_refusal_has_the_form_of_its_route(stand: Stand, request_: bytes, status: int, code: str) -> None:
    check(await stand.ask(request_), status, code)
    native = await stand.ask(request_.replace(OWN.encode(), NATIVE.encode()))
    assert (native.status, native.error) == (status, code)


@on_stand({"key": {"rate": 60, "burst": 3}})
async def test_a_limit_and_a_failure_have_the_form_of_their_route(stand: Stand) -> None:
    client = await stand.connect()
    stand.gateway.failure = Failure(REJECTED_BY_MODEL, "bad", reason="why")
    for _ in range(2):
        await client.send(post(GOOD, OWN, KEY))
        answer = await client.answer()
        check(answer, 422, REJECTED_BY_MODEL)
        assert "ratelimit" in answer.header
        assert (answer.json["error"]["message"], answer.json["error"]["why"]) == ("bad", "why")


async def test_late_bodies_and_faults_have_the_routes_form(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await stand.connect()
    await client.send(post("", OWN, "Expect: 100-continue", length=5))
    assert (await client.answer()).status == 100
    stand.later(100.0)
    check(await client.answer(), 408, "REQUEST_TIMEOUT")
    monkeypatch.setattr(stand.gateway, "enter", None)
    check(await stand.ask(post(GOOD, OWN)), 500, "INTERNAL")


async def test_the_form_changes_with_the_route_on_one_connection(stand: Stand) -> None:
    client = await stand.connect()
    for _ in range(2):  # The second time under known heads.
        for _ in range(2):
            await client.send(post(WRONG, OWN))
            check(await client.answer(), 400, "BAD_REQUEST")
        for request in (post(WRONG), post(WRONG), get("/nothing"), get(OWN)):
            await client.send(post(GOOD, OWN))
            assert (await client.answer()).status == 200
            await client.send(request)
            assert (await client.answer()).error in ("BAD_REQUEST", "NOT_FOUND", "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        (b"nonsense\r\n\r\n", "BAD_REQUEST"),
        (b"\x16\x03\x01", "BAD_REQUEST"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, "HEADERS_TOO_LARGE"),
        (b"GET /livez HTTP/1.1\r\n", "REQUEST_TIMEOUT"),
        (post("", "/livez", length=9_000_000), "PAYLOAD_TOO_LARGE"),
        (b"POST /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "BAD_REQUEST"),
    ],
    ids=["head", "line", "long", "late", "length", "chunk"],
)
async def test_an_error_before_a_route_is_known_is_a_problem_document(stand: Stand, rest: bytes, error: str) -> None:
    """Also on a connection whose last request had another form."""
    client = await stand.connect()
    await client.send(post(GOOD, OWN))
    assert (await client.answer()).status == 200
    await client.send(rest)
    if error == "REQUEST_TIMEOUT":
        (connection,) = stand.door._connections()
        await settled(lambda: bool(connection.reader.buffer))
        stand.later(100.0)
    assert (await client.answer()).error == error


@on_stand(KEYS)
async def test_the_end_of_a_connection_between_two_requests_is_a_problem_document(stand: Stand) -> None:
    """Its owner holds too much, so that the next request is not read."""
    context: Any = stand.door._context
    client = await stand.connect()
    context.quotas.bytes.take("another", context.quotas.bytes.free - 1)
    client.writer.write(post("", OWN) * 1000)
    for _ in range(REQUESTS_PER_TURN):
        check(await client.answer(), 401, "UNAUTHENTICATED")
    assert (await client.answer()).error == "SERVICE_OVERLOADED"


MISSING = "Object missing required field `input`"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"Input": "a"}', "; did you mean it by `Input`?"),
        (b'{"imput": "a"}', "; did you mean it by `imput`?"),
        (b'{"instances": ["a"]}', "; several inputs go as `inputs` to /v1/inference"),
        (b'{"prompt": "a"}', "; prompts go to /v1/completions"),
        (b'{"messages": []}', "; chats go to /v1/chat/completions"),
        (b'{"a": 1, "b": 2}', "; it has `a`, `b`"),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', "; it has `a`, `b`, `c`, `d`, `e`, …"),
        (b"{}", ""),
        (b"[]", ""),
        (b'{"a": "' + b"x" * 70_000 + b'"}', ""),
    ],
)
def test_who_lacks_a_member_is_told_what_was_most_likely_meant(body: bytes, told: str) -> None:
    assert suggestion(MISSING, body) == told
    assert suggestion("Expected `str`, got `int` - at `$.input`", body) == ""


async def test_each_native_route_tells_it(stand: Stand) -> None:
    for path, body, told in (
        ("/v1/inference", '{"Input": "a"}', "`input`; did you mean it by `Input`?"),
        ("/api/inference", '{"inputs": ["a"]}', "`input`; did you mean it by `inputs`?"),
        ("/v1/predict", '{"model_id": "m", "input": "a"}', "`input_data`; /v1/inference takes an `input`"),
    ):
        answer = await stand.ask(post(body, path))
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert answer.json["message"].endswith(told), answer.json["message"]


async def test_a_slash_at_the_end_of_a_route_is_pointed_out(stand: Stand) -> None:
    for request, path in (
        (post('{"input": "a"}', "/v1/inference/"), "/v1/inference"),
        (get("/v1/result/x//"), "/v1/result/x"),
        (get("/readyz/"), "/readyz"),
    ):
        answer = await stand.ask(request)
        assert answer.status == 404
        assert answer.json["message"].endswith(f"; leave out the slash at its end: {path}")
    assert "leave out" not in (await stand.ask(get("/nowhere/"))).json["message"]


@pytest.mark.parametrize("path", ["/v1/inference", "/v1/predict"])
@on_stand(whole=True)
async def test_a_version_is_heeded_by_either_name(stand: Stand, path: str) -> None:
    input = '"input": "a"' if path == "/v1/inference" else '"model_id": "default", "input_data": "a"'
    assert (await stand.ask(post(f'{{{input}, "model_version": "1"}}', path))).status == 200
    assert (await stand.ask(post(f'{{{input}, "model_version": "1", "version": "1"}}', path))).status == 200
    for member in ("version", "model_version"):
        answer = await stand.ask(post(f'{{{input}, "{member}": "7"}}', path))
        assert (answer.status, answer.error) == (404, "NOT_FOUND"), answer.json
    assert (await stand.ask(post(f'{{{input}, "model_version": ""}}', path))).status == 400
    differ = await stand.ask(post(f'{{{input}, "model_version": "1", "version": "2"}}', path))
    assert (differ.status, "which differ" in differ.json["message"]) == (400, True)
