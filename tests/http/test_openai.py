import base64
import json
import struct
from typing import Any

import pytest

from headway.doors.exchange import Outcome
from headway.errors import STATUS
from headway.http.openai.answers import ChoicesWriter
from headway.http.problem import encode_openai_error
from headway.model import ALL_PARAMETERS, Failure, ModelLimit, PerCall, TokenCount, added_up
from tests.http.stand import Answer, Keys, Stand, get, on_stand, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
KEY, INVALID = "Authorization: Bearer key", "invalid_request_error"
HELLO = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": HELLO},
    EMBEDDINGS: {"input": "hello"},
    RESPONSES: {"input": "hello"},
}


def asked(path: str, *fields: str, **members: Any) -> bytes:
    return post(json.dumps({**GOOD[path], **members}), path, *fields)


def failure(answer: Answer) -> tuple[int, str, str, str | None]:
    """Return the status, type, code and param of an error in OpenAI's format."""
    assert answer.header["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(answer.json) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status, error["type"], error["code"], error["param"]


def events(answer: Answer) -> list[Any]:
    assert answer.header["content-type"] == "text/event-stream; charset=utf-8"
    *bodies, done, end = answer.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(body.partition("data: ")[2]) for body in bodies]


async def test_a_prompt_is_completed(stand: Stand) -> None:
    answer = await stand.ask(asked(COMPLETIONS, model="default", user="me", max_tokens=5, stop=["x"]))
    assert (answer.status, answer.header["content-type"]) == (200, "application/json")
    id = answer.header["x-request-id"].removeprefix("req_")
    assert answer.json.pop("created") > 1e9
    body = {key: value for key, value in answer.json.items() if key != "created"}
    assert set(body.pop("usage").values()) == {0}
    choice = {"index": 0, "text": "HELLO", "logprobs": None, "finish_reason": "stop"}
    assert body == {"id": f"cmpl-{id}", "object": "text_completion", "model": "default", "choices": [choice]}
    (entry,) = stand.gateway.asked
    assert json.loads(entry.parameters) == {"max_tokens": 5, "stop": ["x"], "user": "me"}


async def test_several_prompts_and_choices_are_as_many_entries_in_order(stand: Stand) -> None:
    answer = await stand.ask(asked(COMPLETIONS, prompt=["a", "b"], n=3, temperature=1.5))
    texts = [(choice["index"], choice["text"]) for choice in answer.json["choices"]]
    assert texts == [(0, "A"), (1, "A"), (2, "A"), (3, "B"), (4, "B"), (5, "B")]
    assert {entry.parameters for entry in stand.gateway.asked} == {b'{"temperature":1.5}'}
    assert (await stand.ask(asked(COMPLETIONS, prompt=["one"]))).json["choices"][0]["text"] == "ONE"


async def test_a_query_that_names_a_model_or_a_version_is_refused_and_another_is_ignored(stand: Stand) -> None:
    for query, status in (("version=2", 400), ("model=other", 400), ("api-version=2", 200)):
        answer = await stand.ask(post(json.dumps({"prompt": "a"}), f"{COMPLETIONS}?{query}"))
        assert answer.status == status, query


@on_stand({"key": {"rate": 600, "model_limits": [ModelLimit("default", 60.0, 4.0)]}}, whole=True)
async def test_a_list_of_prompts_counts_as_many_requests_also_towards_the_limit_for_its_model(stand: Stand) -> None:
    answer = await stand.ask(asked(COMPLETIONS, KEY, prompt=["a", "b", "c"]))
    assert [answer.header[f"x-ratelimit-{what}-requests"] for what in ("limit", "remaining")] == ["60", "1"]
    assert answer.header["x-ratelimit-reset-requests"] == answer.header["ratelimit"].rpartition("=")[2] + "s"
    answer = await stand.ask(asked(COMPLETIONS, KEY, prompt=["a", "b"]))
    assert failure(answer) == (429, "rate_limit_exceeded", "rate_limit_exceeded", None)
    assert int(answer.header["retry-after-ms"]) > 0
    assert answer.header["x-ratelimit-remaining-requests"] == "1"
    assert stand.runs == ["a", "b", "c"]


async def test_a_chat_is_answered(stand: Stand) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]},
    ]
    answer = await stand.ask(asked(CHAT, model="default", messages=messages, max_tokens=5))
    text = "system: be brief\nuser: hello\nyou\nassistant:"
    message = {"role": "assistant", "content": text.upper(), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert (answer.json["object"], answer.json["choices"]) == ("chat.completion", [choice])
    assert answer.json["id"].startswith("chatcmpl-")
    (entry,) = stand.gateway.asked
    assert entry.input == text
    assert json.loads(entry.parameters) == {"messages": messages, "max_tokens": 5}
    answer = await stand.ask(asked(CHAT, n=2))
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]


async def test_a_stream_has_a_chunk_for_each_choice_and_an_end(stand: Stand) -> None:
    (chunk,) = events(await stand.ask(asked(CHAT, stream=True)))
    delta = {"role": "assistant", "content": "USER: HELLO\nASSISTANT:", "refusal": None}
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"] == [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}]
    assert "usage" not in chunk
    first, second, last = events(
        await stand.ask(asked(COMPLETIONS, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}))
    )
    assert [one["choices"][0]["text"] for one in (first, second)] == ["A", "B"]
    assert (first["object"], first["id"]) == ("text_completion", last["id"])
    assert (first["usage"], last["choices"]) == (None, [])
    assert last["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, "its clients read numbers"


async def test_a_target_may_tell_usage_and_why_it_finished(stand: Stand) -> None:
    told = {"text": "é", "usage": {"prompt_tokens": 2, "completion_tokens": 3}, "finish_reason": "length"}
    stand.gateway.output = json.dumps(told).encode()
    answer = await stand.ask(asked(COMPLETIONS, n=2))
    assert [(one["text"], one["finish_reason"]) for one in answer.json["choices"]] == [("é", "length")] * 2
    assert answer.json["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    answer = await stand.ask(asked(COMPLETIONS, prompt=["a", "b"], n=2))
    assert answer.json["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    *_, last = events(await stand.ask(asked(CHAT, stream=True, stream_options={"include_usage": True})))
    assert last["usage"]["total_tokens"] == 5
    stand.gateway.output = b'{"text": 3}'
    answer = await stand.ask(asked(COMPLETIONS))
    assert (answer.json["choices"][0]["text"], answer.json["usage"]["total_tokens"]) == ('{"text": 3}', 0)
    assert "usage" not in (await stand.ask(asked(CHAT))).json


@pytest.mark.parametrize("output", ["[0.5, -2, 1e-3]", b"[0.5, -2, 1e-3]", '{"embedding": [0.5, -2, 1e-3]}'])
async def test_embeddings_come_as_numbers_or_in_base64(stand: Stand, output: Any) -> None:
    stand.gateway.output = output
    numbers = [0.5, -2.0, 0.001]
    answer = await stand.ask(asked(EMBEDDINGS, input=["a", "b"], model="default", dimensions=3))
    data = [{"object": "embedding", "index": index, "embedding": numbers} for index in (0, 1)]
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    assert answer.json == {"object": "list", "data": data, "model": "default", "usage": usage}
    assert json.loads(stand.gateway.asked[0].parameters) == {"dimensions": 3}
    (one,) = (await stand.ask(asked(EMBEDDINGS, encoding_format="base64"))).json["data"]
    assert base64.b64decode(one["embedding"]) == struct.pack("<3f", *numbers)


@pytest.mark.parametrize("output", ["no", "3", "", "a [1]"])
async def test_a_model_of_texts_gives_no_embeddings(stand: Stand, output: str) -> None:
    stand.gateway.output = output
    answer = await stand.ask(asked(EMBEDDINGS))
    assert failure(answer) == (400, INVALID, "bad_request", None)
    assert "the model returns text, not embeddings" in answer.json["error"]["message"]


@pytest.mark.parametrize("output", ["[]", "[1, null]", "[true]", '["1"]', "[1e999]", "{}", b"3", "[" * 5000])
async def test_an_output_that_is_no_embedding_fails_and_says_so(stand: Stand, output: Any) -> None:
    stand.gateway.output = output
    answer = await stand.ask(asked(EMBEDDINGS))
    assert failure(answer) == (502, "server_error", "backend_error", None)
    assert answer.header["x-should-retry"] == "false"
    assert "embedding" in answer.json["error"]["message"]


async def test_a_number_beyond_four_bytes_is_told(stand: Stand) -> None:
    stand.gateway.output = "[1e300]"
    assert (await stand.ask(asked(EMBEDDINGS))).json["data"][0]["embedding"] == [1e300]
    answer = await stand.ask(asked(EMBEDDINGS, encoding_format="base64"))
    assert (answer.status, "float" in answer.json["error"]["message"]) == (502, True)


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
CALL = [{"type": "function_call_output", "call_id": "c", "output": "o"}]
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": None}, "prompt", "expected a string"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "Expected `str | array | null`, got `int`"),
    (COMPLETIONS, {"prompt": []}, "prompt", "at least one"),
    (COMPLETIONS, {"prompt": [1, 2]}, "prompt", "token arrays"),
    (COMPLETIONS, {"prompt": ["a", None]}, "prompt", "got `null` - at `$.prompt[1]`"),
    (COMPLETIONS, {"prompt": "a\0b"}, "", "U+0000"),
    (COMPLETIONS, {"model": 3}, "model", "Expected `str | null`"),
    (COMPLETIONS, {"n": 0}, "n", "from 1 to 128"),
    (COMPLETIONS, {"n": 129}, "n", "from 1 to 128"),
    (COMPLETIONS, {"n": 1.5}, "n", "Expected `int | null`"),
    (COMPLETIONS, {"stream": "yes"}, "stream", "Expected `bool | null`"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 3}}, "stream_options", "include_usage"),
    (COMPLETIONS, {"logprobs": 3}, "logprobs", "leave this out"),
    (COMPLETIONS, {"echo": True}, "echo", "leave this out"),
    (COMPLETIONS, {"best_of": 3}, "best_of", "request n choices"),
    (COMPLETIONS, {"deep": json.loads("[" * 40 + "]" * 40)}, "", "deeper than 32"),
    (COMPLETIONS, {f"p{number}": 1 for number in range(200)}, "", "at most 64 are allowed"),
    (CHAT, {"messages": None}, "messages", "at least one message"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "tool calls are not supported"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages", "missing required field `role` - at `$.messages[0]`"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages", "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "`text`"),
    (CHAT, {"logprobs": True}, "logprobs", "leave this out"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "leave this out"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "leave them out"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "leave them out"),
    (CHAT, {"audio": {"voice": "x"}}, "audio", "leave this out"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "audio is not supported"),
    (CHAT, {"response_format": "json"}, "response_format", "Expected `object | null`, got `str`"),
    (EMBEDDINGS, {"input": [[1, 2]]}, "input", "token arrays"),
    (EMBEDDINGS, {"encoding_format": "hex"}, "encoding_format", "`float` or `base64`"),
    (EMBEDDINGS, {"dimensions": 2}, "dimensions", "the model returns 3 numbers"),
    (RESPONSES, {"input": None}, "input", "Expected a string, or at least one message"),
    (RESPONSES, {"input": []}, "input", "at least one message"),
    (RESPONSES, {"input": [{"content": "a"}]}, "input", "missing required field `role`"),
    (RESPONSES, {"input": IMAGE}, "input", "'input_image' is not supported, only text is"),
    (RESPONSES, {"input": CALL}, "input", "'function_call_output' is not supported, only messages are"),
    (RESPONSES, {"instructions": 3}, "instructions", "Expected `str | null`"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools", "tools are not supported"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "not stored; leave this out, and send the whole conversation"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "not stored"),
    (RESPONSES, {"background": True}, "background", "use /v1/inference for tasks"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt", "stored prompts are not supported"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include", "a response has only text and usage"),
    (RESPONSES, {"text": {"format": {"name": "x"}}}, "text", "missing required field `type` - at `$.text.format`"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice", "tools are not supported"),
    (RESPONSES, {"modalities": ["audio"]}, "modalities", "the model returns only text"),
    (RESPONSES, {"metadata": {"a": 1}}, "metadata", "Expected `str`"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "members", "param", "says"), WRONG)
async def test_what_is_wrong_is_told_with_its_member(
    stand: Stand, path: str, members: dict[str, Any], param: str, says: str
) -> None:
    stand.gateway.output = "[1, 2, 3]"
    answer = await stand.ask(asked(path, **members))
    assert failure(answer) == (400, INVALID, "bad_request", param or None)
    assert says in answer.json["error"]["message"]
    assert answer.header["x-should-retry"] == "false"


async def test_a_body_that_is_no_object_is_refused(stand: Stand) -> None:
    for body in ("", "[]", "{", '{"a": "\ud800"}', '{"input": "\\ud800", "prompt": "\\ud800"}'):
        for path in GOOD:
            answer = await stand.ask(post(body.encode("utf-8", "surrogatepass"), path))
            assert failure(answer)[:3] == (400, INVALID, "bad_request"), (path, body)


async def test_what_asks_for_nothing_is_no_error_and_no_parameter(stand: Stand) -> None:
    for more in ({"best_of": 1}, {"best_of": 3, "n": 3}):
        assert (await stand.ask(asked(COMPLETIONS, **more))).status == 200
    stand.gateway.asked.clear()
    nothing = {"logprobs": None, "echo": False, "best_of": None, "n": None, "stream": None, "stream_options": None}
    assert (await stand.ask(asked(COMPLETIONS, **nothing))).status == 200
    chat = {"tools": [], "tool_choice": "auto", "logprobs": False, "top_logprobs": 0, "n": 1.0, "modalities": ["text"]}
    assert (await stand.ask(asked(CHAT, **chat))).status == 200
    assert [set(json.loads(one.parameters or b"{}")) for one in stand.gateway.asked] == [set(), {"messages"}]


def takes(stand: Stand, *, parameters: PerCall) -> None:
    stand.learn("text", sees=parameters)


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("path", "member", "form", "plain"),
    [
        (CHAT, "response_format", FORM, [{"type": "text"}, None]),
        (CHAT, "response_format", {"type": "json_object"}, []),
        (RESPONSES, "text", TEXT, [{"format": {"type": "text"}}, {"format": None}, None]),
    ],
)
async def test_a_format_is_passed_to_a_target_that_can_see_it_and_else_refused(
    stand: Stand, path: str, member: str, form: dict[str, Any], plain: list[Any]
) -> None:
    ways: list[tuple[PerCall, str]] = [
        (ALL_PARAMETERS, ""),
        ((member, "t"), ""),
        (("t",), f"does not list {member} in its attribute"),
        ((), "takes no parameters"),
    ]
    for sees, why in ways:
        takes(stand, parameters=sees)
        answer = await stand.ask(asked(path, **{member: form}))
        if not why:
            assert answer.json.get(member, form) == json.loads(stand.gateway.asked.pop().parameters)[member] == form
            continue
        assert failure(answer) == (400, INVALID, "bad_request", member)
        kind = form.get("format", form)["type"]
        assert f"answer in the format '{kind}', as its target {why}" in answer.json["error"]["message"]
        assert not stand.gateway.asked
        for text in plain:
            assert (await stand.ask(asked(path, **{member: text}))).status == 200
            stand.gateway.asked.clear()


async def test_the_user_reaches_a_target_that_takes_parameters(stand: Stand) -> None:
    stand.gateway.output = "[1]"
    given: list[tuple[PerCall, bool]] = [(ALL_PARAMETERS, True), (("user",), True), (("t",), False), ((), False)]
    for parameters, sees in given:
        takes(stand, parameters=parameters)
        for path in GOOD:
            assert (await stand.ask(asked(path, user="ann"))).status == 200
            found = json.loads(stand.gateway.asked.pop().parameters or "{}")
            assert found.pop("user", None) == ("ann" if sees else None), (path, parameters)
            assert set(found) <= {"messages"}


@on_stand(max_queue=100)
async def test_too_many_inputs_are_told(stand: Stand) -> None:
    answer = await stand.ask(asked(COMPLETIONS, prompt=["a"] * 101))
    assert failure(answer) == (413, INVALID, "payload_too_large", "prompt")
    answer = await stand.ask(asked(COMPLETIONS, prompt=["a"] * 40, n=3))
    assert failure(answer) == (413, INVALID, "payload_too_large", "n")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (asked(CHAT), (401, "authentication_error", "invalid_api_key", None)),
        (asked(CHAT, KEY, model="other"), (404, INVALID, "model_not_found", "model")),
        (post("", CHAT, KEY, length=9_000_000), (413, INVALID, "payload_too_large", None)),
        (
            post(b"x\r\n", CHAT, KEY).replace(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
            (400, INVALID, "bad_request", None),
        ),
        (asked(CHAT, KEY, "X-Request-Tier: best"), (400, INVALID, "bad_request", None)),
        (asked(CHAT, KEY, "Prefer: respond-async"), (400, INVALID, "bad_request", None)),
        (get(CHAT, KEY), (405, INVALID, "method_not_allowed", None)),
        (get("/v1/chat/nothing", KEY), (404, INVALID, "unknown_url", None)),
        (post("{}", "/v1/responses/resp_1", KEY), (404, INVALID, "unknown_url", None)),
        (get("/v1/models/", KEY), (404, INVALID, "unknown_url", None)),
        (get("/models/other", KEY), (404, INVALID, "unknown_url", None)),
        (get("/v1/models"), (401, "authentication_error", "invalid_api_key", None)),
        (get("/v1/models/other", KEY), (404, INVALID, "model_not_found", "model")),
        (post("{}", "/v1/models", KEY), (405, INVALID, "method_not_allowed", None)),
    ],
)
@on_stand({"key": {}}, whole=True)
async def test_refusals_have_openai_codes(stand: Stand, request_: bytes, expected: tuple[Any, ...]) -> None:
    answer = await stand.ask(request_)
    assert (failure(answer), answer.header["x-should-retry"]) == (expected, "false")


@pytest.mark.parametrize(
    ("code", "kind", "named", "retry"),
    [
        ("BACKEND_ERROR", "server_error", "backend_error", "false"),
        ("DEADLINE_EXCEEDED", "server_error", "deadline_exceeded", "false"),
        ("REJECTED_BY_MODEL", INVALID, "rejected_by_model", "false"),
        ("SERVICE_OVERLOADED", "server_error", "server_is_overloaded", None),
        ("NO_WORKERS", "server_error", "server_is_overloaded", None),
        ("DRAINING", "server_error", "server_is_overloaded", None),
        ("IDEMPOTENCY_MISUSE", INVALID, "idempotency_conflict", "false"),
        ("RATE_LIMITED", "rate_limit_exceeded", "rate_limit_exceeded", None),
        ("SHED", "rate_limit_exceeded", "rate_limit_exceeded", None),
        ("INTERNAL", "server_error", "internal", None),
    ],
)
def test_failures_have_openais_types_and_codes(code: str, kind: str, named: str, retry: str | None) -> None:
    header, body = encode_openai_error(Failure(code, "lone \ud800", 1.5), "req_1")
    error = {"message": "lone \\ud800", "type": kind, "param": None, "code": named}
    assert (json.loads(body), header["content-type"]) == ({"error": error}, "application/json")
    assert header.get("x-should-retry") == retry
    assert header.get("retry-after-ms") == ("1500" if STATUS[code] in (429, 503) else None)


async def test_a_failure_before_the_first_byte_is_no_stream(stand: Stand) -> None:
    stand.gateway.failure = Failure("SHED", "busy", 1.5)
    for request in (asked(CHAT, stream=True), asked(COMPLETIONS, prompt=["a", "b"])):
        answer = await stand.ask(request)
        assert failure(answer) == (429, "rate_limit_exceeded", "rate_limit_exceeded", None)
        assert answer.header["retry-after-ms"] == "1500"


KEYS: Keys = {"key": {"rate": 60, "burst": 9, "models": ["default"]}, "other": {"models": ["elsewhere"]}}


@on_stand(KEYS)
async def test_models_are_those_that_a_caller_may_ask(stand: Stand) -> None:
    answer = await stand.ask(get("/v1/models", KEY))
    (model,) = answer.json["data"]
    assert (answer.json["object"], model["id"], model["object"]) == ("list", "default", "model")
    assert "ratelimit" in answer.header
    assert (await stand.ask(get("/v1/models/default", KEY))).json == model
    other = "Authorization: Bearer other"
    assert (await stand.ask(get("/v1/models", other))).json["data"] == []
    assert failure(await stand.ask(get("/v1/models/default", other)))[2] == "model_not_found"


@on_stand(model="org/model-1")
async def test_the_id_of_a_model_may_hold_a_slash(stand: Stand) -> None:
    for path in ("org/model-1", "org%2Fmodel-1", "org%2fmodel-1"):
        assert (await stand.ask(get(f"/v1/models/{path}"))).json["id"] == "org/model-1"


async def test_fields_of_the_client_are_heeded(stand: Stand) -> None:
    client = await stand.connect()
    for retry, patience in (("0", "600"), ("1", "0.25"), ("1", "0.25"), ("2", "nonsense"), ("x", "0")):
        await client.send(asked(CHAT, f"X-Stainless-Retry-Count: {retry}", f"X-Stainless-Read-Timeout: {patience}"))
        assert (await client.answer()).status == 200
    assert stand.counters.gateway.client_retries == 3
    longest = stand.settings.request_timeout_ms / 1000
    assert [one.options.timeout for one in stand.gateway.asked] == [longest, 0.25, 0.25, longest, longest]
    await client.ask(asked(CHAT, "Idempotency-Key: k", "X-Request-Tier: free", "X-Request-Timeout-Ms: 100"))
    options = stand.gateway.asked[-1].options
    assert (options.key, options.tier, options.timeout) == ("k", 2, 0.1)


def named_events(answer: Answer) -> list[tuple[str, Any]]:
    """Return the names and data of a stream's events, without the end marker."""
    names = [line.removeprefix("event: ") for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    return list(zip(names, events(answer), strict=True))


async def test_instructions_and_input_are_one_conversation_and_the_target_finds_its_messages(stand: Stand) -> None:
    answer = await stand.ask(
        asked(RESPONSES,
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
    assert (body["object"], body["status"], body["model"], body["usage"]) == ("response", "completed", "default", None)
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


async def test_a_target_may_tell_usage_and_that_it_ended_early(stand: Stand) -> None:
    told = {"text": "a", "usage": {"prompt_tokens": 2, "completion_tokens": 3}, "finish_reason": "length"}
    stand.gateway.output = json.dumps(told).encode()
    body = (await stand.ask(asked(RESPONSES))).json
    assert body["usage"] == {
        "input_tokens": 2, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5,
    }  # fmt: skip
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert named_events(await stand.ask(asked(RESPONSES, stream=True)))[-1][0] == "response.incomplete"


async def test_a_stream_has_the_events_of_a_whole_response(stand: Stand) -> None:
    found = named_events(await stand.ask(asked(RESPONSES, stream=True, stream_options={"include_obfuscation": False})))
    assert [data["type"] for _, data in found] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found] == list(range(9))
    text = "USER: HELLO\nASSISTANT:"
    assert [data["delta"] for name, data in found if name.endswith("delta")] == [text]
    assert found[0][1]["response"]["output"] == []
    (message,) = found[-1][1]["response"]["output"]
    assert message["content"][0]["text"] == text
    assert {data["item_id"] for _, data in found if "item_id" in data} == {message["id"]}


REQUIRED = {
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id", "incomplete_details", "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output", "parallel_tool_calls", "presence_penalty",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store", "temperature",
    "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
}  # fmt: skip
"""Members required by the Open Responses specification of 2026-04-24."""
NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_logprobs", "top_p")


async def test_a_response_has_all_members_that_open_responses_requires(stand: Stand) -> None:
    whole = (await stand.ask(asked(RESPONSES, temperature=None, text={"verbosity": "low"}))).json
    events = named_events(await stand.ask(asked(RESPONSES, stream=True)))
    for body in (whole, *(data["response"] for _, data in events if "response" in data)):
        assert body.keys() >= REQUIRED
        assert all(isinstance(body[name], int | float) for name in NUMBERS)
    assert whole["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    given = {"temperature": 0.5, "top_p": 0, "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}
    body = (await stand.ask(asked(RESPONSES, **given))).json
    assert {name: body[name] for name in given} == given


def test_the_tokens_of_a_list_are_those_that_are_told() -> None:
    assert added_up([]) is added_up([None, None]) is None
    assert added_up([None, TokenCount(5, 2), TokenCount(1)]) == TokenCount(6, 2)


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
