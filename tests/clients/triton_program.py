"""Calls of `tritonclient` to a service for strings and arrays. Arguments: `http` or `grpc`, the port's address, a good key, and a key
for one request a minute.
"""

import importlib
import json
import queue
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]

PROTOCOL, ADDRESS, KEY, SLOW = sys.argv[1:]
GRPC = PROTOCOL == "grpc"
triton: Any = importlib.import_module(f"tritonclient.{PROTOCOL}")
client = triton.InferenceServerClient(ADDRESS) if GRPC else triton.InferenceServerClient(ADDRESS, network_timeout=60.0)
HEADERS = {"authorization": f"Bearer {KEY}"}
JSON: dict[str, Any] = {"as_json": True} if GRPC else {}
PACKED: dict[str, Any] = {"compression_algorithm" if GRPC else "request_compression_algorithm": "gzip"}
WAYS: list[tuple[Any, Any]] = [(None, None)] if GRPC else [*product((True, False), (True, False, None))]
"""Whether inputs, and whether outputs, are binary; None if unspecified, as over gRPC all are."""
BINARY_ALONE = ("FP16", "BF16")
"""Datatypes that the client supports over HTTP only in binary."""
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
TEXTS = ("one", "zwölf", "")
FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
done: queue.Queue[Any] = queue.Queue()


def given(name: str, datatype: str, array: Any, binary: bool | None = None) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **({} if binary is None else {"binary_data": binary}))
    return tensor


def wanted(name: str, binary: bool | None = None) -> Any:
    return triton.InferRequestedOutput(name, **({} if binary is None else {"binary_data": binary}))


def infer(model: str, *inputs: Any, **options: Any) -> Any:
    return client.infer(
        model, list(inputs), **{"headers": {**HEADERS}, **options}
    )  # The client modifies these headers.


def tensor(*texts: str, shape: list[int] | None = None, binary: bool | None = None) -> Any:
    return given("INPUT", "BYTES", np.array([one.encode() for one in texts], object).reshape(shape or [-1]), binary)


def texts(*sent: str, way: tuple[Any, Any] = (None, None), shape: list[int] | None = None, **options: Any) -> list[Any]:
    """Return the strings of an answer, their shape, and its id."""
    outputs = None if way[1] is None else [wanted("OUTPUT", way[1])]
    answer = infer("default", tensor(*sent, shape=shape, binary=way[0]), outputs=outputs, **options)
    return [texts_of(answer), list(answer.as_numpy("OUTPUT").shape), id_of(answer)]


def texts_of(answer: Any) -> list[str]:
    return [one if isinstance(one, str) else one.decode() for one in answer.as_numpy("OUTPUT").ravel().tolist()]


def id_of(answer: Any) -> str:
    return str(answer.get_response().id if GRPC else answer.get_response().get("id", ""))


def arrays(rows: int, columns: int) -> dict[str, Any]:
    numbers = np.arange(rows * 2 * columns).reshape(rows, 2, columns)
    found = {name: (numbers % 100).astype(dtype) for name, dtype in DTYPES.items()}
    for name, dtype in DTYPES.items():
        if "INT" in name:
            found[name].flat[:2] = [np.iinfo(dtype).min, np.iinfo(dtype).max]
        elif name in ("FP32", "FP64"):
            found[name].flat[0] = -np.finfo(dtype).max
    found["BOOL"] = numbers % 3 == 0
    found["BYTES"] = np.array([f"é {number}".encode() for number in numbers.flat], dtype=object).reshape(numbers.shape)
    return found


def changed(size: tuple[int, int], way: tuple[Any, Any]) -> list[str]:
    """Return the datatypes whose array comes back changed."""
    sent = arrays(*size)
    ways = {name: (True, True) if name in BINARY_ALONE and not GRPC else way for name in sent}
    inputs = [given(f"in_{name}", name, array, ways[name][0]) for name, array in sent.items()]
    answer = infer("same", *inputs, outputs=[wanted(f"out_{name}", ways[name][1]) for name in reversed(sent)])
    return [name for name, array in sent.items() if not _equal(answer.as_numpy(f"out_{name}"), array)]


def _equal(found: Any, array: Any) -> bool:
    if found is None or found.shape != array.shape:
        return False
    if array.dtype == object:
        return [one if isinstance(one, bytes) else one.encode() for one in found.flat] == list(array.flat)
    return bool(found.astype(array.dtype).tobytes() == array.tobytes())


def sums(array: Any, binary: bool | None = None, name: str = "x", **options: Any) -> Any:
    answer = infer("sums", given(name, "FP32", array, binary), **options)
    return [answer.as_numpy("sums").tolist(), id_of(answer)]


def ranked() -> list[Any]:
    return [given("query", "FP32", np.array([[1, 2]], np.float32)), given("ids", "INT64", np.array([[3, 4]]))]


def rank(*outputs: str) -> list[str]:
    told = infer("ranker", *ranked(), outputs=[wanted(name) for name in outputs] or None).get_response()
    return [one.name for one in told.outputs] if GRPC else [one["name"] for one in told["outputs"]]


def embeddings() -> Any:
    return infer("embed", given("TEXT", "BYTES", np.array(["a", "bcd"], dtype=object))).as_numpy("OUTPUT").tolist()


def later() -> list[str]:
    if not GRPC:
        return texts_of(client.async_infer("default", [tensor("later")], headers={**HEADERS}).get_result())
    client.async_infer("default", [tensor("later")], lambda result, error: done.put(result), headers=HEADERS)
    return texts_of(done.get(timeout=30))


def streamed() -> list[Any]:
    """Return what a stream brings: answers to strings, an error, the last of a final answer, and numbers."""
    client.start_stream(lambda result, error: done.put(error or result), headers=HEADERS)
    for number in range(3):
        client.async_stream_infer("default", [tensor(f"s{number}")], request_id=str(number))
    client.async_stream_infer("other", [tensor("x")])
    *answers, error = [done.get(timeout=30) for _ in range(4)]
    client.async_stream_infer("default", [tensor("last")], enable_empty_final_response=True)
    last = done.get(timeout=30).get_response().parameters["triton_final_response"].bool_param
    client.async_stream_infer("sums", [given("x", "FP32", FOUR)])
    client.async_stream_infer("sums", [given("x", "FP32", FOUR[:, :3])])
    numbers, wrong = done.get(timeout=30).as_numpy("sums").tolist(), done.get(timeout=30)
    client.stop_stream()
    return [[texts_of(answer) for answer in answers], str(error), last, numbers, str(wrong)]


def refusal(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except InferenceServerException as exc:
        return [str(exc.status()).removeprefix("StatusCode."), exc.message()]
    raise AssertionError("no error")


def of(found: Any, member: str) -> Any:
    """Return a member of a service's metadata, which gRPC wraps in another message."""
    return found[member] if GRPC else found


def shapes(specs: list[dict[str, Any]]) -> list[list[Any]]:
    return [[one["name"], one["datatype"], [int(size) for size in one["shape"]]] for one in specs]


ASKED: Any = {"headers": HEADERS, **JSON}
client.get_inference_statistics("default", **ASKED)  # This tenant has statistics from now on.
refused = {
    "no key": lambda: texts("a", headers={}),
    "other model": lambda: client.get_model_metadata("other", headers=HEADERS),
    "element": lambda: texts("good", "bad"),
    "fault": lambda: texts("fault"),
    "rate": lambda: [texts("a", headers={"authorization": f"Bearer {SLOW}"}) for _ in range(2)],
    "too late": lambda: texts("slow", **({"client_timeout": 0.05} if GRPC else {"timeout": 1})),
    "too large": lambda: texts("x" * 2_000_000),
    "load": lambda: client.load_model("default", headers=HEADERS),
    "axis": lambda: sums(FOUR[:, :3]),
    "rows": lambda: sums(np.zeros((1000, 4), np.float32)),
}
json.dump(
    {
        "health": [
            client.is_server_live(),
            client.is_server_ready(),
            *(client.is_model_ready(model, headers=HEADERS) for model in ("default", "other")),
            *(client.is_model_ready("default", version, headers=HEADERS) for version in ("1", "9")),
        ],
        "answers": [texts(*TEXTS, way=way) for way in WAYS],
        "column": texts(*TEXTS, shape=[3, 1], request_id="42"),
        "other": [texts(*TEXTS, **PACKED), texts(*TEXTS, priority=3, timeout=60_000_000, parameters={"heat": 0.5})],
        "version": texts(*TEXTS, model_version="1"),
        "later": later(),
        "stream": streamed() if GRPC else None,
        "server": client.get_server_metadata(**JSON)["name"],
        "inputs": [shapes(client.get_model_metadata(model, **ASKED)["inputs"]) for model in ("default", "ranker")],
        "config": [
            [one["name"], one["data_type"], [int(size) for size in one["dims"]]]
            for one in of(client.get_model_config("ranker", **ASKED), "config")["output"]
        ],
        "index": [one["name"] for one in of(client.get_model_repository_index(**ASKED), "models")],
        "statistics": int(client.get_inference_statistics("default", **ASKED)["model_stats"][0]["inference_count"]),
        "changed": [changed(size, way) for size in ((1, 1), (3, 4)) for way in WAYS],
        "sums": [sums(FOUR, way[0], request_id="7") for way in WAYS],
        "any name": sums(FOUR, name="y"),
        "packed": sums(FOUR, **PACKED),
        "ranked": [rank(), rank("names")],
        "embeddings": embeddings(),
        "refusals": {name: refusal(call) for name, call in refused.items()},
    },
    sys.stdout,
)
