"""Program of LangChain: chat models, streams and embeddings, towards the URL that is its argument."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, KEY = sys.argv[1:3]
AT: Any = {"base_url": f"{URL}/v1", "api_key": KEY, "model": "default"}

chat = ChatOpenAI(**AT)
embeddings = OpenAIEmbeddings(**AT, check_embedding_ctx_length=False)
seen = {
    "chat": chat.invoke("hello").content,
    "stream": [chunk.content for chunk in chat.stream("hello") if chunk.content],
    "batch": [answer.content for answer in chat.batch(["a", "b"])],
    "text": OpenAI(**AT).invoke("hello"),
    "embeddings": embeddings.embed_documents(["e:1", "e:22"]),
}
sys.stdout.write(json.dumps(seen))
