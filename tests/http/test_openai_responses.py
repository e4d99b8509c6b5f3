"""The route of OpenAI's responses on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.stand import Answer, Stand, on_stand, post
from tests.http.test_openai import takes

PATH = "/v1/responses"


def asked(**members: Any) -> bytes:
    return post(json.dumps({"input": "hello", **members}), PATH)


def events(answer: Answer) -> list[tuple[str, Any]]:
    """Names and data of a stream's events, without the last, which says that it is complete."""
    assert answer.header["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    *bodies, done, rest = answer.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in bodies:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@on_stand()
async def test_instructions_and_input_are_one_conversation_and_the_target_finds_its_messages(stand: Stand) -> None:
    answer = await stand.ask(
        asked(
            model="default", user="me", store=True, max_output_tokens=5, temperature=0.5, instructions="be brief",
            metadata={"a": "b"}, text={"format": {"type": "text"}, "verbosity": "low"}, tools=[], include=[],
            input=[
                {"role": "user", "content": "a"},
                {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": "d"}]},
            ],
        )
    )  # fmt: skip
    text = "system: be brief\nuser: a\nassistant: b\nuser: c\nd\nassistant:"
    body = answer.json
    (message,) = body["output"]
    assert message["content"] == [{"type": "output_text", "text": text.upper(), "annotations": [], "logprobs": []}]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert body["id"] == "resp_" + answer.header["x-request-id"].removeprefix("req_")
    assert (body["object"], body["status"], body["model"], body["usage"]) == (
        "response",
        "completed",
        "default",
        None,
    )
    assert (body["metadata"], body["temperature"], body["max_output_tokens"]) == ({"a": "b"}, 0.5, 5)
    assert (body["instructions"], body["store"], body["error"]) == ("be brief", False, None)
    (entry,) = stand.gateway.asked
    parameters = json.loads(entry.parameters)
    assert [one["role"] for one in parameters.pop("messages")] == ["system", "user", "assistant", "user"]
    assert parameters == {
        "max_output_tokens": 5,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "user": "me",
    }
    assert entry.input == text


@on_stand()
async def test_a_target_may_tell_usage_and_that_it_ended_early(stand: Stand) -> None:
    told = {"text": "a", "usage": {"prompt_tokens": 2, "completion_tokens": 3}, "finish_reason": "length"}
    stand.gateway.output = json.dumps(told).encode()
    body = (await stand.ask(asked())).json
    assert body["usage"] == {
        "input_tokens": 2, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5,
    }  # fmt: skip
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(await stand.ask(asked(stream=True)))[-1][0] == "response.incomplete"


@on_stand()
async def test_a_stream_has_the_events_of_a_whole_response(stand: Stand) -> None:
    found = events(await stand.ask(asked(stream=True, stream_options={"include_obfuscation": False})))
    assert [data["type"] for _, data in found] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found] == list(range(9))
    text = "USER: HELLO\nASSISTANT:"
    assert [data["delta"] for name, data in found if name.endswith("delta")] == [text]
    assert found[0][1]["response"]["output"] == []
    (message,) = found[-1][1]["response"]["output"]
    assert message["content"][0]["text"] == text
    assert {data["item_id"] for _, data in found if "item_id" in data} == {message["id"]}


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
CALL = [{"type": "function_call_output", "call_id": "c", "output": "o"}]


@pytest.mark.parametrize(
    ("members", "param", "says"),
    [
        ({"input": None}, "input", "Expected a text, or at least one message"),
        ({"input": []}, "input", "at least one message"),
        ({"input": 3}, "input", "Expected `str | array | null`, got `int`"),
        ({"input": ["a"]}, "input", "Expected `object`, got `str`"),
        ({"input": [{"content": "a"}]}, "input", "missing required field `role`"),
        ({"input": [{"role": "user"}]}, "input", "missing required field `content`"),
        ({"input": IMAGE}, "input", "'input_image' is not taken, only text"),
        ({"input": CALL}, "input", "'function_call_output' is not taken, only messages"),
        ({"instructions": 3}, "instructions", "Expected `str | null`"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools are not served"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored; send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"background": True}, "background", "ask /v1/inference for a task"),
        ({"prompt": {"id": "p"}}, "prompt", "stored prompts are not served"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "nothing is there but text"),
        ({"text": {"format": {"name": "x"}}}, "text", "missing required field `type` - at `$.text.format`"),
        ({"text": 3}, "text", "Expected `object | null`, got `int`"),
        ({"tool_choice": "required"}, "tool_choice", "tools are not served"),
        ({"modalities": ["audio"]}, "modalities", "the model gives text only"),
        ({"metadata": {"a": 1}}, "metadata", "Expected `str`"),
        ({"stream": "yes"}, "stream", "Expected `bool | null`"),
    ],
)
@on_stand()
async def test_what_is_not_served_is_refused_and_says_what_to_do(
    stand: Stand, members: dict[str, Any], param: str, says: str
) -> None:
    answer = await stand.ask(asked(**members))
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert says in error["message"]
    assert not stand.gateway.asked


REQUIRED = {
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id", "incomplete_details", "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output", "parallel_tool_calls", "presence_penalty",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store", "temperature",
    "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
}  # fmt: skip
"""Members that a response has by the Open Responses specification, 2026-04-24."""
NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_logprobs", "top_p")


@on_stand()
async def test_a_response_has_all_members_that_open_responses_requires(stand: Stand) -> None:
    whole = (await stand.ask(asked(temperature=None, text={"verbosity": "low"}))).json
    streamed = [data["response"] for _, data in events(await stand.ask(asked(stream=True))) if "response" in data]
    for body in (whole, *streamed):
        assert body.keys() >= REQUIRED
        assert all(isinstance(body[name], int | float) for name in NUMBERS)
    assert whole["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    told = {
        "temperature": 0.5,
        "top_p": 0,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "presence_penalty": 2,
    }
    body = (await stand.ask(asked(**told))).json
    assert {name: body[name] for name in told} == told


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@on_stand()
async def test_a_format_is_passed_to_a_target_that_can_see_it_and_else_refused(stand: Stand, kind: str) -> None:
    text = {"format": {"type": kind, "name": "x", "schema": {}}}
    takes(stand, parameters=("text", "user"))
    answer = await stand.ask(asked(text=text))
    assert (answer.status, answer.json["text"]) == (200, text)
    assert json.loads(stand.gateway.asked.pop().parameters)["text"] == text
    for parameters, why in ((("t",), "does not name text in its attribute together"), ((), "takes no parameters")):
        takes(stand, parameters=parameters)
        await check_refused(stand, kind, text, why)


async def check_refused(stand: Stand, kind: str, text: Any, why: str) -> None:
    for plain in ({"format": {"type": "text"}}, {"format": None}, None):
        assert (await stand.ask(asked(text=plain, user="me"))).status == 200
        assert "user" not in json.loads(stand.gateway.asked.pop().parameters)
    answer = await stand.ask(asked(text=text))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "text")
    assert f"cannot answer in the format '{kind}', as its target {why} and so never sees it" in error["message"]
    assert not stand.gateway.asked
