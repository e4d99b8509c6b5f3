"""Different requests on one connection: earlier ones never change an answer, not even on the fast path."""

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import SERVICE_OVERLOADED, RequestError, Unauthenticated
from tests.http.stand import Answer, Keys, Stand, get, on_stand, post, served

KEYS: Keys = {name: {"rate": 6e7, "burst": 1e6, "user": name, "tenant": name} for name in ("a", "b")}


def asked(body: Any, path: str = "/v1/inference", *fields: str, key: str = "a") -> bytes:
    text = body if isinstance(body, str) else json.dumps(body)
    return post(text, path, f"Authorization: Bearer {key}", *fields)


REQUESTS = {
    "text": asked({"input": "hello"}),
    "named": asked({"input": "hello", "model": "default"}),
    "unknown": asked({"input": "hello", "model": "other"}),
    "list": asked({"inputs": ["a", "b"]}),
    "value": asked({"input": {"a": 1}}),
    "bad": asked({"input": "bad one"}),
    "broken": asked('{"input": "hello"'),
    "large": asked({"input": "x" * 5000}),
    "largest": asked({"input": "x" * 700_000}),
    "wrong and large": asked({"inptu": "x" * 300_000}),
    "larger, other key": asked({"input": "x" * 70_000}, key="b"),
    "other key": asked({"input": "hello"}, key="b"),
    "no key": post('{"input": "hello"}', "/v1/inference", "Authorization: Bearer nobody"),
    "chosen": asked({"input": "hello"}, "/v1/inference", "X-Request-ID: 0190a0c0-0000-7000-8000-000000000000"),
    "tier": asked({"input": "hello"}, "/v1/inference", "X-Request-Tier: free"),
    "kept": asked({"input": "hello"}, "/v1/inference", "Idempotency-Key: k"),
    "misused": asked({"input": "other"}, "/v1/inference", "Idempotency-Key: k"),
    "awaited task": asked({"input": "hello"}, "/v1/inference", "Prefer: respond-async, wait=9"),
    "list as task": asked({"inputs": ["a", "b"]}, "/v1/inference", "Prefer: respond-async"),
    "plain": asked({"input": "hello"}, "/api/inference"),
    "predict": asked({"model_id": "default", "input_data": "hello"}, "/v1/predict"),
    "alive": get("/livez"),
    "nowhere": get("/nowhere"),
}  # fmt: skip
CHAT, PROMPT = [{"role": "user", "content": "hello"}], {"model": "default", "prompt": "hello"}
OPENAI_BODIES: dict[str, dict[str, Any] | str] = {
    "chat": {"model": "default", "messages": CHAT},
    "stream": {"model": "default", "messages": CHAT, "stream": True},
    "stream with usage": {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}},
    "unknown model": {"model": "other", "messages": CHAT},
    "choices": {"messages": CHAT, "n": 2},
    "warm": {"messages": CHAT, "temperature": 0.5, "max_tokens": 9},
    "named": {"messages": [{"role": "system", "content": "é{role}"}, {**CHAT[0], "name": "ann"}], "stream": None},
    "in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    "nobody": {"messages": []},
    "U+0000": {"messages": [{"role": "user", "content": "\0"}]},
    "broken": '{"messages": [',
    "format": {"messages": CHAT, "response_format": {"type": "json_object"}},
    "long": {"messages": [{"role": "user", "content": "x" * 70_000}]},
    "prompt": PROMPT,
    "prompt of the default model": {"prompt": "bad one"},
    "prompt as stream": {**PROMPT, "stream": True},
    "prompts": {"prompt": ["a", "b"]},
    "prompt that is none": {"prompt": 7},
}
OPENAI = {
    name: asked(body, "/v1/completions" if "prompt" in body else "/v1/chat/completions")
    for name, body in OPENAI_BODIES.items()
}
PASSING = {"request_id", "task_id", "latency_ms", "id", "created", "metadata"}
"""Members and fields that vary between answers."""
SHOWN = {"content-type", "ratelimit-policy", "connection"}


def lasting(text: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text).items() if name not in PASSING}


def seen(answer: Answer) -> tuple[int, dict[str, str], Any]:
    """Return the parts of an answer that don't vary."""
    body: Any = answer.body
    if body[:1] == b"{":
        body = lasting(body)
    elif body[:6] == b"data: ":
        body = [lasting(line[6:]) if line[6:7] == b"{" else line for line in body.split(b"\n")]
    return answer.status, {name: value for name, value in answer.header.items() if name in SHOWN}, body


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([REQUESTS, OPENAI, REQUESTS | OPENAI]))
def test_what_came_before_on_a_connection_changes_no_answer(data: st.DataObject, requests: dict[str, bytes]) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(requests)), min_size=2, max_size=24))

    async def main(stand: Stand) -> None:
        alone = {name: seen(await stand.ask(requests[name])) for name in sorted(set(names))}
        client = await stand.connect()
        for name in names:
            assert (name, seen(await client.ask(requests[name]))) == (name, alone[name])
            if alone[name][1].get("connection") == "close":
                client = await stand.connect()

    served(main, KEYS, whole=True, user_rate=0.0)


@pytest.mark.parametrize(
    ("error", "status", "wait"),
    [
        (Unauthenticated("the credential has expired"), 401, None),
        (RequestError("the keys are being looked up", code=SERVICE_OVERLOADED, retry_after=1.0), 503, "1"),
    ],
)
@on_stand(KEYS, whole=True, user_rate=0.0)
async def test_an_ending_credential_is_told(stand: Stand, error: RequestError, status: int, wait: str | None) -> None:
    knows = stand.context.entrance._identify
    stand.context.entrance._identify = identify = mock.Mock(side_effect=knows)
    client = await stand.connect()
    for has_ended in (False, False, True, True, False):
        identify.side_effect = error if has_ended else knows
        answer = await client.ask(REQUESTS["text"])
        expected = (status, wait) if has_ended else (200, None)
        assert (answer.status, answer.header.get("retry-after")) == expected
    assert stand.counters.gateway.refusals == {(error.code.lower(), "none", ""): 2}
