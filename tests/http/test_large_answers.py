"""Answers with several outputs that are large in total: their limit, their memory, and how they are sent."""

import json
import struct
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from headway.doors import answer_pieces
from headway.errors import BACKEND_ERROR, PAYLOAD_TOO_LARGE
from headway.oip.tensors import unpack
from headway.runtime.fair_turns import FairTurns
from tests.http.stand import ADA, BOB, MEBIBYTE, TENANTS, Answer, Stand, on_stand, post, settled


def many(count: int, *fields: str) -> bytes:
    return post(json.dumps({"inputs": ["a"] * count}), "/v1/inference", *fields)


async def none_is_held(stand: Stand) -> None:
    await settled(lambda: stand.nothing_held)


@on_stand(keys=TENANTS, memory_mb=8, max_body_bytes=1 << 18)
async def test_outputs_that_are_too_many_bytes_together_are_refused_when_the_bound_is_passed(stand: Stand) -> None:
    stand.gateway.output = "x" * 300_000
    answer = await stand.ask(many(20, ADA))
    assert (answer.status, answer.error) == (413, PAYLOAD_TOO_LARGE)
    assert f"exceed {MEBIBYTE} bytes in total" in answer.json["message"]
    assert "memory_mb" in answer.json["message"]
    assert stand.counters.gateway.refusals["answer", "paid", "default"] == 1
    assert (await stand.ask(many(3, ADA))).status == 200
    await none_is_held(stand)


@on_stand(keys=TENANTS, memory_mb=64, max_body_bytes=1 << 18)
async def test_a_tenant_holds_no_more_of_answers_than_leaves_room_for_others(stand: Stand) -> None:
    stand.gateway.output = "x" * MEBIBYTE
    refused = None
    while refused is None:
        client = await stand.connect()
        client.listen(False)
        await client.send(many(7, ADA))
        before = stand.bodies.used("acme")
        answer = await stand.ask(many(7, ADA))
        refused = answer if answer.status != 200 else None
        assert before <= 0.9 * stand.settings.bodies_bytes
    assert (refused.status, refused.header["x-headway-dropped-reason"]) == (429, "bodies")
    assert (await stand.ask(many(2, BOB))).status == 200
    for client in stand.clients:
        client.writer.transport.abort()
    await none_is_held(stand)


@on_stand(keys=TENANTS)
async def test_a_large_answer_is_made_and_sent_bit_by_bit(
    stand: Stand, turns: list[tuple[FairTurns, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_pieces, "TURN", -1.0)
    stand.gateway.output = "x" * 100_000
    assert (await stand.ask(many(40, ADA))).json["outputs"] == ["x" * 100_000] * 40
    assert turns.count((stand.context.large_bodies, "acme")) > 2 * 40
    await none_is_held(stand)


@on_stand(keys=TENANTS)
async def test_no_more_is_sent_than_the_client_takes_and_its_leaving_gives_the_room_back(stand: Stand) -> None:
    stand.gateway.output = "x" * MEBIBYTE
    client = await stand.connect()
    client.listen(False)
    await client.send(many(100, ADA))
    connection = stand.connection
    await settled(lambda: connection.unread.since > 0)
    assert connection.transport.get_write_buffer_size() < 8 * MEBIBYTE
    assert 80 * MEBIBYTE < stand.bodies.used("acme") <= 101 * MEBIBYTE
    client.writer.transport.abort()
    await none_is_held(stand)


@on_stand(keys=TENANTS)
async def test_requests_behind_a_large_answer_are_answered_after_it(stand: Stand) -> None:
    stand.gateway.output = "x" * 50_000
    client = await stand.connect()
    await client.send(many(100, ADA), post('{"input": "b"}', "/v1/inference", ADA))
    first, second = await client.answer(), await client.answer()
    assert (len(first.json["outputs"]), second.json["output"]) == (100, "x" * 50_000)
    stand.gateway.output = "x" * 50_000 + "\udcff"
    answer = await client.ask(many(20, ADA))
    assert (answer.status, answer.error) == (502, BACKEND_ERROR), "found before anything is sent"
    await none_is_held(stand)


TEXT = 'é"\n' * 90_000
NUMBERS = ",".join(f"{number / 8}" for number in range(40_000))


def _completions(answer: Answer) -> list[str]:
    assert answer.json["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return [choice["text"] for choice in answer.json["choices"]]


def _chat(answer: Answer) -> list[str]:
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    return [choice["message"]["content"] for choice in answer.json["choices"]]


def _events(answer: Answer) -> list[str]:
    *events, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(one.removeprefix(b"data: "))["choices"][0]["delta"]["content"] for one in events]


def _embeddings(answer: Answer) -> list[str]:
    return [",".join(map(str, one["embedding"])) for one in answer.json["data"]]


def _packed_embeddings(answer: Answer) -> list[str]:
    numbers = [b64decode(one["embedding"]) for one in answer.json["data"]]
    return [",".join(map(str, struct.unpack(f"<{len(one) // 4}f", one))) for one in numbers]


def _binary(answer: Answer) -> list[str]:
    _, packed = answer.parts
    return [one.decode() for one in unpack("OUTPUT", packed, 3)]


_INPUT = {"name": "INPUT", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]}
_MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/inference", {"inputs": ["a", "b", "c"]}, lambda answer: answer.json["outputs"]),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, _completions),
        ("/v1/chat/completions", {"messages": _MESSAGES, "n": 3}, _chat),
        ("/v1/chat/completions", {"messages": _MESSAGES, "n": 3, "stream": True}, _events),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, _embeddings),
        ("/v1/embeddings", {"input": ["a", "b", "c"], "encoding_format": "base64"}, _packed_embeddings),
        ("/v2/models/default/infer", {"inputs": [_INPUT]}, lambda answer: answer.json["outputs"][0]["data"]),
        ("/v2/models/default/infer", {"inputs": [_INPUT], "parameters": {"binary_data_output": True}}, _binary),
    ],
)
@on_stand(keys=TENANTS)
async def test_every_door_answers_alike_whether_the_outputs_are_large_or_small(
    stand: Stand, path: str, body: dict[str, Any], read: Callable[[Answer], list[str]], small: bool
) -> None:
    text = NUMBERS if "embeddings" in path else TEXT
    output = text[: text.index(",", 40)] if small and text is NUMBERS else text[:30] if small else text
    stand.gateway.output = f"[{output}]" if text is NUMBERS else output
    answer = await stand.ask(post(json.dumps(body), path, ADA))
    assert answer.status == 200, answer.body[:300]
    assert read(answer) == [output] * 3
    await none_is_held(stand)


def _response_events(answer: Answer) -> str:
    told = [json.loads(one.partition(b"data: ")[2]) for one in answer.body.split(b"\n\n")[:-2]]
    [delta] = [one["delta"] for one in told if one["type"] == "response.output_text.delta"]
    assert told[-1]["response"]["output"] == [told[-2]["item"]]
    assert {told[-2]["item"]["content"][0]["text"], told[-3]["part"]["text"], told[-4]["text"]} == {delta}
    return str(delta)


_ALONE = {"inputs": [{**_INPUT, "shape": [1], "data": ["a"]}]}
_OCTETS = "Accept: application/octet-stream"


@pytest.mark.parametrize(
    ("path", "body", "fields", "read"),
    [
        ("/v1/inference", {"input": "a"}, (), lambda answer: answer.json["output"]),
        ("/v1/predict", {"model_id": "default", "input_data": "a"}, (_OCTETS,), lambda answer: answer.body.decode()),
        ("/v1/completions", {"prompt": "a"}, (), lambda answer: _completions(answer)[0]),
        ("/v1/chat/completions", {"messages": _MESSAGES, "stream": True}, (), lambda answer: _events(answer)[0]),
        ("/v1/responses", {"input": "a"}, (), lambda answer: answer.json["output"][0]["content"][0]["text"]),
        ("/v1/responses", {"input": "a", "stream": True}, (), _response_events),
        ("/v2/models/default/infer", _ALONE, (), lambda answer: answer.json["outputs"][0]["data"][0]),
    ],
)
@on_stand(keys=TENANTS)
async def test_the_answer_with_one_large_output_is_sent_bit_by_bit_too(
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    fields: tuple[str, ...],
    read: Callable[[Answer], str],
) -> None:
    """Sent in one piece, it would block the loop: 6 ms for 8 MB."""
    monkeypatch.setattr(answer_pieces, "TURN", -1.0)
    pieces, take = list[int](), answer_pieces.LargeAnswer.take

    def taken(answer: answer_pieces.LargeAnswer) -> bytes:
        piece = take(answer)
        pieces.append(len(piece))
        return piece

    monkeypatch.setattr(answer_pieces.LargeAnswer, "take", taken)
    stand.gateway.output = '"\u00fc\n' * MEBIBYTE
    asked = post(json.dumps(body), path, ADA, *fields)
    answer = await stand.ask(asked)
    assert read(answer) == stand.gateway.output
    assert len(answer.body) == sum(pieces)
    assert max(pieces) <= 3 * answer_pieces.PIECE < sum(pieces) / 5
    stand.gateway.output = "\ud800" * MEBIBYTE
    assert (await stand.ask(asked)).status == 502


@on_stand(keys=TENANTS)
async def test_what_a_client_leaves_of_one_large_output_counts_for_it_and_is_let_go_of_with_it(stand: Stand) -> None:
    stand.gateway.output = "x" * (16 * MEBIBYTE)
    client = await stand.connect()
    client.listen(False)
    await client.send(post('{"input": "a"}', "/v1/inference", ADA), post('{"input": "b"}', "/v1/inference", ADA))
    connection = stand.connection
    await settled(lambda: connection.unread.since > 0)
    assert stand.bodies.used("acme") > 4 * MEBIBYTE
    assert connection.transport.get_write_buffer_size() < 8 * MEBIBYTE
    client.listen()
    for _ in range(2):
        assert len((await client.answer()).json["output"]) == 16 * MEBIBYTE
    await none_is_held(stand)


@on_stand(keys=TENANTS)
async def test_a_large_answer_comes_though_the_client_had_not_taken_what_came_before(stand: Stand) -> None:
    stand.gateway.output = "x" * (2 * MEBIBYTE)
    client = await stand.hold(post('{"input": "a"}', "/v1/inference", ADA))
    connection = stand.connection
    connection.pause_writing()
    stand.gateway.release()
    connection.resume_writing()
    assert len((await client.answer()).json["output"]) == 2 * MEBIBYTE
    await none_is_held(stand)
