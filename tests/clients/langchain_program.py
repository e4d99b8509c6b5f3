"""LangChain's chat models, streams and embeddings. Argument: the service's URL."""

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, KEY = sys.argv[1:3]
AT: Any = {"base_url": f"{URL}/v1", "api_key": KEY, "model": "default"}

chat = ChatOpenAI(**AT)
embeddings = OpenAIEmbeddings(**AT, check_embedding_ctx_length=False)


def raised(call: Callable[[], Any]) -> list[Any]:
    try:
        return ["no error", repr(call())]
    except openai.APIStatusError as exc:
        return [type(exc).__name__, exc.code]


seen = {
    "chat": chat.invoke("hello").content,
    "stream": [chunk.content for chunk in chat.stream("hello") if chunk.content],
    "batch": [answer.content for answer in chat.batch(["a", "b"])],
    "text": OpenAI(**AT).invoke("hello"),
    "errors": {
        "chat": raised(lambda: ChatOpenAI(**{**AT, "model": "other"}).invoke("hello")),
        "stream": raised(lambda: list(ChatOpenAI(**{**AT, "model": "other"}).stream("hello"))),
        "text": raised(lambda: OpenAI(**AT).invoke("bad")),
        "embeddings": raised(lambda: embeddings.embed_documents(["no numbers"])),
    },
    "embeddings": embeddings.embed_documents(["e:1", "e:22"]),
}
sys.stdout.write(json.dumps(seen))
