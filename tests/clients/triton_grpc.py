"""Everything that `tritonclient.grpc` asks of a server of texts; its arguments are the port's address and a good key."""

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]

ADDRESS, KEY = sys.argv[1:]
HEADERS = {"authorization": f"Bearer {KEY}"}
client = triton.InferenceServerClient(ADDRESS)
done: queue.Queue[Any] = queue.Queue()


def tensor(*texts: str) -> Any:
    made = triton.InferInput("INPUT", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object))
    return made


def infer(*texts: str, **options: Any) -> Any:
    answer = client.infer(**{"model_name": "default", "inputs": [tensor(*texts)], "headers": HEADERS, **options})
    return [answer.get_response().id, texts_of(answer)]


def texts_of(answer: Any) -> list[str]:
    return [one.decode() for one in answer.as_numpy("OUTPUT")]


def status(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as exc:
        return [exc.status(), exc.message()]
    raise AssertionError("no error")


def later() -> list[str]:
    client.async_infer("default", [tensor("later")], lambda result, error: done.put(result), headers=HEADERS)
    return texts_of(done.get(timeout=30))


def streamed() -> list[Any]:
    """Texts of answers on a stream, and the error that ends it."""
    client.start_stream(lambda result, error: done.put(error or result), headers=HEADERS)
    for number in range(3):
        client.async_stream_infer("default", [tensor(f"s{number}")], request_id=str(number))
    client.async_stream_infer("other", [tensor("x")])
    *answers, error = [done.get(timeout=30) for _ in range(4)]
    client.async_stream_infer("default", [tensor("last")], enable_empty_final_response=True)
    last = done.get(timeout=30).get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    return [*(texts_of(answer) for answer in answers), last, str(error)]


ASKED: Any = {"headers": HEADERS, "as_json": True}
client.get_inference_statistics("default", **ASKED)  # From now on this tenant is counted.
json.dump(
    {
        "health": [
            client.is_server_live(),
            client.is_server_ready(),
            client.is_model_ready("default", headers=HEADERS),
            client.is_model_ready("other", headers=HEADERS),
            client.is_model_ready("default", "9", headers=HEADERS),
        ],
        "server": client.get_server_metadata(as_json=True)["name"],
        "inputs": client.get_model_metadata("default", **ASKED)["inputs"],
        "config": client.get_model_config("default", **ASKED)["config"]["max_batch_size"],
        "index": client.get_model_repository_index(**ASKED)["models"],
        "infer": infer("a", "b", request_id="7", outputs=[triton.InferRequestedOutput("OUTPUT")]),
        "compressed": infer("zip" * 100, compression_algorithm="gzip", parameters={"n": 1}, priority=2),
        "later": later(),
        "stream": streamed(),
        "statistics": int(client.get_inference_statistics("default", **ASKED)["model_stats"][0]["inference_count"]),
        "refusals": {
            "no key": status(lambda: infer("a", headers={})),
            "other model": status(lambda: infer("a", model_name="other")),
            "other metadata": status(lambda: client.get_model_metadata("other", headers=HEADERS)),
            "other version": status(lambda: infer("a", model_version="9")),
            "too large": status(lambda: infer("a" * 3_000_000)),
            "element": status(lambda: infer("good", "bad")),
            "fault": status(lambda: infer("fault")),
            "too late": status(lambda: infer("slow", client_timeout=0.05)),
            "load": status(lambda: client.load_model("default", headers=HEADERS)),
            "traces": status(lambda: client.get_trace_settings(headers=HEADERS)),
        },
    },
    sys.stdout,
)
