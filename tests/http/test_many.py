"""Several inputs in one HTTP request."""

import json
from typing import Any

import pytest

from headway.errors import DEADLINE_EXCEEDED
from headway.gateway.fan_out import AT_ONCE, MOST_INPUTS
from headway.model import Failure, Reply, TokenCount
from tests.http.stand import Stand, on_stand, post

UUID = "0189f7a4-1111-7222-8333-444455556666"


def many(inputs: list[Any], *fields: str, **members: Any) -> bytes:
    return post(json.dumps({"inputs": inputs, **members}), "/v1/inference", *fields)


async def test_several_inputs_are_answered_in_order(stand: Stand) -> None:
    texts = [f"é {number}" for number in range(3 * AT_ONCE)]
    client, stand.gateway.tokens = await stand.connect(), TokenCount(7, 3)
    answer = await client.ask(many(texts, f"X-Request-Id: {UUID}", parameters={"a": 1}))
    assert answer.status == 200
    assert answer.json["outputs"] == [text.upper() for text in texts]
    assert set(answer.json) == {"request_id", "outputs", "metadata"}
    assert answer.json["metadata"]["tokens_used"] == 7 * len(texts)
    assert answer.json["request_id"] == answer.header["x-request-id"] == f"req_{UUID}"
    asked = stand.gateway.asked
    assert (asked[0].id, len({one.id for one in asked})) == (UUID, len(texts))
    assert {one.parameters for one in asked} == {b'{"a": 1}'}
    assert (await client.ask(post('{"input": "one"}'))).json["output"] == "ONE"


async def test_several_json_values_are_answered_with_json(stand: Stand) -> None:
    stand.learn("json")
    inputs: list[Any] = [{"a": 1}, "text", None, [], 'q"']
    assert (await stand.ask(many(inputs))).json["outputs"] == [{"a": 1}, "TEXT", None, [], 'Q"']
    assert (await stand.ask(many([[]]))).json["outputs"] == [[]]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ('{"inputs": []}', 400, "at least one input - at `$.inputs`"),
        ('{"inputs": {"a": 1}}', 400, "Expected `array`, got `object` - at `$.inputs`"),
        ('{"inputs": ["a", 1]}', 400, "Expected `str`, got `number` - at `$.inputs[1]`"),
        pytest.param('{"inputs": ["a", "b\\u0000"]}', 400, "`$.inputs[1]` contains U+0000", id="U+0000"),
        ('{"inputs": ["a"], "input": ["a"]}', 400, "both `input` and `inputs`"),
        ('{"inputs": null, "input": "a"}', 400, "both `input` and `inputs`"),
        (json.dumps({"inputs": ["a"] * (MOST_INPUTS + 1)}), 413, f"more than {MOST_INPUTS} members"),
        ('{"inputs": [' + "[]," * 300_000 + "1]}", 413, f"more than {MOST_INPUTS} members"),
    ],
    ids=lambda given: given[:30] if isinstance(given, str) else "",
)
async def test_a_wrong_list_is_told_what_is_wrong_with_it(stand: Stand, body: str, status: int, says: str) -> None:
    answer = await stand.ask(post(body))
    assert answer.status == status, answer.json
    assert says in answer.json["message"]
    assert stand.gateway.asked == []


@on_stand(keys={"k": {"rate": 60.0, "burst": 5.0}}, whole=True)
async def test_several_inputs_that_should_become_a_task_are_refused(stand: Stand) -> None:
    bearer = "Authorization: Bearer k"
    for preference, left in (("respond-async", 4), ("respond-async, wait=20", 3)):
        refused = await stand.ask(many(["a", "b"], f"Prefer: {preference}", bearer))
        assert (refused.status, refused.error) == (400, "BAD_REQUEST")
        assert "cannot become a task; send a request for each input" in refused.json["message"]
        assert f";r={left};" in refused.header["ratelimit"]  # Charged as one invalid request.
    waited = await stand.ask(many(["a", "b"], "Prefer: wait=20", bearer))
    assert (waited.status, waited.json["outputs"]) == (200, ["A", "B"])


async def test_the_failure_of_one_input_or_a_client_that_leaves_lets_go_of_the_others(stand: Stand) -> None:
    client = await stand.hold(many(["a", "b", "c"]))
    _, second, _ = waiting = stand.gateway.waiting
    second.sink.answer(
        Reply(second.id, second.principal.tenant, None, Failure(DEADLINE_EXCEEDED, "too late", None, "queue"))
    )
    answer = await client.answer()
    assert (answer.status, answer.error) == (504, "DEADLINE_EXCEEDED")
    assert answer.json["message"] == "input 1 of 3, counted from 0: too late"
    assert stand.gateway.abandoned == [("default", waiting[0].id), ("default", waiting[2].id)]
    stand.gateway.waiting.clear()
    client = await stand.hold(many(["a", "b"]))
    client.leave()
    await stand.gateway.until(lambda: not stand.gateway.waiting)


@on_stand(whole=True)
async def test_a_key_holds_for_the_list_as_a_whole(stand: Stand) -> None:
    key = "Idempotency-Key: k"
    for replayed in (False, True):
        answer = await stand.ask(many(["a", "b"], key))
        assert answer.json["outputs"] == ["A", "B"]
        assert ("idempotency-replayed" in answer.header) == replayed
    assert stand.runs == ["a", "b"]
    for other in (many(["b", "a"], key), many(["a"], key), post('{"input": "a"}', "/v1/inference", key)):
        answer = await stand.ask(other)
        assert (answer.status, answer.error) == (422, "IDEMPOTENCY_CONFLICT")


async def test_every_input_for_a_model_of_octets_is_checked_before_any_is_taken(stand: Stand) -> None:
    stand.learn("bytes")
    answer = await stand.ask(many(["AAAA", "no base64"]))
    assert (answer.status, answer.error) == (400, "BAD_REQUEST")
    assert answer.json["message"].endswith("got other text - at `$.inputs[1]`")
    assert stand.gateway.asked == []
