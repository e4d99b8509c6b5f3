"""Files and batches with OpenAI's client. Argument: the service's URL."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

URL, KEY, OTHER = sys.argv[1:4]


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key)


def line(id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": {"model": "default", **body}})


def ended(id: str) -> Any:
    while (batch := client().batches.retrieve(id)).status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
    return batch


def of_endpoint(url: Any, lines: list[str]) -> dict[str, Any]:
    """Run a batch of lines. Returns its status and counts, and the status and body of each result."""
    file = client().files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client().batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"k": "v"})
    batch = ended(batch.id)
    records = [
        json.loads(text)
        for id in filter(None, (batch.output_file_id, batch.error_file_id))
        for text in client().files.content(id).text.splitlines()
    ]
    told = {one["custom_id"]: (one["response"]["status_code"], one["response"]["body"]) for one in records}
    counts = batch.request_counts
    return {"status": batch.status, "counts": [counts.total, counts.completed, counts.failed], "told": told}


def main() -> None:
    completions, chat, embeddings = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
    seen: dict[str, Any] = {}
    found = of_endpoint(completions, [line("a", completions, prompt="hello"), line("b", chat, prompt="hello"), "{"])
    seen["completions"] = [
        found["status"],
        found["counts"],
        found["told"]["a"][1]["choices"][0]["text"],
        found["told"]["b"][0],
    ]
    found = of_endpoint(chat, [line("c", chat, messages=[{"role": "user", "content": "hi"}])])
    seen["chat"] = found["told"]["c"][1]["choices"][0]["message"]["content"]
    found = of_endpoint(
        embeddings, [line("e", embeddings, input="e:"), line("several", embeddings, input=["e:", "e:", "e:"])]
    )
    seen["embeddings"] = [[one["embedding"] for one in found["told"][id][1]["data"]] for id in ("e", "several")]
    files, batches = client().files.list(limit=3), client().batches.list(limit=2)
    seen["files"] = [len(files.data), len([*files]), files.data[0].purpose]
    seen["batches"] = [len(batches.data), len([*batches]), batches.data[0].metadata]
    input_file = next(one for one in client().files.list() if one.purpose == "batch")
    seen["file"] = client().files.retrieve(input_file.id) == input_file
    seen["deleted"] = client().files.delete(input_file.id).deleted
    foreign = batches.data[0]
    calls: dict[str, Callable[[], Any]] = {
        "gone": lambda: client().files.retrieve(input_file.id),
        "foreign file": lambda: client(OTHER).files.content(foreign.output_file_id or ""),
        "foreign batch": lambda: client(OTHER).batches.cancel(foreign.id),
    }
    for name, call in calls.items():
        try:
            seen[name] = repr(call())
        except openai.NotFoundError as exc:
            seen[name] = exc.code
    many = [line(str(n), completions, prompt="hello") for n in range(50_000)]
    file = client().files.create(file=("many.jsonl", "\n".join(many).encode()), purpose="batch")
    batch = client().batches.create(input_file_id=file.id, endpoint=completions, completion_window="24h")
    cancelled = ended(client().batches.cancel(batch.id).id)
    seen["cancelled"] = [cancelled.status, cancelled.cancelled_at is not None]
    json.dump(seen, sys.stdout)


main()
