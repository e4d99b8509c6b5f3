"""Calls each route of a service with a client that openapi-python-client generates from its contract.

Arguments: URL of the service, and an empty folder for the client.
"""

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

url, folder = sys.argv[1], Path(sys.argv[2])
generator = str(Path(sys.executable).with_name("openapi-python-client"))
made = subprocess.run(
    [generator, "generate", "--url", f"{url}/openapi.json", "--output-path", str(folder / "made"), "--meta", "none"],
    capture_output=True, text=True, check=True,
    env={"PATH": str(Path(sys.executable).parent), "HOME": str(folder)},
)  # fmt: skip
sys.path.insert(0, str(folder))
made_of = importlib.import_module("made.models")
client = importlib.import_module("made").Client(url)
File = importlib.import_module("made.types").File
seen: dict[str, Any] = {}


def call(name: str, *places: str, status: int = 200, **arguments: Any) -> Any:
    """Call an operation. Its answer must have the status and type stated in the contract."""
    operation = importlib.import_module(f"made.api.default.{name}")
    answer = operation.sync_detailed(*places, client=client, **arguments)
    assert answer.status_code == status, (name, answer)
    assert answer.parsed is not None or status == 204, (name, answer)
    seen[name] = type(answer.parsed).__name__
    return answer.parsed


def main() -> None:
    seen["texts"] = [
        call("plain_inference", body=made_of.PlainRequest(input_="a")).output,
        call("predict", body=File(io.BytesIO(b"b")), model_id="text").output,
        call("predict", body=made_of.PredictRequest("text", "c")).output,
        call("inference", body=made_of.InferenceRequest(inputs=["d", "e"])).outputs,
        call("inference", body=made_of.InferenceRequest(input_="YWI=", model="octets")).output,
        call("inference", body=made_of.InferenceRequest(input_="f", parameters=None)).output,
    ]
    task = call("inference", status=202, body=made_of.InferenceRequest(input_="g"), prefer="respond-async")
    seen["texts"].append(call("result", task.task_id, wait="20").output)
    call("forget", task.task_id, status=204)
    seen["refused"] = call("inference", status=400, body=made_of.InferenceRequest()).error
    for name in ("live", "ready", "health", "oip_server", "oip_live", "oip_ready", "oip_all_statistics", "models"):
        call(name)
    call("model", "text")
    message = made_of.ChatRequestMessagesItem(role="user", content="h")
    seen["texts"].append(call("chat", body=made_of.ChatRequest(messages=[message])).choices[0].message["content"])
    seen["texts"].append(call("complete", body=made_of.CompletionRequest(prompt="i")).choices[0].text)
    call("respond", body=made_of.ResponseRequest(input_="k"))
    seen["numbers"] = call("embed", body=made_of.EmbeddingRequest(input_="e:")).data[0].embedding
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1], "data": ["j"]}
    asked = made_of.OipRequest.from_dict({"inputs": [tensor]})
    for kind, place in (("model", ("text",)), ("version", ("text", "1"))):
        for what in ("metadata", "ready", "config", "statistics"):
            call(f"oip_{kind}_{what}", *place)
        seen["texts"].append(call(f"oip_{kind}_infer", *place, body=asked).outputs[0].data[0])
    seen["texts"].append(call("oip_infer", body=asked).outputs[0].data[0])
    call("oip_index", body=made_of.OipIndexRequest())
    seen["warned"] = made.stdout.count("WARNING") + made.stderr.count("WARNING")
    json.dump(seen, sys.stdout)


main()
