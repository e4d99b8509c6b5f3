"""Program of OpenAI's client: every call and every error, towards the URL that is its argument."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

HELLO: Any = [{"role": "user", "content": "hello"}]
IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
URL, KEY, OTHER = sys.argv[1:4]


def client(**options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": f"{URL}/v1", "api_key": KEY, **options})


def raised(call: Callable[[], Any]) -> list[Any]:
    """Class of the error, its status, code and param."""
    try:
        return ["no error", repr(call())]
    except openai.APIStatusError as exc:
        assert exc.request_id is not None and exc.request_id.startswith("req_")
        return [type(exc).__name__, exc.status_code, exc.code, exc.param]


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
    seen["errors"] = {
        "tokens": raised(lambda: completions.create(model="default", prompt=[1, 2])),
        "image": raised(lambda: chat.create(model="default", messages=IMAGE)),
        "key": raised(lambda: client(api_key="wrong").models.list()),
        "forbidden": raised(lambda: client(api_key=OTHER).completions.create(model="default", prompt="a")),
        "model": raised(lambda: completions.create(model="other", prompt="a")),
        "slash": raised(lambda: ours.models.retrieve("org/other")),
        "path": raised(lambda: ours.responses.create(model="default", input="a")),
        "input": raised(lambda: completions.create(model="default", prompt="bad")),
        "output": raised(lambda: ours.embeddings.create(model="default", input="no numbers")),
        "late": raised(
            lambda: completions.create(model="default", prompt="slow", extra_headers={"X-Request-Timeout-Ms": "50"})
        ),
        "rate": raised(lambda: client(max_retries=0).completions.create(model="default", prompt=["a"] * 60)),
        "large": raised(lambda: completions.create(model="default", prompt="a" * 2_000_000)),
    }
    return seen


sys.stdout.write(json.dumps(main()))
