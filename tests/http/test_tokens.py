"""Tokens in answers over HTTP: what a target tells, on the native routes, on OpenAI's, and by the Open Inference Protocol."""

import json
from typing import Any

import pytest

from headway.doors.exchange import Outcome
from headway.http.openai.answers import ChoicesWriter
from headway.model import TokenCount, added_up
from tests.http.stand import Stand, get, on_stand, post


async def test_native_answers_tell_the_tokens_of_a_request_and_null_where_nobody_does(stand: Stand) -> None:
    async def used(body: str) -> Any:
        return (await stand.ask(post(body))).json["metadata"]["tokens_used"]

    assert await used('{"input": "a"}') is None
    assert await used('{"inputs": ["a", "b"]}') is None
    stand.gateway.tokens = TokenCount(7, 3)
    assert await used('{"input": "a"}') == 7
    assert await used('{"input": "a", "parameters": {"x": 1}}') == 7
    assert await used('{"inputs": ["a", "b"]}') == 14
    stand.gateway.output = b'{"label": 1}'
    assert await used('{"input": "a"}') == 7


def test_the_tokens_of_a_list_are_those_that_are_told() -> None:
    assert added_up([]) is added_up([None, None]) is None
    assert added_up([None, TokenCount(5, 2), TokenCount(1)]) == TokenCount(6, 2)


@on_stand(whole=True)
async def test_the_outcome_of_a_task_tells_its_tokens_and_version(stand: Stand) -> None:
    async def metadata(key: str) -> Any:
        line = await stand.connect()
        await line.send(post('{"input": "a"}', "/v1/inference", "Prefer: respond-async", f"Idempotency-Key: {key}"))
        id = (await line.answer()).json["task_id"]
        return (await line.ask(get(f"/v1/result/{id}?wait=25"))).json["metadata"]

    stand.go.set()
    assert await metadata("untold") == {"tokens_used": None, "model_version": "1"}
    stand.gateway.tokens = TokenCount(7, 3)
    told = {"tokens_used": 7, "model_version": "1"}
    assert await metadata("told") == await metadata("told") == told, "an outcome that is kept tells them, too"


async def test_the_open_inference_protocol_tells_tokens_in_a_parameter(stand: Stand) -> None:
    async def told(binary: bool, *texts: str) -> Any:
        tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        asked = {"inputs": [tensor], "parameters": {"binary_data_output": binary}}
        answer = await stand.ask(post(json.dumps(asked), "/v2/models/default/infer"))
        length = int(answer.header.get("inference-header-content-length", len(answer.body)))
        return json.loads(answer.body[:length]).get("parameters")

    assert await told(False, "a") is await told(True, "a", "b") is None
    stand.gateway.tokens = TokenCount(7, 3)
    assert await told(False, "a") == await told(True, "a") == {"tokens_used": 7}
    assert await told(False, "a", "b") == await told(True, "a", "b") == {"tokens_used": 14}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("each", "choices", "prompt", "completion"),
    [
        ([None, TokenCount(7, 3), TokenCount(2, 1)], 1, 4, 5),
        ([TokenCount(7, 3), TokenCount(5, 3), None, TokenCount(4, 1)], 2, 4, 9),
    ],
)
def test_the_usage_of_several_choices_is_that_of_those_that_tell_it(
    each: list[TokenCount | None], choices: int, prompt: int, completion: int, stream: bool
) -> None:
    _, pieces = ChoicesWriter("m", stream, stream, True, choices)(Outcome("req_x", ["a"] * len(each), 1.0, "1", each))
    assert not isinstance(pieces, bytes)
    *_, last = [text for text in b"".join(pieces).decode().split("data: ") if "DONE" not in text]
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    assert json.loads(last)["usage"] == usage


async def test_openai_s_clients_find_the_tokens_as_usage(stand: Stand) -> None:
    async def usage(path: str, **members: Any) -> dict[str, int]:
        answer = await stand.ask(post(json.dumps(members), path))
        assert answer.status == 200
        return {name: count for name, count in answer.json["usage"].items() if isinstance(count, int)}

    stand.gateway.tokens = TokenCount(7, 3)
    hello = [{"role": "user", "content": "hello"}]
    once = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    twice = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert await usage("/v1/completions", prompt="a") == once
    assert await usage("/v1/completions", prompt="a", n=2) == twice
    assert await usage("/v1/chat/completions", messages=hello) == once
    assert await usage("/v1/responses", input="a") == {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
    stand.gateway.output = "[0.5]"
    assert await usage("/v1/embeddings", input=["a", "b"]) == {"prompt_tokens": 14, "total_tokens": 14}
    told = {"text": "a", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    stand.gateway.output = json.dumps(told).encode()
    assert (await usage("/v1/completions", prompt="a"))["total_tokens"] == 2, "what the output says itself counts first"
