"""Everything that `tritonclient.http` asks of a server of texts; its arguments are the server's address and a good key."""

import json
import sys
from typing import Any

import numpy as np
import tritonclient.http as triton  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]

ADDRESS, KEY, SLOW = sys.argv[1:]
HEADERS = {"Authorization": f"Bearer {KEY}"}
client = triton.InferenceServerClient(ADDRESS, network_timeout=60.0)


def infer(
    texts: list[str], shape: list[int] | None = None, binary: bool = True, output: bool | None = None, **options: Any
) -> Any:
    array = np.array(texts, dtype=object).reshape(shape or [len(texts)])
    tensor = triton.InferInput("INPUT", list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array, binary_data=binary)
    wanted = None if output is None else [triton.InferRequestedOutput("OUTPUT", binary_data=output)]
    options = {"headers": {**HEADERS}, **options}  # The client writes into the headers that it is given.
    answer = client.infer("default", [tensor], outputs=wanted, **options)
    found = answer.as_numpy("OUTPUT")
    flat = [one.decode() if isinstance(one, bytes) else one for one in found.flatten().tolist()]
    return [flat, list(found.shape), answer.get_response().get("id")]


def refusal(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as exc:
        return [exc.status(), exc.message()]
    raise AssertionError("no error")


def later() -> list[str]:
    tensor = triton.InferInput("ANY", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(["later"], dtype=object))
    pending = client.async_infer("default", [tensor], headers={**HEADERS})
    return [one.decode() for one in pending.get_result().as_numpy("OUTPUT").tolist()]


def metadata(**which: Any) -> Any:
    return client.get_model_metadata(**which, headers=HEADERS)


TEXTS = ["one", "zwölf", ""]
client.get_inference_statistics("default", headers=HEADERS)  # From now on this tenant is counted.
json.dump(
    {
        "health": [
            client.is_server_live(),
            client.is_server_ready(),
            client.is_model_ready("default", headers=HEADERS),
            client.is_model_ready("default", "1", headers=HEADERS),
            client.is_model_ready("other", headers=HEADERS),
        ],
        "answers": [
            infer(TEXTS, binary=binary, output=output) for binary in (True, False) for output in (True, False, None)
        ],
        "column": infer(TEXTS, [3, 1], request_id="42"),
        "compressed": [infer(TEXTS, request_compression_algorithm=one) for one in ("gzip", "deflate")],
        "wishes": infer(TEXTS, priority=3, timeout=60_000_000, parameters={"heat": 0.5}),
        "version": infer(TEXTS, model_version="1"),
        "later": later(),
        "server": client.get_server_metadata(),
        "model": metadata(model_name="default"),
        "config": client.get_model_config("default", headers=HEADERS),
        "index": client.get_model_repository_index(headers=HEADERS),
        "statistics": client.get_inference_statistics("default", headers=HEADERS),
        "all statistics": client.get_inference_statistics(headers=HEADERS),
        "refusals": {
            "no key": refusal(lambda: infer(TEXTS, headers={})),
            "other model": refusal(lambda: metadata(model_name="other")),
            "other version": refusal(lambda: infer(TEXTS, model_version="9")),
            "shape": refusal(lambda: infer(["a", "b"], [1, 2])),
            "element": refusal(lambda: infer(["good", "bad"])),
            "fault": refusal(lambda: infer(["fault"])),
            "rate": refusal(lambda: [infer(["a"], headers={"Authorization": f"Bearer {SLOW}"}) for _ in range(2)]),
            "too late": refusal(lambda: infer(["slow"], timeout=1)),
            "too large": refusal(lambda: infer(["x" * 2_000_000])),
            "load": refusal(lambda: client.load_model("default", headers=HEADERS)),
        },
    },
    sys.stdout,
)
