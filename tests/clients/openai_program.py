"""Every call and every error with OpenAI's client. Argument: the service's URL."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

HELLO: Any = [{"role": "user", "content": "hello"}]
IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
URL, KEY, OTHER, SLOW, MANY = sys.argv[1:6]
NOWHERE = "http://127.0.0.1:9"
sent: list[Any] = []
"""The requests of one call, including retries, and the seconds between them."""


def client(**options: Any) -> openai.OpenAI:
    count = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(request.method)]})
    return openai.OpenAI(**{"base_url": f"{URL}/v1", "api_key": KEY, "http_client": count, **options})


def raised(call: Callable[[], Any]) -> list[Any]:
    """Return the error's class, status, code and param, and how often the request was sent."""
    sent.clear()
    try:
        return ["no error", repr(call())]
    except openai.APIStatusError as exc:
        assert exc.request_id is not None and exc.request_id.startswith("req_")
        return [type(exc).__name__, exc.status_code, exc.code, exc.param, sent.count("POST") + sent.count("GET")]
    except openai.APIConnectionError as exc:
        return [type(exc).__name__, sent.count("POST")]


def complete(prompt: Any, fields: Any = None, **options: Any) -> Any:
    return client(**options).completions.create(model="default", prompt=prompt, extra_headers=fields or {})


def held() -> dict[str, Any]:
    """Return the errors of requests made while the model is busy with another."""
    gate, same = str(Path(tempfile.mkdtemp()) / "gate"), {"X-Request-Id": "0192c8a4-5f6e-7d01-9abc-1234567890ab"}
    os.mkfifo(gate)
    first = threading.Thread(target=complete, args=(f"gate {gate}", same))
    first.start()
    with open(gate, "w"):  # noqa: PTH123  # It waits until the model has opened the other end.
        seen = {
            "conflict": raised(lambda: complete("other", same, max_retries=1)),
            "impatient": raised(lambda: complete("a", {"x-stainless-read-timeout": "20"}, timeout=0.1, max_retries=1)),
            "late": raised(lambda: complete("a", {"X-Request-Timeout-Ms": "50"})),
        }
    first.join()
    return seen


def patient() -> dict[str, Any]:
    """Return the outcome of a request over the limit whose retry succeeds, and whether the client waited as told."""
    told, waited, sleep = [], [], time.sleep
    ours = client(api_key=SLOW, max_retries=5)
    ours._client.event_hooks["response"] = [lambda answer: told.append(answer.headers.get("retry-after-ms"))]
    time.sleep = lambda seconds: (waited.append(seconds), sleep(seconds))[1]  # type: ignore[func-returns-value]
    try:
        texts = [ours.completions.create(model="default", prompt="hello").choices[0].text for _ in range(3)]
    finally:
        time.sleep = sleep
    return {"texts": texts, "refused": any(told), "as told": waited == [int(one) / 1000 for one in told if one]}


def responses(ours: openai.OpenAI) -> dict[str, Any]:
    """Return the results of the responses API, with and without streaming."""
    told = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    whole = ours.responses.create(model="default", input=told, instructions="be brief", temperature=0.5)
    streamed = list(ours.responses.create(model="default", input="hello", stream=True))
    with ours.responses.stream(model="default", input="hello") as stream:
        gathered = stream.get_final_response()
    return {
        "whole": [whole.output_text, whole.status, whole.instructions, whole.temperature, whole.usage],
        "streamed": [streamed[0].type, streamed[-1].type, streamed[-1].response.output_text],
        "gathered": gathered.output_text,
    }


def main() -> dict[str, Any]:
    ours = client()
    completions, chat = ours.completions, ours.chat.completions
    whole = completions.create(model="default", prompt=["a", "b"], n=2, max_tokens=3)
    answered = chat.create(model="default", messages=HELLO)
    chunks = list(
        chat.create(model="default", messages=HELLO, stream=True, n=2, stream_options={"include_usage": True})
    )
    texts = completions.create(model="default", prompt="hello", stream=True)
    packed = ours.embeddings.create(model="default", input=["e:1", "e:22"])
    plain = ours.embeddings.create(model="default", input="e:1", encoding_format="float")
    seen = {
        "version": openai.__version__,
        "texts": [choice.text for choice in whole.choices],
        "usage": [whole.usage.total_tokens if whole.usage else None, answered.usage is None],
        "chat": [answered.choices[0].message.content, answered.choices[0].finish_reason],
        "chunks": [[choice.delta.content for choice in chunk.choices] for chunk in chunks],
        "stream": [chunk.choices[0].text for chunk in texts],
        "packed": [one.embedding for one in packed.data],
        "plain": [one.embedding for one in plain.data],
        "counted": packed.usage.total_tokens,
        "models": [model.id for model in ours.models.list()],
        "model": ours.models.retrieve("default").id,
    }
    many = client(api_key=MANY).embeddings.create(model="default", input=[f"e:{number}" for number in range(2048)])
    seen["many"] = [len(many.data), many.data[2047].embedding]
    seen["responses"] = responses(ours)
    seen["errors"] = {
        "tokens": raised(lambda: completions.create(model="default", prompt=[1, 2])),
        "image": raised(lambda: chat.create(model="default", messages=IMAGE)),
        "key": raised(lambda: client(api_key="wrong").models.list()),
        "forbidden": raised(lambda: client(api_key=OTHER).completions.create(model="default", prompt="a")),
        "model": raised(lambda: completions.create(model="other", prompt="a")),
        "slash": raised(lambda: ours.models.retrieve("org/other")),
        "path": raised(lambda: ours.files.list()),
        "stored": raised(lambda: ours.responses.create(model="default", input="a", previous_response_id="resp_1")),
        "tools": raised(lambda: ours.responses.create(model="default", input="a", tools=[{"type": "web_search"}])),
        "input": raised(lambda: completions.create(model="default", prompt="bad")),
        "output": raised(lambda: ours.embeddings.create(model="default", input="no numbers")),
        "fault": raised(lambda: complete("fault")),
        "rate": raised(lambda: complete(["a"] * 60, max_retries=0)),
        "large": raised(lambda: complete("a" * 2_000_000)),
        "nobody": raised(lambda: complete("a", base_url=NOWHERE, max_retries=1)),
        **held(),
    }
    seen["patient"] = patient()
    return seen


sys.stdout.write(json.dumps(main()))
