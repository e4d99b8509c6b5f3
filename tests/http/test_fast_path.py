"""The native routes over HTTP: answers, error messages, ids, deadlines, tiers, and clients that disconnect."""

import gzip
import json

import pytest

from headway.http.inference import request_in_hand
from headway.model import Reply
from tests.http.stand import INSTANT, Stand, chunked, get, on_stand, post, settled

UUID = "0189f7a4-1111-7222-8333-444455556666"


async def test_requests_of_all_three_shapes_are_answered(stand: Stand) -> None:
    first = await stand.ask(post('{"input": "hé"}'))
    assert (first.status, first.header["content-type"]) == (200, "application/json")
    assert (first.json["output"], first.json["request_id"]) == ("HÉ", first.header["x-request-id"])
    assert set(first.json) == {"request_id", "output", "metadata"}
    assert (first.json["metadata"]["tokens_used"], first.json["metadata"]["model_version"]) == (None, "1")
    second = await stand.ask(post('{"input": ""}', "/api/inference"))
    third = await stand.ask(post('{"model_id": "other", "input_data": "x"}', "/v1/predict"))
    assert set(second.json) == set(third.json) == {"output", "request_id", "latency_ms"}
    assert (second.json["output"], third.json["output"]) == ("", "X")
    octets = "Content-Type: application/octet-stream; a=b"
    fourth = await stand.ask(post("é".encode(), "/v1/predict?model_id=a%2Fb&x=1", octets))
    assert fourth.json["output"] == "É"
    assert [asked.model for asked in stand.gateway.asked] == ["default", "default", "other", "a/b"]


@pytest.mark.parametrize(
    ("field", "id"),
    [
        (f"X-Request-Id: {UUID}", UUID),
        (f"X-Request-Id: req_{UUID.upper()}", UUID),
        (f"X-Request-Id: REQ_{UUID}", None),
        (f"X-Request-Id: {UUID}0", None),
        ("X-Request-Id:", None),
        ("X-A: b", None),
    ],
)
async def test_a_uuid_is_taken_as_the_id_and_others_replaced(stand: Stand, field: str, id: str | None) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", field))
    assert answer.header["x-request-id"] == answer.json["request_id"] == f"req_{stand.gateway.asked[0].id}"
    assert (stand.gateway.asked[0].id == id) == stand.gateway.asked[0].options.chosen == (id is not None)
    for refused in (post("{", "/v1/inference", field), get("/nowhere", field)):
        assert ((await stand.ask(refused)).header["x-request-id"] == f"req_{id}") == (id is not None)


@pytest.mark.parametrize(
    ("field", "timeout", "tier"),
    [
        ("X-Request-Timeout-Ms: 250", 0.25, 1),
        ("X-Request-Timeout-Ms: 0.5", 0.0005, 1),
        ("X-Request-Timeout-Ms: 999999", 4.0, 1),
        (f"X-Request-Timeout-Ms: {'9' * 5000}.5", 4.0, 1),
        ("X-Request-Tier: free", 4.0, 2),
        ("X-Request-Tier: enterprise", 4.0, 1),
        ("Prefer: wait=1, handling=lenient", 4.0, 1),
    ],
)
async def test_headers_only_shorten_and_lower(stand: Stand, field: str, timeout: float, tier: int) -> None:
    assert (await stand.ask(post('{"input": "a"}', "/v1/inference", field))).status == 200
    assert (stand.gateway.asked[0].options.timeout, stand.gateway.asked[0].tier) == (timeout, tier)


RAW = "Content-Type: application/octet-stream"


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (post('{"Input": "a"}'), "missing required field `input`; did you mean that by `Input`?"),
        (post('{"inputs": ["a"]}', "/api/inference"), "`input`; did you mean that by `inputs`?"),
        (post('{"model_id": "m", "input": "a"}', "/v1/predict"), "`input_data`; /v1/inference takes an `input`"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: soon"), "'soon'"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: 0"), "above 0"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: 1e3"), "'1e3'"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Tier: gold"), "enterprise, paid, free"),
        (post('{"input": "a"}', "/v1/inference", "Idempotency-Key: a\tb"), "malformed; expected 1 to 255 printable"),
        (post(gzip.compress(b" " * 10_000_000), "/v1/inference", "Content-Encoding: gzip"), "'gzip'"),
        (post('{"input": "a"}', "/v1/inference", "Content-Encoding: identity, gzip"), "gzip"),
        (post("x", "/v1/predict", RAW), "model_id"),
        (post("x", "/v1/predict?model_id=", RAW), "model_id"),
        (post("x", "/v1/predict?model_id=a&model_id=b", RAW), "model_id"),
        (post("x", "/v1/predict?model_id=%ff", RAW), "query"),
        (post("x", "/v1/inference?model_id=a", RAW), "`model_id`"),
        (post('{"input": "a"}', "/v1/inference?version=3"), "the query names `version`"),
        (post('{"model_id": "a", "input_data": "a"}', "/v1/predict?x=1&version="), "name it in the body"),
        (post("x", "/v1/predict?model_id=a" + "&" * 100, RAW), "the query has 101 members; the limit is 100"),
    ],
)
async def test_client_errors_keep_the_connection(stand: Stand, request_: bytes, says: str) -> None:
    client = await stand.connect()
    for _ in range(2):
        answer = await client.ask(request_)
        assert (answer.status, answer.error, says in answer.json["message"]) == (400, "BAD_REQUEST", True)
        assert (answer.header["x-should-retry"], "connection" in answer.header) == ("false", False)
    assert (await client.ask(post('{"input": "a"}'))).status == 200
    assert len(stand.gateway.asked) == 1


async def test_refusals_at_the_door_are_counted(stand: Stand) -> None:
    await stand.ask(post("{}"))
    await stand.ask(post("{}", "/v1/inference", "X-Request-Tier: gold"))
    await stand.ask(b"nonsense\r\n")
    assert dict(stand.counters.gateway.refusals) == {("bad_request", "paid", ""): 2, ("bad_request", "none", ""): 1}


async def test_an_output_that_is_no_text_is_a_backend_error(stand: Stand) -> None:
    stand.gateway.output = "\ud800"
    answer = await stand.ask(post('{"input": "a"}'))
    assert (answer.status, answer.error) == (502, "BACKEND_ERROR")


async def test_every_spelling_of_a_route_is_the_route(stand: Stand) -> None:
    for target in ("/v1/inference?a=b", "http://test/v1/inference", "/v1/%69nference", "/%761/inference?"):
        assert (await stand.ask(post('{"input": "a"}', target))).json["output"] == "A"


KEYS = {"secret": {"user": "ada", "tenant": "acme", "tier": "enterprise"}}


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("X-A: b", "a key is required"),
        ("Authorization: Bearer", "a key is required"),
        ("Authorization: secret", "the value of Authorization does not begin with Bearer"),
        ("Authorization: Basic secret", "the value of Authorization does not begin with Bearer"),
        ("Authorization: bearer secret x", "the credential is not valid"),
        ("Authorization: Bearer hw_svc_secret", "this is a service token, which is valid only on the admin port"),
    ],
)
@on_stand(keys=KEYS)
async def test_no_good_key_is_401_before_the_body_is_read(stand: Stand, field: str, says: str) -> None:
    client = await stand.connect()
    answer = await client.ask(post("not even JSON", "/v1/inference", field, length=20))
    assert (answer.status, answer.error) == (401, "UNAUTHENTICATED")
    assert answer.json["message"].startswith(says), answer.json["message"]
    assert (answer.header["www-authenticate"], answer.header["x-should-retry"]) == ("Bearer", "false")
    good = post('{"input": "a"}', "/v1/inference", "Authorization: bearer secret")
    assert (await client.ask(b"x" * 7 + good)).status == 200
    assert (stand.gateway.asked[0].principal.user, stand.gateway.asked[0].tier) == ("ada", 0)
    assert dict(stand.counters.gateway.refusals) == {("unauthenticated", "none", ""): 1}


@pytest.mark.parametrize("length", ["0" * 5000 + "16", "1_6", "16 ", "0016", "16;", "١٦", "9" * 40, "-16", ""])
async def test_a_known_head_with_an_odd_length_means_what_it_means_when_new(stand: Stand, length: str) -> None:
    good = post('{"input": "abc"}')
    odd = good.replace(b"Content-Length: 16", b"Content-Length: %b" % length.encode())
    fresh = await stand.ask(odd)
    client = await stand.connect()
    assert (await client.ask(good)).status == 200
    known = await client.ask(odd)
    assert (known.status, known.json.get("error")) == (fresh.status, fresh.json.get("error"))


async def test_a_client_that_leaves_is_told_to_the_gateway_once_and_not_after_its_answer(stand: Stand) -> None:
    for leave in ("close", "abort", "write_eof"):
        client = await stand.hold(post('{"input": "a"}'))
        given_up = list(stand.gateway.waiting)
        getattr(client.writer if leave == "write_eof" else client.writer.transport, leave)()
        await stand.gateway.until(lambda: not stand.gateway.waiting)
    assert stand.gateway.abandoned == [("default", asked.id) for asked in stand.gateway.asked]
    stand.gateway.waiting, stand.gateway.hold = given_up, False
    stand.gateway.release()  # An answer to a disconnected client is dropped.
    client = await stand.connect()
    assert (await client.ask(post('{"input": "a"}'))).status == 200
    client.writer.write_eof()
    assert await client.ended()
    assert len(stand.gateway.abandoned) == 3


async def test_an_answer_says_how_many_milliseconds_it_took(stand: Stand) -> None:
    client = await stand.hold(post('{"input": "a"}'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_in_hand, "monotonic", lambda: INSTANT + 0.25)
        stand.gateway.release()
        assert (await client.answer()).json["metadata"]["latency_ms"] == pytest.approx(250.0)


async def test_a_reply_to_an_earlier_request_is_never_written(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    for _ in range(3):  # First the head is parsed, then it is known, then it has an open lane.
        await client.send(post('{"input": "a"}'))
        await stand.gateway.until(lambda: bool(stand.gateway.waiting))
        (asked,) = stand.gateway.waiting
        stand.gateway.release()
        assert (await client.answer()).json["output"] == "A"
        await client.send(post('{"input": "b"}'))
        await stand.gateway.until(lambda: bool(stand.gateway.waiting))
        asked.sink.answer(Reply(asked.id, asked.principal.tenant, "NOT FOR YOU"))
        stand.gateway.release()
        assert (await client.answer()).json["output"] == "B"


async def test_one_request_of_a_connection_is_with_the_gateway_at_a_time(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post('{"input": "a"}') + post('{"input": "b"}'), post('{"input": "c"}'))
    for text in "abc":
        await stand.gateway.until(lambda: bool(stand.gateway.waiting))
        assert [asked.input for asked in stand.gateway.waiting] == [text]
        stand.gateway.release()
        assert (await client.answer()).json["output"] == text.upper()


@on_stand(whole=True)
async def test_an_input_that_the_gateway_has_is_kept_by_no_connection(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post(json.dumps({"input": "a" * 9_000}), "/v1/inference", "Idempotency-Key: k"))
    await settled(lambda: stand.real.pending == 1)
    assert stand.connection.in_hand.exchange.input == ""
    stand.go.set()
    assert (await client.answer()).json["output"] == "A" * 9_000


OPENAI = post('{"prompt": "a"}', "/v1/completions")


@pytest.mark.parametrize(
    ("following", "error"),
    [
        (b"nonsense\r\n\r\n", "BAD_REQUEST"),
        (b"\x16\x03\x01", "BAD_REQUEST"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, "HEADERS_TOO_LARGE"),
        (b"GET /livez HTTP/1.1\r\n", "REQUEST_TIMEOUT"),
        (post("", "/livez", length=9_000_000), "PAYLOAD_TOO_LARGE"),
        (chunked(path="/livez", end=b"x\r\n"), "BAD_REQUEST"),
        (get("/nothing"), "NOT_FOUND"),
        (get("/v1/inference"), "METHOD_NOT_ALLOWED"),
    ],
    ids=["head", "line", "long", "late", "length", "chunk", "route", "method"],
)
async def test_an_error_without_a_route_is_a_problem_document(stand: Stand, following: bytes, error: str) -> None:
    """Even if the route of the connection's previous request has another error format."""
    client = await stand.connect()
    assert (await client.ask(OPENAI)).status == 200
    await client.send(following)
    if error == "REQUEST_TIMEOUT":
        await settled(lambda: bool(stand.connection.reader.buffer))
        stand.later(100.0)
    assert (await client.answer()).error == error


async def test_a_fault_has_the_form_of_its_route(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand.gateway, "submit", None)
    for path in ("/v1/completions", "/v2/models/default/infer"):
        tensor = '{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["a"]}'
        answer = await stand.ask(post(f'{{"prompt": "a", "inputs": [{tensor}]}}', path))
        assert (answer.status, answer.header["content-type"]) == (500, "application/json")
        assert set(answer.json) == {"error"}


@pytest.mark.parametrize("path", ["/v1/inference", "/v1/predict"])
@on_stand(whole=True)
async def test_a_version_is_heeded_by_either_name(stand: Stand, path: str) -> None:
    input = '"input": "a"' if path == "/v1/inference" else '"model_id": "default", "input_data": "a"'
    for members, status in (
        ('"model_version": "1"', 200),
        ('"model_version": "1", "version": "1"', 200),
        ('"version": "7"', 404),
        ('"model_version": "7"', 404),
        ('"model_version": ""', 400),
        ('"model_version": "1", "version": "2"', 400),
    ):
        answer = await stand.ask(post(f"{{{input}, {members}}}", path))
        assert answer.status == status, (members, answer.body)
    assert "they differ" in answer.json["message"]
