"""What `tritonclient.grpc` asks of a server of arrays; its argument is the port's address."""

import json
import queue
import sys
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]

client = triton.InferenceServerClient(sys.argv[1])
done: queue.Queue[Any] = queue.Queue()
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}  # fmt: skip


def given(name: str, datatype: str, array: Any) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def arrays(rows: int, columns: int) -> dict[str, Any]:
    numbers = np.arange(rows * 2 * columns).reshape(rows, 2, columns)
    found = {name: (numbers % 100).astype(dtype) for name, dtype in DTYPES.items()}
    for name in ("FP32", "FP64"):
        found[name].flat[:2] = [np.nan, -np.inf]
    found["BOOL"] = numbers % 3 == 0
    found["BYTES"] = np.array([b"\xff\0 %d" % number for number in numbers.flat], dtype=object).reshape(numbers.shape)
    return found


def same(rows: int, columns: int) -> list[str]:
    """Datatypes of which another array comes back than was sent."""
    sent = arrays(rows, columns)
    inputs = [given(f"in_{name}", name, array) for name, array in sent.items()]
    answer = client.infer("same", inputs, outputs=[triton.InferRequestedOutput(f"out_{name}") for name in sent])
    return [name for name, array in sent.items() if not _equal(answer.as_numpy(f"out_{name}"), array)]


def _equal(found: Any, array: Any) -> bool:
    if found is None or found.shape != array.shape:
        return False
    if array.dtype == object:
        return list(found.flat) == list(array.flat)
    return bool(found.astype(array.dtype).tobytes() == array.tobytes())


def sums(array: Any, **options: Any) -> Any:
    answer = client.infer("sums", [given("x", "FP32", array)], **options)
    return [answer.as_numpy("sums").tolist(), answer.get_response().id]


def ranked() -> list[Any]:
    return [given("query", "FP32", np.array([[1, 2]], np.float32)), given("ids", "INT64", np.array([[3, 4]]))]


def rank(*outputs: str) -> list[str]:
    wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
    return [one.name for one in client.infer("ranker", ranked(), outputs=wanted).get_response().outputs]


def streamed() -> list[Any]:
    """Numbers of answers on a stream, of which one has failed."""
    client.start_stream(lambda result, error: done.put(error or result))
    for rows in (1, 2):
        client.async_stream_infer("sums", [given("x", "FP32", FOUR[:rows])])
    client.async_stream_infer("sums", [given("x", "FP32", FOUR[:, :3])])
    client.async_stream_infer("ranker", ranked())
    found = [done.get(timeout=30) for _ in range(4)]
    client.stop_stream()
    return [
        found[0].as_numpy("sums").tolist(),
        found[1].as_numpy("sums").tolist(),
        str(found[2]),
        found[3].as_numpy("scores").tolist(),
    ]


def large() -> bool:
    numbers = np.random.default_rng(1).random((1, 2, 75_000), np.float32)
    inputs = [given(f"in_{name}", name, numbers if name == "FP32" else array) for name, array in arrays(1, 1).items()]
    answer = client.infer("same", inputs, outputs=[triton.InferRequestedOutput("out_FP32")])
    return bool(np.array_equal(answer.as_numpy("out_FP32"), numbers))


def refusal(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as exc:
        return [exc.status(), exc.message()]
    raise AssertionError("no error")


FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
text = triton.InferInput("TEXT", [2], "BYTES")
text.set_data_from_numpy(np.array(["a", "bcd"], dtype=object))
json.dump(
    {
        "other": [same(*size) for size in ((1, 1), (3, 4))],
        "large": large(),
        "sums": sums(FOUR[:1]),
        "rows": sums(FOUR, request_id="7"),
        "compressed": sums(FOUR, compression_algorithm="gzip"),
        "any name": client.infer("sums", [given("y", "FP32", FOUR)]).as_numpy("sums").tolist(),
        "all": rank(),
        "some": rank("names"),
        "embeddings": client.infer("embed", [text]).as_numpy("OUTPUT").tolist(),
        "stream": streamed(),
        "model": client.get_model_metadata("ranker", as_json=True)["inputs"],
        "config": client.get_model_config("ranker", as_json=True)["config"]["output"],
        "refusals": {
            "datatype": refusal(lambda: client.infer("sums", [given("x", "FP64", FOUR.astype("f8"))])),
            "axis": refusal(lambda: sums(FOUR[:, :3])),
            "rank": refusal(lambda: sums(FOUR[0])),
            "rows": refusal(lambda: sums(np.zeros((1000, 4), np.float32))),
            "missing": refusal(lambda: client.infer("ranker", ranked()[:1])),
            "output": refusal(lambda: rank("other")),
        },
    },
    sys.stdout,
)
