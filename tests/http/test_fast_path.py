"""The native routes on the wire: answers, errors, ids, deadlines, tiers, and clients that leave."""

from typing import Any

import pytest

from headway.errors import STATUS
from headway.http.inference import request_in_hand
from headway.model import Failure, Reply
from tests.http.stand import INSTANT, Stand, get, on_stand, post

UUID = "0189f7a4-1111-7222-8333-444455556666"


async def test_requests_of_all_three_shapes_are_answered(stand: Stand) -> None:
    first = await stand.ask(post('{"input": "hé"}'))
    assert (first.status, first.header["content-type"]) == (200, "application/json")
    assert first.json["output"] == "HÉ"
    assert first.json["request_id"] == first.header["x-request-id"]
    assert set(first.json) == {"request_id", "output", "metadata"}
    assert first.json["metadata"]["tokens_used"] is None
    assert first.json["metadata"]["model_version"] == "1"
    assert 0 <= first.json["metadata"]["latency_ms"] < 20_000

    second = await stand.ask(post('{"input": ""}', "/api/inference"))
    assert set(second.json) == {"output", "request_id", "latency_ms"}
    assert second.json["output"] == ""

    third = await stand.ask(post('{"model_id": "other", "input_data": "x"}', "/v1/predict"))
    assert set(third.json) == {"request_id", "output", "latency_ms"}

    raw = "é\0"[:1].encode()
    fourth = await stand.ask(post(raw, "/v1/predict?model_id=a%2Fb&x=1", "Content-Type: application/octet-stream; a=b"))
    assert fourth.json["output"] == "É"
    assert [asked.model for asked in stand.gateway.asked] == ["default", "default", "other", "a/b"]


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ([f"X-Request-Id: {UUID}"], UUID),
        ([f"X-Request-Id: req_{UUID.upper()}"], UUID),
        ([f"X-Request-Id: REQ_{UUID}"], None),
        (["X-Request-Id: 123"], None),
        (["X-Request-Id:"], None),
        ([f"X-Request-Id: {UUID}0"], None),
        ([], None),
    ],
)
async def test_a_uuid_is_taken_as_the_id_and_others_replaced(stand: Stand, fields: list[str], id: str | None) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", *fields))
    shown = answer.header["x-request-id"]
    assert shown == answer.json["request_id"] == f"req_{stand.gateway.asked[0].id}"
    assert (stand.gateway.asked[0].id == id) == (id is not None)
    bad = await stand.ask(post("{", "/v1/inference", *fields))
    assert (bad.header["x-request-id"] == f"req_{id}") == (id is not None)
    cold = await stand.ask(get("/nowhere", *fields))
    assert (cold.header["x-request-id"] == f"req_{id}") == (id is not None)
    assert cold.error == "NOT_FOUND"


@pytest.mark.parametrize(
    ("field", "timeout", "tier"),
    [
        ("X-Request-Timeout-Ms: 250", 0.25, 1),
        ("X-Request-Timeout-Ms: 0.5", 0.0005, 1),
        ("X-Request-Timeout-Ms: 999999", 4.0, 1),
        ("X-Request-Timeout-Ms: 1000000000", 4.0, 1),
        (f"X-Request-Timeout-Ms: {'9' * 5000}.5", 4.0, 1),
        ("X-Request-Tier: free", 4.0, 2),
        ("X-Request-Tier: paid", 4.0, 1),
        ("X-Request-Tier: enterprise", 4.0, 1),
        ("Prefer: wait=1, handling=lenient", 4.0, 1),
    ],
)
async def test_headers_only_shorten_and_lower(stand: Stand, field: str, timeout: float, tier: int) -> None:
    assert (await stand.ask(post('{"input": "a"}', "/v1/inference", field))).status == 200
    assert (stand.gateway.asked[0].options.timeout, stand.gateway.asked[0].tier) == (timeout, tier)


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (post("{}"), 400, "missing required field `input`"),
        (post(""), 400, "empty"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: soon"), 400, "'soon'"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: 0"), 400, "above 0"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: -5"), 400, "'-5'"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Timeout-Ms: 1e3"), 400, "'1e3'"),
        (post('{"input": "a"}', "/v1/inference", "X-Request-Tier: gold"), 400, "enterprise, paid, free"),
        (post('{"input": "a"}', "/v1/inference", "Content-Encoding: gzip"), 400, "'gzip'"),
        (post('{"input": "a"}', "/v1/inference", "Content-Encoding: identity, gzip"), 400, "gzip"),
        (post("x", "/v1/predict", "Content-Type: application/octet-stream"), 400, "model_id"),
        (post("x", "/v1/predict?model_id=", "Content-Type: application/octet-stream"), 400, "model_id"),
        (post("x", "/v1/predict?model_id=a&model_id=b", "Content-Type: application/octet-stream"), 400, "model_id"),
        (post("x", "/v1/predict?model_id=%ff", "Content-Type: application/octet-stream"), 400, "query"),
        (post("x", "/v1/inference?model_id=a", "Content-Type: application/octet-stream"), 400, "`model_id`"),
        (post('{"input": "a"}', "/v1/inference?version=3"), 400, "the query names `version`"),
        (post('{"model_id": "a", "input_data": "a"}', "/v1/predict?x=1&version="), 400, "name it in the body"),
        (post('{"input": "a"}', "/v1/inference?" + "&" * 100), 400, "the query has 101 members, the limit is 100"),
        (post('{"model_id": "a", "input_data": "a"}', "/v1/predict?" + "&" * 100), 400, "101 members"),
        (post("x", "/v1/predict?model_id=a" + "&" * 100, "Content-Type: application/octet-stream"), 400, "101 members"),
        (get("/v1/inference"), 405, "POST"),
        (get("/v1/predict", method="DELETE"), 405, "POST"),
        (post("{}", "/v1/inference/"), 404, "/v1/inference/"),
        (post("{}", "/v3/inference"), 404, "/v3/inference"),
    ],
)
async def test_client_errors_keep_the_connection(stand: Stand, request_: bytes, status: int, says: str) -> None:
    client = await stand.connect()
    for _ in range(2):
        await client.send(request_)
        answer = await client.answer()
        assert answer.status == status
        assert STATUS[answer.error] == status
        assert says in answer.json["message"]
        assert answer.header["x-should-retry"] == "false"
        assert "connection" not in answer.header
    await client.send(post('{"input": "a"}'))
    assert (await client.answer()).status == 200
    assert len(stand.gateway.asked) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v2/models/a/infer"])
async def test_a_query_of_many_members_is_refused_by_every_route(stand: Stand, path: str) -> None:
    answer = await stand.ask(post("{}", path + "?" + "&" * 100))
    assert answer.status == 400
    assert b"the query has 101 members, the limit is 100" in answer.body


async def test_refusals_at_the_door_are_counted(stand: Stand) -> None:
    await stand.ask(post("{}"))
    await stand.ask(post("{}", "/v1/inference", "X-Request-Tier: gold"))
    await stand.ask(b"nonsense\r\n")
    assert dict(stand.counters.gateway.refusals) == {("bad_request", "paid", ""): 2, ("bad_request", "none", ""): 1}


@pytest.mark.parametrize(
    ("failure", "header"),
    [
        (Failure("NOT_FOUND", "no model 'x'"), {"x-should-retry": "false"}),
        (
            Failure("RATE_LIMITED", "slow down", 1.2, "rate"),
            {"retry-after": "2", "retry-after-ms": "1200", "x-headway-dropped-reason": "rate"},
        ),
        (Failure("SHED", "busy", None, "tier"), {"retry-after": "1", "x-headway-dropped-reason": "tier"}),
        (Failure("SERVICE_OVERLOADED", "full", 0.05, "queue"), {"retry-after": "1", "retry-after-ms": "50"}),
        (Failure("DEADLINE_EXCEEDED", "the queue deadline passed", None, "queue"), {}),
        (Failure("REJECTED_BY_MODEL", "ValueError"), {"x-should-retry": "false"}),
        (Failure("BACKEND_ERROR", "crashed"), {}),
    ],
)
async def test_a_failure_becomes_its_document(stand: Stand, failure: Failure, header: dict[str, str]) -> None:
    stand.gateway.failure = failure
    client = await stand.connect()
    await client.send(post('{"input": "a"}') * 2)
    for _ in range(2):
        answer = await client.answer()
        assert answer.status == STATUS[failure.code]
        assert answer.error == failure.code
        assert answer.json["message"] == failure.message
        assert header.items() <= answer.header.items()
        assert ("x-should-retry" in answer.header) == ("x-should-retry" in header)


async def test_an_output_that_is_no_text_is_a_backend_error(stand: Stand) -> None:
    stand.gateway.output = "\ud800"
    answer = await stand.ask(post('{"input": "a"}'))
    assert (answer.status, answer.error) == (502, "BACKEND_ERROR")


@pytest.mark.parametrize(
    "target", ["/v1/inference?a=b", "http://test/v1/inference", "/v1/%69nference", "/%761/inference?"]
)
async def test_every_spelling_of_a_route_is_the_route(stand: Stand, target: str) -> None:
    assert (await stand.ask(post('{"input": "a"}', target))).json["output"] == "A"


KEYS = {"secret": {"user": "ada", "tenant": "acme", "tier": "enterprise"}}


@on_stand(keys=KEYS)
async def test_who_sends_the_service_token_is_told_where_it_is_good(stand: Stand) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", "Authorization: Bearer hw_svc_secret"))
    assert (answer.status, answer.error) == (401, "UNAUTHENTICATED")
    assert "the admin port only" in answer.json["message"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "a key is required"),
        ("Bearer", "a key is required"),
        ("secret", "the value of Authorization does not begin with Bearer"),
        ("Basic secret", "the value of Authorization does not begin with Bearer"),
        ("Bearer other", "the credential is not valid"),
        ("bearer secret x", "the credential is not valid"),
    ],
)
@on_stand(keys=KEYS)
async def test_no_good_key_is_401_before_the_body_is_read(stand: Stand, value: str, told: str) -> None:
    fields = [f"Authorization: {value}"] if value else []
    client = await stand.connect()
    await client.send(post("not even JSON", "/v1/inference", *fields, length=20))
    answer = await client.answer()
    assert (answer.status, answer.error) == (401, "UNAUTHENTICATED")
    assert answer.json["message"].startswith(told)
    assert answer.header["www-authenticate"] == "Bearer"
    assert answer.header["x-should-retry"] == "false"
    await client.send(b"x" * 7 + post('{"input": "a"}', "/v1/inference", "Authorization: bearer secret"))
    assert (await client.answer()).status == 200
    assert stand.gateway.asked[0].principal.user == "ada"
    assert stand.gateway.asked[0].tier == 0
    assert dict(stand.counters.gateway.refusals) == {("unauthenticated", "none", ""): 1}


@on_stand(keys=KEYS)
async def test_the_key_is_looked_up_for_every_request_under_a_known_head(stand: Stand) -> None:
    client = await stand.connect()
    for field, status in (("Bearer secret", 200), ("Bearer secret", 200), ("Bearer secreT", 401), ("Bearer x", 401)):
        for text in ("a", "bb"):
            await client.send(post(f'{{"input": "{text}"}}', "/v1/inference", f"Authorization: {field}"))
            assert (await client.answer()).status == status


@on_stand(keys=KEYS)
async def test_a_key_that_is_revoked_stops_working_on_an_open_connection(stand: Stand) -> None:
    client = await stand.connect()
    request = post('{"input": "a"}', "/v1/inference", "Authorization: Bearer secret")
    await client.send(request)
    assert (await client.answer()).status == 200
    context: Any = stand.door._context
    context.entrance._identify.__self__._callers.clear()
    await client.send(request)
    assert (await client.answer()).error == "UNAUTHENTICATED"
    assert len(stand.gateway.asked) == 1


async def test_known_heads_with_other_lengths_and_in_pieces(stand: Stand) -> None:
    client = await stand.connect()
    texts = ["a", "bb", "c" * 300, "d", "", "e" * 5000, "f"]
    for text in texts:
        await client.send(post(f'{{"input": "{text}"}}'))
        assert (await client.answer()).json["output"] == text.upper()
    whole = post('{"input": "xyz"}')
    for cut in (1, 20, len(whole) - 30, len(whole) - 17, len(whole) - 16, len(whole) - 1):
        await client.send(whole[:cut], whole[cut:])
        assert (await client.answer()).json["output"] == "XYZ"


@pytest.mark.parametrize(
    "length", ["0" * 5000 + "16", "0" * 5000, "1_6", "+16", "16 ", " 16", "0016", "16;", "١٦", "9" * 40, "-16", ""]
)
async def test_a_known_head_with_an_odd_length_means_what_it_means_when_new(stand: Stand, length: str) -> None:
    def request(text: str) -> bytes:
        return (
            b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-A: b\r\n\r\n" % text.encode()
            + b'{"input": "abc"}'
        )

    fresh = await stand.ask(request(length))
    client = await stand.connect()
    await client.send(request("16"))
    assert (await client.answer()).status == 200
    await client.send(request(length))
    known = await client.answer()
    assert (known.status, known.json.get("error")) == (fresh.status, fresh.json.get("error"))


async def test_a_client_that_leaves_is_told_to_the_gateway_once(stand: Stand) -> None:
    stand.gateway.hold = True
    for leave in ("close", "reset", "half"):
        client = await stand.connect()
        await client.send(post('{"input": "a"}'))
        await stand.gateway.until(lambda: bool(stand.gateway.waiting))
        if leave == "close":
            client.leave()
        elif leave == "reset":
            client.writer.transport.abort()
        else:
            client.writer.write_eof()
        await stand.gateway.until(lambda: not stand.gateway.waiting)
    assert stand.gateway.abandoned == [("default", asked.id) for asked in stand.gateway.asked]


async def test_an_answer_says_how_many_milliseconds_it_took(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post('{"input": "a"}'))
    await stand.gateway.until(lambda: bool(stand.gateway.waiting))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_in_hand, "monotonic", lambda: INSTANT + 0.25)
        stand.gateway.release()
        assert (await client.answer()).json["metadata"]["latency_ms"] == pytest.approx(250.0)


async def test_an_answer_for_a_client_that_has_left_is_dropped(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post('{"input": "a"}'))
    await stand.gateway.until(lambda: bool(stand.gateway.waiting))
    buffer = list(stand.gateway.waiting)
    client.leave()
    await stand.gateway.until(lambda: not stand.gateway.waiting)
    stand.gateway.waiting = buffer
    stand.gateway.release()


async def test_a_reply_to_an_earlier_request_is_never_written(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    for _ in range(3):  # The head is read, is known, and has an open lane.
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


async def test_nothing_is_abandoned_when_a_client_leaves_after_its_answer(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post('{"input": "a"}'))
    assert (await client.answer()).status == 200
    client.writer.write_eof()
    assert await client.ended()
    assert stand.gateway.abandoned == []


async def test_answers_leave_in_the_order_of_requests(stand: Stand) -> None:
    client = await stand.connect()
    mixed = [
        post('{"input": "a"}'), get("/livez"), post("{}"), get("/nowhere"), post('{"input": "b"}', "/api/inference"),
        get("/readyz"), get("/livez", method="HEAD"), post('{"input": "c"}'), post("", "/livez"),
    ]  # fmt: skip
    await client.send(b"".join(mixed))
    answers = [await client.answer(bodiless=number == 6) for number in range(len(mixed))]
    assert [answer.status for answer in answers] == [200, 200, 400, 404, 200, 200, 200, 200, 405]
    assert [answers[number].json["output"] for number in (0, 4, 7)] == ["A", "B", "C"]


async def test_one_request_of_a_connection_is_with_the_gateway_at_a_time(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post('{"input": "a"}') + post('{"input": "b"}'), post('{"input": "c"}'))
    for text in "abc":
        await stand.gateway.until(lambda: bool(stand.gateway.waiting))
        assert [asked.input for asked in stand.gateway.waiting] == [text]
        stand.gateway.release()
        assert (await client.answer()).json["output"] == text.upper()
